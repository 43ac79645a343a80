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
from configs.choices import Backend, Dtype, PauseMode
from configs.schema import Config
from controller.start.gpus import (
    GPU_CONTEXT_BYTES,
    Devices,
    choose_devices,
    rank_bytes,
    rank_host_bytes,
)
from controller.start.model_size import ModelSize, model_size
from controller.units import format_bytes, format_number_of
from weight_sync.types import ITEM_BYTES

CPU_KV_TOKENS = 65536
"""KV cache of a CPU engine when rollout.engine.max_total_tokens is null."""
ENGINE_PROCESS_BYTES = 2 * 2**30
"""A CPU engine without weights and KV cache: SGLang's three processes, measured."""
WORKER_PROCESS_BYTES = 400 * 2**20
"""One of our processes, with Ray and numpy loaded."""
FLOAT32_DIFF = 1e-3
"""Nats a token. SGLang on a CPU and the trainer differ by about 1e-5 in float32. More is no error
on GPUs, which may multiply in TF32, and with a KV cache that is kept from older weights."""
OTHER_DIFF = 1.0
"""Nats a token: bfloat16 causes a few hundredths."""
DEFAULT_STAGE_DIR = "/dev/shm"


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
    """Processes, devices and bounds of a run."""

    config: Config = field(repr=False)
    """The settings of the run, with automatic values filled in."""
    devices: Devices
    threads_per_process: int
    """Torch threads of a CPU process."""
    serving_dtype: str
    """Dtype of the weights in the engines, which the trainer sends, as torch spells it."""
    model: ModelSize
    processes: tuple[PlannedProcess, ...]

    @property
    def host_bytes(self) -> int | None:
        """Host memory of a run that uses the GPUs of one machine; None if the model's size is
        unknown."""
        config, num_ranks = self.config, self.devices.num_ranks
        rank = rank_host_bytes(config, self.model, num_ranks=num_ranks, served=self.serving_dtype)
        if rank is None or self.model.num_params is None:
            return None
        staged = config.weight_sync.num_staged * ITEM_BYTES[self.serving_dtype]
        engines = config.rollout.num_engines * ENGINE_PROCESS_BYTES
        return num_ranks * rank + self.model.num_params * staged + engines

    @property
    def num_gpus(self) -> float:
        return sum(p.count * p.num_gpus for p in self.processes)

    def render(self) -> RenderableType:
        """A table of processes, followed by the other facts."""
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
        table.add_column("process", style="bold")
        table.add_column("count", justify="right")
        table.add_column("GPUs", justify="right")
        table.add_column("threads", justify="right")
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
        facts.add_row("leash", _staleness_sentence(self.config))
        facts.add_row("weights", _weights_sentence(self.config, self.model, self.serving_dtype))
        return Group(Text("Processes of this run", style="bold cyan"), table, facts)


