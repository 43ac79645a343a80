"""Every setting of a run, with its one default and the rules that join them.

A section is handed to the component that it configures and to nobody else. Types are those that
OmegaConf can check; `load.py` turns YAML and command-line overrides into one `Config`. A broken
rule raises ValueError naming the field, its value and the fix.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from configs.choices import (
    AppendFsync,
    Backend,
    CommitStrategy,
    Dtype,
    OnFull,
    OnStale,
    PauseMode,
    Selector,
)
from configs.joint_rules import check_joint_rules
from configs.rollout_schema import RolloutConfig, TaskConfig
from configs.rules import at_least, require


@dataclass(kw_only=True, slots=True)
class ScratchModelConfig:
    """A small Qwen3 with a byte-level tokenizer, built with random weights when the run starts."""

    hidden_size: int = 128
    intermediate_size: int = 384
    num_layers: int = 4
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 32
    max_position_embeddings: int = 2048

    def __post_init__(self) -> None:
        at_least(
            1,
            "model.scratch",
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            num_layers=self.num_layers,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            max_position_embeddings=self.max_position_embeddings,
        )
        require(
            self.num_heads % self.num_kv_heads == 0,
            "model.scratch.num_kv_heads",
            self.num_kv_heads,
            f"must divide model.scratch.num_heads={self.num_heads}",
        )


@dataclass(kw_only=True, slots=True)
class ModelConfig:
    """Exactly one of `path` and `scratch` says where the initial policy comes from."""

    path: str | None = None
    """Hugging Face name or a local folder."""
    scratch: ScratchModelConfig | None = None
    trust_remote_code: bool = False


@dataclass(kw_only=True, slots=True)
class WarmStartConfig:
    """Supervised learning on the task's own answers before RL begins (0 steps: none)."""

    num_steps: int = 0
    batch_size: int = 64
    learning_rate: float = 1e-3

    def __post_init__(self) -> None:
        at_least(0, "trainer.warm_start", num_steps=self.num_steps)
        at_least(1, "trainer.warm_start", batch_size=self.batch_size)


@dataclass(kw_only=True, slots=True)
class TrainerConfig:
    num_ranks: int | None = None
    """ZeRO-3 ranks. None is 2, or 1 where there are too few GPUs for that."""
    num_steps: int = 100
    groups_per_step: int = 16
    """Prompt groups in one global batch, shared among the ranks by tokens."""
    num_minibatches: int = 1
    """Optimizer steps a batch. More than one: proximal log-probabilities are computed first."""
    micro_batch_tokens: int = 16384
    """Padded tokens in one forward pass of one rank."""
    learning_rate: float = 1e-6
    lr_warmup_steps: int = 0
    weight_decay: float = 0.0
    adam_beta1: float = 0.9
    adam_beta2: float = 0.95
    max_grad_norm: float = 1.0
    clip_low: float = 0.2
    clip_high: float = 0.28
    """PPO clips importance_ratio (trainer / proximal) to [1 - clip_low, 1 + clip_high]."""
    tis_cap: float = 2.0
    """Cap of the token-level truncated importance weight (proximal / rollout)."""
    normalize_advantage_std: bool = True
    gradient_checkpointing: bool = False
    dtype: Dtype = Dtype.auto
    backend: Backend = Backend.auto
    checkpoint_every: int = 50
    """Steps between checkpoints; the last step always makes one."""
    timeout_s: float = 600.0
    """Longest that one collective among the trainer ranks may take."""
    warm_start: WarmStartConfig = field(default_factory=WarmStartConfig)

    def __post_init__(self) -> None:
        at_least(
            1,
            "trainer",
            num_ranks=self.ranks,
            num_steps=self.num_steps,
            num_minibatches=self.num_minibatches,
            micro_batch_tokens=self.micro_batch_tokens,
            checkpoint_every=self.checkpoint_every,
        )
        require(
            self.groups_per_step >= self.ranks,
            "trainer.groups_per_step",
            self.groups_per_step,
            f"every rank needs a group: at least trainer.num_ranks={self.ranks}",
        )
        require(
            self.num_minibatches <= self.groups_per_step // self.ranks,
            "trainer.num_minibatches",
            self.num_minibatches,
            "at most trainer.groups_per_step // trainer.num_ranks = "
            f"{self.groups_per_step // self.ranks}",
        )
        require(0 < self.clip_low < 1, "trainer.clip_low", self.clip_low, "must lie in (0, 1)")
        require(self.clip_high > 0, "trainer.clip_high", self.clip_high, "must be above 0")
        require(self.tis_cap >= 1, "trainer.tis_cap", self.tis_cap, "must be at least 1")
        require(
            self.learning_rate > 0, "trainer.learning_rate", self.learning_rate, "must be above 0"
        )
        require(self.timeout_s > 0, "trainer.timeout_s", self.timeout_s, "must be above 0")

    @property
    def ranks(self) -> int:
        """`num_ranks`; where that is left open the most that the run will have."""
        return 2 if self.num_ranks is None else self.num_ranks


