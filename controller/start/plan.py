"""The processes of a run and the resources they need, computed before the start (pure).

`make dry-run` prints the plan, and `run.py` follows it.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from buffer.admission import admission_limit
from buffer.redis.address import address
from configs.choices import Backend, Dtype, LoraMode, PauseMode
from configs.schema import Config
from controller.start.gpus import (
    GPU_CONTEXT_BYTES,
    Devices,
    activation_bytes,
    choose_devices,
    num_servers,
    rank_bytes,
    rank_host_bytes,
    resolved,
    tokens_of_rank,
)
from controller.start.model_size import ModelSize, model_size, num_trained
from controller.units import format_bytes, format_number_of
from processes.tree import SHARED_MEMORY
from tensors.layout import ITEM_BYTES

CPU_KV_TOKENS = 65536
"""KV cache of a CPU engine when rollout.engine.max_total_tokens is null."""
ENGINE_PROCESS_BYTES = 2 * 2**30
"""A CPU engine without weights and KV cache: SGLang's three processes, measured."""
WORKER_PROCESS_BYTES = 400 * 2**20
"""One of our processes, with Ray and numpy loaded."""
FLOAT32_DIFF = 1e-3
"""Nats a token. SGLang on a CPU and the trainer differ by about 1e-5 in float32."""
BFLOAT16_DIFF = 0.2
"""Nats a token: three times the most that was measured (docs/models.md). Also for float32 on GPUs,
which may multiply in TF32."""
CORES_FOR_TWO = 4
"""Fewest cores on which a second rank trains faster: the engine and its worker need two."""
UNKNOWN_DIFF = 1.0
"""Nats a token, where the difference that rounding explains is unknown."""


@dataclass(kw_only=True, slots=True, frozen=True)
class PlannedProcess:
    """One kind of process; all fields but `count` describe a single one."""

    what: str
    count: int = 1
    num_gpus: float = 0
    num_threads: int | None = None
    """Torch threads; None if torch computes nothing on the CPU."""
    memory: str
    """An estimate as text: device memory on a GPU, host memory elsewhere."""
    note: str


