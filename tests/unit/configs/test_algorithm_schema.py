"""Which anchors, corrections, losses and numbers of updates go together, and why others do not."""

from __future__ import annotations

import re

import pytest

from configs.load import ConfigError, load_config, options, read_config, to_yaml
from trainer_pool.algorithms.trial import check_algorithm

ROLLOUT = "algorithm.proximal=rollout"
KL_REWARD = ["algorithm.kl.weight=0.1", "algorithm.kl.where=reward", "algorithm.kl.estimator=k1"]
NONE = "algorithm.correction.kinds=[]"


def kinds(*names: str) -> str:
    return f"algorithm.correction.kinds=[{', '.join(names)}]"


TEACHER = ("task.rewards.teacher={kind: teacher, url: 'http://host:1/v1', model: m}",)


@pytest.mark.parametrize("name", options("algorithm"))
@pytest.mark.parametrize("max_staleness", [2, 8])
@pytest.mark.parametrize("num_minibatches", [1, 2])
def test_every_file_of_the_group_is_a_legal_algorithm(
    name: str, max_staleness: int, num_minibatches: int
) -> None:
    config = load_config(
        [
            f"algorithm={name}",
            f"buffer.max_staleness={max_staleness}",
            f"trainer.num_minibatches={num_minibatches}",
            *(TEACHER if name == "distill" else ()),
        ]
    )
    check_algorithm(config.full_algorithm)


def test_default_is_decoupled_ppo() -> None:
    assert load_config([]).algorithm == load_config(["algorithm=decoupled_ppo"]).algorithm


