"""Says what a run takes of the machines that it runs on, as far as its settings tell (pure)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from configs.choices import LoraMode
from configs.schema import Config
from controller.start.gpu_host import SURE_FRACTION
from controller.start.gpus import CHECKPOINT_BYTES_PER_PARAM, num_servers
from controller.start.model_size import num_trained
from controller.start.plan import Plan
from host.machine import existing
from processes.tree import SHARED_MEMORY
from rollout_pool.engines.kinds import shared_memory_bytes

OWN_FILES = 512
"""Files and sockets of a process besides one connection for each request."""
NUM_CHECKPOINTS = 3
"""The newest two, and the one that is being written."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Needs:
    """Sizes in bytes."""

    uses_gpu: bool
    num_engines: int
    engine_gpus: float
    stage_bytes: int
    """In the folder for staged weights of a machine with engines."""
    host_bytes: int | None
    """Memory of all machines together; None: unknown."""
    version_bytes: int | None
    checkpoint_bytes: int | None
    most_files: int
    min_bytes_per_s: float


def needs_of(config: Config, plan: Plan, num_nodes: int) -> Needs:
    rollout, engines = config.rollout, num_servers(config)
    trained = num_trained(config.model, plan.model)
    samples = rollout.max_groups_in_flight * rollout.group_size
    return Needs(
        uses_gpu=plan.uses_gpu,
        num_engines=engines,
        engine_gpus=plan.devices.engine_gpus,
        stage_bytes=shared_memory_needed(config, plan, engines if num_nodes == 1 else 1),
        host_bytes=plan.host_bytes if plan.uses_gpu else None,
        version_bytes=plan.weights_bytes,
        checkpoint_bytes=None
        if trained is None
        else NUM_CHECKPOINTS * CHECKPOINT_BYTES_PER_PARAM * trained,
        most_files=OWN_FILES + min(samples, rollout.engine.max_running_requests * engines),
        min_bytes_per_s=config.weight_sync.min_bandwidth,
    )


def shared_memory_needed(config: Config, plan: Plan, num_engines: int) -> int:
    """Bytes that these engines of one machine and their receiver surely take in the folder of
    staged weights."""
    # Sizes in a model's name are rounded.
    staged = staged_slots(config, num_engines) * (plan.staged_bytes or 0)
    needed = int(SURE_FRACTION * staged)
    if stage_folder(config) == SHARED_MEMORY:
        needed += num_engines * shared_memory_bytes(config.rollout.engine.tp_size)
    return needed


def stage_folder(config: Config) -> Path:
    return existing(config.weight_sync.stage_dir or SHARED_MEMORY)


def staged_slots(config: Config, num_engines: int) -> int:
    slots, lora = config.weight_sync.num_staged, config.model.lora
    if lora is not None and lora.mode is LoraMode.versions:  # engines copy what they serve
        slots += num_engines * (config.buffer.max_staleness + 3)
    return slots
