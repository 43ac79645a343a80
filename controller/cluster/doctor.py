"""`make doctor`: what a launch with these settings would find on each machine, and its repair."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec
import torch
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

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
from host.printable import printable

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
    for table in (_versions(nodes), _machines(nodes), *([_network(nodes)] if nodes[1:] else [])):
        console.print(table)
    for problem in found:
        mark = "breaks a launch" if problem.breaks else "warning"
        console.print(printable(f"{mark}: {problem.line}"), markup=False, soft_wrap=True)
    if not found:
        console.print("Nothing is wrong that could be seen before a launch.")


def table_of(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*(Text(printable(cell)) for cell in row))
    return table


def _versions(nodes: Sequence[NodeFacts]) -> Table:
    rows = [[node.name, *(node.versions.get(name) or "-" for name in VERSIONS)] for node in nodes]
    return table_of(["machine", *VERSIONS], rows)


def _machines(nodes: Sequence[NodeFacts]) -> Table:
    columns = [
        "machine",
        "CPUs",
        "GPUs",
        "memory",
        "files",
        "locked",
        "free: staging",
        "/tmp",
        "run.dir",
    ]
    rows = [
        [
            node.name,
            f"{node.num_cpus:g}",
            f"{node.num_gpus:g}",
            format_bytes(node.memory),
            str(node.most_files),
            "unlimited" if node.locked_memory is None else format_bytes(node.locked_memory),
            *map(format_bytes, (node.stage_free, node.tmp_free, node.run_dir_free)),
        ]
        for node in nodes
    ]
    return table_of(columns, rows)


def _network(nodes: Sequence[NodeFacts]) -> Table:
    columns = [
        "machine",
        "address",
        "interface",
        "clock",
        "ports",
        "to the next machine",
        "run.dir",
    ]
    rows = [
        [
            node.name,
            node.address,
            node.interface,
            f"{1000 * node.clock_s:+.0f} ms (±{1000 * node.clock_error_s:.0f})",
            "open" if not node.unreached else f"{len(node.unreached)} closed",
            "-" if node.bytes_per_s is None else f"{format_bytes(node.bytes_per_s)}/s",
            "shared" if node.sees_run_dir else "not shared",
        ]
        for node in nodes
    ]
    return table_of(columns, rows)
