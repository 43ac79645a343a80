"""Every setting of a run, with its default and the constraints between settings.

Each section is passed only to the component that it configures. Types are limited to those that
OmegaConf can check; `load.py` turns YAML and command-line overrides into one `Config`. An invalid
value raises ValueError naming the field, its value and the fix.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from typing import ClassVar
from urllib.parse import urlsplit

from configs.advantages import (
    AggregationConfig,
    CriticConfig,
    Gdpo,
    OwnAdvantage,
    SequenceMeanTokenSumNorm,
)
from configs.algorithm_schema import AlgorithmConfig
from configs.checks import (
    FRACTION,
    NOT_EMPTY,
    NOT_NEGATIVE,
    NUM_BYTES,
    PORT,
    POSITIVE,
    SECONDS,
    SEED,
    VARIABLE,
    Rule,
    Section,
    at_least,
    live,
    matching,
    within,
)
from configs.choices import (
    AppendFsync,
    Backend,
    CommitStrategy,
    Dtype,
    Logger,
    LoraInit,
    LoraMode,
    LrSchedule,
    OnFull,
    OnStale,
    OnStall,
    PauseMode,
    Selector,
    StreamTokens,
    TailPolicy,
    TaskKind,
)
from configs.rollout_schema import (
    CACHE_DTYPE,
    TEST_TIME_FRACTION,
    RolloutConfig,
    TaskConfig,
)

RUN_NAME = matching(
    "[A-Za-z0-9][A-Za-z0-9._-]{0,99}",
    "up to 100 letters, digits, '.', '_', '-' (it names a folder and Redis keys)",
)
HOST = matching("[A-Za-z0-9:][A-Za-z0-9:._%-]*", "an IP address or the name of a host")
SHORT_RESPONSE = 32
"""Tokens that an engine samples in about the time that it takes to end a request, and to compute
its prompt again."""
STAGE_DIR = matching("(?s)/.*", "an absolute path: it means the same folder on every node")
EVAL_METRIC = matching(
    r"(accuracy|score_mean|(pass|mean)_at_\d+)(/.+)?",
    "accuracy, score_mean, pass_at_4 or the like, of a task or a set with a slash and its name",
)
LAYERS = matching(r"[A-Za-z0-9_-]+", "last names of layers, as [q_proj, v_proj], or [all-linear]")
RAY_ADDRESS = matching(r"auto|(ray://)?[^\s/]+:\d{1,5}", "auto or HOST:PORT")


@dataclass(kw_only=True, slots=True)
class ScratchModelConfig(Section):
    """A small Qwen3 with a byte-level tokenizer, built with random weights when the run starts."""

    SECTION: ClassVar[str] = "model.scratch"

    hidden_size: int = field(default=128, metadata=at_least(1))
    intermediate_size: int = field(default=384, metadata=at_least(1))
    num_layers: int = field(default=4, metadata=at_least(1))
    num_heads: int = field(default=4, metadata=at_least(1))
    num_kv_heads: int = field(default=2, metadata=at_least(1))
    head_dim: int = field(default=32, metadata=at_least(1))
    max_position_embeddings: int = field(default=2048, metadata=at_least(1))

    def rules(self) -> Iterator[Rule]:
        fix = f"must divide model.scratch.num_heads={self.num_heads}"
        yield Rule(self.num_heads % self.num_kv_heads == 0, "num_kv_heads", fix)
        yield Rule(self.head_dim % 2 == 0, "head_dim", "must be even: RoPE rotates pairs of it")


ALL_LINEAR = "all-linear"
"""A target of adapters: every linear layer but the output head; of experts, attention alone."""


@dataclass(kw_only=True, slots=True)
class LoraConfig(Section):
    """A low-rank adapter is trained instead of all weights, and it alone is sent to the engines."""

    SECTION: ClassVar[str] = "model.lora"

    rank: int = field(default=16, metadata=within(1, 1024))
    alpha: int = field(default=32, metadata=at_least(1))
    """The adapter's part of the output is multiplied by alpha / rank."""
    targets: list[str] = field(default_factory=lambda: [ALL_LINEAR], metadata=LAYERS)
    """The last names of the linear layers that get one, such as q_proj; all-linear: all but the
    output head, in a mixture of experts those of attention."""
    init: LoraInit = LoraInit.kaiming
    mode: LoraMode = LoraMode.merged
    resume_from: str | None = field(default=None, metadata=NOT_EMPTY)
    """A folder with an adapter as peft writes it, with which training begins."""

    @property
    def scale(self) -> float:
        return self.alpha / self.rank

    def rules(self) -> Iterator[Rule]:
        fix = "name at least one, each once, or all-linear alone"
        is_set = 0 < len({*self.targets}) == len(self.targets)
        is_whole = self.targets == [ALL_LINEAR] or ALL_LINEAR not in self.targets
        yield Rule(is_set and is_whole, "targets", fix)


@dataclass(kw_only=True, slots=True)
class ModelConfig(Section):
    """The initial policy: exactly one of `path` and `scratch`."""

    SECTION: ClassVar[str] = "model"

    path: str | None = field(default=None, metadata=NOT_EMPTY)
    """Hugging Face name or a local folder."""
    scratch: ScratchModelConfig | None = None
    trust_remote_code: bool = False
    lora: LoraConfig | None = None
    """None: all weights are trained."""


@dataclass(kw_only=True, slots=True)
class WarmStartConfig(Section):
    """Supervised learning on the task's own answers before RL begins (0 steps: none)."""

    SECTION: ClassVar[str] = "trainer.warm_start"

    num_steps: int = field(default=0, metadata=at_least(0))
    batch_size: int = field(default=64, metadata=at_least(1))
    learning_rate: float = field(default=1e-3, metadata=POSITIVE)
    echo_fraction: float = field(default=0.0, metadata=FRACTION)
    """Fraction of the demonstrations whose last answer repeats the question instead: an unreliable
    teacher, so that RL has something to improve."""


