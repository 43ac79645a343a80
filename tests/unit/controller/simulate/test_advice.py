"""Recommendations where the answer is known."""

from __future__ import annotations

from dataclasses import replace

import pytest

from configs.choices import OnStale
from controller.commands.simulate import lognormal_lengths
from controller.simulate.advice import colocated_s, fastest, in_words, recommended, splits
from controller.simulate.events import Setting
from controller.simulate.machine import Machine

SETTING = Setting(
    machine=Machine(
        gpu="H100",
        num_params=9e9,
        active_params=9e9,
        kv_elements=65536,
        tp_size=1,
        max_running=256,
    ),
    num_engines=1,
    num_trainer_gpus=1,
    num_steps=16,
    groups_per_step=32,
    prompt_tokens=100,
    max_staleness=0,
    on_stale=OnStale.wait,
    max_commits=8,
)


SHORT = replace(SETTING, prompt_tokens=4000)
"""With answers of a few tokens training is nearly all of the work."""


def said(setting: Setting, lengths: str, switch_s: float) -> str:
    draw = lognormal_lengths(lengths, 8, 30_000)
    plans = [fastest(setting, 16, value, draw) for value in (0, 2, 8)]
    return in_words(plans, colocated_s(setting, 16, switch_s, draw), price=2.0)


def test_short_equal_answers_are_a_case_for_staying_synchronous() -> None:
    assert said(SHORT, "20,20", 0.0).startswith("Stay synchronous and colocated: all 16 GPUs")


def test_heavy_tail_is_a_case_for_asynchrony() -> None:
    words = said(SETTING, "1000,20000", 10.0)
    assert words.startswith("Asynchronous: ")
    assert "Take buffer.max_staleness=8 with " in words and " GPU-hours, " in words


def test_splits_leave_the_training_state_room() -> None:
    found = [(one.num_trainer_gpus, one.num_engines) for one in splits(SETTING, 16)]
    assert found == [(14, 2), (12, 4), (10, 6), (8, 8), (6, 10), (4, 12)]  # 162 GB of state
    with pytest.raises(ValueError, match=r"GPUS=2: a model of 9e\+09 parameters does not fit"):
        next(splits(SETTING, 2))
    large = replace(SETTING, machine=replace(SETTING.machine, num_params=70e9))
    with pytest.raises(ValueError, match=r"rollout\.engine\.tp_size=1"):
        next(splits(large, 64))


def test_nearly_as_fast_and_less_stale_is_preferred() -> None:
    draw = lognormal_lengths("20,20", 8, 1000)
    plans = [fastest(SHORT, 16, value, draw) for value in (0, 2, 8)]
    assert recommended(plans) is plans[1]
    assert plans[2].outcome.step_s > plans[1].outcome.step_s / 1.03
