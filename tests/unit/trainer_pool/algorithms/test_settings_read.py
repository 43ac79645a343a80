"""Every function reads all settings of its kind; that it reads no others is checked by its type."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np
import pytest
import torch

from configs.advantages import ADVANTAGES, AGGREGATIONS, AdvantageConfig
from configs.algorithm_schema import TEACHER_COLUMN, AlgorithmConfig
from configs.checks import FunctionConfig
from configs.corrections import CORRECTIONS
from configs.losses import LOSSES, STREAM_LOSSES
from tests.support.trainer.made_up import trajectory
from tests.support.trainer.token_batch import tokens
from trainer_pool.algorithms import corrections
from trainer_pool.algorithms.advantages import AdvantageInputs
from trainer_pool.algorithms.aggregation import AggregationInputs
from trainer_pool.algorithms.registry import OUR_FUNCTIONS
from trainer_pool.algorithms.types import LossInputs


@dataclass(slots=True)
class Watched:
    """Settings that note the names of those that are read."""

    section: FunctionConfig
    read: set[str] = field(default_factory=set)

    def __getattr__(self, name: str) -> Any:
        self.read.add(name)
        return getattr(self.section, name)


def batch() -> LossInputs:
    logprobs = torch.tensor([-0.6, -0.8, -0.3])
    inputs = tokens(
        trainer=logprobs - 0.1,
        proximal=logprobs,
        rollout=logprobs + 0.1,
        advantages=torch.tensor([1.0, -1.0, 0.5]),
    )
    return replace(inputs, columns={TEACHER_COLUMN: logprobs})


EPISODES = AdvantageInputs(
    rewards_E=np.array([1.0, 0.0]),
    groups_E=np.array([0, 0]),
    num_tokens_E=np.array([3.0, 2.0]),
    parts={"right": np.array([1.0, 0.0])},
    trajectories=[trajectory([0, 1, 1])],
    episodes=[0],
    masks=[np.array([0, 1, 1], np.uint8)],
    values=[np.zeros(3, np.float32)],
)
TRAJECTORIES = AggregationInputs(
    num_tokens_R=np.array([3, 2]), shares_R=np.ones(2), groups_R=np.zeros(2, np.int64)
)
CASES: list[tuple[str, str, type[FunctionConfig], object]] = [
    *(("algorithm.loss", kind, section, batch()) for kind, section in LOSSES.items()),
    *(("algorithm.streams.*.loss", kind, one, batch()) for kind, one in STREAM_LOSSES.items()),
    *(("algorithm.advantage.kind", kind, one, EPISODES) for kind, one in ADVANTAGES.items()),
    *(("algorithm.aggregation", kind, one, TRAJECTORIES) for kind, one in AGGREGATIONS.items()),
    *(("algorithm.correction", kind, one, batch()) for kind, one in CORRECTIONS.items()),
]
GIVEN = {"part_weights": {"right": 1.0}, "aggregation_length": 9}


@pytest.mark.parametrize(("setting", "kind", "section", "inputs"), CASES)
def test_function_reads_all_settings_of_its_kind(
    setting: str, kind: str, section: type[FunctionConfig], inputs: object
) -> None:
    names = {item.name for item in fields(section)}
    given = {name: value for name, value in GIVEN.items() if name in names}
    settings = Watched(section(kind=kind, **given))  # type: ignore[arg-type]
    OUR_FUNCTIONS[setting][kind](inputs, settings)
    shared = {item.name for item in fields(AdvantageConfig)}  # read where rewards are made
    if setting == "algorithm.correction":
        config = AlgorithmConfig(correction=[settings.section])  # type: ignore[list-item]
        assert corrections.needs_batch(config) == (kind == "m2po")
        shared |= {"normalize", "m2po_limit"}  # read with the statistics of the batch
    assert settings.read | shared >= names