@dataclass(kw_only=True, slots=True)
class TrainerConfig(Section):
    SECTION: ClassVar[str] = "trainer"

    num_ranks: int | None = field(default=None, metadata=at_least(1))
    """ZeRO-3 ranks. None is 2, or 1 if there are too few GPUs, or without GPUs fewer than 4 cores.
    """
    num_steps: int = field(default=100, metadata=at_least(1))
    groups_per_step: int = field(default=16, metadata=at_least(1))
    """Prompt groups in one global batch, balanced over the ranks by their passes' cost.
    """
    min_groups_per_step: int | None = field(default=None, metadata=live(at_least(1)))
    """So many groups suffice for a step that has waited for `batch_timeout_s`; None: it always
    waits for a full batch."""
    batch_timeout_s: float = field(default=60.0, metadata=live(SECONDS))
    """How long a step waits for a full batch if `min_groups_per_step` is set."""
    num_minibatches: int = field(default=1, metadata=at_least(1))
    """Updates with each batch. If more than one, proximal log-probabilities are computed first.
    """
    gradient_accumulation_steps: int = field(default=1, metadata=at_least(1))
    """Steps, each with a batch of its own, whose gradients add up to one update and one policy
    version. A step begins as soon as its batch is there."""
    publish_every: int = field(default=1, metadata=at_least(1))
    """Every so many policy versions the engines get the weights; the last ones always."""
    micro_batch_tokens: int = field(default=16384, metadata=at_least(1))
    """Most tokens in one forward pass of one rank: trajectories laid end to end. Ranks that split
    them have `sequence_parallel_size` times fewer each."""
    sequence_parallel_size: int = field(default=1, metadata=at_least(1))
    """Ranks that split the tokens of each forward pass, for long trajectories: a number that
    divides `num_ranks` and the model's attention heads."""
    share_prefixes: bool = False
    """Compute the tokens that trajectories of one forward pass begin with, such as the prompt of a
    group, once for all of them."""
    learning_rate: float = field(default=1e-6, metadata=live(POSITIVE))
    lr_warmup_steps: int = field(default=0, metadata=at_least(0))
    """Steps in which the learning rate rises linearly to `learning_rate`."""
    lr_schedule: LrSchedule = LrSchedule.constant
    """The course of the learning rate after the warm-up, until `num_steps`."""
    lr_min_ratio: float = field(default=0.0, metadata=within(0, 1))
    """The last step's learning rate as a fraction of `learning_rate`; unused by a constant one."""
    weight_decay: float = field(default=0.0, metadata=NOT_NEGATIVE)
    adam_beta1: float = field(default=0.9, metadata=within(0, below=1))
    adam_beta2: float = field(default=0.95, metadata=within(0, below=1))
    adam_epsilon: float = field(default=1e-8, metadata=POSITIVE)
    max_grad_norm: float = field(default=1.0, metadata=NOT_NEGATIVE)
    max_grad_value: float | None = field(default=None, metadata=POSITIVE)
    """Clip each element of the gradient to so much, after its norm; None: do not."""
    max_grad_spike: float | None = field(default=100.0, metadata=within(above=1))
    """Skip an update whose gradient norm is more than so many times the median of the last 20;
    None: make it."""
    min_ess: float = field(default=0.0, metadata=within(0, below=1))
    """Skip an update whose effective sample size is less than this fraction of its tokens: a few of
    them carry it, since policies too far away sampled the others."""
    max_skipped_updates: int | None = field(default=10, metadata=at_least(1))
    """End the run when so many updates in a row were skipped for these reasons, or because a
    gradient was not finite; None: never."""
    peak_tflops: float | None = field(default=None, metadata=POSITIVE)
    """Peak of a rank's GPU in dense bfloat16, in TFLOP/s, for `mfu`; None: that of NVIDIA's A100,
    H100, H200, B200 and L40S is known."""
    gradient_checkpointing: bool = False
    offload_activations: bool = False
    """Hold the inputs of layers, which is what gradient_checkpointing keeps, in pinned host memory
    until the backward pass."""
    mlp_tile_tokens: int | None = field(default=None, metadata=at_least(1))
    """Tokens of a rank whose MLP is computed at a time, which lowers the memory of
    gradient_checkpointing for long rows, for one more pass of the MLP; None: all."""
    offload_optimizer: bool = False
    """Hold the float32 weights and Adam's moments in pinned host memory, and update there."""
    offload_parameters: bool = False
    """Hold the sharded weights in pinned host memory; each layer is copied to the GPU for its pass.
    """
    dtype: Dtype = Dtype.auto
    """Dtype of the passes; with bfloat16, updates add up in float32 copies of the weights."""
    backend: Backend = Backend.auto
    checkpoint_every: int = field(default=50, metadata=at_least(1))
    """Steps between checkpoints; the last step always writes one."""
    keep_checkpoints: int = field(default=2, metadata=at_least(1))
    """The newest ones that are kept."""
    keep_checkpoint_every: int | None = field(default=None, metadata=at_least(1))
    """Checkpoints of every so many steps are kept for ever; None keeps only the newest."""
    keep_best: str | None = field(default=None, metadata=EVAL_METRIC)
    """Keep the checkpoint too whose evaluation had the most of this, as accuracy, pass_at_4 or
    accuracy/SET: docs/watching.md#the-best-checkpoint."""
    memory_copy_every: int | None = field(default=None, metadata=at_least(1))
    """Steps between copies of the training state in the host memory of two machines, for ranks that
    start again after one has died; None: they go on from the last checkpoint on disk."""
    checkpoint_groups: bool = True
    """Checkpoints hold the buffer's groups, for a resume whose Redis has lost them; without
    them, or if this is off at the resume, their prompts are sampled again."""
    max_restarts: int = field(default=3, metadata=at_least(0))
    """How often the ranks start again from the last checkpoint after one of them has died."""
    timeout_s: float = field(default=600.0, metadata=SECONDS)
    """Longest that one collective among the trainer ranks may take. They start again from the last
    checkpoint after that, and if one does not answer for ten of its usual steps: 150 s at least,
    and no longer than this."""
    warm_start: WarmStartConfig = field(default_factory=WarmStartConfig)

    def rules(self) -> Iterator[Rule]:
        size, parts = self.sequence_parallel_size, "trainer.num_ranks"
        if size > 1:
            fix = f"must be a multiple of trainer.sequence_parallel_size={size}"
            is_whole = self.num_ranks is not None and self.num_ranks % size == 0
            yield Rule(is_whole, "num_ranks", fix)
            parts = "(trainer.num_ranks / trainer.sequence_parallel_size)"
        fix = f"every rank needs a group: at least {parts}={self.dp_size}"
        yield Rule(self.groups_per_step >= self.dp_size, "groups_per_step", fix)
        least = self.min_groups_per_step
        fix = (
            f"every rank needs a group: {parts}={self.dp_size} to "
            f"trainer.groups_per_step={self.groups_per_step}"
        )
        is_possible = least is None or self.dp_size <= least <= self.groups_per_step
        yield Rule(is_possible, "min_groups_per_step", fix)
        most = self.groups_per_step // self.dp_size
        fix = f"at most trainer.groups_per_step // {parts} = {most}"
        yield Rule(self.num_minibatches <= most, "num_minibatches", fix)
        is_constant = self.lr_schedule is LrSchedule.constant
        fix = f"less than trainer.num_steps={self.num_steps}, or trainer.lr_schedule=constant"
        yield Rule(is_constant or self.lr_warmup_steps < self.num_steps, "lr_warmup_steps", fix)
        fix = "it offloads what trainer.gradient_checkpointing=true keeps: set that too, or false"
        yield Rule(
            self.gradient_checkpointing or not self.offload_activations, "offload_activations", fix
        )
        fix = "it lowers the memory of trainer.gradient_checkpointing=true: set that too, or null"
        is_possible = self.gradient_checkpointing or self.mlp_tile_tokens is None
        yield Rule(is_possible, "mlp_tile_tokens", fix)
        yield from self._accumulation_rules()

    def _accumulation_rules(self) -> Iterator[Rule]:
        steps = self.gradient_accumulation_steps
        if steps == 1:
            return
        where = f"trainer.gradient_accumulation_steps={steps}"
        for name in ("num_steps", "checkpoint_every", "memory_copy_every"):
            value = getattr(self, name)
            fix = f"must be a multiple of {where}: between its steps an update is unfinished"
            yield Rule(value is None or value % steps == 0, name, fix)
        fix = f"with {where} several batches make one update; set one of the two to 1"
        yield Rule(self.num_minibatches == 1, "num_minibatches", fix)
        fix = f"with {where} no step has all tokens of an update; set 0"
        yield Rule(self.min_ess == 0, "min_ess", fix)

    @property
    def groups_per_version(self) -> int:
        return self.groups_per_step * self.gradient_accumulation_steps

    @property
    def ranks(self) -> int:
        """`num_ranks`; if that is None, the most that the run will have."""
        return 2 if self.num_ranks is None else self.num_ranks

    @property
    def dp_size(self) -> int:
        """Parts of a batch: ranks, or groups of ranks that split the same rows."""
        return self.ranks // self.sequence_parallel_size