@dataclass(kw_only=True, slots=True)
class BufferConfig:
    url: str | None = None
    """redis://[user:password@]host:port/db or unix://; None starts a server for this run."""
    tls_ca_file: str | None = None
    """Certificates that a rediss:// server is checked against; None takes the system's."""
    shards: int = 1
    """Complete buffers that the groups are spread over, on one server or on a Redis Cluster."""
    max_staleness: int = 2
    """The most policy versions by which a trained token may lag. Can change during the run."""
    on_stale: OnStale = OnStale.requeue
    max_retries: int = 2
    """How often a prompt whose group went stale is run again."""
    selector: Selector = Selector.stalest
    capacity_groups: int | None = None
    """The most groups that may be ready or leased; None leaves it to `max_staleness`."""
    capacity_bytes: int | None = None
    """The most bytes that ready and leased groups may take."""
    on_full: OnFull = OnFull.block
    max_attempts: int = 5
    """A group that was leased this often and never trained is put into quarantine."""
    lease_timeout_s: float = 600.0
    """A lease or a credit that is not renewed for this long returns to the buffer."""
    wait_timeout_s: float = 600.0
    """Longest that a trainer waits for a batch, a worker for a credit, a push for room."""
    remember_s: float = 3600.0
    """How long the id of a finished group is kept, so that a late retry of its push is known."""
    audit_length: int = 100_000
    """About how many events of groups are kept for `make trace`; 0 for none."""
    compress: bool = False
    """Compress payloads with zstd; pays where the network to Redis is slow."""
    appendfsync: AppendFsync = AppendFsync.everysec
    start_timeout_s: float = 30.0

    def __post_init__(self) -> None:
        at_least(
            0,
            "buffer",
            max_staleness=self.max_staleness,
            max_retries=self.max_retries,
            audit_length=self.audit_length,
        )
        at_least(1, "buffer", shards=self.shards, max_attempts=self.max_attempts)
        for name, limit in (
            ("capacity_groups", self.capacity_groups),
            ("capacity_bytes", self.capacity_bytes),
        ):
            require(
                limit is None or limit >= self.shards,
                f"buffer.{name}",
                limit,
                f"must be at least buffer.shards={self.shards}, or null for no limit",
            )
        for name, value in (
            ("lease_timeout_s", self.lease_timeout_s),
            ("wait_timeout_s", self.wait_timeout_s),
            ("remember_s", self.remember_s),
        ):
            require(value > 0, f"buffer.{name}", value, "must be above 0")
        if self.url is not None:
            require(
                self.url.split("://")[0] in {"redis", "rediss", "unix"},
                "buffer.url",
                self.url.split("@")[-1],
                "must begin with redis://, rediss:// or unix://",
            )


