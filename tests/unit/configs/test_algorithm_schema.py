"""Anchors, corrections, losses and numbers of updates that go together, and why others do not."""

from __future__ import annotations

import re

import pytest

from configs.advantages import OwnAdvantage, SequenceMeanTokenSumNorm
from configs.load import ConfigError, load_config, options, read_config, to_yaml
from configs.losses import Ppo
from trainer_pool.algorithms.trial import check_algorithm

ROLLOUT = "algorithm.proximal=rollout"
KL_REWARD = ["algorithm.kl.weight=0.1", "algorithm.kl.where=reward", "algorithm.kl.estimator=k1"]
NONE = "algorithm.correction=[]"


def kinds(*names: str) -> str:
    return f"algorithm.correction=[{', '.join(names)}]"


TEACHER = ("task.rewards.teacher={kind: teacher, url: 'http://host:1/v1', model: m}",)
CRITIC = ["algorithm=ppo"]


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
        ["algorithm.loss.dual_clip=3", "trainer.num_minibatches=2"],
        ["algorithm.loss.dual_clip=3", ROLLOUT, NONE],
        ["algorithm.correction=[{kind: tis_sequence, normalize: true}]"],
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
        ([kinds("tis")], "algorithm.correction.0='tis': must be tis_token, "),
        (["algorithm=ppoo"], "algorithm=ppoo: there is no such algorithm;"),
        # Anchor at the engine and a second weight.
        (
            [ROLLOUT],
            "algorithm.correction=['tis_token']: algorithm.loss=ppo with "
            "algorithm.proximal=rollout already weights tokens by trainer / rollout",
        ),
        (
            ["algorithm.loss=cispo", ROLLOUT, kinds("icepop")],
            "algorithm.correction=['icepop']: algorithm.loss=cispo with "
            "algorithm.proximal=rollout already weights tokens by trainer / rollout",
        ),
        *(
            (
                [f"algorithm.loss={loss}", kinds("tis_sequence")],
                f"algorithm.correction=['tis_sequence']: algorithm.loss={loss} already "
                "weights tokens by trainer / rollout, and a second weight would count staleness "
                "twice; keep only masks, or set []",
            )
            for loss in ("reinforce", "importance_sampling", "dppo_tv", "dppo_kl")
        ),
        # Masks that see nothing.
        (
            [ROLLOUT, kinds("veto", "opsm")],
            "algorithm.correction=['veto', 'opsm']: with algorithm.proximal=rollout the "
            "ratio to rollout is 1 for every token, so veto would change nothing",
        ),
        (
            ["algorithm.loss=mine.py:loss", ROLLOUT, kinds("tis_token")],
            "algorithm.correction=['tis_token']: with algorithm.proximal=rollout the ratio "
            "to rollout is 1 for every token, so tis_token would change nothing",
        ),
        # A denominator of the trained version for tokens of others.
        *(
            (
                [f"algorithm.loss={loss}", NONE, *more],
                "algorithm.correction=[]: with buffer.max_staleness=2 "
                f"algorithm.loss={loss} would treat tokens of older versions",
            )
            for loss, more in (
                ("ppo", []),
                ("gspo", []),
                ("cispo", []),
                ("sapo", ["algorithm.proximal=log_linear"]),
            )
        ),
        *(
            (
                [kinds(*masks)],
                f"algorithm.correction={list(masks)}: with buffer.max_staleness=2 "
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
                ("advantage.kind=gae", CRITIC),
                (
                    "streams.*.loss=teacher_kl",
                    ["algorithm.streams.t.loss=teacher_kl", *TEACHER, "task.rewards.a.kind=task"],
                ),
            )
        ),
        # A critic.
        (
            ["algorithm.advantage=gae"],
            "algorithm.advantage.kind='gae': it needs the values of a critic; set "
            "algorithm.critic={}",
        ),
        (
            ["algorithm.critic={}"],
            "algorithm.critic={}: only algorithm.advantage=gae reads values",
        ),
        (
            [*CRITIC, "algorithm.loss=supervised", NONE],
            "algorithm.critic={}: only algorithm.advantage=gae reads values, for a loss that reads",
        ),
        ([*CRITIC, "model.lora={}"], "algorithm.critic={}: a critic's weights are all trained"),
        (
            [*CRITIC, "trainer.num_ranks=2", "trainer.sequence_parallel_size=2"],
            "algorithm.critic={}: a critic's weights are all trained, and its rows are whole: set "
            "trainer.sequence_parallel_size=1",
        ),
        (
            [
                *CRITIC,
                "algorithm.critic.warmup_steps=3",
                "trainer.gradient_accumulation_steps=2",
            ],
            "algorithm.critic.warmup_steps=3: must be a multiple of",
        ),
        ([*CRITIC, "algorithm.critic.clip_range=0"], "algorithm.critic.clip_range=0.0: must be"),
        (
            ["task.rewards={t: {kind: teacher, url: 'http://t', weight: 5}, a: {kind: task}}"],
            "task.rewards.*.weight=5.0: task.rewards.*.kind=teacher gives no reward",
        ),
        (
            ["algorithm.loss.dual_clip=3"],
            "algorithm.loss.dual_clip=3.0: with trainer.num_minibatches=1 the ratio to the policy "
            "at the start of the step is 1",
        ),
        # Settings of another kind.
        (
            ["algorithm.loss=sapo", "algorithm.loss.dual_clip=3", "trainer.num_minibatches=2"],
            "algorithm.loss.dual_clip: sapo has no such setting; it has sapo_good, sapo_bad",
        ),
        (
            ["algorithm.loss.sapo_good=1"],
            "algorithm.loss.sapo_good: ppo has no such setting; it has clip_low, clip_high, dual",
        ),
        (
            ["algorithm=cispo", "algorithm.loss.kind=sapo"],
            "algorithm.loss.clip_low: sapo has no such setting; it has sapo_good, sapo_bad",
        ),
        (
            ["algorithm.loss.params.low=1"],
            "algorithm.loss.params: ppo has no such setting; it has clip_low, ",
        ),
        (
            ["algorithm.aggregation.aggregation_length=9"],
            "algorithm.aggregation.aggregation_length: token_mean has no such setting; it has none",
        ),
        (
            ["algorithm.advantage={kind: rloo, ddof: 0}"],
            "algorithm.advantage.ddof: rloo has no such setting; it has overlong_start, ",
        ),
        (
            ["algorithm.correction=[veto, {kind: icepop, m2po_limit: 1}]"],
            "algorithm.correction.1.m2po_limit: icepop has no such setting; it has icepop_low, ",
        ),
        (
            ["algorithm.streams.t.loss={kind: supervised, weight_cap: 1}"],
            "algorithm.streams.t.loss.weight_cap: supervised has no such setting; it has none",
        ),
        (
            ["algorithm.kl={weight: 0.1, params: {low: 1}}"],
            "algorithm.kl.params={'low': 1}: algorithm.kl.estimator=k3 reads none",
        ),
        # What is no function.
        (["algorithm.loss=5"], "algorithm.loss=5: expected a kind, or a mapping"),
        (["algorithm.correction=veto"], "algorithm.correction='veto': expected a list"),
        (["algorithm.streams.t=5"], "algorithm.streams.t=5: expected a mapping"),
        (
            ["algorithm.correction=[{kind: tis_token, tis_cap: x}]"],
            "algorithm.correction.0.tis_cap='x': expected a number, at least 1",
        ),
        (
            ["algorithm.clip_low=1"],
            "algorithm.clip_low: there is no such setting; did you mean alg",
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
            "algorithm.correction=['tis_token', 'icepop']: tis_token and icepop would "
            "multiply two weights",
        ),
        ([kinds("veto", "veto")], "algorithm.correction=['veto', 'veto']: each correction"),
        (
            ["algorithm.loss=supervised"],
            "algorithm.correction=['tis_token']: algorithm.loss=supervised imitates",
        ),
        # Bounds of tokens for whole trajectories.
        (
            ["algorithm.loss={kind: gspo, clip_low: 0.2}"],
            "algorithm.loss.clip_low=0.2: must be above 0 and at most 0.05",
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
            ["algorithm.advantage={kind: gdpo, part_weights: {right: .nan}}"],
            "algorithm.advantage.part_weights={'right': nan}: weights must be finite",
        ),
        (
            ["algorithm.advantage={kind: gdpo, part_weights: {right: 0}}"],
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


@pytest.mark.parametrize(
    "settings",
    [
        ["algorithm.loss=mine.py:loss", "algorithm.loss.params.low=1"],
        ["algorithm.loss.params.low=1", "algorithm.loss=mine.py:loss"],
        ["algorithm.advantage={kind: 'mine.py:kind', params: {a: 1}, part_weights: {right: 1}}"],
        ["algorithm.streams.mine.loss={kind: 'mine.py:loss', params: {a: 1}}"],
        ["algorithm.streams.a.aggregation={kind: sequence_mean_token_sum_norm}"],
        ["algorithm.kl={weight: 0.1, estimator: 'mine.py:kl', params: {low: 1}}"],
    ],
)
def test_function_accepts_the_settings_of_its_kind(settings: list[str]) -> None:
    load_config(settings)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ([], ""),
        (["algorithm=dapo"], ""),
        (["algorithm=grpo"], "algorithm.loss.clip_high=0.2 will change no gradient: with "),
        (
            ["algorithm.loss={kind: gspo, clip_low: 0.01, clip_high: 0.02}"],
            "algorithm.loss.clip_low=0.01 and algorithm.loss.clip_high=0.02 will change no ",
        ),
        (["algorithm.loss={kind: sapo, sapo_good: 2}"], "algorithm.loss.sapo_good=2.0 will "),
        (["algorithm=grpo", "trainer.num_minibatches=2"], ""),
        (["algorithm=a3po", "algorithm.loss.clip_low=0.1"], ""),
        (["algorithm=cispo"], ""),
        (["algorithm.loss={kind: dppo_tv, dppo_low: 0.1}", NONE], ""),
    ],
)
def test_settings_that_change_no_gradient_are_named(settings: list[str], named: str) -> None:
    found = load_config(settings).idle_settings
    assert found.startswith(named) and bool(found) == bool(named)


