"""What the controller hands to the trainer pool and gets back; importable without torch."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from configs.schema import BufferConfig, TrainerConfig, WeightSyncConfig


@dataclass(kw_only=True, slots=True, frozen=True)
class TrainerSpec:
    """Everything that a trainer rank is built from; the same for every rank."""

    config: TrainerConfig
    weight_sync: WeightSyncConfig
    buffer: BufferConfig
    model_path: str
    """Hugging Face name or folder of the policy that the run starts with."""
    trust_remote_code: bool
    redis_url: str = field(repr=False)
    """With its password, so that no log shows it."""
    run: str
    run_dir: str
    seed: int
    host: str
    """Address on which rank 0 listens, for the other ranks and for the receivers."""
    num_threads: int
    uses_gpu: bool
    serving_dtype: str
    """Of the weights as engines serve them, as torch spells it: "float32" or "bfloat16"."""
    weights_key: str = field(repr=False)
    """What the receivers of this run ask for."""
    gpu_share: float = 1.0
    """Of a GPU, for each rank that uses one: less than 1 where it shares it with an engine."""


@dataclass(kw_only=True, slots=True, frozen=True, eq=False)
class SupervisedExample:
    """A text to imitate: [T] token ids, and 1 where the token is to be learnt."""

    tokens: NDArray[np.int32]
    loss_mask: NDArray[np.uint8]


@dataclass(kw_only=True, slots=True, frozen=True)
class WarmStartReport:
    """Mean negative log-likelihood of a learnt token in the first and the last batch (nats)."""

    loss_first: float
    loss_last: float
    num_steps: int
    seconds: float


@dataclass(kw_only=True, slots=True, frozen=True)
class TrainReport:
    """How a training loop ended."""

    num_steps: int
    version: int
    """Of the weights that the loop ended with."""
    was_stopped: bool
    """By `stop()`, before all steps were done."""
    export_dir: str
    """The final policy in Hugging Face's layout."""
    seconds: float