def make_plan(
    config: Config, num_gpus: int | None, num_cpus: int, gpu_bytes: int | None = None
) -> Plan:
    """The plan for `num_cpus` cores and `num_gpus` GPUs of `gpu_bytes` each.

    `num_gpus` None: unknown (a dry run for a cluster), so enough are assumed. Raises ValueError if
    the settings ask for more GPUs.
    """
    model = model_size(config.model)
    devices = choose_devices(config, model, num_gpus, gpu_bytes)
    config = _filled_in(config, devices)
    uses_gpu = devices.rank_gpus > 0
    ranks_of_engines = config.rollout.num_engines * config.rollout.engine.tp_size
    num_torch_processes = devices.num_ranks + ranks_of_engines
    threads = config.cluster.threads_per_process or max(1, num_cpus // num_torch_processes)
    trainer = PlannedProcess(
        what="trainer rank",
        count=devices.num_ranks,
        num_gpus=devices.rank_gpus,
        num_threads=None if uses_gpu else threads,
        memory=_rank_memory(config, model, uses_gpu),
        note=f"{config.trainer.groups_per_step} x {config.rollout.group_size} samples per step",
    )
    engine = PlannedProcess(
        what="SGLang engine",
        count=config.rollout.num_engines,
        num_gpus=devices.engine_gpus,
        num_threads=None if uses_gpu else threads,
        memory=_engine_memory(config, model, uses_gpu),
        note=_engine_note(config, uses_gpu),
    )
    return Plan(
        config=config,
        devices=devices,
        threads_per_process=threads,
        serving_dtype=serving_dtype(config, uses_gpu),
        model=model,
        processes=(*_plain_processes(config), trainer, engine, _receiver(config, model, uses_gpu)),
    )


def _staleness_sentence(config: Config) -> str:
    """The bound that admission enforces for max_staleness, as a sentence."""
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


def serving_dtype(config: Config, uses_gpu: bool) -> str:
    """rollout.engine.dtype, with `auto` resolved as the engines resolve it."""
    dtype = config.rollout.engine.dtype
    if dtype is Dtype.auto:
        return "bfloat16" if uses_gpu else "float32"
    return str(dtype.value)


def max_logprob_diff(config: Config, uses_gpu: bool) -> float:
    """Mean difference, in nats, of engines and trainer that can only be an error."""
    is_float32 = Dtype.bfloat16 not in (config.trainer.dtype, config.rollout.engine.dtype)
    keeps_old_cache = config.weight_sync.pause_mode is PauseMode.in_place
    return FLOAT32_DIFF if is_float32 and not uses_gpu and not keeps_old_cache else OTHER_DIFF


def _filled_in(config: Config, devices: Devices) -> Config:
    sync, engine = config.weight_sync, config.rollout.engine
    return replace(
        config,
        trainer=replace(config.trainer, num_ranks=devices.num_ranks),
        rollout=replace(config.rollout, engine=replace(engine, mem_fraction=devices.mem_fraction)),
        # NCCL rejects a receiver on the GPU of the rank that sends to it.
        weight_sync=replace(sync, backend=Backend.gloo) if devices.is_shared else sync,
    )


def _plain_processes(config: Config) -> tuple[PlannedProcess, ...]:
    """The processes that never use a GPU."""
    actors = config.rollout.reward_actors
    processes = f"{config.rollout.reward_processes} scoring processes each"
    worker = PlannedProcess(
        what="rollout worker",
        count=config.rollout.num_workers,
        memory=format_bytes(WORKER_PROCESS_BYTES),
        note="keeps groups in flight" if actors else f"keeps groups in flight; {processes}",
    )
    scorer = PlannedProcess(
        what="reward actor",
        count=actors,
        memory=format_bytes(WORKER_PROCESS_BYTES),
        note=processes,
    )
    scoring = (worker, scorer) if actors else (worker,)
    if config.buffer.url is not None:
        return scoring
    redis = PlannedProcess(
        what="Redis server",
        memory=format_bytes(_buffer_bytes(config)),
        note=f"replay buffer, fsync {config.buffer.appendfsync.name}",
    )
    return (redis, *scoring)


def _receiver(config: Config, model: ModelSize, uses_gpu: bool) -> PlannedProcess:
    """One per node with engines; their number is known once the engines are placed."""
    memory = "unknown"
    if model.num_params is not None:
        staged = model.num_params * _item_bytes(config, uses_gpu) * config.weight_sync.num_staged
        memory = format_bytes(staged + WORKER_PROCESS_BYTES)
    return PlannedProcess(
        what="weights receiver",
        memory=memory,
        note=f"one per node; stages in {config.weight_sync.stage_dir or DEFAULT_STAGE_DIR}",
    )


def _weights_sentence(config: Config, model: ModelSize, dtype: str) -> str:
    """How a version reaches the engines, and its size."""
    sync, every = config.weight_sync, config.weight_sync.full_every
    size = "all bytes"
    if model.num_params is not None:
        size = format_bytes(model.num_params * ITEM_BYTES[dtype])
    what = f"{size} per version"
    if every > 1:
        what = f"{size} every {every} versions, only changes in between"
    most = sync.max_concurrent_commits
    pausing = "one engine pauses" if most == 1 else f"at most {most} engines pause"
    return f"{what}, as {dtype}; {pausing} at a time, for the commit"


def _redis_sentence(config: Config) -> str:
    if config.buffer.url is not None:
        return f"yours (buffer.url), at {address(config.buffer.url)}"
    here = "127.0.0.1" if config.cluster.ray_address is None else "this machine's address in Ray"
    host = config.cluster.host or here
    return f"started for this run on {host}, with a password, data in its folder"


def _buffer_bytes(config: Config) -> int:
    """Groups that admission allows and those of the last steps, at about 8 bytes per token."""
    num_groups = (config.buffer.max_staleness + 2) * config.trainer.groups_per_version
    num_tokens = config.rollout.max_prompt_tokens + config.rollout.max_response_tokens
    return 16 * 2**20 + num_groups * config.rollout.group_size * num_tokens * 8


def _rank_memory(config: Config, model: ModelSize, uses_gpu: bool) -> str:
    num_ranks = config.trainer.ranks
    needed = rank_bytes(config, model, num_ranks=num_ranks, uses_gpu=uses_gpu)
    if needed is None:
        return "unknown"
    text = f"from {format_bytes(needed)}"  # activations come on top
    if not uses_gpu:
        return text
    served = serving_dtype(config, uses_gpu)
    host = rank_host_bytes(config, model, num_ranks=num_ranks, served=served) or 0
    return f"{text}; {format_bytes(host)} of the host's"


def _engine_memory(config: Config, model: ModelSize, uses_gpu: bool) -> str:
    engine = config.rollout.engine
    if uses_gpu and engine.max_total_tokens is None:
        of = f"{'the' if engine.tp_size == 1 else 'each'} GPU"
        if engine.mem_fraction is None:
            return f"SGLang's choice of {of}"
        return f"{engine.mem_fraction:.0%} of {of}"
    if model.num_params is None:
        return "unknown"
    item_bytes = _item_bytes(config, uses_gpu)
    num_gpus = engine.tp_size if uses_gpu else 1
    process = GPU_CONTEXT_BYTES if uses_gpu else ENGINE_PROCESS_BYTES
    weights = model.num_params * item_bytes // num_gpus
    if model.kv_elements is None:
        return f"{format_bytes(process + weights)} + KV cache"
    kv_cache = _kv_tokens(config) * model.kv_elements * item_bytes // num_gpus
    return format_bytes(process + weights + kv_cache)


def _item_bytes(config: Config, uses_gpu: bool) -> int:
    return ITEM_BYTES[serving_dtype(config, uses_gpu)]


def _engine_note(config: Config, uses_gpu: bool) -> str:
    tp_size = config.rollout.engine.tp_size
    where = f"{tp_size} ranks on one machine; " if tp_size > 1 else ""
    if uses_gpu and config.rollout.engine.max_total_tokens is None:
        return f"{where}weights and KV cache"
    return f"{where}KV cache of {_kv_tokens(config):,} tokens"


def _kv_tokens(config: Config) -> int:
    return config.rollout.engine.max_total_tokens or CPU_KV_TOKENS