@dataclass(kw_only=True, slots=True)
class AutotuneConfig(Section):
    """The run moves buffer.max_staleness by itself, between these bounds, and engines if it may
    (docs/staleness.md#a-bound-that-moves-by-itself)."""

    SECTION: ClassVar[str] = "buffer.autotune"

    min_staleness: int = field(default=1, metadata=at_least(0))
    max_staleness: int = field(default=8, metadata=at_least(0))
    min_ess: float = field(default=0.5, metadata=within(0, below=1))
    """Lower it while the effective sample size is less than this fraction of the tokens."""
    steps: int = field(default=20, metadata=at_least(5))
    """Trained steps that are measured once the leash has filled; long waits need fewer."""
    max_engines: int | None = field(default=None, metadata=at_least(1))
    """It also adds engines where Ray has room for them, up to so many, and takes idle ones away;
    None: rollout.num_engines changes by `make scale` alone."""

    def rules(self) -> Iterator[Rule]:
        fix = f"at most buffer.autotune.max_staleness={self.max_staleness}"
        yield Rule(self.min_staleness <= self.max_staleness, "min_staleness", fix)


@dataclass(kw_only=True, slots=True)
class BufferConfig(Section):
    SECTION: ClassVar[str] = "buffer"

    url: str | None = None
    """redis://[user@]host:port/db or unix://; None starts a server for this run. Its password comes
    from `password_file` or from LEASH_REDIS_PASSWORD in the environment."""
    max_restarts: int = field(default=3, metadata=at_least(0))
    """How often the server that was started for a run is started again after it has died."""
    password_file: str | None = field(default=None, metadata=NOT_EMPTY)
    """File with the password of `url`, on the machine of the controller."""
    tls_ca_file: str | None = field(default=None, metadata=NOT_EMPTY)
    """CA certificates for a rediss:// server; None takes the system's."""
    shards: int = field(default=1, metadata=at_least(1))
    """Complete buffers that the groups are spread over, on one server or on a Redis Cluster."""
    max_staleness: int = field(default=2, metadata=live(at_least(0)))
    """The most policy versions by which a trained token may lag."""
    autotune: AutotuneConfig | None = None
    """None: max_staleness changes by `make tune` alone."""
    on_stale: OnStale = field(default=OnStale.requeue, metadata=live())
    """A running job keeps mask_tokens, and does not change to it."""
    max_retries: int = field(default=2, metadata=at_least(0))
    """How often a prompt whose group went stale is run again."""
    selector: Selector = Selector.stalest
    capacity_groups: int | None = field(default=None, metadata=live(at_least(1)))
    """The most groups that may be ready or leased; None: limited by `max_staleness` only."""
    capacity_bytes: int | None = field(default=None, metadata=live(NUM_BYTES))
    """The most bytes that ready and leased groups may take."""
    on_full: OnFull = OnFull.block
    max_attempts: int = field(default=5, metadata=at_least(1))
    """A group that was leased this often and never trained is put into quarantine."""
    lease_timeout_s: float = field(default=600.0, metadata=SECONDS)
    """A lease or credit that is not renewed for this long returns to the buffer."""
    wait_timeout_s: float = field(default=600.0, metadata=SECONDS)
    """Longest that a trainer waits for a batch, a worker for a credit, a push for room, while
    nothing in the run moves: no token is sampled, no group pushed, no step trained."""
    outage_timeout_s: float = field(default=600.0, metadata=SECONDS)
    """Longest that the processes of a run wait for a Redis that is down; while it loads its data
    they wait as long as that takes."""
    remember_s: float = field(default=3600.0, metadata=SECONDS)
    """How long the id of a finished group is kept, to recognize a late retry of its push."""
    audit_length: int = field(default=100_000, metadata=at_least(0))
    """Approximate number of group events kept for `make trace`; 0 for none."""
    paused: bool = field(default=False, metadata=live())
    """No group begins and no step is taken: `make pause` and `make unpause`."""
    compress: bool = False
    """Compress payloads with zstd; pays off if the network to Redis is slow."""
    appendfsync: AppendFsync = AppendFsync.everysec
    start_timeout_s: float = field(default=30.0, metadata=SECONDS)

    def rules(self) -> Iterator[Rule]:
        fix = f"must be at least buffer.shards={self.shards}, or null for no limit"
        for name, limit in (
            ("capacity_groups", self.capacity_groups),
            ("capacity_bytes", self.capacity_bytes),
        ):
            yield Rule(limit is None or limit >= self.shards, name, fix)
        if self.url is None:
            fix = "only for your own server: set buffer.url too"
            yield Rule(self.password_file is None, "password_file", fix)
            return
        is_known = self.url.split("://")[0] in {"redis", "rediss", "unix"}
        yield Rule(is_known, "url", "must begin with redis://, rediss:// or unix://")
        yield Rule(
            _has_server(self.url),
            "url",
            "must name a server, as in redis://host:6379/0, its port at most 65535, or a socket, "
            "as in unix:///path",
        )