def test_kind_alone_drops_the_settings_that_a_file_gave_to_another() -> None:
    config = load_config(["algorithm=cispo", "algorithm.loss=ppo", "algorithm.loss.clip_low=0.1"])
    assert config.algorithm.loss == Ppo(kind="ppo", clip_low=0.1)


def test_what_other_sections_say_fills_the_algorithm() -> None:
    config = load_config(
        [
            "task.rewards={right: {kind: task, weight: 2}, t: {kind: teacher, url: 'http://h', "
            "model: m}}",
            "algorithm.streams.t.loss=teacher_kl",
            "algorithm.advantage={kind: 'mine.py:kind', overlong_start: 4}",
            "algorithm.aggregation=sequence_mean_token_sum_norm",
            "algorithm.streams.t.aggregation=sequence_mean_token_sum_norm",
        ]
    )
    full = config.full_algorithm
    filled = SequenceMeanTokenSumNorm(kind="sequence_mean_token_sum_norm", aggregation_length=8)
    assert full.aggregation == full.streams["t"].aggregation == filled
    assert full.advantage == OwnAdvantage(
        kind=full.advantage.kind, overlong_start=4, overlong_end=8, part_weights={"right": 2.0}
    )
    assert config.algorithm.aggregation != filled


def test_length_may_cost_reward_from_the_first_token_on() -> None:
    full = load_config(["algorithm.advantage.overlong_start=0"]).full_algorithm
    assert (full.advantage.overlong_start, full.advantage.overlong_end) == (0, 8)


def test_algorithm_survives_the_file_of_a_run(tmp_path) -> None:  # type: ignore[no-untyped-def]
    config = load_config(["algorithm.loss=/mine.py:loss", "algorithm.loss.params.mine=[1, 2]"])
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    assert read_config(tmp_path / "config.yaml") == config
