"""Types that the controller hands to the rollout pool and gets back; imports no heavy library."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

from configs.rollout_schema import RolloutConfig, TaskConfig
from configs.run_files import Scalar
from configs.schema import BufferConfig, WeightSyncConfig
from weight_sync.types import MergeSpec


@dataclass(kw_only=True, slots=True, frozen=True)
class AdapterSpec:
    """The adapter that engines serve by versions, each of which is one more adapter to them."""

    rank: int
    alpha: int
    layers: tuple[str, ...]
    """Last names of the linear layers that have it."""
    num_slots: int
    """Versions that an engine can serve at once."""


@dataclass(kw_only=True, slots=True, frozen=True)
class RolloutSpec:
    """Everything that the engines and workers are built from; the same for all of them."""

    config: RolloutConfig
    task: TaskConfig
    data: Mapping[str, str] = field(default_factory=dict)
    """The data of its tasks when the run began (`registry.data_of`): a worker or a scoring process
    that starts later must find the same."""
    weight_sync: WeightSyncConfig
    buffer: BufferConfig
    model_path: str
    """Hugging Face name or folder: the tokenizer, the architecture and the first weights."""
    trust_remote_code: bool
    redis_url: str = field(repr=False)
    """Contains the password, so it is kept out of `repr`."""
    run: str
    run_dir: str
    host: str
    """Address on which servers listen; unless it is loopback, each uses its own node's address."""
    num_threads: int
    """Torch threads of an engine without a GPU."""
    uses_gpu: bool
    seed: int
    engine_key: str = field(repr=False)
    """API key of the engines; new for each run."""
    weights_key: str = field(repr=False)
    """API key of the weight receivers; new for each run."""
    outlives_controller: bool = False
    """Whether the actors go on when the controller that created them dies."""
    stage_token: str = field(default_factory=lambda: secrets.token_hex(4))
    """Keeps this launch's stage folders apart from any other's."""
    gpu_share: float = 1.0
    """Share of each GPU that an engine uses: below 1 where a trainer rank has the rest."""
    merge: MergeSpec | None = None
    """How receivers merge the adapters that are sent; None: engines load what is sent."""
    adapter: AdapterSpec | None = None
    """None: whole weights are sent, or adapters are merged."""


@dataclass(kw_only=True, slots=True, frozen=True)
class WorkerReport:
    """A worker's report at its end."""

    num_groups: int
    """Groups handed to the buffer."""
    num_failed: int
    """Groups that no engine could complete."""
    num_too_old: int
    """Groups stopped because they became too stale to be trained."""
    num_skipped: int
    """Prompts that were too long."""


@dataclass(kw_only=True, slots=True, frozen=True)
class EvalReport:
    """One pass over the held-out prompts."""

    version_min: int
    version_max: int
    """The oldest and the newest policy version that sampled one of its tokens."""
    accuracy: float
    """Fraction of samples that got rollout.eval.full_score or more."""
    score_mean: float
    num_prompts: int
    """Prompts with all their samples; the others are left out."""
    seconds: float
    num_samples: int = 1
    num_failed: int = 0
    """Prompts for which a sample failed."""
    num_unscored: int = 0
    """Samples that no service could score; they are left out."""
    mean_at_k: Mapping[int, float] = field(default_factory=dict)
    """Fraction of correct samples among the first k, for k = 1, 2, 4, ... and `num_samples`."""
    pass_at_k: Mapping[int, float] = field(default_factory=dict)
    """Estimated probability that at least one of k samples is correct, for the same k."""
    accuracy_of: Mapping[str, float] = field(default_factory=dict)
    """`accuracy` by the task of a mixture that has one."""

    of_sets: Mapping[str, EvalReport] = field(default_factory=dict)
    """The reports on the further held-out sets, by name."""
    failed_sets: Mapping[str, str] = field(default_factory=dict)
    """Why there is none of the others, by name."""

    def record(self) -> dict[str, Scalar]:
        """Flat, for a metrics log: mean_at_<k> and pass_at_<k> for each k, accuracy/<task>; of a
        further set the same names with /<set>, or failed/<set>."""
        flat = self._flat()
        of_sets = {
            f"{name}/{place}": value
            for place, report in self.of_sets.items()
            for name, value in report._flat().items()
            if name.startswith(_OF_EACH_SET)
        }
        failed = {f"failed/{place}": why for place, why in self.failed_sets.items()}
        return flat | of_sets | failed

    def _flat(self) -> dict[str, Scalar]:
        flat = asdict(self)
        del flat["of_sets"], flat["failed_sets"]
        by_name = {"mean_at": flat.pop("mean_at_k"), "pass_at": flat.pop("pass_at_k")}
        of_tasks = {f"accuracy/{task}": v for task, v in flat.pop("accuracy_of").items()}
        by_size = {f"{name}_{k}": v for name, by_k in by_name.items() for k, v in by_k.items()}
        return flat | by_size | of_tasks


_OF_EACH_SET = ("version_", "accuracy", "score_mean", "mean_at_", "pass_at_", "num_")
"""Beginnings of the names of what a record has of each set."""
