"""The rows that a training step makes of a group, against values worked out by hand."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from buffer.types import Trajectory, TrajectoryGroup, VersionSpan
from configs.advantages import ADVANTAGES, OwnAdvantage
from tests.support.trainer import made_up
from tests.support.trainer.made_up import group
from tests.support.trainer.token_batch import algorithm
from trainer_pool.collectives import Collectives
from trainer_pool.data.packing import Row, pack
from trainer_pool.data.rows import StepBatch, rows_by_group


def rows_of(
    ranks: Collectives, *groups: TrajectoryGroup, version: int = 3, **advantage: object
) -> list[Row]:
    """The rows of a batch of these groups, with the advantages of GRPO unless they are others."""
    batch = StepBatch(
        version=version, group_ids=tuple(group.group_id for group in groups), groups=groups
    )
    kind = str(advantage.pop("kind", "grpo"))
    settings = ADVANTAGES.get(kind, OwnAdvantage)(kind=kind, **advantage)  # type: ignore[arg-type]
    rows = rows_by_group(batch, algorithm(advantage=settings), ranks)
    return [row for of_group in rows for row in of_group]


def advantages_of(rows: list[Row]) -> list[float]:
    """The advantage of each row, whose tokens all have the same."""
    values = []
    for row in rows:
        assert row.advantages is not None and len(row.advantages) == len(row.tokens)
        [value] = set(row.advantages.tolist())
        values.append(value)
    return values


def trajectory(episode: int, reward: float, num_trained: int = 2) -> Trajectory:
    mask = [0, 0] + [1] * num_trained
    columns = {"teacher_logprobs": np.zeros(len(mask), np.float32)}
    return made_up.trajectory(mask, episode=episode, reward=reward, columns=columns)


def test_episode_counts_once_and_its_trajectories_share_its_weight(ranks: Collectives) -> None:
    # Rewards by episode 1, 0, 0, 0: mean 0.25, deviation 0.5. Were each trajectory counted, the
    # mean would be 0.5.
    rows = rows_of(
        ranks,
        group(
            trajectory(0, 1.0),
            trajectory(0, 1.0, 5),
            trajectory(0, 1.0, 1),
            trajectory(1, 0.0),
            trajectory(2, 0.0),
            trajectory(3, 0.0),
        ),
    )
    assert advantages_of(rows) == pytest.approx([1.5] * 3 + [-0.5] * 3, rel=1e-5)
    assert [row.weight for row in rows] == [1 / 3, 1 / 3, 1 / 3, 1, 1, 1]
    assert [row.num_trained for row in rows] == [2, 5, 1, 2, 2, 2]
    assert all(row.is_current for row in rows)


def test_episodes_may_be_in_any_order(ranks: Collectives) -> None:
    some = group(trajectory(1, 4.0), trajectory(0, 2.0), trajectory(1, 4.0))
    rows = rows_of(ranks, some, version=4, kind="dr_grpo")
    assert advantages_of(rows) == [1.0, -1.0, 1.0]
    assert [row.weight for row in rows] == [0.5, 1.0, 0.5]
    assert not any(row.is_current for row in rows)


def test_tokens_know_by_how_many_versions_they_lag(ranks: Collectives) -> None:
    two_versions = replace(
        trajectory(0, 1.0, 4),
        version_spans=(
            VersionSpan(version=3, start=2, end=4),
            VersionSpan(version=5, start=4, end=6),
        ),
    )
    [row, _] = rows_of(ranks, group(two_versions, trajectory(1, 0.0)), version=5)
    assert row.staleness is not None
    assert row.staleness.tolist() == [0, 0, 2, 2, 0, 0]
    assert not row.is_current


def test_trajectory_without_a_trained_token_leaves_its_weight_to_the_others(
    ranks: Collectives,
) -> None:
    some = group(trajectory(0, 1.0, 0), trajectory(0, 1.0), trajectory(1, 0.0))
    rows = rows_of(ranks, some, kind="dr_grpo")
    assert advantages_of(rows) == [0.5, -0.5]
    assert [row.weight for row in rows] == [1.0, 1.0]


def test_rows_have_the_temperature_of_their_group_or_of_each_token(ranks: Collectives) -> None:
    own = replace(trajectory(1, 0.0), columns={"temperature": np.array([1, 1, 0.2, 1.5], "<f4")})
    some = group(trajectory(0, 1.0), own, temperature=0.7)
    first, second = rows_of(ranks, some)
    assert first.temperatures == pytest.approx([0.7] * 4)
    assert second.temperatures == pytest.approx([1, 1, 0.2, 1.5])
    assert "temperature" not in second.columns
    for wrong in (0, np.nan):
        broken = {"temperature": np.array([1, 1, wrong, 1], "<f4")}
        some = group(trajectory(0, 1.0), replace(own, columns=broken))
        with pytest.raises(ValueError, match=f"group g7: its column temperature has {wrong}"):
            rows_of(ranks, some)


def test_episode_that_was_cut_off_is_not_trained_but_counts_in_its_group(
    ranks: Collectives,
) -> None:
    cut = replace(trajectory(0, 0.0), finish_reason="length")
    some = group(cut, trajectory(0, 0.0), trajectory(1, 1.0), trajectory(2, 5.0))
    assert len(rows_of(ranks, some, kind="dr_grpo")) == 4
    rows = rows_of(ranks, some, kind="dr_grpo", mask_truncated=True)
    assert advantages_of(rows) == [-1.0, 3.0]


def test_long_answers_lose_reward(ranks: Collectives) -> None:
    # Lengths 2, 6, 8 and 10 lose 0, 1/4, 1/2 and 1/2 of it.
    some = group(*(trajectory(i, 1.0, n) for i, n in enumerate((2, 6, 8, 10))))
    rows = rows_of(
        ranks, some, kind="dr_grpo", overlong_start=4, overlong_end=8, overlong_penalty=0.5
    )
    mean = (1 + 0.75 + 0.5 + 0.5) / 4
    assert advantages_of(rows) == pytest.approx([1 - mean, 0.75 - mean, 0.5 - mean, 0.5 - mean])


LAST_TURN = """
import numpy as np

