"""The pure parts: staleness, admission, shares, shards, keys."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from buffer.admission import admission_limit, engine_lag
from buffer.lease import split_by_cost
from buffer.redis.keys import Keys, check_group_id
from buffer.replay_buffer import quota
from buffer.shard_routes import id_in_shard, ids_by_shard, shard_of
from buffer.staleness import (
    is_fresh,
    mask_over_age,
    renumber,
)
from buffer.types import PromptRef, Trajectory, TrajectoryGroup, VersionSpan


def test_group_is_fresh_up_to_exactly_max_staleness() -> None:
    assert is_fresh(7, 5, max_staleness=2)
    assert not is_fresh(7, 4, max_staleness=2)


def _mixed_group() -> TrajectoryGroup:
    """A trajectory of a prompt token and two tokens each by versions 4, 5 and 6, and one by 5."""

    def trajectory(episode: int, *spans: tuple[int, int, int]) -> Trajectory:
        return Trajectory(
            tokens=np.arange(7, dtype=np.int32),
            loss_mask=np.array([0, 1, 1, 1, 0, 1, 1], np.uint8),
            rollout_logprobs=np.array([0, -1, -2, -3, 0, -5, -6], np.float32),
            version_spans=tuple(VersionSpan(version=v, start=a, end=b) for v, a, b in spans),
            prompt_length=1,
            reward=1.0,
            finish_reason="stop",
            episode=episode,
        )

    return TrajectoryGroup(
        group_id="mixed",
        prompt=PromptRef(task="sums", index=0),
        trajectories=(trajectory(0, (4, 1, 3), (5, 3, 5), (6, 5, 7)), trajectory(1, (5, 1, 7))),
    )


def test_masking_takes_only_tokens_before_the_oldest_version_out_of_the_loss() -> None:
    group = _mixed_group()
    masked = mask_over_age(group, 5)
    assert masked.trajectories[0].loss_mask.tolist() == [0, 0, 0, 1, 0, 1, 1]
    assert masked.trajectories[0].rollout_logprobs.tolist() == [0, 0, 0, -3, 0, -5, -6]
    assert masked.trajectories[1] is group.trajectories[1]
    assert masked.min_version == 5
    assert group.trajectories[0].loss_mask.tolist() == [0, 1, 1, 1, 0, 1, 1]
    assert mask_over_age(group, 4) is group


def test_trajectory_may_lose_all_its_tokens_to_the_mask() -> None:
    masked = mask_over_age(_mixed_group(), 6)
    assert [t.num_trainable_tokens for t in masked.trajectories] == [2, 0]
    assert masked.min_version == 6


def test_renumbering_gives_each_version_its_own_new_number() -> None:
    group = _mixed_group()
    moved = renumber(group, [7, 8, 12])
    assert [s.version for s in moved.trajectories[0].version_spans] == [7, 8, 12]
    assert [s.version for s in moved.trajectories[1].version_spans] == [8]
    assert moved.trajectories[0].loss_mask is group.trajectories[0].loss_mask
    assert (moved.group_id, moved.prompt) == (group.group_id, group.prompt)
    with pytest.raises(ValueError):
        renumber(group, [7, 8])


def test_admitted_id_names_its_shard() -> None:
    assert id_in_shard("g", 2, num_shards=3) == "g@2"
    assert shard_of("g@2", 3) == 2
    assert id_in_shard("g", 0, num_shards=1) == "g" and shard_of("g@7", 1) == 0
    with pytest.raises(ValueError, match="must not contain '@'"):
        id_in_shard("g@1", 0, num_shards=2)


def test_ids_without_a_mark_are_spread_out() -> None:
    parts = ids_by_shard([f"worker-{i}" for i in range(300)], 3)
    assert sorted(parts) == [0, 1, 2] and all(70 < len(ids) < 130 for ids in parts.values())
    assert sorted(i for ids in parts.values() for i in ids) == sorted(
        f"worker-{i}" for i in range(300)
    )


@given(st.integers(0, 1000), st.integers(1, 9))
def test_quotas_add_up_to_the_limit(limit: int, num_shards: int) -> None:
    parts = [quota(limit, shard, num_shards) for shard in range(num_shards)]
    assert sum(parts) == limit and max(parts) - min(parts) <= 1


def test_admission_bound_shrinks_by_a_step_for_each_version_that_engines_lag() -> None:
    limits = [admission_limit(max_staleness=2, lag=lag, groups_per_version=16) for lag in range(5)]
    assert limits == [48, 32, 16, 0, 0]


def test_engine_lag_is_that_of_the_slowest_engine_and_never_negative() -> None:
    assert engine_lag(5, [5, 3, 4], 2) == 2
    assert engine_lag(5, [], 2) == 0
    assert engine_lag(5, [6], 2) == 0


def test_engines_too_far_behind_for_a_request_count_only_if_there_is_no_other() -> None:
    assert engine_lag(5, [5, 1, 4], 2) == 1
    assert engine_lag(5, [4, 5], 0) == 0
    # More than max_staleness: the limit is 0.
    assert engine_lag(5, [1, 2], 2) == 3
    assert engine_lag(5, [4], 0) == 1


def test_largest_groups_go_to_the_lightest_shares() -> None:
    # 9 | 8, then 7 to the second, 5 to the first, 4 to the first (14 < 15), 1 to the second.
    assert split_by_cost([4, 9, 8, 7, 5, 1], 2) == ((0, 1, 4), (2, 3, 5))


@given(st.lists(st.integers(0, 10_000), min_size=1, max_size=40), st.data())
def test_shares_are_a_partition_without_empty_ones_and_within_grahams_bound(
    tokens: list[int], data: st.DataObject
) -> None:
    num_shares = data.draw(st.integers(1, len(tokens)))
    shares = split_by_cost(tokens, num_shares)
    assert sorted(i for share in shares for i in share) == list(range(len(tokens)))
    assert len(shares) == num_shares and all(shares)
    heaviest = max(sum(tokens[i] for i in share) for share in shares)
    assert heaviest <= sum(tokens) / num_shares + max(tokens)
    assert shares == split_by_cost(list(tokens), num_shares)


def test_shares_may_not_outnumber_groups() -> None:
    with pytest.raises(ValueError, match="num_shares=3 with 2 groups"):
        split_by_cost([1, 2], 3)


@pytest.mark.parametrize("name", ["", "a b", "a}b", "a:b", "x" * 129])
def test_run_name_that_breaks_keys_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=r"run\.name="):
        Keys(name)


@pytest.mark.parametrize("group_id", ["", "a b", "a\n", "a:1", "x" * 257])
def test_group_id_that_breaks_the_wire_is_refused(group_id: str) -> None:
    with pytest.raises(ValueError, match="group_id="):
        check_group_id(group_id)
