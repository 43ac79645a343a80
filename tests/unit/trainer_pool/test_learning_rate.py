"""The learning rate of every step: warm-up, then the schedule."""

from __future__ import annotations

import math

import pytest

from configs.choices import LrSchedule
from configs.load import ConfigError, load_config
from configs.schema import TrainerConfig
from trainer_pool.learning_rate import learning_rate


def _rates(
    schedule: LrSchedule, num_steps: int = 9, warmup: int = 4, low: float = 0.1
) -> list[float]:
    config = TrainerConfig(
        num_steps=num_steps,
        learning_rate=2.0,
        lr_warmup_steps=warmup,
        lr_schedule=schedule,
        lr_min_ratio=low,
    )
    return [learning_rate(step, config) for step in range(num_steps)]


def test_rate_rises_to_its_peak_and_follows_the_schedule() -> None:
    rise = [0.4, 0.8, 1.2, 1.6, 2.0]
    assert _rates(LrSchedule.constant) == pytest.approx([*rise, 2.0, 2.0, 2.0, 2.0])
    assert _rates(LrSchedule.linear) == pytest.approx([*rise, 1.55, 1.1, 0.65, 0.2])
    half = [0.2 + 0.9 * (1 + math.cos(math.pi * done)) for done in (0.25, 0.5, 0.75, 1)]
    assert _rates(LrSchedule.cosine) == pytest.approx([*rise, *half])


@pytest.mark.parametrize("schedule", LrSchedule)
def test_rate_without_warmup_begins_at_its_peak(schedule: LrSchedule) -> None:
    rates = _rates(schedule, warmup=0, low=0.0)
    assert rates[0] == 2.0 and rates[-1] == (2.0 if schedule is LrSchedule.constant else 0.0)
    assert _rates(schedule, num_steps=1, warmup=0) == [2.0]


def test_warmup_as_long_as_the_run_leaves_no_schedule() -> None:
    with pytest.raises(ConfigError, match=r"trainer\.lr_warmup_steps=7.*less than trainer\.num_s"):
        load_config(
            ["trainer.num_steps=7", "trainer.lr_warmup_steps=7", "trainer.lr_schedule=cosine"]
        )