@pytest.mark.parametrize(
    "settings",
    [
        ["buffer.max_staleness=0", NONE],
        [ROLLOUT, NONE],
        [ROLLOUT, kinds("opsm")],
        ["algorithm.loss=dppo_tv", NONE],
        ["algorithm.loss=reinforce", kinds("veto", "geometric_mask")],
        ["algorithm.loss=supervised", NONE],
        [kinds("m2po")],
        [kinds("tis_token", "veto", "opsm", "kpop")],
        ["algorithm.dual_clip=3", "trainer.num_minibatches=2"],
        ["algorithm.dual_clip=3", ROLLOUT, NONE],
        [kinds("tis_sequence"), "algorithm.correction.normalize=true"],
        ["rollout.sampling={top_k: 50, top_p: 0.95, min_p: 0.01}"],
        ["rollout.sampling.top_k=50", "algorithm.streams.words.tokens=observations"],
    ],
)
def test_legal_combinations_load(settings: list[str]) -> None:
    load_config(settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        # An unknown name.
        (["algorithm.loss=pppo"], "algorithm.loss='pppo': must be ppo, gspo, cispo, "),
        ([kinds("tis")], "algorithm.correction.kinds=['tis']: must be tis_token, "),
        (["algorithm=ppoo"], "algorithm=ppoo: there is no such algorithm;"),
        # Anchor at the engine and a second weight.
        (
            [ROLLOUT],
            "algorithm.correction.kinds=['tis_token']: algorithm.loss=ppo with "
            "algorithm.proximal=rollout already weights tokens by trainer / rollout",
        ),
        (
            ["algorithm.loss=cispo", ROLLOUT, kinds("icepop")],
            "algorithm.correction.kinds=['icepop']: algorithm.loss=cispo with "
            "algorithm.proximal=rollout already weights tokens by trainer / rollout",
        ),
        *(
            (
                [f"algorithm.loss={loss}", kinds("tis_sequence")],
                f"algorithm.correction.kinds=['tis_sequence']: algorithm.loss={loss} already "
                "weights tokens by trainer / rollout, and a second weight would count staleness "
                "twice; keep only masks, or set []",
            )
            for loss in ("reinforce", "importance_sampling", "dppo_tv", "dppo_kl")
        ),
        # Masks that see nothing.
        (
            [ROLLOUT, kinds("veto", "opsm")],
            "algorithm.correction.kinds=['veto', 'opsm']: with algorithm.proximal=rollout the "
            "ratio to rollout is 1 for every token, so veto would change nothing",
        ),
        (
            ["algorithm.loss=mine.py:loss", ROLLOUT, kinds("tis_token")],
            "algorithm.correction.kinds=['tis_token']: with algorithm.proximal=rollout the ratio "
            "to rollout is 1 for every token, so tis_token would change nothing",
        ),
        # A denominator of the trained version for tokens of others.
        *(
            (
                [f"algorithm.loss={loss}", NONE, *more],
                "algorithm.correction.kinds=[]: with buffer.max_staleness=2 "
                f"algorithm.loss={loss} would treat tokens of older versions",
            )
            for loss, more in (
                ("ppo", []),
                ("gspo", ["algorithm.clip_low=3e-4", "algorithm.clip_high=4e-4"]),
                ("cispo", []),
                ("sapo", ["algorithm.proximal=log_linear"]),
            )
        ),
        *(
            (
                [kinds(*masks)],
                f"algorithm.correction.kinds={list(masks)}: with buffer.max_staleness=2 "
                "algorithm.loss=ppo would treat tokens of older versions",
            )
            for masks in (("veto",), ("opsm",), ("veto", "opsm"))
        ),
        # Settings without an effect.
        (
            ["algorithm.loss=dppo_tv", NONE, ROLLOUT],
            "algorithm.proximal='rollout': algorithm.loss=dppo_tv without a correction does not "
            "read it",
        ),
        (
            ["algorithm.proximal=log_linear", "buffer.max_staleness=1"],
            "algorithm.proximal='log_linear': with buffer.max_staleness=1 the version before the "
            "trained one is that of each older token",
        ),
        (
            ["algorithm.advantage.overlong_end=100"],
            "algorithm.advantage.overlong_end=100: without algorithm.advantage.overlong_start",
        ),
        *(
            (
                ["rollout.filter_zero_variance=true", *more],
                f"rollout.filter_zero_variance=True: with algorithm.{setting} groups of equal",
            )
            for setting, more in (
                ("loss=supervised", ["algorithm.loss=supervised", NONE]),
                ("advantage.kind=reinforce_pp", ["algorithm.advantage.kind=reinforce_pp"]),
                (
                    "advantage.kind=gdpo",
                    ["algorithm.advantage={kind: gdpo, part_weights: {right: 1.0}}"],
                ),
                (
                    "streams.*.loss=teacher_kl",
                    ["algorithm.streams.t.loss=teacher_kl", *TEACHER, "task.rewards.a.kind=task"],
                ),
            )
        ),
        (
            ["task.rewards={t: {kind: teacher, url: 'http://t', weight: 5}, a: {kind: task}}"],
            "task.rewards.*.weight=5.0: task.rewards.*.kind=teacher gives no reward",
        ),
        (
            ["algorithm.dual_clip=3"],
            "algorithm.dual_clip=3.0: with trainer.num_minibatches=1 the ratio to the policy at "
            "the start of the step is 1",
        ),
        (
            ["algorithm.loss=sapo", "algorithm.dual_clip=3", "trainer.num_minibatches=2"],
            "algorithm.dual_clip=3.0: algorithm.loss=sapo has no such bound",
        ),
        (
            [kinds("icepop"), "algorithm.correction.normalize=true"],
            "algorithm.correction.normalize=True: there is no truncated weight",
        ),
        # Distributions over parts of the vocabulary, and over all of it.
        *(
            (
                ["rollout.sampling.top_k=50", *more],
                f"rollout.sampling.top_k=50: {what} needs the policy's distribution over the whole",
            )
            for what, more in (
                ("algorithm.kl.weight above 0", ["algorithm.kl.weight=0.1"]),
                ("a teacher in task.rewards", ["algorithm=distill", *TEACHER]),
                (
                    "a teacher in task.rewards",
                    ["algorithm.loss=mine.py:loss", *TEACHER, "task.rewards.a.kind=task"],
                ),
                ("algorithm.loss=supervised", ["algorithm.loss=supervised", NONE]),
                (
                    "algorithm.streams.*.loss=supervised with tokens=answers",
                    ["algorithm.streams.good.min_reward=1"],
                ),
            )
        ),
        # Two weights, or one twice.
        (
            [kinds("tis_token", "icepop")],
            "algorithm.correction.kinds=['tis_token', 'icepop']: tis_token and icepop would "
            "multiply two weights",
        ),
        ([kinds("veto", "veto")], "algorithm.correction.kinds=['veto', 'veto']: each correction"),
        (
            ["algorithm.loss=supervised"],
            "algorithm.correction.kinds=['tis_token']: algorithm.loss=supervised imitates",
        ),
        # Bounds of tokens for whole trajectories.
        (
            ["algorithm.loss=gspo"],
            "algorithm.clip_low=0.2: algorithm.loss=gspo clips the geometric mean",
        ),
        # Advantages.
        (
            ["algorithm.advantage.kind=gdpo"],
            "algorithm.advantage.kind='gdpo': it needs named parts of the reward",
        ),
        (
            ["algorithm.advantage.overlong_start=8"],
            "algorithm.advantage.overlong_start=8: the loss of reward must begin below "
            "algorithm.advantage.overlong_end=8, and that be at most rollout.max_response_tokens=8",
        ),
        *(
            (
                [f"algorithm.advantage.kind={kind}", "algorithm.advantage.overlong_start=4"],
                f"algorithm.advantage.overlong_start=4: algorithm.advantage.kind={kind} {why}",
            )
            for kind, why in (("gdpo", "learns from the parts"), ("max_rl", "cannot use"))
        ),
        (
            ["algorithm.advantage.kind=gdpo", *KL_REWARD],
            "algorithm.kl.where='reward': algorithm.advantage.kind=gdpo learns from the parts",
        ),
        (
            ["algorithm.advantage.kind=max_rl", *KL_REWARD],
            "algorithm.kl.where='reward': algorithm.advantage.kind=max_rl cannot use the rewards",
        ),
        (
            ["algorithm.loss=supervised", NONE, *KL_REWARD],
            "algorithm.kl.where='reward': with algorithm.loss=supervised no reward is learnt from",
        ),
        (
            [
                "algorithm.policy_weight=0",
                "algorithm.streams.good.min_reward=1",
                "algorithm.advantage.overlong_start=4",
            ],
            "algorithm.advantage.overlong_start=4: with algorithm.policy_weight=0 no reward is",
        ),
        (
            ["algorithm.advantage.kind=gdpo", "algorithm.advantage.part_weights={right: .nan}"],
            "algorithm.advantage.part_weights={'right': nan}: weights must be finite",
        ),
        (
            ["algorithm.advantage.kind=gdpo", "algorithm.advantage.part_weights={right: 0}"],
            "algorithm.advantage.part_weights={'right': 0.0}: nothing would be learnt",
        ),
        (
            ["algorithm.advantage.overlong_start=4", "algorithm.advantage.overlong_end=3"],
            "algorithm.advantage.overlong_start=4: must be below",
        ),
    ],
)
def test_illegal_combination_is_refused_with_its_reason(settings: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}") as caught:
        load_config(settings)
    assert "\n" not in str(caught.value)


