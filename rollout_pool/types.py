"""What the controller hands to the rollout pool and gets back; imports no heavy library."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

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
    redis_url: str = field(repr=False)
    """With its password, so that no log shows it."""
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
    gpu_share: float = 1.0
    """Share of each GPU that an engine uses: less than 1 where a trainer rank has the rest."""


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
    """One pass over the held-out prompts."""

    version_min: int
    version_max: int
    """The oldest and the newest policy version that wrote a token of it."""
    accuracy: float
    """Share of answers that got rollout.eval.full_score or more."""
    score_mean: float
    num_prompts: int
    """Number of prompts with all their answers; the others count for nothing."""
    seconds: float
    num_samples: int = 1
    """Answers of each prompt."""
    num_failed: int = 0
    """Prompts of which an answer could not be had."""
    num_unscored: int = 0
    """Answers that no service could score; they count for nothing."""
    mean_at_k: Mapping[int, float] = field(default_factory=dict)
    """Share of right ones among the first k answers, for k = 1, 2, 4, ... and `num_samples`."""
    pass_at_k: Mapping[int, float] = field(default_factory=dict)
    """Estimate of the chance that one of k answers is right, for the same k."""

    def record(self) -> dict[str, float | int | str]:
        """Flat, for a metrics log: mean_at_<k> and pass_at_<k> for each k."""
        flat = asdict(self)
        by_name = {"mean_at": flat.pop("mean_at_k"), "pass_at": flat.pop("pass_at_k")}
        return flat | {f"{name}_{k}": v for name, by_k in by_name.items() for k, v in by_k.items()}