def last_turn(inputs, config):
    for t, episode in zip(inputs.trajectories, inputs.episodes):
        values = np.zeros(t.num_tokens, np.float32)
        values[t.version_spans[-1].start :] = inputs.rewards_E[episode]
        yield values
"""


def test_turn_that_is_credited_by_itself_has_its_advantage_alone_in_the_micro_batch(
    ranks: Collectives, tmp_path: Path
) -> None:
    """A prompt of 2 tokens, an answer of 3, words of the environment (2), and an answer."""

    def two_turns(episode: int, reward: float, num_last: int) -> Trajectory:
        mask = [0, 0, 1, 1, 1, 0, 0, *[1] * num_last]
        return made_up.trajectory(mask, episode=episode, reward=reward)

    mine = tmp_path / "mine.py"
    mine.write_text(LAST_TURN)
    some = group(two_turns(0, 2.0, 1), two_turns(1, -1.0, 2))
    rows = rows_of(ranks, some, kind=f"{mine}:last_turn")
    (batch,) = pack(rows, max_tokens=20)
    assert batch.targets_N.tolist() == [2, 3, 4, 7, 2, 3, 4, 7, 8]
    assert batch.advantages_N.tolist() == [0, 0, 0, 2, 0, 0, 0, -1, -1]


def test_parts_of_the_reward_reach_the_advantage_by_name(ranks: Collectives) -> None:
    parts = [{"right": 1.0, "short": 0.0}, {"right": 0.0, "short": 9.0}]
    some = group(*(replace(trajectory(i, 1.0), reward_parts=p) for i, p in enumerate(parts)))
    # Both parts have the deviation of their group as unit, so that 3 times the first one wins.
    rows = rows_of(ranks, some, kind="gdpo", part_weights={"right": 3.0, "short": 1.0}, ddof=0)
    assert advantages_of(rows) == pytest.approx([1.0, -1.0], rel=1e-5)
    with pytest.raises(ValueError, match=r"part_weights=\{'kind': 1\.0\}: an episode has no part"):
        rows_of(ranks, some, kind="gdpo", part_weights={"kind": 1.0})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"top_p": 0.9}, r"group g7: top_p=0\.9 .* sample with top_p=1\.0"),
        ({"top_k": 50}, r"group g7: top_k=50 .* sample with top_k=-1"),
        ({"min_p": 0.1}, r"group g7: min_p=0\.1"),
        ({"repetition_penalty": 1.1}, r"group g7: repetition_penalty=1\.1"),
        ({"frequency_penalty": 0.5}, r"group g7: frequency_penalty=0\.5"),
        ({"temperature": 0.0}, r"group g7: temperature=0\.0: greedy"),
        ({"temperature": 1e-46}, r"group g7: temperature=1e-46: greedy"),
        ({"temperature": math.inf}, r"group g7: temperature=inf: its tokens were drawn without"),
    ],
)
def test_samples_not_drawn_from_the_policy_are_refused(
    ranks: Collectives, changes: dict[str, float], message: str
) -> None:
    some = group(trajectory(0, 1.0), trajectory(1, 0.0), **changes)
    with pytest.raises(ValueError, match=message):
        rows_of(ranks, some)


def test_truncated_samples_are_trained_with_their_candidates_alone(ranks: Collectives) -> None:
    ids = np.array([[-1, -1], [-1, -1], [2, 9], [3, -1]], np.int32)

    def drawn(episode: int) -> Trajectory:
        plain = trajectory(episode, float(episode))
        return replace(plain, columns={**plain.columns, "candidates": ids})

    truncation = {"top_k": 50, "top_p": 0.9, "min_p": 0.1}
    rows = rows_of(ranks, group(drawn(0), drawn(1), **truncation))
    assert all(row.candidates is ids for row in rows)
    assert {*rows[0].columns} == {"teacher_logprobs"}
    with pytest.raises(ValueError, match=r"group g7: top_p=0\.9 .* it has no column candidates"):
        rows_of(ranks, group(drawn(0), trajectory(1, 1.0), **truncation))
    with pytest.raises(ValueError, match=r"group g7: presence_penalty=0\.5"):
        rows_of(ranks, group(drawn(0), drawn(1), presence_penalty=0.5))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_tokens_without_a_finite_logprob_of_the_engine_are_not_trained(
    ranks: Collectives, bad: float
) -> None:
    one, other, third = (trajectory(episode, float(episode == 0)) for episode in (0, 1, 2))
    one.rollout_logprobs[3] = bad
    other.rollout_logprobs[2:] = bad
    rows = rows_of(ranks, group(one, other, third), kind="dr_grpo")
    assert [row.loss_mask.tolist() for row in rows] == [[0, 0, 1, 0], [0, 0, 1, 1]]
    assert rows[0].rollout_logprobs.tolist() == [0, 0, -1, 0]
    assert advantages_of(rows) == pytest.approx([2 / 3, -1 / 3])


def test_each_role_is_compared_with_itself_and_has_a_weight_of_its_own(ranks: Collectives) -> None:
    def of(role: str, episode: int, reward: float) -> Trajectory:
        return replace(trajectory(episode, reward), role=role)

    # Solvers 1, 0, 0: mean 1/3, deviation sqrt(1/3). Critics 4, 2, of whom episode 1 has none, and
    # episode 0 has two trajectories: mean 3, deviation sqrt(2). One judge: nothing to compare with.
    every = group(
        *(of("solver", 0, 1.0), of("critic", 0, 4.0), of("critic", 0, 4.0), of("solver", 1, 0.0)),
        *(of("solver", 2, 0.0), of("critic", 2, 2.0), of("judge", 2, 7.0)),
    )
    other = group(of("solver", 0, 5.0), of("solver", 1, 3.0), group_id="g8")
    rows = rows_of(ranks, every, other, epsilon=0.0)
    a, b = 3**-0.5, 2**-0.5
    expected = [2 * a, b, b, -a, -a, -b, 0, b, -b]
    np.testing.assert_allclose(advantages_of(rows), expected, rtol=1e-6)
    assert [row.weight for row in rows] == [1, 0.5, 0.5, 1, 1, 1, 1, 1, 1]
    third = 1 / 3
    for kind, expected in {
        "dr_grpo": [2 * third, 1, 1, -third, -third, -1, 0, 1, -1],
        "rloo": [1, 2, 2, -0.5, -0.5, -2, 0, 2, -2],
        "pass_at_k": [3**0.5, 2**0.5, 2**0.5, 0, 0, 0, 0, 2**0.5, 0],
    }.items():
        settings = {"epsilon": 0.0} if kind == "pass_at_k" else {}
        found = advantages_of(rows_of(ranks, every, other, kind=kind, **settings))
        np.testing.assert_allclose(found, expected, rtol=1e-6)
    assert every.teaches and not group(of("solver", 0, 1.0), of("critic", 0, 0.0)).teaches


def finished(episode: int, advantage: float) -> Trajectory:
    one = trajectory(episode, 0.0)
    column = np.full(one.num_tokens, advantage, np.float32)
    return replace(one, role="critic", columns={**one.columns, "advantage": column})


def test_finished_advantage_is_trained_as_it_is(ranks: Collectives) -> None:
    given = group(finished(0, 0.25), finished(1, 3.0))
    rows = rows_of(ranks, given, group(trajectory(0, 1.0), trajectory(1, 0.0), group_id="g8"))
    np.testing.assert_allclose(advantages_of(rows), [0.25, 3.0, 0.5**0.5, -(0.5**0.5)], rtol=1e-5)
    assert [{*row.columns} for row in rows] == 4 * [{"teacher_logprobs"}]
    assert given.teaches and not group(finished(0, 0.0), finished(1, 0.0)).teaches


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kind": "batch_std"}, r"advantage.kind='batch_std': needs rewards, .* group g7 .*grpo"),
        ({"overlong_start": 4, "overlong_end": 9}, r"advantage.overlong_start: needs rewards"),
    ],
)
def test_finished_advantage_beside_what_needs_rewards_is_refused(
    ranks: Collectives, settings: dict[str, object], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        rows_of(ranks, group(finished(0, 0.25), finished(1, 3.0)), **settings)
