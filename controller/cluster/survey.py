"""Asks every machine of a Ray cluster for its facts, by an actor on each.

    look at each ─► clocks, one after the other ─► who reaches whom ─► each sends to the next

All but the clocks at the same time on all machines, and every wait has an end.
"""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from configs.schema import Config
from controller.cluster.facts import Asked, NodeFacts
from controller.cluster.needs import needs_of
from controller.cluster.probe import Probe
from controller.cluster.problems import Problem, problems
from controller.start.plan import Plan
from controller.watch.supervise import POLL_S
from host.machine import existing

ANSWER_S = 60.0
"""For all machines together, unless a launch gives them longer: Ray starts a process on each."""
CLOCK_S = 5.0
NUM_CLOCK_READS = 5


@dataclass(kw_only=True, slots=True, frozen=True)
class Survey:
    nodes: list[NodeFacts]
    """The controller's machine first; without those that did not answer."""
    silent: list[Problem]


@dataclass(kw_only=True, slots=True, frozen=True)
class RayNode:
    """A living node as Ray lists it."""

    id: str
    name: str
    address: str
    num_cpus: float
    num_gpus: float
    kind: str | None
    """Kind of its GPUs, as "H100"."""


def ray_nodes() -> list[RayNode]:
    """The node of this process comes first."""
    own, kind = ray.get_runtime_context().get_node_id(), "accelerator_type:"
    found = [
        RayNode(
            id=node["NodeID"],
            name=node["NodeManagerHostname"],
            address=node["NodeManagerAddress"],
            num_cpus=node["Resources"].get("CPU", 0.0),
            num_gpus=node["Resources"].get("GPU", 0.0),
            kind=next((r[len(kind) :] for r in node["Resources"] if r.startswith(kind)), None),
        )
        for node in ray.nodes()
        if node["Alive"]
    ]
    return sorted(found, key=lambda node: (node.id != own, node.address))


def survey(
    config: Config,
    folder: Path,
    check: Callable[[], None] = lambda: None,
    start_s: float = ANSWER_S,
) -> Survey:
    """Facts on all machines of the cluster that this process has joined, without those that leave
    it meanwhile. `folder` is below run.dir; calls `check` while it waits, which may raise.
    `start_s`: for the processes that Ray starts."""
    nodes = ray_nodes()
    with contextlib.ExitStack() as ending:
        probes = dict[str, Any]()
        for node in nodes:
            place = NodeAffinitySchedulingStrategy(node.id, soft=False)
            options = ray.remote(Probe).options(num_cpus=0, scheduling_strategy=place)
            probes[node.id] = probe = options.remote()
            ending.callback(ray.kill, probe)
        marker = ending.enter_context(_marked(folder))
        stage_dir, host = config.weight_sync.stage_dir, config.cluster.host
        asked = Asked(
            run_dir=str(folder),
            stage_dir=stage_dir,
            marker=str(marker),
            controller=host or nodes[0].address,
        )
        looks = {
            node.id: probes[node.id].look.remote(asked, node.address, node.num_cpus, node.num_gpus)
            for node in nodes
        }
        found, failed = _gather(looks, check, start_s)
        facts = {node: _with_clock(own, probes[node]) for node, own in found.items()}
        unreached, untested = _test_network(facts, probes, check)
    living = {node.id for node in ray_nodes()}
    silent = [
        Problem(
            node=node.name,
            what=_silence(failed[node.id], start_s),
            breaks=failed[node.id] is not None,  # late is not wrong
        )
        for node in nodes
        if node.id in failed and node.id in living
    ]
    silent += [
        Problem(node=facts[node].name, what=_untested(error), breaks=False)
        for node, error in untested.items()
        if node in living
    ]
    for own, others in unreached.items():
        names = tuple(facts[other].name for other in others if other in living)
        facts[own] = replace(facts[own], unreached=names)
    known = [facts[node.id] for node in nodes if node.id in facts and node.id in living]
    return Survey(nodes=known, silent=silent)


def check_cluster(
    config: Config, plan: Plan, run_dir: Path, check: Callable[[], None]
) -> list[Problem]:
    """Problems of the machines of this cluster."""
    seen = survey(config, run_dir, check, config.cluster.start_timeout_s)
    return [*seen.silent, *judged(config, plan, seen)]


