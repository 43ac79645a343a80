"""Part CHAINS: two receivers with two links each, all of one rate, and a version down one chain and
down two.

Two ranks share a third machine, which has both links, too. The machines are network namespaces, so
this part needs root and `tc`; a link is a virtual cable to a switch of its own.

- chains_ratio: seconds of the wire with one chain over those with two, medians of rounds that take
  turns in the same processes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from rich.table import Table

from benchmarks import KEY
from benchmarks.report import Report
from benchmarks.weights.model import SMALL, SharedWeights
from benchmarks.weights.ours import MemoryBoard
from configs.schema import WeightSyncConfig
from tensors.layout import Layout
from tests.support.hosts import Host, joined_hosts, missing
from weight_sync.checkpoint_engine import CheckpointEngine
from weight_sync.types import ReceiverSpec

RATE = "400mbit"
LINKS = ("eth0", "eth1")
NUM_RANKS, NUM_RECEIVERS = 2, 2
_BUCKET_BYTES = 1 << 20
"""Small against the rate, so that filling the chain takes little of the time."""
_PORT = 7000


def measure(report: Report, *, is_short: bool) -> None:
    if (why := missing()) is not None:
        raise SystemExit(f"--only chains: {why}")
    rounds = 1 if is_short else 5
    with tempfile.TemporaryDirectory(prefix="leash-bench-") as folder:
        weights = SharedWeights.write(Path(folder) / "weights", SMALL, "bfloat16")
        with joined_hosts(Path(folder), 1 + NUM_RECEIVERS) as hosts:
            _add_second_link(hosts)
            seconds = _play(hosts, weights, rounds)
    mb = weights.num_bytes / 1e6
    report.say(f"{mb:.0f} MB to {NUM_RECEIVERS} receivers over links of {RATE}")
    table = Table("chains", "s median", "least", "most", "MB/s", "of the links")
    for number, each in seconds.items():
        rate = mb / median(each)
        share = rate / (number * float(RATE.removesuffix("mbit")) / 8)
        cells = (median(each), min(each), max(each), rate, share)
        table.add_row(str(number), *(f"{cell:.3g}" for cell in cells))
        report.note(f"chains_{number}_s", median(each))
    report.show(table)
    ratio = median(seconds[1]) / median(seconds[2])
    report.target("chains_ratio", ratio, ">=", 1.8, "times as fast with two chains as with one")


def _add_second_link(hosts: list[Host]) -> None:
    """A switch, cables and addresses beside the first, and the rate of what leaves on either."""
    switch, second = hosts[0], LINKS[1]
    switch.check(f"ip link add {second} type bridge && ip link set {second} up")
    for host in hosts[1:]:
        cable = ["ip", "link", "add", f"{second}-{host.name}", "netns", str(switch.pid)]
        cable += ["type", "veth", "peer", "name", second, "netns", str(host.pid)]
        subprocess.run(cable, check=True, timeout=60)
        switch.check(f"ip link set {second}-{host.name} master {second} up")
        for end, link in ((switch, f"to-{host.name}"), (switch, f"{second}-{host.name}")):
            _limit(end, link)
        host.check(f"ip link set {second} up")
        for link in LINKS:
            _limit(host, link)
    for host in hosts:
        address = host.address.replace("10.0.0.", "10.0.1.")
        host.check(f"ip addr add {address}/24 dev {second}")


def _limit(host: Host, link: str) -> None:
    host.check(f"tc qdisc add dev {link} root tbf rate {RATE} burst 256kb latency 100ms")


def _play(hosts: list[Host], weights: SharedWeights, rounds: int) -> dict[int, list[float]]:
    """Seconds of the wire by number of chains."""
    environment = {"GLOO_SOCKET_IFNAME": ",".join(LINKS), "OMP_NUM_THREADS": "1"}
    streams = (subprocess.PIPE, subprocess.PIPE, sys.stderr.fileno())
    running: list[subprocess.Popen[str]] = []
    urls = {}
    try:
        for host in hosts[1:]:
            spec = _receiver_spec(host).to_json()
            command = f"{sys.executable} -m weight_sync.receiver.app '{spec}'"
            process = host.start(command, environment, streams)
            running.append(process)
            assert process.stdin is not None and process.stdout is not None
            process.stdin.write(KEY + "\n")
            process.stdin.flush()
            urls[host.name] = process.stdout.readline().strip()
        for rank in reversed(range(NUM_RANKS)):
            spec = json.dumps([rank, rounds, str(weights.path), hosts[0].address, urls])
            command = f"{sys.executable} -m benchmarks.weights.chains '{spec}'"
            running.append(hosts[0].start(command, environment, streams))
        output, _ = running[-1].communicate(timeout=600)
        found = {int(key): value for key, value in json.loads(output.splitlines()[-1]).items()}
        return found
    finally:
        for process in running:
            process.kill()
            process.wait()


def _receiver_spec(host: Host) -> ReceiverSpec:
    config = WeightSyncConfig()
    return ReceiverSpec(
        name=host.name,
        host=host.address,
        folder=f"/dev/shm/{host.name}",
        num_slots=config.num_staged,
        num_buffers=config.num_buffers,
        timeout_s=config.timeout_s,
        min_bandwidth=config.min_bandwidth,
        key=KEY,
    )


class _Rank:
    """One trainer rank, in a process of its own; every round has an engine of its own."""

    def __init__(self, rank: int, path: str, host: str, urls: dict[str, str]) -> None:
        torch.set_num_threads(1)
        self._rank, self._host, self._urls = rank, host, urls
        self._version = -1
        weights = SharedWeights(path=Path(path), layout=Layout.of(SMALL.tensors("bfloat16"), 1))
        self._layout = weights.spread_over(NUM_RANKS)
        self._shards = weights.shards(rank, NUM_RANKS)
        dist.init_process_group(
            "gloo", init_method=f"tcp://{host}:{_PORT}", rank=rank, world_size=NUM_RANKS
        )

    def play(self, num_chains: int) -> float:
        """Two publishes; seconds of the second's wire, at rank 0."""
        board = MemoryBoard(self._urls)

        async def open_board() -> MemoryBoard:
            return board

        engine = CheckpointEngine(
            self._layout,
            WeightSyncConfig(bucket_bytes=_BUCKET_BYTES, num_chains=num_chains),
            rank=self._rank,
            run=f"chains-{self._version}",
            host=self._host,
            key=KEY,
            uses_gpu=False,
            open_board=open_board,
            control_timeout_s=60.0,
        )
        wire_s = 0.0
        for _ in range(2):
            self._version += 1
            engine.send(self._version, self._shards)
            if self._rank == 0:
                board.wait_for(self._version)
                wire_s = float(board.record_of(self._version)["wire_s"])
            dist.barrier()
        engine.close()
        return wire_s


def main(argument: str) -> None:
    rank, rounds, *place = json.loads(argument)
    member = _Rank(rank, *place)
    seconds: dict[int, list[float]] = {1: [], 2: []}
    for _ in range(rounds):
        for number, each in seconds.items():
            each.append(member.play(number))
    print(json.dumps(seconds), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1])