def _has_server(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return bool(parts.path if parts.scheme == "unix" else parts.hostname) and parts.port != 0
    except ValueError:  # of the port
        return False


@dataclass(kw_only=True, slots=True)
class WeightSyncConfig(Section):
    SECTION: ClassVar[str] = "weight_sync"

    backend: Backend = Backend.auto
    bucket_bytes: int = field(default=32 * 2**20, metadata=NUM_BYTES)
    """Size of one message; a tensor may span several, and several share one."""
    num_buffers: int = field(default=2, metadata=at_least(1))
    """Buckets in flight at once, per member."""
    num_chains: int = field(default=1, metadata=at_least(1))
    """Chains of receivers that a version goes down at the same time, each with a thread, and a link
    where there are several; the trainer's ranks are divided over them."""
    num_staged: int = field(default=2, metadata=at_least(2))
    """Versions that a receiver can hold: the one it offers and the one that arrives."""
    stage_dir: str | None = field(default=None, metadata=STAGE_DIR)
    """Folder of the staged versions, on every node; None is /dev/shm."""
    commit: CommitStrategy = CommitStrategy.staged_disk
    pause_mode: PauseMode = PauseMode.auto
    max_concurrent_commits: int = field(default=1, metadata=at_least(1))
    """Engines that may pause for a commit at the same time."""
    commit_timeout_s: float = field(default=120.0, metadata=SECONDS)
    """Longest that one engine's commit may take."""
    drain_timeout_s: float = field(default=60.0, metadata=SECONDS)
    """Longest wait for an engine's requests to end, before it leaves the run; with pause_mode=drain
    also before each commit."""
    full_every: int = field(default=1, metadata=at_least(1))
    """Publishes from one full version to the next; those between send only what changed."""
    max_delta_density: float = field(default=0.25, metadata=within(0, 0.5))
    """If a larger fraction of elements changed, everything is sent. Above 0.5 a delta of 2-byte
    weights would be larger than the weights."""
    timeout_s: float = field(default=30.0, metadata=SECONDS)
    """Longest silence of a member, beyond what its bytes need at `min_bandwidth`."""
    min_bandwidth: float = field(default=50e6, metadata=within(1))
    """Bytes per second below which a member counts as stalled."""

    def rules(self) -> Iterator[Rule]:
        yield Rule(
            self.full_every == 1 or self.max_delta_density > 0,
            "full_every",
            "with max_delta_density=0 every version is sent in full: raise it, or set full_every=1",
        )


@dataclass(kw_only=True, slots=True)
class ClusterConfig(Section):
    SECTION: ClassVar[str] = "cluster"

    ray_address: str | None = field(default=None, metadata=RAY_ADDRESS)
    """Address of a Ray cluster ("auto" finds a running one); None starts Ray on this machine."""
    num_cpus: int | None = field(default=None, metadata=at_least(1))
    """Cores that a Ray started here may use; None is all of them."""
    num_gpus: int | None = field(default=None, metadata=at_least(0))
    """GPUs that a Ray started here may use; None is all of them. `make dry-run` shows the plan for
    any number."""
    gpus_per_rank: int | None = field(default=None, metadata=within(0, 1))
    """GPUs of a trainer rank: 0 runs everything on the CPU; None is 1, half of one shared with the
    engine, or 0, depending on the GPUs found. An engine takes tp_size."""
    threads_per_process: int | None = field(default=None, metadata=at_least(1))
    """Torch threads of a CPU process; None divides the cores evenly."""
    host: str | None = field(default=None, metadata=HOST)
    """Address on which this machine's servers listen. None is this machine's address in the cluster
    of ray_address, or 127.0.0.1 without a cluster. Redis always has a password."""
    start_timeout_s: float = field(default=900.0, metadata=SECONDS)
    stop_timeout_s: float = field(default=20.0, metadata=SECONDS)
    """For each part of the shutdown: the current step and the model, each pool, files on other
    hosts, Redis, and what is left."""


@dataclass(kw_only=True, slots=True)
class StallConfig(Section):
    """The answer of a run when nothing in it moves (docs/failures.md#when-a-run-stalls)."""

    SECTION: ClassVar[str] = "run.stall"

    factor: float = field(default=3.0, metadata=within(above=1))
    """A stall begins after so many times what its stage usually takes, and 20 s at least."""
    policy: OnStall = OnStall.alarm
    command: str | None = field(default=None, metadata=NOT_EMPTY)
    """Shell command that runs once when a stall begins and once when it ends, with a JSON object
    that describes it on its standard input."""
    webhook_env: str | None = field(default=None, metadata=VARIABLE)
    """Environment variable with an address that gets the same object by POST."""


@dataclass(kw_only=True, slots=True)
class RunConfig(Section):
    SECTION: ClassVar[str] = "run"

    name: str | None = field(default=None, metadata=RUN_NAME)
    """Folder of the run below `dir`; None is the experiment's name with date and time."""
    dir: str = field(default="runs", metadata=NOT_EMPTY)
    group: str | None = field(default=None, metadata=NOT_EMPTY)
    """Unix group that may read the run's folder; None: only its owner."""
    seed: int = field(default=0, metadata=SEED)
    max_restarts: int = field(default=3, metadata=at_least(0))
    """How often a controller that was killed is followed by another, which attaches to the run's
    processes, or resumes the run if some of them are gone."""
    attach_timeout_s: float = field(default=600.0, metadata=POSITIVE)
    """How long the processes of a run whose controller and guard were killed go on without one."""
    panel: bool = True
    """Draw the live panel; without a terminal each step prints a line."""
    loggers: list[Logger] = field(default_factory=list)
    """Other readers of the metrics: tensorboard (event files in the run's folder, needs the extra
    leash-rl[tensorboard]), wandb (Weights & Biases, needs leash-rl[wandb])."""
    prometheus_port: int | None = field(default=None, metadata=PORT)
    """Port on cluster.host where Prometheus can read metrics; 0 takes a free one, None disables it.
    """
    page_port: int | None = field(default=None, metadata=PORT)
    """Port on 127.0.0.1 of this machine where the controller serves the page of the run; 0 takes a
    free one. None: `make page` serves it, at any time."""
    stall: StallConfig = field(default_factory=StallConfig)


@dataclass(kw_only=True, slots=True)
class Config(Section):
    """A whole run."""

    experiment: str = "quickstart"
    """Name of its file, or what a file of your own says here. Begins the name of the run."""
    run: RunConfig = field(default_factory=RunConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    task: TaskConfig = field(default_factory=TaskConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    buffer: BufferConfig = field(default_factory=BufferConfig)
    weight_sync: WeightSyncConfig = field(default_factory=WeightSyncConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)

    def rules(self) -> Iterator[Rule]:
        """Constraints between settings of several sections."""
        yield from self._model_rules()
        yield from self._adapter_rules()
        yield from self._weight_rules()
        yield from self._version_rules()
        yield from self._tail_rules()
        yield Rule(
            self.trainer.min_groups_per_step is None
            or self.trainer.batch_timeout_s < self.buffer.wait_timeout_s,
            "trainer.batch_timeout_s",
            "a step must take a short batch before it gives up: set less than "
            f"buffer.wait_timeout_s={self.buffer.wait_timeout_s:g}",
        )
        yield Rule(
            self.rollout.openai.port is None
            or self.rollout.openai.idle_timeout_s < self.buffer.wait_timeout_s,
            "rollout.openai.idle_timeout_s",
            "idle programs that hold all credits must make way before the run gives up: set less "
            f"than buffer.wait_timeout_s={self.buffer.wait_timeout_s:g}",
        )
        every, of = self.rollout.eval.command_every, self.trainer.checkpoint_every
        fix = f"it evaluates checkpoints: must be a multiple of trainer.checkpoint_every={of}"
        yield Rule(every is None or every % of == 0, "rollout.eval.command_every", fix)
        yield from self._best_rules()
        yield from self._task_rules()
        yield from self._algorithm_rules()
        if self.cluster.gpus_per_rank == 0:
            yield from self.rules_without_gpus("cluster.gpus_per_rank=0")
        yield from self._autotune_rules()

    def _model_rules(self) -> Iterator[Rule]:
        model = self.model
        fix = "name a Hugging Face model or a folder, or choose model=tiny (which builds one)"
        yield Rule(model.path is not None or model.scratch is not None, "model.path", fix)
        fix = "model.scratch would build another model; add model=pretrained to disable it"
        yield Rule(model.path is None or model.scratch is None, "model.path", fix)
        longest = self.rollout.longest_trajectory
        yield Rule(
            longest <= self.trainer.micro_batch_tokens,
            "trainer.micro_batch_tokens",
            "a trajectory of rollout.max_prompt_tokens + rollout.max_response_tokens = "
            f"{longest} tokens must fit in one forward pass",
        )
        room = self.rollout.engine.max_total_tokens
        yield Rule(
            room is None or longest <= room,
            "rollout.engine.max_total_tokens",
            "the engine would cut answers short: it needs room for a trajectory of "
            f"rollout.max_prompt_tokens + rollout.max_response_tokens = {longest} tokens",
        )
        if model.scratch is not None:
            most = model.scratch.max_position_embeddings
            yield Rule(
                longest <= most,
                "rollout.max_prompt_tokens + rollout.max_response_tokens",
                f"must fit in model.scratch.max_position_embeddings={most}",
                longest,
            )

    def _adapter_rules(self) -> Iterator[Rule]:
        """Rules for engines that serve versions of an adapter beside each other."""
        lora, engine, sync = self.model.lora, self.rollout.engine, self.weight_sync
        if lora is None or lora.mode is not LoraMode.versions:
            return
        fix = (
            "with model.lora.mode=versions an engine must be one process with one group of GPUs: "
            f"remove {', '.join(engine.splitting_args)} and set rollout.num_engines, or choose "
            "model.lora.mode=merged"
        )
        yield Rule(not engine.splitting_args, "rollout.engine.extra_args", fix)
        yield Rule(
            self.pause_mode is PauseMode.resubmit,
            "weight_sync.pause_mode",
            "with model.lora.mode=versions no engine pauses: leave it at auto; requests end "
            "only of the oldest version, where all slots are in use",
        )
        yield Rule(
            sync.commit is CommitStrategy.staged_disk,
            "weight_sync.commit",
            "with model.lora.mode=versions an engine reads adapters from their files: choose "
            "staged_disk",
        )
        yield Rule(
            sync.commit_timeout_s >= 30,
            "weight_sync.commit_timeout_s",
            "with model.lora.mode=versions a load may wait 20 s until requests of the oldest "
            "version have ended: set at least 30",
        )
        yield Rule(
            self.rollout.tail is not TailPolicy.interrupt_and_resume,
            "rollout.tail",
            "it stops each request at each version, as model.lora.mode=versions is to avoid: "
            "choose another, or model.lora.mode=merged",
        )
        yield Rule(
            not engine.deterministic,
            "rollout.engine.deterministic",
            "SGLang's kernels for adapters are not known to be batch-invariant: set false, "
            "or choose model.lora.mode=merged",
        )

    def _weight_rules(self) -> Iterator[Rule]:
        engine, sync = self.rollout.engine, self.weight_sync
        yield Rule(
            not (engine.radix_cache and sync.pause_mode is PauseMode.retract),
            "rollout.engine.radix_cache",
            "with weight_sync.pause_mode=retract a request would find its old prefix in the cache; "
            "set weight_sync.pause_mode=resubmit or rollout.engine.radix_cache=false",
        )
        algorithm = self.algorithm
        is_weighted = algorithm.is_anchored_at_rollout or any(
            one.IS_WEIGHT or one.is_own for one in algorithm.correction
        )
        reads_ratio = algorithm.loss.ANCHOR == "proximal" and algorithm.policy_weight > 0
        yield Rule(
            is_weighted or not (reads_ratio and CACHE_DTYPE in engine.quantizes),
            "algorithm.correction",
            "with --kv-cache-dtype in rollout.engine.extra_args engines sample from another policy "
            "than the one that is trained: weight their tokens, as by [{kind: tis_token}]",
            algorithm.corrections,
        )
        yield Rule(
            sync.num_chains <= (self.trainer.num_ranks or 1),
            "weight_sync.num_chains",
            "each chain needs a rank that sends in it: set it to 1, or trainer.num_ranks to at "
            f"least {sync.num_chains}",
        )
        yield Rule(
            sync.commit_timeout_s < engine.request_timeout_s,
            "weight_sync.commit_timeout_s",
            "a request that waits for a commit must not time out first: set less than "
            f"rollout.engine.request_timeout_s={engine.request_timeout_s:g}",
        )
        keeps = sync.pause_mode in (PauseMode.retract, PauseMode.in_place)
        yield Rule(
            keeps or engine.dp_size == 1,
            "weight_sync.pause_mode",
            "with --dp-size SGLang only reports whether its first part has ended all requests; set "
            "in_place, or retract with rollout.engine.radix_cache=false",
        )
        yield Rule(
            sync.pause_mode is not PauseMode.drain or self._can_drain,
            "weight_sync.drain_timeout_s",
            "a sample may wait for the only engine while it drains and commits: set less than "
            f"buffer.wait_timeout_s - weight_sync.commit_timeout_s = {self._longest_drain_s:g}",
        )

    @property
    def pause_mode(self) -> PauseMode:
        """`weight_sync.pause_mode`, with `auto` resolved. A run's settings keep `auto`: what it
        depends on may change when the run is resumed."""
        if self.weight_sync.pause_mode is not PauseMode.auto:
            return self.weight_sync.pause_mode
        is_short = self.rollout.max_response_tokens <= SHORT_RESPONSE
        pauses = self.model.lora is None or self.model.lora.mode is not LoraMode.versions
        drains = is_short and pauses and self._can_drain
        return PauseMode.drain if drains else PauseMode.resubmit

    @property
    def _can_drain(self) -> bool:
        return self.weight_sync.drain_timeout_s < self._longest_drain_s

    @property
    def _longest_drain_s(self) -> float:
        return self.buffer.wait_timeout_s - self.weight_sync.commit_timeout_s

    def starting_rules(self) -> Iterator[Rule]:
        """Rules for a launch, a resume and a change: the files of older runs may break them."""
        # A group that the trainer waits for must have room, however many are ready before it.
        waits = self.buffer.on_stale is OnStale.wait and self.buffer.on_full is OnFull.block
        versions, capacity = self.buffer.max_staleness + 1, self.buffer.capacity_groups
        groups = versions * self.trainer.groups_per_version
        admitted = math.floor(groups * self.rollout.oversampling + 1e-6)
        yield Rule(
            not waits or capacity is None or capacity >= admitted,
            "buffer.capacity_groups",
            "with buffer.on_stale=wait the trainer would wait for a group that waits for room; set "
            f"null, or at least what is admitted: {admitted}",
        )

    def launch_rules(self) -> Iterator[Rule]:
        """Rules for a launch alone: a run that goes on may have left them behind."""
        auto, engines = self.buffer.autotune, self.rollout.num_engines
        warm_start = self.trainer.warm_start
        yield Rule(
            self.model.path is None or not (warm_start.num_steps and warm_start.echo_fraction),
            "trainer.warm_start.echo_fraction",
            "teaches wrong answers first, as the quickstart teaches its own tiny model; with "
            "model.path set trainer.warm_start.num_steps=0, or this to 0 for right answers alone",
        )
        yield Rule(
            auto is None or auto.max_engines is None or auto.max_engines >= engines,
            "buffer.autotune.max_engines",
            f"the run would begin with more, rollout.num_engines={engines}: set at "
            f"least {engines}, or null",
            None if auto is None else auto.max_engines,
        )

    def _version_rules(self) -> Iterator[Rule]:
        trainer, most = self.trainer, self.buffer.max_staleness + 1
        yield Rule(
            trainer.publish_every <= most,
            "trainer.publish_every",
            f"must be at most buffer.max_staleness + 1 = {most}: engines would be too old to get a "
            "request, and the trainer would wait for ever",
        )
        capacity, groups = self.buffer.capacity_groups, trainer.groups_per_version
        yield Rule(
            capacity is None or capacity >= groups,
            "buffer.capacity_groups",
            "what one update trains on, trainer.groups_per_step * "
            f"trainer.gradient_accumulation_steps = {groups} groups, would never fit; raise it to "
            "at least that",
        )
        steps = trainer.gradient_accumulation_steps * trainer.publish_every
        yield Rule(
            self.rollout.eval_every % steps == 0,
            "rollout.eval_every",
            "engines evaluate the versions that they get: must be a multiple of "
            f"trainer.gradient_accumulation_steps * trainer.publish_every = {steps}",
        )
        yield Rule(
            trainer.gradient_accumulation_steps == 1 or not self.algorithm.streams,
            "trainer.gradient_accumulation_steps",
            "each of algorithm.streams has a denominator of its own, which is not known before the "
            "last step; set 1, or remove the streams",
        )
        is_sum = self.algorithm.aggregation.kind == "token_sum"
        yield Rule(
            trainer.gradient_accumulation_steps == 1
            or not (is_sum and self.algorithm.load_balancing_weight),
            "trainer.gradient_accumulation_steps",
            "with algorithm.aggregation=token_sum the load balancing losses of all steps would add "
            "up; set 1, or algorithm.load_balancing_weight=0",
        )

    def _autotune_rules(self) -> Iterator[Rule]:
        """The run must be legal with all that it may set: rules on the bound hold up to a value, or
        from one on."""
        for name in ("min_staleness", "max_staleness") if self.buffer.autotune else ():
            bound = getattr(self.buffer.autotune, name)
            try:
                buffer = replace(self.buffer, max_staleness=bound, autotune=None)
                (moved := replace(self, buffer=buffer)).enforce(moved.starting_rules())
            except ValueError as error:
                fix = f"choose another bound, which the run would not take: {error}"
                yield Rule(False, f"buffer.autotune.{name}", fix)

    def _tail_rules(self) -> Iterator[Rule]:
        rollout, buffer = self.rollout, self.buffer
        is_synchronous = buffer.max_staleness == 0
        yield Rule(
            not (rollout.tail is TailPolicy.postpone and buffer.on_stale is OnStale.wait),
            "rollout.tail",
            "with buffer.on_stale=wait the trainer waits for the very groups that are postponed; "
            "choose another buffer.on_stale, or rollout.tail=continue_across_versions",
        )
        yield Rule(
            not is_synchronous or rollout.tail is TailPolicy.continue_across_versions,
            "rollout.tail",
            "with buffer.max_staleness=0 no group outlives a version, so none can be resumed at a "
            "later one; raise buffer.max_staleness, or set rollout.tail=continue_across_versions",
        )
        yield Rule(
            rollout.keep_partial or rollout.tail is not TailPolicy.continue_across_versions,
            "rollout.keep_partial",
            "rollout.tail=continue_across_versions stops no sample, so none would begin again; set "
            "rollout.tail=interrupt_and_resume or postpone, or rollout.keep_partial=true",
        )
        throws_away = buffer.on_stale in (OnStale.requeue, OnStale.drop)
        yield Rule(
            not (is_synchronous and throws_away and rollout.oversampling > 1),
            "rollout.oversampling",
            "with buffer.max_staleness=0 each publish discards the surplus, which are the groups "
            "with the longest answers: training would be biased to short answers; set 1, or raise "
            "buffer.max_staleness",
        )

    def _best_rules(self) -> Iterator[Rule]:
        metric, every = self.trainer.keep_best, self.rollout.eval_every
        if metric is None:
            return
        fix = f"only evaluated checkpoints compare: a multiple of {self.trainer.checkpoint_every}"
        is_multiple = every > 0 and every % self.trainer.checkpoint_every == 0
        yield Rule(is_multiple, "rollout.eval_every", f"{fix} (trainer.checkpoint_every)")
        name, _, of = metric.partition("/")
        known, usual = list(self.task.eval_sets), self.rollout.eval
        known += self.task.tasks if name == "accuracy" else []
        fix = f"evaluations have it of {', '.join(known) or 'no set'} only"
        yield Rule(not of or of in known, "trainer.keep_best", fix)
        k = int(name.partition("_at_")[2] or 1)
        one = self.task.eval_sets.get(of)
        most = (one and one.num_samples) or usual.num_samples
        fix = f"of {most} answers evaluations have it for 1, 2, 4, ... and {most}"
        yield Rule(k <= most and (k == most or k.bit_count() == 1), "trainer.keep_best", fix)

    def _task_rules(self) -> Iterator[Rule]:
        for name, task in self.task.by_name.items():
            section = self.task.section_of(name)
            for rule in self._rules_of_task(task, section):
                yield rule._replace(setting=f"{section}.{rule.setting}")
        usual = self.rollout.eval
        for name, one in self.task.eval_sets.items():
            num_samples = one.num_samples or usual.num_samples
            temperature = usual.temperature if one.temperature is None else one.temperature
            yield Rule(
                num_samples == 1 or temperature > 0,
                f"task.eval_sets.{name}.num_samples",
                f"greedy answers are all the same: set task.eval_sets.{name}.temperature above 0",
                num_samples,
            )
        yield Rule(
            len(self.task.teachers) <= 1,
            "task.rewards",
            "a trajectory has one column of teacher log-probabilities; keep one part with "
            "kind=teacher",
            self.task.teachers,
        )

    def _rules_of_task(self, task: TaskConfig, section: str) -> Iterator[Rule]:
        shown = [reward.kind.name for reward in task.rewards.values()]
        parts = [reward for reward in task.rewards.values() if reward.gives_reward]
        # Streams may learn without any reward.
        algorithm = self.algorithm
        learns_from_rewards = algorithm.policy_weight > 0 and algorithm.loss.kind != "supervised"
        yield Rule(
            not task.rewards or bool(parts) or not learns_from_rewards,
            "rewards",
            "a teacher gives no reward, so every reward would be 0 and nothing would be learnt; "
            f"add another part, as {section}.rewards.right.kind=task, or set "
            "algorithm.policy_weight=0",
            shown,
        )
        yield Rule(
            not parts or not learns_from_rewards or any(reward.weight for reward in parts),
            "rewards.*.weight",
            "every reward would be 0 and nothing would be learnt; give one part another weight",
            [reward.weight for reward in parts],
        )
        brings_rewards = task.env is not None or task.agent is not None
        yield Rule(
            task.kind is not TaskKind.code or any(r.runs_tests for r in parts) or brings_rewards,
            "rewards",
            "an answer of task.kind=code is scored by running its tests; set "
            f"{section}.rewards={{tests: {{kind: code_tests}}}}, or give rewards in {section}.env "
            "or an agent",
            shown,
        )
        timeout_s = self.rollout.reward_timeout_s
        for reward in parts:
            if not reward.runs_tests or reward.url is not None:
                continue
            compile_s = reward.compile_time_s if reward.compile else 0.0
            after = f" (after compile_time_s={compile_s:g})" if compile_s else ""
            yield Rule(
                compile_s + reward.wall_time_s <= TEST_TIME_FRACTION * timeout_s,
                "rewards.*.wall_time_s",
                f"all tests of an answer{after} must end within {TEST_TIME_FRACTION:g} of "
                f"rollout.reward_timeout_s={timeout_s:g}, so that one would never get as long; "
                "give it less, or raise rollout.reward_timeout_s",
                reward.wall_time_s,
            )
        for setting, value in (
            ("grammar", task.grammar),
            ("min_turn_tokens", task.min_turn_tokens),
        ):
            yield Rule(
                not value or self.rollout.sampling.is_truncated,
                setting,
                "the candidates that it leaves of each token travel with the token, so that the "
                "trainer computes the same distribution: set rollout.sampling.top_k, as 50",
                value,
            )
        yield Rule(
            task.grammar is None or not task.min_turn_tokens,
            "min_turn_tokens",
            "a grammar says itself where an answer ends; remove one of them",
            task.min_turn_tokens,
        )
        fix = "the chat template describes the tools to the model: set task.chat_template=true"
        yield Rule(not task.tools or task.chat_template, "tools", fix, task.tools)

    def _algorithm_rules(self) -> Iterator[Rule]:
        algorithm, advantage = self.algorithm, self.algorithm.advantage
        off_policy = algorithm.off_policy_rules(
            self.buffer.max_staleness, self.trainer.num_minibatches
        )
        for rule in off_policy:
            yield rule._replace(setting=f"algorithm.{rule.setting}")
        yield Rule(
            not isinstance(advantage, Gdpo) or bool(self._part_weights(advantage)),
            "algorithm.advantage.kind",
            "it needs named parts of the reward; set task.rewards, or, for the parts of an "
            "environment, algorithm.advantage.part_weights",
        )
        has_teacher = bool(self.task.teachers)
        shown = [reward.kind.name for reward in self.task.rewards.values()]
        yield Rule(
            has_teacher or not algorithm.needs_teacher,
            "task.rewards",
            "a stream with loss=teacher_kl learns from a teacher's log-probabilities; add one, as "
            "task.rewards.teacher={kind: teacher, url: http://host:port/v1, model: NAME}",
            shown,
        )
        yield Rule(
            not has_teacher or algorithm.may_read_teacher,
            "task.rewards",
            "nothing would read the teacher's log-probabilities; set "
            "algorithm.streams.teacher.loss=teacher_kl, or remove the teacher",
            shown,
        )
        imitates = any(
            stream.loss.kind == "supervised" and stream.tokens is StreamTokens.answers
            for stream in algorithm.streams.values()
        )
        for what, has in {
            "algorithm.kl.weight above 0": algorithm.kl.weight > 0,
            "a teacher in task.rewards": has_teacher,
            "algorithm.loss=supervised": algorithm.loss.kind == "supervised",
            "algorithm.streams.*.loss=supervised with tokens=answers": imitates,
        }.items():
            yield Rule(
                not (has and self.rollout.sampling.is_truncated),
                "rollout.sampling.top_k",
                f"{what} needs the policy's distribution over the whole vocabulary, and with "
                "truncated sampling the trainer computes it over a few tokens only; set top_k=-1, "
                "top_p=1 and min_p=0",
            )
        teaches_at_equal_rewards = {
            "policy_weight=0": algorithm.policy_weight == 0,
            "loss=supervised": algorithm.loss.kind == "supervised",
            f"advantage.kind={advantage.kind}": advantage.kind in ("reinforce_pp", "gdpo", "gae"),
            "streams.*.loss=teacher_kl": algorithm.needs_teacher,
        }
        for setting, does in teaches_at_equal_rewards.items():
            yield Rule(
                not (does and self.rollout.filter_zero_variance),
                "rollout.filter_zero_variance",
                f"with algorithm.{setting} groups of equal rewards teach as much as others; set "
                "false",
            )
        if algorithm.critic is not None:
            yield from self._critic_rules(algorithm.critic)
        longest = self.rollout.max_response_tokens
        end = longest if advantage.overlong_end is None else advantage.overlong_end
        yield Rule(
            advantage.overlong_start is None or advantage.overlong_start < end <= longest,
            "algorithm.advantage.overlong_start",
            f"the loss of reward must begin below algorithm.advantage.overlong_end={end}, and that "
            f"be at most rollout.max_response_tokens={longest}",
        )

    def _critic_rules(self, critic: CriticConfig) -> Iterator[Rule]:
        trainer = self.trainer
        for setting, is_usual in (
            ("model.lora=null", self.model.lora is None),
            ("trainer.sequence_parallel_size=1", trainer.sequence_parallel_size == 1),
        ):
            fix = f"a critic's weights are all trained, and its rows are whole: set {setting}"
            yield Rule(is_usual, "algorithm.critic", fix, {})
        steps = trainer.gradient_accumulation_steps
        fix = f"must be a multiple of trainer.gradient_accumulation_steps={steps}"
        yield Rule(critic.warmup_steps % steps == 0, "algorithm.critic.warmup_steps", fix)

    @property
    def idle_settings(self) -> str:
        """A sentence about settings of the loss that were changed and have no effect; "" for none.

        They are not refused, because files of configs/algorithm set them.
        """
        loss = self.algorithm.loss
        usual = asdict(type(loss)(kind=loss.kind))
        changed = [
            f"algorithm.loss.{name}={value}"
            for name, value in asdict(loss).items()
            if value != usual[name]
        ]
        if not (changed and self.algorithm.has_unit_ratio(self.trainer.num_minibatches)):
            return ""
        return (
            f"{' and '.join(changed)} will change no gradient: with trainer.num_minibatches=1 and "
            "algorithm.proximal=recomputed the ratio that a loss bounds is 1. Raise "
            "trainer.num_minibatches, or set algorithm.proximal=rollout and algorithm.correction=[]"
        )

    @property
    def full_algorithm(self) -> AlgorithmConfig:
        """`algorithm` with each length that it leaves open, which is then
        rollout.max_response_tokens, and with the weights of the parts of the reward."""
        algorithm, longest = self.algorithm, self.rollout.max_response_tokens

        def filled(aggregation: AggregationConfig) -> AggregationConfig:
            if not isinstance(aggregation, SequenceMeanTokenSumNorm):
                return aggregation
            length = aggregation.aggregation_length or longest
            return replace(aggregation, aggregation_length=length)

        advantage = algorithm.advantage
        if advantage.overlong_start is not None:
            advantage = replace(advantage, overlong_end=advantage.overlong_end or longest)
        if isinstance(advantage, Gdpo | OwnAdvantage):
            advantage = replace(advantage, part_weights=self._part_weights(advantage))
        return replace(
            algorithm,
            aggregation=filled(algorithm.aggregation),
            streams={
                name: replace(stream, aggregation=filled(stream.aggregation))
                for name, stream in algorithm.streams.items()
            },
            advantage=advantage,
        )

    def _part_weights(self, advantage: Gdpo | OwnAdvantage) -> dict[str, float]:
        rewards = self.task.rewards.items()
        kept = {name: reward.weight for name, reward in rewards if reward.gives_reward}
        return advantage.part_weights or kept

    @property
    def keeps_first_policy(self) -> bool:
        """Whether the reference of algorithm.kl is the policy that RL begins with, and no folder
        that the settings name has its weights."""
        model, kl = self.model, self.full_algorithm.kl
        is_changed = self.trainer.warm_start.num_steps > 0 or (
            model.lora is not None and model.lora.resume_from is not None
        )
        return kl.weight > 0 and kl.reference is None and is_changed

    def rules_without_gpus(self, why: str) -> Iterator[Rule]:
        """Rules for a run without GPUs, to be passed to `enforce`; `why` says why it has none."""
        fix = f"it shares GPU memory, and {why}: choose staged_disk"
        yield Rule(self.weight_sync.commit is not CommitStrategy.ipc, "weight_sync.commit", fix)
        yield Rule(
            not self.rollout.engine.deterministic,
            "rollout.engine.deterministic",
            "SGLang has batch-invariant attention (fa3, fa4, flashinfer, triton) on GPUs only, and "
            f"{why}: set false",
        )
        fix = f"it frees GPU memory, and {why}: set false"
        yield Rule(not self.trainer.offload_optimizer, "trainer.offload_optimizer", fix)
        yield Rule(not self.trainer.offload_parameters, "trainer.offload_parameters", fix)
        yield Rule(not self.algorithm.kl.offload, "algorithm.kl.offload", fix)
        fix = f"it needs GPUs, and {why}: choose auto or gloo"
        yield Rule(self.weight_sync.backend is not Backend.nccl, "weight_sync.backend", fix)
        yield Rule(self.trainer.backend is not Backend.nccl, "trainer.backend", fix)