def judged(config: Config, plan: Plan, seen: Survey) -> list[Problem]:
    num_nodes = len(seen.nodes) + len(seen.silent)
    return problems(seen.nodes, needs_of(config, plan, num_nodes)) if seen.nodes else []


def offset(reads: Sequence[tuple[float, float, float]]) -> tuple[float, float]:
    """By how much a clock is ahead, and how wrong that may be, from (sent, its time, received): it
    was read at some moment of the round trip, so the shortest says most."""
    sent, its_time, received = min(reads, key=lambda read: read[2] - read[0])
    return its_time - (sent + received) / 2, (received - sent) / 2


def _with_clock(facts: NodeFacts, probe: Any) -> NodeFacts:
    reads = []
    with contextlib.suppress(RayError, GetTimeoutError):
        for _ in range(NUM_CLOCK_READS):
            sent = time.time()
            its_time = ray.get(probe.clock.remote(), timeout=CLOCK_S)
            reads.append((sent, its_time, time.time()))
    if not reads:
        return facts
    clock_s, error_s = offset(reads)
    return replace(facts, clock_s=clock_s, clock_error_s=error_s)


def _test_network(
    facts: dict[str, NodeFacts], probes: Mapping[str, Any], check: Callable[[], None]
) -> tuple[dict[str, list[str]], dict[str, RayError | None]]:
    """Adds to the facts how fast each machine reaches the next one; returns whom each does not
    reach, and why it was not tested."""
    if len(facts) < 2:
        return {}, {}
    ports = {node: probes[node].open_port.remote(own.address) for node, own in facts.items()}
    opened, closed = _gather(ports, check)
    ids = list(opened)
    places = [(facts[node].address, opened[node]) for node in ids]
    asked = {node: probes[node].unreached.remote(places) for node in ids}
    missed, unasked = _gather(asked, check)
    after = dict(zip(ids, [*ids[1:], *ids[:1]], strict=True))
    sends = {n: probes[n].send.remote(places[ids.index(after[n])]) for n in ids}
    rates, _ = _gather(sends, check)
    for node, rate in rates.items():
        facts[node] = replace(facts[node], next_node=facts[after[node]].name, bytes_per_s=rate)
    unreached = {node: [ids[number] for number in numbers] for node, numbers in missed.items()}
    return unreached, closed | unasked


def _gather(
    refs: Mapping[str, Any], check: Callable[[], None], limit_s: float = ANSWER_S
) -> tuple[dict[str, Any], dict[str, RayError | None]]:
    """Results by node; and of the others the error, or None if there was no answer in time."""
    nodes, pending = {ref: node for node, ref in refs.items()}, list(refs.values())
    deadline = time.monotonic() + limit_s
    while pending and time.monotonic() < deadline:
        check()
        _, pending = ray.wait(pending, num_returns=len(pending), timeout=POLL_S)
    found, failed = dict[str, Any](), dict[str, RayError | None]()
    for ref, node in nodes.items():
        if ref in pending:
            failed[node] = None
            continue
        try:
            found[node] = ray.get(ref)
        except RayError as error:
            failed[node] = error
    return found, failed


def _silence(error: RayError | None, limit_s: float) -> str:
    fix = "is its checkout the same, at the same path, with its .venv?"
    if error is None:
        return f"no process that Ray starts there has answered within {limit_s:g} s; {fix}"
    return f"it could not be looked at ({_last_line(error)}); {fix}"


def _untested(error: RayError | None) -> str:
    why = "no answer in time" if error is None else _last_line(error)
    return f"its ports were not tested ({why}); open all of them (docs/cluster.md, firewall)"


def _last_line(error: RayError) -> str:
    return str(error).strip().splitlines()[-1].strip()


@contextlib.contextmanager
def _marked(folder: Path) -> Iterator[Path]:
    """A file of a name that no other folder has."""
    marker = existing(folder) / f".leash-{secrets.token_hex(8)}"
    marker.touch()
    try:
        yield marker
    finally:
        marker.unlink(missing_ok=True)