def test_what_other_sections_say_fills_the_algorithm() -> None:
    config = load_config(
        [
            "task.rewards={right: {kind: task, weight: 2}, t: {kind: teacher, url: 'http://h', "
            "model: m}}",
            "algorithm.streams.t.loss=teacher_kl",
            "algorithm.advantage.overlong_start=4",
        ]
    )
    full = config.full_algorithm
    assert full.aggregation_length == full.advantage.overlong_end == 8
    assert full.advantage.part_weights == {"right": 2.0}
    assert config.algorithm.aggregation_length is None


def test_length_may_cost_reward_from_the_first_token_on() -> None:
    full = load_config(["algorithm.advantage.overlong_start=0"]).full_algorithm
    assert (full.advantage.overlong_start, full.advantage.overlong_end) == (0, 8)


def test_algorithm_survives_the_file_of_a_run(tmp_path) -> None:  # type: ignore[no-untyped-def]
    config = load_config(["algorithm=gspo", "algorithm.params.mine=[1, 2]"])
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    assert read_config(tmp_path / "config.yaml") == config


def test_live_staleness_is_held_against_the_algorithm(tmp_path) -> None:  # type: ignore[no-untyped-def]
    config = load_config(["buffer.max_staleness=0", NONE])
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    with pytest.raises(ConfigError, match=r"with buffer\.max_staleness=1 algorithm\.loss=ppo"):
        read_config(tmp_path / "config.yaml", ["buffer.max_staleness=1"])
