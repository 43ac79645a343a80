"""Assigns the available GPUs to ranks and engines, and says why (pure).

    enough for every rank and engine       a GPU for each rank, tp_size for each engine
    too few, trainer.num_ranks not set     one rank
    one GPU, one engine                    rank and engine take half of it each
    too little memory on it, or no GPU     everything on the CPU

An explicit setting is kept, and rejected if it does not fit.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from configs.choices import Backend, Dtype
from configs.schema import Config, TrainerConfig
from controller.start.model_size import ModelSize, num_trained
from controller.units import format_bytes, format_number_of
from tensors.layout import ITEM_BYTES
from weight_sync.types import NUM_SNAPSHOTS

STATE_BYTES_PER_PARAM = {"float32": 16, "bfloat16": 18}
"""In a rank's share: gradients, updated weights and two Adam moments, each in float32, and with
bfloat16 the weights of the passes."""
STEP_BYTES_PER_PARAM = 4
"""At the step: a second copy of the gradients, of at most STEP_PARAMS at a time (DeepSpeed's
sub_group_size)."""
STEP_PARAMS = 10**9
CHECKPOINT_BYTES_PER_PARAM = 12
"""Host memory in which a rank's updated weights and moments wait to be written."""
COPIES_BYTES_PER_PARAM = 2 * CHECKPOINT_BYTES_PER_PARAM
"""Shared memory for trainer.memory_copy_every: a copy is removed once the next one is whole."""
GPU_CONTEXT_BYTES = 2**30
"""CUDA context and kernels of one process."""
RANK_PROCESS_BYTES = 550 * 2**20
"""A CPU rank without its share of the model: torch, DeepSpeed and Ray, measured."""
HOST_PROCESS_BYTES = 4 * 2**30
"""Host memory of a process with CUDA: its libraries, and pinned buffers."""
SHARED_MEM_FRACTION = 0.3
"""rollout.engine.mem_fraction beside a trainer rank, if the size of the GPU or of the model is
unknown."""
SHARED_PART = 0.5
"""Share of rank and engine each in a GPU that they share, in Ray's count."""
MOST_FILLED = 0.8
"""Share of a GPU's memory for what is known beforehand: activations and KV cache need the rest."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Devices:
    """The GPUs of each kind of process."""

    num_ranks: int
    rank_gpus: float
    """GPUs of one rank; 0: the whole run is on the CPU."""
    engine_gpus: float
    """GPUs of one engine."""
    mem_fraction: float | None
    """rollout.engine.mem_fraction; None on the CPU, and where SGLang chooses it: on GPUs that the
    engines have for themselves."""
    why: str

    @property
    def is_shared(self) -> bool:
        """True if a rank and an engine share a GPU."""
        return 0 < self.rank_gpus < 1

    @property
    def gpu_share(self) -> float:
        """Share of each GPU that a process uses."""
        return SHARED_PART if self.is_shared else 1.0


def choose_devices(
    config: Config, model: ModelSize, num_gpus: int | None, gpu_bytes: int | None
) -> Devices:
    """Assign `num_gpus` GPUs (None: unknown, assume enough) with `gpu_bytes` of memory each.

    Raises ValueError if the settings ask for more than there is.
    """
    wanted = config.cluster.gpus_per_rank
    if wanted == 0:
        config.enforce(config.rules_without_gpus("cluster.gpus_per_rank=0"))
        return _on_cpu(config, "cluster.gpus_per_rank=0")
    if num_gpus is None:
        if wanted is None:
            return _on_cpu(config, "the cluster's number of GPUs is not known yet")
        return _own_gpus(config, config.trainer.ranks, "as many GPUs as needed")
    if num_gpus == 0 and wanted is None:
        config.enforce(config.rules_without_gpus("there is no GPU"))
        return _on_cpu(config, "there is no GPU")
    gpus = format_number_of(num_gpus, "GPU")
    engine_gpus = num_servers(config) * config.rollout.engine.tp_size
    if config.trainer.ranks + engine_gpus <= num_gpus:
        return _own_gpus(config, config.trainer.ranks, gpus)
    is_one_rank = config.trainer.num_ranks in (None, 1)
    if is_one_rank and 1 + engine_gpus <= num_gpus:
        need = rank_bytes(config, model, num_ranks=1, uses_gpu=True)
        if _is_too_much(need, gpu_bytes):
            return _cpu_instead(config, f"the rank's {format_bytes(need or 0)}", gpu_bytes)
        why = f"{gpus}: too few for {config.trainer.ranks} ranks and the engines"
        return _own_gpus(config, 1, why)
    if is_one_rank and num_gpus == engine_gpus == 1:
        return _one_gpu_for_both(config, model, gpu_bytes)
    raise ValueError(_too_few(config, num_gpus))


def num_servers(config: Config) -> int:
    """Engines of the run, with the one of a teacher that it serves."""
    return config.rollout.num_engines + (config.task.served_teacher is not None)


def _own_gpus(config: Config, num_ranks: int, why: str) -> Devices:
    engine = config.rollout.engine
    ranks = "1 trainer rank" if num_ranks == 1 else f"each of {num_ranks} trainer ranks"
    return Devices(
        num_ranks=num_ranks,
        rank_gpus=1,
        engine_gpus=engine.tp_size,
        mem_fraction=engine.mem_fraction,
        why=f"1 GPU for {ranks} and {engine.tp_size} for each engine, of {why}",
    )


def _on_cpu(config: Config, why: str) -> Devices:
    return Devices(
        num_ranks=config.trainer.ranks,
        rank_gpus=0,
        engine_gpus=0,
        mem_fraction=config.rollout.engine.mem_fraction,
        why=f"CPU: {why}",
    )


def _cpu_instead(config: Config, what: str, gpu_bytes: int | None) -> Devices:
    why = f"{what} plus working memory do not fit in a GPU of {format_bytes(gpu_bytes or 0)}"
    if config.cluster.gpus_per_rank is not None:
        raise ValueError(
            f"cluster.gpus_per_rank={config.cluster.gpus_per_rank}: {why}; choose a smaller model, "
            "add GPUs, or set cluster.gpus_per_rank=0 to run on the CPU"
        )
    config.enforce(config.rules_without_gpus(why))
    return _on_cpu(config, why)


def _one_gpu_for_both(config: Config, model: ModelSize, gpu_bytes: int | None) -> Devices:
    """One rank and one engine on the only GPU.

    Weights go over gloo: NCCL rejects two members on one GPU, here the rank and the receiver.
    """
    if config.weight_sync.backend is Backend.nccl:
        raise ValueError(
            "weight_sync.backend='nccl': trainer and receiver share the only GPU, and NCCL rejects "
            "two members on one GPU; choose auto or gloo"
        )
    rank = rank_bytes(config, model, num_ranks=1, uses_gpu=True)
    # In bfloat16, without its KV cache.
    size = model.num_params
    engine = None if size is None else 2 * size + GPU_CONTEXT_BYTES
    if rank is not None and engine is not None and _is_too_much(rank + engine, gpu_bytes):
        both = f"the rank's {format_bytes(rank)}, the engine's {format_bytes(engine)}"
        return _cpu_instead(config, both, gpu_bytes)
    fraction = config.rollout.engine.mem_fraction
    if fraction is None:
        fraction = SHARED_MEM_FRACTION
        if rank is not None and engine is not None and gpu_bytes is not None:
            # Room for the engine's weights and a third of what the rank's states leave.
            left = gpu_bytes - rank - engine
            fraction = math.floor(100 * (engine + left / 3) / gpu_bytes) / 100
    elif rank is not None and gpu_bytes is not None and rank + fraction * gpu_bytes > gpu_bytes:
        raise ValueError(
            f"rollout.engine.mem_fraction={fraction:g}: leaves less than the {format_bytes(rank)} "
            f"that the trainer rank on the same GPU of {format_bytes(gpu_bytes)} needs; lower it, "
            "or do not set it"
        )
    return Devices(
        num_ranks=1,
        rank_gpus=SHARED_PART,
        engine_gpus=SHARED_PART,
        mem_fraction=fraction,
        why=(
            f"1 GPU in total: 1 trainer rank and the engine share it; the engine takes "
            f"{fraction:.0%} of its memory; weights go over gloo"
        ),
    )


def rank_bytes(config: Config, model: ModelSize, *, num_ranks: int, uses_gpu: bool) -> int | None:
    """Memory of a rank at the step, of its GPU where it has one, without activations; None if the
    size of the model is unknown."""
    trained = num_trained(config.model, model)
    if model.num_params is None or trained is None:
        return None
    dtype = resolved(config.trainer.dtype, uses_gpu)
    share = trained // num_ranks
    frozen = 0 if config.model.lora is None else model.num_params // num_ranks
    per_param = STATE_BYTES_PER_PARAM[dtype]
    if config.trainer.offload_optimizer:
        per_param -= CHECKPOINT_BYTES_PER_PARAM if dtype == "bfloat16" else 8
    if config.trainer.offload_parameters:
        per_param -= ITEM_BYTES[dtype]
    kl, frozen_bytes = config.full_algorithm.kl, frozen * ITEM_BYTES[dtype]
    if config.trainer.offload_parameters:
        frozen_bytes = 0
    if _holds_reference(config) and not kl.offload:
        frozen_bytes += model.num_params // num_ranks * ITEM_BYTES[dtype]
    context = GPU_CONTEXT_BYTES if uses_gpu else RANK_PROCESS_BYTES
    step_bytes = min(share, STEP_PARAMS) * STEP_BYTES_PER_PARAM
    return num_states(config) * share * per_param + frozen_bytes + step_bytes + context


def tokens_of_rank(config: TrainerConfig) -> int:
    """The most tokens that a rank has in a pass."""
    return -(-config.micro_batch_tokens // config.sequence_parallel_size)


def activation_bytes(config: Config, model: ModelSize, uses_gpu: bool) -> int | None:
    """Bytes that a rank's largest pass keeps for its backward pass, about; None if the shape of the
    model is unknown.

    A layer with gated MLPs keeps for each token the inputs of its products, queries, keys, values
    and output of attention, and of both norms the input in float32 and the normalized one. With
    gradient checkpointing it is the input of each layer, or of one if they are offloaded, and all
    of one layer, with the MLP of one tile.
    """
    if not model.linear:
        return None
    size = ITEM_BYTES[resolved(config.trainer.dtype, uses_gpu)]
    (queries, hidden), (keys, _) = model.linear["q_proj"], model.linear["k_proj"]
    norm = (4 + 2 * size) * hidden
    # SDPA keeps keys and values repeated for each head of queries, and its output twice.
    attention = 2 * (queries + keys) if uses_gpu else 5 * queries
    inner = model.linear["gate_proj"][0]
    layer, mlp = 2 * norm + size * attention, size * 4 * inner
    tokens = tokens_of_rank(config.trainer)
    if not config.trainer.gradient_checkpointing:
        return tokens * (model.num_layers * (layer + mlp) + norm)
    inputs = size * hidden * (1 if config.trainer.offload_activations else model.num_layers)
    tile = min(tokens, config.trainer.mlp_tile_tokens or tokens)
    is_summed = tile < tokens and config.model.lora is None  # gradients of the weights, in float32
    sums = 4 * 3 * inner * hidden if is_summed else 0
    return tokens * (inputs + layer + norm) + tile * mlp + sums


def rank_host_bytes(config: Config, model: ModelSize, *, num_ranks: int, served: str) -> int | None:
    """Host memory of a rank on a GPU: copies of its share of the weights to send (as `served`) and
    of its state for checkpoints, on disk and in memory, and what is offloaded."""
    trained = num_trained(config.model, model)
    if model.num_params is None or trained is None:
        return None
    dtype, whole = resolved(config.trainer.dtype, True), 0
    of_state = CHECKPOINT_BYTES_PER_PARAM
    if config.trainer.offload_optimizer:
        of_state += CHECKPOINT_BYTES_PER_PARAM
    if config.trainer.memory_copy_every is not None:
        of_state += COPIES_BYTES_PER_PARAM
    per_param = NUM_SNAPSHOTS * ITEM_BYTES[served] + num_states(config) * of_state
    if config.trainer.offload_parameters:
        whole += num_states(config) * ITEM_BYTES[dtype]
    if _holds_reference(config) and config.full_algorithm.kl.offload:
        whole += ITEM_BYTES[dtype]
    inputs = 0
    if config.trainer.offload_activations and model.linear:
        inputs = model.num_layers * ITEM_BYTES[dtype] * model.linear["q_proj"][1]
    size = (trained * per_param + model.num_params * whole) // num_ranks
    return size + tokens_of_rank(config.trainer) * inputs + HOST_PROCESS_BYTES


def num_states(config: Config) -> int:
    """Models that are trained, each with its optimizer: the policy, and a critic of its size."""
    return 1 if config.algorithm.critic is None else 2


def _holds_reference(config: Config) -> bool:
    """Whether ranks have weights of a reference; the base of an adapter needs none."""
    kl = config.full_algorithm.kl
    is_base = config.model.lora is not None and kl.reference is None
    return kl.weight > 0 and not (is_base and not config.keeps_first_policy)


def resolved(dtype: Dtype, uses_gpu: bool) -> str:
    """As torch spells it, with `auto` as ranks and engines resolve it."""
    if dtype is Dtype.auto:
        return "bfloat16" if uses_gpu else "float32"
    return str(dtype.value)


def _is_too_much(num_bytes: int | None, gpu_bytes: int | None) -> bool:
    return num_bytes is not None and gpu_bytes is not None and num_bytes > MOST_FILLED * gpu_bytes


def _too_few(config: Config, num_gpus: int) -> str:
    ranks, engines = config.trainer.ranks, config.rollout.num_engines
    teacher = "" if config.task.served_teacher is None else " and a teacher"
    tp_size = config.rollout.engine.tp_size
    fix = "lower trainer.num_ranks or rollout.num_engines, or add GPUs to the Ray cluster"
    if num_gpus == 0:
        fix = "set cluster.gpus_per_rank=0 to run on the CPU, or add GPUs to the Ray cluster"
    return (
        f"trainer.num_ranks={ranks} (1 GPU each) and rollout.num_engines={engines} "
        f"(rollout.engine.tp_size={tp_size} each){teacher} need "
        f"{ranks + num_servers(config) * tp_size} GPUs, and Ray has {num_gpus}: {fix}"
    )
