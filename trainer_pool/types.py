"""Inputs and results of the trainer pool; importable without torch."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from configs.algorithm_schema import AlgorithmConfig
from configs.schema import BufferConfig, LoraConfig, TrainerConfig, WeightSyncConfig

FINAL_MODEL = "final_model"
"""Folder of a run with the final policy in Hugging Face format."""
KEPT_REFERENCE = "reference_model"
"""Folder of a run with the policy that RL began with, which a resumed run is measured against."""


@dataclass(kw_only=True, slots=True, frozen=True)
class TrainerSpec:
    """The inputs of a trainer rank; the same for every rank."""

    config: TrainerConfig
    algorithm: AlgorithmConfig
    weight_sync: WeightSyncConfig
    buffer: BufferConfig
    model_path: str
    """Hugging Face name or folder of the initial policy."""
    trust_remote_code: bool
    lora: LoraConfig | None = None
    """None: all weights are trained."""
    redis_url: str = field(repr=False)
    """Contains the password, so it must not be logged."""
    run: str
    run_dir: str
    seed: int
    host: str
    """Address on which rank 0 listens for the other ranks and the receivers."""
    num_threads: int
    uses_gpu: bool
    serving_dtype: str
    """Dtype of the weights in the engines, as torch spells it: "float32" or "bfloat16"."""
    weights_key: str = field(repr=False)
    """The key that this run's receivers require."""
    resume_from: str | None = None
    """Folder of the checkpoint to go on from; None starts at step 0."""
    copies_dir: str = ""
    """Folder in host memory for copies of the state (trainer.memory_copy_every)."""
    may_use_copies: bool = False
    """Copies in `copies_dir` are this run's: one that is later than the checkpoint replaces it."""
    newest_version: int = 0
    """The newest version that the run is known to have announced, in case Redis has lost it."""
    outlives_controller: bool = False
    """The ranks go on when the controller that created them dies."""
    gpu_share: float = 1.0
    """Share of a GPU for each rank: less than 1 if an engine uses the same GPU."""
    max_logprob_diff: float = 1.0
    """Mean difference between the log-probabilities of engines and trainer, in nats, above which
    training ends."""
    probe_text: tuple[int, ...] = ()
    """Tokens of prompts, as many as the longest trajectory may have, which engines and trainer
    score alike; empty: they are not compared."""
    log_rate: float = 0.0
    """Share of the groups of which advantages and log-probabilities are recorded: those that the
    workers record (rollout.log_rate)."""
    max_probe_diff: float = 1.0
    """The same as `max_logprob_diff` for that text."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Restored:
    """The state from which ranks that follow others go on."""

    step: int
    """Completed steps."""
    from_memory: bool
    """From a copy in host memory, and not from the checkpoint on disk."""


@dataclass(kw_only=True, slots=True, frozen=True, eq=False)
class SupervisedExample:
    """A text to imitate: [T] token ids, and 1 where the token is trained on."""

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
    """The end of a training loop."""

    num_steps: int
    version: int
    """Version of the weights at the end."""
    was_stopped: bool
    """`stop()` ended it before all steps were done."""
