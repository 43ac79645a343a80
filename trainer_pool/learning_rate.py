"""The learning rate of each step."""

from __future__ import annotations

import math

from configs.choices import LrSchedule
from configs.schema import TrainerConfig


def learning_rate(step: int, config: TrainerConfig) -> float:
    """The rate of step 0, 1, ...: it rises linearly to `learning_rate` at step `lr_warmup_steps`,
    then follows `lr_schedule` to `lr_min_ratio` of it at the last step."""
    peak, num_warmup = config.learning_rate, config.lr_warmup_steps
    if step <= num_warmup:
        return peak * (step + 1) / (num_warmup + 1)
    done = (step - num_warmup) / (config.num_steps - 1 - num_warmup)
    match config.lr_schedule:
        case LrSchedule.constant:
            left = 1.0
        case LrSchedule.linear:
            left = 1 - done
        case LrSchedule.cosine:
            left = (1 + math.cos(math.pi * done)) / 2
    return peak * (left + (1 - left) * config.lr_min_ratio)
