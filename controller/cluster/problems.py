"""Judges the facts on the machines of a cluster: what would break a launch, and what may (pure)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from ipaddress import ip_address

from controller.cluster.facts import VERSIONS, NodeFacts
from controller.cluster.needs import NUM_CHECKPOINTS, Needs
from controller.start.gpu_host import SURE_FRACTION
from controller.start.placement import CPUS_PER_PROCESS
from controller.units import format_bytes, format_duration

BREAKING = ("Leash", "NCCL")
"""Versions that must be the same: messages are those of the sources, and NCCL refuses members of
another version. Ray itself compares Python and Ray."""
MOST_SKEW_S = 1.0
LEAST_TMP_BYTES = 2**30


@dataclass(kw_only=True, slots=True, frozen=True)
class Problem:
    node: str
    what: str
    """Value and fix."""
    breaks: bool = False
    """True if it would end a launch; otherwise it may."""

    @property
    def line(self) -> str:
        return f"{self.node}: {self.what}"


def problems(nodes: Sequence[NodeFacts], needs: Needs) -> list[Problem]:
    """First those that break a launch. `nodes[0]` is the controller's machine."""
    found = [*_versions(nodes, needs), *_engines(nodes, needs), *_memory(nodes, needs)]
    for node in nodes:
        found += _network(node, needs, is_alone=len(nodes) == 1)
        found += _folders(node, nodes[0], needs)
        found += _limits(node, needs)
    return sorted(found, key=lambda problem: not problem.breaks)


def _versions(nodes: Sequence[NodeFacts], needs: Needs) -> Iterator[Problem]:
    first = nodes[0]
    for name in VERSIONS:
        others = defaultdict[str, list[str]](list)
        # What a machine lacks, such as NCCL without GPUs, is compared with nothing. Builds of torch
        # for CPU and GPU differ in what follows the plus.
        known = [
            (n, v.partition("+")[0])
            for n in nodes
            if (v := n.versions.get(name)) and (n.num_gpus or name != "NCCL")
        ]
        for node, version in known[1:]:
            if version.rpartition(" ")[2] != known[0][1].rpartition(" ")[2]:  # Leash: its digest
                others[version].append(node.name)
        for version, names in others.items():
            yield Problem(
                node=_together(names),
                what=f"{name} {version}, and {known[0][0].name} has {known[0][1]}; {_same(name)}",
                breaks=name in BREAKING and (name != "NCCL" or needs.uses_gpu),
            )
    if first.versions.get("sglang") is None and len(nodes) == 1:
        what = "sglang is not installed; run `make install`"
        yield Problem(node=first.name, what=what, breaks=True)


def _same(name: str) -> str:
    if name == "driver":
        return "install the same one"
    if name == "Leash":
        return "bring both to the same commit, without changes of their own"
    return "run `make install` on both, from the same checkout"


def _together(names: Sequence[str]) -> str:
    more = f" and {len(names) - 8} more" if len(names) > 8 else ""
    return ", ".join(names[:8]) + more


def _engines(nodes: Sequence[NodeFacts], needs: Needs) -> Iterator[Problem]:
    """Machines where no engine can run. One without room for weights only goes without them; the
    start of one without compilers ends the launch."""
    full = {n.address: _no_room(n, needs) for n in nodes if n.stage_free < needs.stage_bytes}
    yield from _unfit(nodes, needs, full, num_enough=1)
    broken = {n.address: n.gpu_problem for n in nodes if needs.uses_gpu and n.gpu_problem}
    yield from _unfit(nodes, needs, broken, num_enough=needs.num_engines)


def _unfit(
    nodes: Sequence[NodeFacts], needs: Needs, reasons: Mapping[str, str], num_enough: int
) -> Iterator[Problem]:
    is_alone = len(nodes) == 1  # Ray's count of CPUs is only nominal there
    room = sum(_places(node, needs) for node in nodes if node.address not in reasons)
    for node in nodes:
        if node.address in reasons and (is_alone or _places(node, needs)):
            yield Problem(
                node=node.name,
                what=reasons[node.address],
                breaks=room < (1 if is_alone else num_enough),
            )