@dataclass(kw_only=True, slots=True, frozen=True)
class Plan:
    """Processes, devices and bounds of a run.

    plan = make_plan(load_config([]), num_gpus=2, num_cpus=8)
    plan.devices.why     # "1 GPU for 1 trainer rank and 1 for each engine, of 2 GPUs: too few ..."
    plan.num_gpus        # 2
    """

    config: Config = field(repr=False)
    """The settings of the run, with automatic values filled in."""
    devices: Devices
    threads_per_process: int
    """Torch threads of a CPU process."""
    model: ModelSize

    @property
    def uses_gpu(self) -> bool:
        return self.devices.rank_gpus > 0

    @property
    def serving_dtype(self) -> str:
        """Dtype of the weights in the engines, which the trainer sends, as torch spells it."""
        return resolved(self.config.rollout.engine.dtype, self.uses_gpu)

    @property
    def weights_bytes(self) -> int | None:
        """Size of a version as it is sent; None if the model's size is unknown."""
        size = num_trained(self.config.model, self.model)
        return None if size is None else size * ITEM_BYTES[self.serving_dtype]

    @property
    def staged_bytes(self) -> int | None:
        """Size of a version in a receiver: an adapter, and the weights that it is merged into."""
        lora = self.config.model.lora
        is_merged = lora is None or lora.mode is LoraMode.merged
        weights, merged = self.weights_bytes, self.model.num_adapted if is_merged else None
        if weights is None and merged is None:
            return None
        return (weights or 0) + (merged or 0) * ITEM_BYTES[self.serving_dtype]

    @property
    def rank_host_bytes(self) -> int | None:
        served, num_ranks = self.serving_dtype, self.devices.num_ranks
        return rank_host_bytes(self.config, self.model, num_ranks=num_ranks, served=served)

    @property
    def host_bytes(self) -> int | None:
        """Host memory of a run that uses the GPUs of one machine; None if the model's size is
        unknown."""
        rollout, servers = self.config.rollout, num_servers(self.config)
        others = rollout.num_workers + rollout.reward_actors
        return self.bytes_on_host(
            self.devices.num_ranks, servers, others, has_first_rank=True, has_controller=True
        )

    def bytes_on_host(
        self,
        num_ranks: int,
        num_engines: int,
        num_others: int,
        *,
        has_first_rank: bool,
        has_controller: bool,
    ) -> int | None:
        """Host memory of a machine with so many of the run's processes, which uses its GPUs; None
        if the model's size is unknown."""
        rank, staged, size = self.rank_host_bytes, self.staged_bytes, self.model.num_params
        if rank is None or staged is None or size is None:
            return None
        config = self.config
        needed = num_ranks * rank + num_others * WORKER_PROCESS_BYTES
        if num_engines:
            needed += config.weight_sync.num_staged * staged
            needed += num_engines * config.rollout.engine.tp_size * ENGINE_PROCESS_BYTES
        if has_first_rank:  # it gathers the whole model at its export
            needed += size * ITEM_BYTES[resolved(config.trainer.dtype, True)]
        if has_controller:
            needed += WORKER_PROCESS_BYTES
            needed += _buffer_bytes(config, self.model) if config.buffer.url is None else 0
        return needed

    @property
    def num_gpus(self) -> float:
        return sum(p.count * p.num_gpus for p in self.processes)

    @property
    def processes(self) -> tuple[PlannedProcess, ...]:
        config, devices = self.config, self.devices
        threads = None if self.uses_gpu else self.threads_per_process
        trainer = PlannedProcess(
            what="trainer rank",
            count=devices.num_ranks,
            num_gpus=devices.rank_gpus,
            num_threads=threads,
            memory=self._rank_memory(),
            note=f"{config.trainer.groups_per_step} x {config.rollout.group_size} samples per step",
        )
        engine = PlannedProcess(
            what="SGLang engine",
            count=config.rollout.num_engines,
            num_gpus=devices.engine_gpus,
            num_threads=threads,
            memory=self._engine_memory(self.model),
            note=self._engine_note(),
        )
        servers = [engine]
        if config.task.served_teacher is not None:
            path = config.task.served_teacher[1].path
            teacher = model_size(replace(config.model, path=path, scratch=None, lora=None))
            memory = self._engine_memory(teacher)
            servers.append(
                replace(engine, what="teacher", count=1, memory=memory, note=teacher.label)
            )
        staged, sync = self.staged_bytes, config.weight_sync
        if staged is not None:
            staged = staged * sync.num_staged + WORKER_PROCESS_BYTES
        receiver = PlannedProcess(
            what="weights receiver",
            memory="unknown" if staged is None else format_bytes(staged),
            note=f"one per node; stages in {sync.stage_dir or SHARED_MEMORY}",
        )
        return (*_plain_processes(config, self.model), trainer, *servers, receiver)

    def render(self) -> RenderableType:
        """A table of processes, followed by the other facts."""
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
        table.add_column("process", style="bold")
        for name in ("count", "GPUs", "threads"):
            table.add_column(name, justify="right")
        table.add_column("memory each")
        table.add_column("", style="dim", ratio=1)
        for p in self.processes:
            gpus = f"{p.count * p.num_gpus:g}" if p.num_gpus else "-"
            threads = str(p.num_threads or "-")
            table.add_row(p.what, str(p.count), gpus, threads, p.memory, p.note)
        facts = Table.grid(padding=(0, 2))
        facts.add_column(style="bold")
        facts.add_column()
        facts.add_row("model", f"{self.model.label} ({self.model.source})")
        facts.add_row("devices", self.devices.why)
        facts.add_row("Redis", _redis_sentence(self.config))
        facts.add_row("passes", self._passes_sentence())
        facts.add_row("leash", _staleness_sentence(self.config))
        facts.add_row("weights", self._weights_sentence())
        return Group(Text("Processes of this run", style="bold cyan"), table, facts)

    def _weights_sentence(self) -> str:
        sync, num_bytes = self.config.weight_sync, self.weights_bytes
        every, most = sync.full_every, sync.max_concurrent_commits
        weights = "all bytes" if num_bytes is None else format_bytes(num_bytes)
        what = f"{weights} per version"
        if every > 1:
            what = f"{weights} every {every} versions, only changes in between"
        pausing = "one engine pauses" if most == 1 else f"at most {most} engines pause"
        return f"{what}, as {self.serving_dtype}; {pausing} at a time, for the commit"

    def _rank_memory(self) -> str:
        num_ranks, host = self.devices.num_ranks, self.rank_host_bytes
        needed = rank_bytes(self.config, self.model, num_ranks=num_ranks, uses_gpu=self.uses_gpu)
        if needed is None or host is None:
            return "unknown"
        text = f"from {format_bytes(needed)}"  # activations come on top
        return f"{text}; {format_bytes(host)} of the host's" if self.uses_gpu else text

    def _passes_sentence(self) -> str:
        """The most tokens of a rank in a pass, and the memory of their activations."""
        trainer = self.config.trainer
        tokens, size = trainer.micro_batch_tokens, trainer.sequence_parallel_size
        text = f"{tokens:,} tokens at most"
        if size > 1:
            text += f", {tokens_of_rank(trainer):,} on each of {size} ranks"
        num_bytes = activation_bytes(self.config, self.model, self.uses_gpu)
        if num_bytes is None:
            return text
        return f"{text}; about {format_bytes(num_bytes)} of activations on top of a rank's memory"

    def _engine_memory(self, model: ModelSize) -> str:
        engine = self.config.rollout.engine
        if self.uses_gpu and engine.max_total_tokens is None:
            of = f"{'the' if engine.tp_size == 1 else 'each'} GPU"
            if engine.mem_fraction is None:
                return f"SGLang's choice of {of}"
            return f"{engine.mem_fraction:.0%} of {of}"
        if model.num_params is None:
            return "unknown"
        num_gpus = engine.tp_size if self.uses_gpu else 1
        process = GPU_CONTEXT_BYTES if self.uses_gpu else ENGINE_PROCESS_BYTES
        size = process + model.num_params * ITEM_BYTES[self.serving_dtype] // num_gpus
        if model.kv_elements is None:
            return f"{format_bytes(size)} + KV cache"
        kv_bytes = self._kv_tokens * model.kv_elements * ITEM_BYTES[self.serving_dtype]
        return format_bytes(size + kv_bytes // num_gpus)

    def _engine_note(self) -> str:
        engine = self.config.rollout.engine
        where = f"{engine.tp_size} ranks on one machine; " if engine.tp_size > 1 else ""
        if self.uses_gpu and engine.max_total_tokens is None:
            return f"{where}weights and KV cache"
        return f"{where}KV cache of {self._kv_tokens:,} tokens"

    @property
    def _kv_tokens(self) -> int:
        return self.config.rollout.engine.max_total_tokens or CPU_KV_TOKENS


def make_plan(
    config: Config, num_gpus: int | None, num_cpus: int, gpu_bytes: int | None = None
) -> Plan:
    """The plan for `num_cpus` cores and `num_gpus` GPUs of `gpu_bytes` each.

    `num_gpus` None: unknown (a dry run for a cluster), so enough are assumed. Raises ValueError if
    the settings ask for more GPUs.
    """
    model = model_size(config.model)
    devices = choose_devices(config, model, num_gpus, gpu_bytes)
    if config.trainer.num_ranks is None and not devices.rank_gpus and num_cpus < CORES_FOR_TWO:
        devices = replace(devices, num_ranks=1)
    sync, rollout = config.weight_sync, config.rollout
    num_processes = devices.num_ranks + num_servers(config) * rollout.engine.tp_size
    engine = replace(rollout.engine, mem_fraction=devices.mem_fraction)
    config = replace(
        config,
        trainer=replace(config.trainer, num_ranks=devices.num_ranks),
        rollout=replace(rollout, engine=engine),
        # NCCL rejects a receiver on the GPU of the rank that sends to it.
        weight_sync=replace(sync, backend=Backend.gloo) if devices.is_shared else sync,
    )
    threads = config.cluster.threads_per_process or max(1, num_cpus // num_processes)
    return Plan(config=config, devices=devices, threads_per_process=threads, model=model)


def _staleness_sentence(config: Config) -> str:
    staleness, groups = config.buffer.max_staleness, config.trainer.groups_per_version
    factor = config.rollout.oversampling
    limit = admission_limit(
        max_staleness=staleness, lag=0, groups_per_version=groups, oversampling=factor
    )
    times = "" if factor == 1 else f" x {factor:g}"
    bound = f"at most ({staleness} + 1) x {groups}{times} = {limit} groups"
    if staleness == 0:
        return f"{bound} running + ready + leased; each is trained on the weights that sampled it"
    most = format_number_of(staleness, "policy version")
    return f"{bound} running + ready + leased; no trained token lags by more than {most}"


def explained_diff(config: Config, uses_gpu: bool) -> float:
    """Mean difference, in nats, that the dtypes of engines and trainer explain, at temperature 1:
    more can only be an error."""
    if config.rollout.engine.quantizes:
        return UNKNOWN_DIFF
    is_float32 = Dtype.bfloat16 not in (config.trainer.dtype, config.rollout.engine.dtype)
    return FLOAT32_DIFF if is_float32 and not uses_gpu else BFLOAT16_DIFF


def max_logprob_diff(config: Config, uses_gpu: bool) -> float:
    """The same for tokens that were sampled in the run."""
    if config.weight_sync.pause_mode is PauseMode.in_place:  # over a KV cache of older weights
        return UNKNOWN_DIFF
    most = explained_diff(config, uses_gpu)
    if most == FLOAT32_DIFF:
        return most
    # It divides the logits, and with them what they differ by.
    lowest = 0.05 if config.rollout.openai.sampling_overrides else 1.0
    return min(UNKNOWN_DIFF, most / min(lowest, config.rollout.sampling.temperature))


def _plain_processes(config: Config, model: ModelSize) -> tuple[PlannedProcess, ...]:
    """The processes that never use a GPU."""
    actors, memory = config.rollout.reward_actors, format_bytes(WORKER_PROCESS_BYTES)
    scores = f"{config.rollout.reward_processes} scoring processes each"
    note = "keeps groups in flight" if actors else f"keeps groups in flight; {scores}"
    num_workers = config.rollout.num_workers
    worker = PlannedProcess(what="rollout worker", count=num_workers, memory=memory, note=note)
    scorer = PlannedProcess(what="reward actor", count=actors, memory=memory, note=scores)
    scoring = (worker, scorer) if actors else (worker,)
    if config.buffer.url is not None:
        return scoring
    redis = PlannedProcess(
        what="Redis server",
        memory=format_bytes(_buffer_bytes(config, model)),
        note=f"replay buffer, fsync {config.buffer.appendfsync.name}",
    )
    return (redis, *scoring)


def _redis_sentence(config: Config) -> str:
    if config.buffer.url is not None:
        return f"yours (buffer.url), at {address(config.buffer.url)}"
    here = "127.0.0.1" if config.cluster.ray_address is None else "this machine's address in Ray"
    host = config.cluster.host or here
    return f"started for this run on {host}, with a password, data in its folder"


def _buffer_bytes(config: Config, model: ModelSize) -> int:
    """Groups that admission allows and those of the last steps, at about 8 bytes per token, and one
    for each of its experts if they travel with it."""
    num_groups = (config.buffer.max_staleness + 2) * config.trainer.groups_per_version
    num_tokens = config.rollout.longest_trajectory
    per_token = 8 + (model.num_routed if config.rollout.engine.routing_replay else 0)
    return 16 * 2**20 + num_groups * config.rollout.group_size * num_tokens * per_token
