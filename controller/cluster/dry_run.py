"""`make dry-run`: the settings, and what they would start where; starts nothing."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import torch
from rich.console import Console
from rich.table import Table

from configs.load import to_yaml
from configs.schema import Config
from controller.cluster.survey import RayNode, ray_nodes
from controller.commands.simulate import Question, lognormal_lengths, setting_of
from controller.simulate.events import simulate
from controller.simulate.machine import MEMORY
from controller.start.gpu_host import SURE_FRACTION, check_host_memory
from controller.start.gpus import rank_bytes
from controller.start.placement import CPUS_PER_PROCESS, PlacementError, joined
from controller.start.plan import Plan
from controller.start.preflight import check_plan, check_shared_memory, plan_here, plan_on
from controller.units import format_bytes, format_number_of
from host.machine import host_memory
from host.printable import printable, table_of
from tensors.layout import ITEM_BYTES
from trainer_pool.speed import PEAK_TFLOPS

STEPS = 16
"""To simulate: the first half fills pools and leash."""


def dry_run(config: Config, gpu: str | None = None, lengths: str | None = None) -> None:
    """Print the settings and the plan. Raises ValueError as `check_plan` does, and for what cannot
    fit into GPUs or a machine that are known.

    `gpu`: the kind of the GPUs. `lengths`: median and 99th percentile of the answers' tokens.
    """
    if gpu is not None and gpu not in MEMORY:
        raise ValueError(f"GPU={gpu!r}: must be one of {', '.join(MEMORY)}")
    skipped = check_plan(config)
    plan, nodes, unasked = _plan(config, gpu)
    kind = gpu or _kind(config, nodes)
    is_here = config.cluster.ray_address is None and config.cluster.num_gpus is None
    if plan.uses_gpu and kind is not None:
        check_gpu_memory(plan, kind)
    if plan.uses_gpu and is_here:
        check_host_memory(plan)
    if is_here:
        check_shared_memory(plan.config, plan, is_dry=True)
    console = Console(highlight=False)
    console.print(to_yaml(config), markup=False)
    console.print(plan.render())
    if nodes:
        console.print(_places(plan, nodes))
    said = [unasked, config.idle_settings]
    if plan.uses_gpu:
        said = [_memory(plan, is_here), step_sentence(plan, kind, lengths), *said]
    if skipped:
        said.append(f"Not checked before a launch: {', '.join(skipped)}")
    for sentence in filter(None, said):
        console.print(printable(sentence), markup=False, soft_wrap=True)


def _plan(config: Config, gpu: str | None) -> tuple[Plan, list[RayNode], str]:
    """With the machines of the cluster, or why it was not asked."""
    gpu_bytes = None if gpu is None else int(MEMORY[gpu])
    if config.cluster.ray_address is None:
        return plan_here(config, gpu_bytes), [], ""
    with contextlib.ExitStack() as leaving:
        try:
            cluster = leaving.enter_context(joined(config))
        except PlacementError as error:
            return plan_here(config, gpu_bytes), [], f"Planned without the cluster: {error}"
        return plan_on(config, cluster), ray_nodes(), ""


def _kind(config: Config, nodes: Sequence[RayNode]) -> str | None:
    """Kind of the GPUs, if all that are known are of one."""
    names = {node.kind for node in nodes if node.kind is not None}
    is_here = config.cluster.ray_address is None and config.cluster.num_gpus is None
    if is_here and torch.cuda.is_available():
        names = {torch.cuda.get_device_name(0)}
    kinds = {next((kind for kind in PEAK_TFLOPS if kind in name), None) for name in names}
    return kinds.pop() if len(kinds) == 1 else None


def check_gpu_memory(plan: Plan, kind: str) -> None:
    """Raises ValueError if a rank's states, or an engine's weights, surely do not fit in a GPU."""
    config, has = plan.config, MEMORY[kind]
    num_ranks, tp_size = plan.devices.num_ranks, config.rollout.engine.tp_size
    rank = rank_bytes(config, plan.model, num_ranks=num_ranks, uses_gpu=True)
    if rank is not None and SURE_FRACTION * rank > has:
        raise ValueError(
            f"trainer.num_ranks={num_ranks}: a rank needs {format_bytes(rank)} without activations "
            f"for {plan.model.label}, and an {kind} has {format_bytes(has)}; raise it, set "
            "trainer.offload_optimizer=true, or choose a smaller model"
        )
    size = plan.model.num_params
    if size is None or config.rollout.engine.quantizes:
        return
    weights = size * ITEM_BYTES[plan.serving_dtype] // tp_size
    if SURE_FRACTION * weights > has:
        raise ValueError(
            f"rollout.engine.tp_size={tp_size}: each GPU of an engine needs "
            f"{format_bytes(weights)} for the weights of {plan.model.label}, and an {kind} has "
            f"{format_bytes(has)}; raise it, or choose a smaller model"
        )


def _memory(plan: Plan, is_here: bool) -> str:
    if plan.host_bytes is None:
        return ""
    has = f" (this one has {format_bytes(host_memory())})" if is_here else ""
    return f"Host memory, all on one machine: about {format_bytes(plan.host_bytes)}{has}."


def _places(plan: Plan, nodes: Sequence[RayNode]) -> Table:
    """Processes and memory by machine."""
    placed = packed(plan, [(node.num_cpus, node.num_gpus) for node in nodes])
    if placed is None:
        raise PlacementError(
            "the machines cannot hold the run, though they have enough GPUs and CPUs in all: each "
            "process takes a CPU beside its GPUs, and an engine has its GPUs on one machine; lower "
            "trainer.num_ranks, rollout.num_engines, rollout.num_workers or rollout.engine.tp_size"
        )
    first_rank, rows = next(i for i, part in enumerate(placed) if part["rank"]), []
    for number, (node, part) in enumerate(zip(nodes, placed, strict=True)):
        memory = plan.bytes_on_host(
            part["rank"],
            part["engine"] + part["teacher"],
            part["worker"],
            has_first_rank=number == first_rank,
            has_controller=number == 0,
        )
        kinds = [format_number_of(n, name) for name, n in part.items()]
        about = format_bytes(memory) if plan.uses_gpu and memory is not None else "-"
        offered = f"{node.num_cpus:g} CPUs, {node.num_gpus:g} GPUs"
        gets = ", ".join(kinds) or "-"
        row = {"machine": node.name, "in Ray": offered, "gets": gets, "host memory": about}
        rows.append(row)
    table = table_of(rows)
    table.caption = "As Ray would pack them if nothing else runs there; it may choose otherwise."
    return table


def packed(plan: Plan, rooms: Sequence[tuple[float, float]]) -> list[Counter[str]] | None:
    """Processes by kind on machines with these CPUs and GPUs, if nothing else runs there; None if
    they do not fit (pure).

    As Ray packs a placement group: as much as fits goes to the machine with the largest part of its
    room left, then to the next.
    """
    config, devices = plan.config, plan.devices
    groups = [
        ("rank", config.trainer.ranks, devices.rank_gpus),
        *[("engine", 1, devices.engine_gpus)] * config.rollout.num_engines,
        ("worker", config.rollout.num_workers, 0.0),
    ]
    if config.task.served_teacher is not None:
        groups.append(("teacher", 1, devices.engine_gpus))
    left, placed = [[*room] for room in rooms], [Counter[str]() for _ in rooms]
    for kind, count, gpus in sorted(groups, key=lambda group: -group[2]):
        while count:
            fits = [number for number, (cpu, gpu) in enumerate(left) if cpu >= 1 and gpu >= gpus]
            if not fits:
                return None
            best = max(fits, key=lambda number: _part_left(left[number], gpus))
            while count and left[best][0] >= CPUS_PER_PROCESS and left[best][1] >= gpus:
                left[best][0] -= CPUS_PER_PROCESS
                left[best][1] -= gpus
                placed[best][kind] += 1
                count -= 1
    return placed


def _part_left(room: Sequence[float], gpus: float) -> float:
    """Mean over the resources that are asked for."""
    cpu, gpu = room
    parts = [(cpu - CPUS_PER_PROCESS) / cpu]
    if gpus:
        parts.append((gpu - gpus) / gpu)
    return sum(parts) / len(parts)


def step_sentence(plan: Plan, kind: str | None, lengths: str | None) -> str:
    """An estimate of a step's seconds, with what it assumes, or why there is none."""
    config, devices = plan.config, plan.devices
    if kind is None:
        return f"Seconds of a step: estimated where the GPUs are known; GPU={'|'.join(MEMORY)}."
    longest = config.rollout.max_response_tokens
    said = lengths or f"{max(1, longest // 4)},{longest}"
    try:
        if devices.is_shared:
            raise ValueError(
                "a rank and an engine share a GPU, which is not simulated; give each its own"
            )
        prompt = min(Question.prompt, config.rollout.max_prompt_tokens)
        asked = Question(gpu=kind, lengths=said, steps=STEPS, prompt=prompt)
        staleness = config.buffer.max_staleness
        setting = replace(
            setting_of(config, asked),
            num_engines=config.rollout.num_engines,
            num_trainer_gpus=devices.num_ranks,
            max_staleness=staleness,
            num_steps=STEPS + 4 * staleness,
        )
        draw = lognormal_lengths(said, config.rollout.group_size, longest)()
        seconds = simulate(setting, draw).step_s
    except ValueError as error:
        return f"Seconds of a step: no estimate ({error})."
    return (
        f"Seconds of a step: about {seconds:.3g}, simulated and not measured, on {kind}s that "
        f"train at {Question.mfu:.0%} of their peak, with answers of {said} tokens (median, 99th "
        f"percentile{'' if lengths else '; LENGTHS= says others'}), {Question.wire:g} GB/s for new "
        "weights, and rewards that take no time."
    )
