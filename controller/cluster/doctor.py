"""`make doctor`: what a launch with these settings would find on each machine, and its repair."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec
import torch
from rich.console import Console

from configs.schema import Config
from controller.cluster.facts import VERSIONS, Asked, NodeFacts, node_facts
from controller.cluster.problems import Problem
from controller.cluster.survey import Survey, judged, survey
from controller.ray_environment import LOOPBACK
from controller.start.placement import PlacementError, joined
from controller.start.plan import Plan, make_plan
from controller.start.preflight import check_ports, plan_here, plan_on
from controller.units import format_bytes
from host.network import own_address_towards
from host.printable import printable, table_of

T = TypeVar("T")

WIDTH = 100
"""Columns of the tables where there is no wider terminal."""


class UnfitError(RuntimeError):
    """A launch would fail."""


def print_doctor(config: Config, as_json: bool = False) -> None:
    """Prints the facts on each machine, then the problems; `as_json`: one object. Raises
    UnfitError if any of these would break a launch."""
    seen, found = _on_cluster(config) if config.cluster.ray_address else _here(config)
    if as_json:
        print(msgspec.json.encode({"nodes": seen.nodes, "problems": found}).decode())
    else:
        _print(seen, found)
    if num_breaking := sum(problem.breaks for problem in found):
        raise UnfitError(
            f"a launch would fail, for {num_breaking} of these reasons; do what each says"
        )


def _here(config: Config) -> tuple[Survey, list[Problem]]:
    asked = Asked(run_dir=config.run.dir, stage_dir=config.weight_sync.stage_dir)
    address = own_address_towards(config.cluster.host or LOOPBACK)  # it may be a name
    facts = node_facts(asked, address, os.cpu_count() or 1, torch.cuda.device_count())
    return _judged(config, Survey(nodes=[facts], silent=[]), lambda: plan_here(config), address)


def _on_cluster(config: Config) -> tuple[Survey, list[Problem]]:
    with joined(config) as cluster:
        seen = survey(config, Path(config.run.dir))
        return _judged(config, seen, lambda: plan_on(config, cluster), cluster.host)


def _judged(
    config: Config, seen: Survey, make: Callable[[], Plan], host: str
) -> tuple[Survey, list[Problem]]:
    found, here = [*seen.silent], seen.nodes[0].name if seen.nodes else "the controller's machine"

    def tried(check: Callable[[], T]) -> T | None:
        try:
            return check()
        except (ValueError, PlacementError) as error:
            found.append(Problem(node=here, what=str(error), breaks=True))
            return None

    tried(lambda: check_ports(config, host))
    plan = tried(make) or make_plan(config, None, os.cpu_count() or 1)
    return seen, sorted([*found, *judged(config, plan, seen)], key=lambda one: not one.breaks)


# The tables --------------------------------------------------------------------------------------


def _print(seen: Survey, found: Sequence[Problem]) -> None:
    console = Console(highlight=False)
    console = Console(highlight=False, width=max(console.width, WIDTH))
    nodes = seen.nodes
    for row_of in (_versions, _machine, *([_network] if nodes[1:] else [])):
        console.print(table_of([*map(row_of, nodes)]))
    for problem in found:
        mark = "breaks a launch" if problem.breaks else "warning"
        console.print(printable(f"{mark}: {problem.line}"), markup=False, soft_wrap=True)
    if not found:
        console.print("Nothing is wrong that could be seen before a launch.")


def _versions(node: NodeFacts) -> dict[str, str]:
    return {"machine": node.name, **{name: node.versions.get(name) or "-" for name in VERSIONS}}


def _machine(node: NodeFacts) -> dict[str, str]:
    locked = node.locked_memory
    return {
        "machine": node.name,
        "CPUs": f"{node.num_cpus:g}",
        "GPUs": f"{node.num_gpus:g}",
        "memory": format_bytes(node.memory),
        "files": str(node.most_files),
        "locked": "unlimited" if locked is None else format_bytes(locked),
        "free: staging": format_bytes(node.stage_free),
        "/tmp": format_bytes(node.tmp_free),
        "run.dir": format_bytes(node.run_dir_free),
    }


def _network(node: NodeFacts) -> dict[str, str]:
    rate = node.bytes_per_s
    return {
        "machine": node.name,
        "address": node.address,
        "interface": node.interface,
        "clock": f"{1000 * node.clock_s:+.0f} ms (±{1000 * node.clock_error_s:.0f})",
        "ports": "open" if not node.unreached else f"{len(node.unreached)} closed",
        "to the next machine": "-" if rate is None else f"{format_bytes(rate)}/s",
        "run.dir": "shared" if node.sees_run_dir else "not shared",
    }