def _places(node: NodeFacts, needs: Needs) -> int:
    """Engines for which Ray has room there at most."""
    if needs.engine_gpus:
        return int(node.num_gpus // needs.engine_gpus)
    return int(node.num_cpus // CPUS_PER_PROCESS)


def _no_room(node: NodeFacts, needs: Needs) -> str:
    return (
        f"{node.stage_dir} has {format_bytes(node.stage_free)} free, and a machine with an engine "
        f"needs {format_bytes(needs.stage_bytes)} there; remove files, make it larger "
        "(in a container: --shm-size), or set weight_sync.stage_dir to a larger file system"
    )


def _memory(nodes: Sequence[NodeFacts], needs: Needs) -> Iterator[Problem]:
    has = sum(node.memory for node in nodes)
    if needs.host_bytes is not None and has < SURE_FRACTION * needs.host_bytes:
        yield Problem(
            node=_together([node.name for node in nodes]),
            what=f"{format_bytes(has)} of memory, and the run needs about "
            f"{format_bytes(needs.host_bytes)}; add memory (in a container: raise its limit) or "
            "machines, or choose a smaller model",
            breaks=True,
        )


def _network(node: NodeFacts, needs: Needs, is_alone: bool) -> Iterator[Problem]:
    if is_alone:
        return
    problem = partial(Problem, node=node.name)
    if abs(node.clock_s) - node.clock_error_s > MOST_SKEW_S:
        what = "ahead" if node.clock_s > 0 else "behind"
        yield problem(
            what=f"its clock is {format_duration(abs(node.clock_s))} {what}, so times in the run's "
            "reports are wrong; let chrony or ntpd set it"
        )
    own, at = ip_address(node.address.partition("%")[0]), f"{node.address} ({node.interface})"
    fix = "start its Ray with --node-ip-address of an address that all others reach"
    if own.is_loopback:
        yield problem(
            what=f"Ray knows it as {at}, which no other machine reaches; {fix}", breaks=True
        )
    elif own.is_link_local:
        yield problem(what=f"Ray knows it as {at}, a link-local address; {fix}")
    elif node.towards != node.address:
        yield problem(
            what=f"it reaches the controller's machine from {node.towards}, and Ray knows it as "
            f"{at}; if these are different networks, {fix}"
        )
    if node.unreached:
        yield problem(
            what=f"it cannot connect to free ports of {_together(node.unreached)}; open all ports "
            "between the machines (docs/cluster.md, firewall)",
            breaks=True,
        )
    if node.bytes_per_s is not None and node.bytes_per_s < needs.min_bytes_per_s:
        size = needs.version_bytes
        takes = "" if size is None else f", {format_duration(size / node.bytes_per_s)} a version"
        yield problem(
            what=f"{format_bytes(node.bytes_per_s)}/s to {node.next_node}{takes}; below "
            f"weight_sync.min_bandwidth={needs.min_bytes_per_s:g} a transfer may be given up: "
            "use a faster network, or lower it"
        )


def _folders(node: NodeFacts, first: NodeFacts, needs: Needs) -> Iterator[Problem]:
    problem = partial(Problem, node=node.name)
    if not node.sees_run_dir and (node.num_gpus if needs.uses_gpu else node.num_cpus):
        yield problem(
            what=f"run.dir is not the folder of that path on {first.name}; mount one shared folder "
            "at the same path on all machines, and set run.dir to it",
            breaks=True,
        )
    if needs.checkpoint_bytes is not None and node.run_dir_free < needs.checkpoint_bytes:
        yield problem(
            what=f"{format_bytes(node.run_dir_free)} free in run.dir, and {NUM_CHECKPOINTS} "
            f"checkpoints take {format_bytes(needs.checkpoint_bytes)}; remove files, or set "
            "run.dir to a larger file system"
        )
    if node.tmp_free < LEAST_TMP_BYTES:
        yield problem(
            what=f"{format_bytes(node.tmp_free)} free in /tmp, where Ray writes; remove files there"
        )


def _limits(node: NodeFacts, needs: Needs) -> Iterator[Problem]:
    problem = partial(Problem, node=node.name)
    if node.most_files < needs.most_files:
        yield problem(
            what=f"a process may open {node.most_files} files, and one with all requests at once "
            f"takes {needs.most_files}; raise it (ulimit -n, LimitNOFILE, in a container "
            "--ulimit nofile)"
        )
    if needs.uses_gpu and node.gpu_warning is not None:
        yield problem(what=node.gpu_warning)
    if needs.uses_gpu and node.num_gpus and node.locked_memory is not None:
        yield problem(
            what=f"{format_bytes(node.locked_memory)} may be locked, so copies between host and "
            "GPU are slower; ulimit -l unlimited (in a container --ulimit memlock=-1)"
        )
