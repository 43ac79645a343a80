"""What the controller hands to the rollout pool and gets back; imports no heavy library."""

from __future__ import annotations

from dataclasses import dataclass, field

from configs.rollout_schema import RolloutConfig, TaskConfig
from configs.schema import BufferConfig, WeightSyncConfig


@dataclass(kw_only=True, slots=True, frozen=True)
class RolloutSpec:
    """Everything that the engines and workers are built from; the same for all of them."""

    config: RolloutConfig
    task: TaskConfig
    weight_sync: WeightSyncConfig
    buffer: BufferConfig
    model_path: str
    """Hugging Face name or folder: the tokenizer, the architecture and the first weights."""
    trust_remote_code: bool
    redis_url: str
    run: str
    run_dir: str
    host: str
    """Address on which servers listen; beyond loopback each engine listens on its own node's."""
    num_threads: int
    """Torch threads of an engine without a GPU."""
    uses_gpu: bool
    seed: int
    engine_key: str = field(repr=False)
    """What a request must carry for an engine to answer it; made anew for each run."""
    weights_key: str = field(repr=False)
    """The same for the receivers of weights."""


@dataclass(kw_only=True, slots=True, frozen=True)
class WorkerReport:
    """How a worker's generating ended."""

    num_groups: int
    """Groups handed to the buffer."""
    num_failed: int
    """Groups that no engine could complete."""
    num_too_old: int
    """Groups stopped since they could not have been trained any more."""
    num_skipped: int
    """Prompts that were too long."""


@dataclass(kw_only=True, slots=True, frozen=True)
class EvalReport:
    """One pass over the held-out prompts, greedy, one answer each."""

    version_min: int
    version_max: int
    """The oldest and the newest policy version that wrote a token of it."""
    accuracy: float
    """Share of prompts that got the full score, 1."""
    score_mean: float
    num_prompts: int
    seconds: float