@dataclass(kw_only=True, slots=True)
class WeightSyncConfig:
    backend: Backend = Backend.auto
    bucket_bytes: int = 32 * 2**20
    """Size of one message; a tensor may span several, and several share one."""
    num_buffers: int = 2
    """Buckets that are on their way at once, for each member."""
    num_staged: int = 2
    """Versions that a receiver has room for: the one it offers and the one that arrives."""
    stage_dir: str | None = None
    """Folder of the staged versions, on every node; None is /dev/shm."""
    commit: CommitStrategy = CommitStrategy.staged_disk
    pause_mode: PauseMode = PauseMode.retract
    max_concurrent_commits: int = 1
    """Engines of the fleet that may stand still at once to take a version."""
    commit_timeout_s: float = 120.0
    """Longest that one engine's commit may take."""
    full_every: int = 1
    """Every so many publishes all bytes are sent, between them only those that changed."""
    max_delta_density: float = 0.25
    """A larger share of changed elements than this is sent in full."""
    timeout_s: float = 30.0
    """Longest silence of a member, beyond what its bytes need at `min_bandwidth`."""
    min_bandwidth: float = 50e6
    """Bytes per second below which a member counts as stalled."""

    def __post_init__(self) -> None:
        at_least(
            1,
            "weight_sync",
            bucket_bytes=self.bucket_bytes,
            num_buffers=self.num_buffers,
            max_concurrent_commits=self.max_concurrent_commits,
            full_every=self.full_every,
            min_bandwidth=self.min_bandwidth,
        )
        at_least(2, "weight_sync", num_staged=self.num_staged)
        require(
            0 <= self.max_delta_density <= 0.5,
            "weight_sync.max_delta_density",
            self.max_delta_density,
            "must lie in [0, 0.5]: with more a delta of 2-byte weights is larger than all of them",
        )
        require(
            self.full_every == 1 or self.max_delta_density > 0,
            "weight_sync.full_every",
            self.full_every,
            "with max_delta_density=0 every version is sent in full: raise it, or set full_every=1",
        )
        require(
            self.stage_dir is None or self.stage_dir.startswith("/"),
            "weight_sync.stage_dir",
            self.stage_dir,
            "give an absolute path: it means the same folder on every node",
        )
        for name, value in (
            ("timeout_s", self.timeout_s),
            ("commit_timeout_s", self.commit_timeout_s),
        ):
            require(value > 0, f"weight_sync.{name}", value, "must be above 0")


@dataclass(kw_only=True, slots=True)
class ClusterConfig:
    ray_address: str | None = None
    """Address of a Ray cluster ("auto" finds a running one); None starts Ray on this machine."""
    num_cpus: int | None = None
    """Cores that a Ray started here may promise; None is all of them."""
    num_gpus: int | None = None
    """GPUs that a Ray started here may promise; None is all of them. `make dry-run` shows the plan
    for any number."""
    gpus_per_rank: int | None = None
    """GPUs of a trainer rank: 0 runs everything on the CPU; None is 1, half of one that it shares
    with the engine, or 0, by what there is. An engine takes tp_size."""
    threads_per_process: int | None = None
    """Torch threads of a CPU process; None shares the cores out."""
    host: str | None = None
    """Address on which this machine's servers listen. None is the one by which the cluster of
    ray_address knows this machine, or 127.0.0.1 without such. Redis has a password in any case."""
    start_timeout_s: float = 900.0
    stop_timeout_s: float = 20.0

    def __post_init__(self) -> None:
        if self.gpus_per_rank is not None:
            require(
                self.gpus_per_rank in (0, 1),
                "cluster.gpus_per_rank",
                self.gpus_per_rank,
                "a ZeRO-3 rank drives one GPU: 0 or 1",
            )


@dataclass(kw_only=True, slots=True)
class RunConfig:
    name: str | None = None
    """Folder of the run below `dir`; None is the experiment's name with date and time."""
    dir: str = "runs"
    group: str | None = None
    """Unix group that may read the run's folder; None leaves it to its owner alone."""
    seed: int = 0
    panel: bool = True
    """Draw the live panel; a line a step is printed where the output is no terminal."""
    prometheus_port: int | None = None
    """Port on cluster.host where Prometheus may read the metrics; None for none."""


@dataclass(kw_only=True, slots=True)
class Config:
    """A whole run."""

    experiment: str = "quickstart"
    run: RunConfig = field(default_factory=RunConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    task: TaskConfig = field(default_factory=TaskConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    buffer: BufferConfig = field(default_factory=BufferConfig)
    weight_sync: WeightSyncConfig = field(default_factory=WeightSyncConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)

    def __post_init__(self) -> None:
        check_joint_rules(self)
