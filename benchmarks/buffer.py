"""The replay buffer against a Ray actor queue, bare Redis and its own targets; ends with RESULT.

    python benchmarks/buffer.py            # about ten minutes
    python benchmarks/buffer.py --short    # every part within a minute; the figures mean little

What is compared runs in turn, in the same minutes on the same machine, so ratios can be trusted
more than rates. Each round is one warm team of processes: 2 producers and 2 consumers.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from uuid import uuid4

_HERE = Path(__file__).resolve().parent
# Run as a file, this folder would come first and hide the package `buffer` behind this very file.
sys.path[:] = [str(_HERE.parent), *(p for p in sys.path if Path(p or ".").resolve() != _HERE)]

import psutil  # noqa: E402

from benchmarks import depth, memory, waiting  # noqa: E402
from benchmarks.leash_rate import leash_team  # noqa: E402
from benchmarks.raw_rate import raw_team  # noqa: E402
from benchmarks.ray_rate import RayTeam  # noqa: E402
from benchmarks.report import Report  # noqa: E402
from benchmarks.team import IN_FLIGHT, Round, Team  # noqa: E402
from buffer.redis.server import EmbeddedServer  # noqa: E402
from configs.schema import BufferConfig  # noqa: E402


@dataclass(kw_only=True, slots=True, frozen=True)
class Sizes:
    groups_1k: int = 1_920
    groups_16k: int = 192
    rounds: int = 5
    depth: int = 1_000_000
    latency_rounds: int = 1_500
    wake_rounds: int = 100
    idle_s: float = 15.0
    memory_groups: int = 1_000
    tiny_groups: int = 20_000


SHORT = Sizes(
    groups_1k=0,  # the same code as for the longer ones
    groups_16k=32,
    rounds=1,
    depth=5_000,
    latency_rounds=40,
    wake_rounds=5,
    idle_s=2.0,
    memory_groups=100,
    tiny_groups=1_000,
)


class Stage:
    """The server that is measured; one of our own unless a URL is given."""

    def __init__(self, url: str | None, folder: Path) -> None:
        self._server = None
        if url is None:
            self._server = EmbeddedServer.start(
                folder, BufferConfig(), "127.0.0.1", folder / "server.log"
            )
        self.url = url or self._server.url  # type: ignore[union-attr]

    def cpu_s(self) -> float:
        """CPU time of the server so far; 0 for one that is not ours."""
        if self._server is None:
            return 0.0
        times = psutil.Process(self._server.pid).cpu_times()
        return times.user + times.system

    def close(self) -> None:
        if self._server is not None:
            self._server.stop(timeout_s=30)


def interleaved(
    teams: dict[str, Team | RayTeam], num_groups: int, rounds: int
) -> dict[str, list[Round]]:
    """Rounds of all teams in turn, after one to warm up."""
    for team in teams.values():
        team.play(num_groups // 4 // 32 * 32 or 32)
    played: dict[str, list[Round]] = {name: [] for name in teams}
    for _ in range(rounds):
        for name, team in teams.items():
            played[name].append(team.play(num_groups))
    for team in teams.values():
        team.close()
    return played


def ratio(ours: list[Round], theirs: list[Round]) -> float:
    return median(a.groups_per_s / b.groups_per_s for a, b in zip(ours, theirs, strict=True))


def tell_rates(report: Report, size: str, played: dict[str, list[Round]]) -> None:
    for name, rounds in played.items():
        rate = median(each.groups_per_s for each in rounds)

        def cost(part: Callable[[Round], float], rounds: list[Round] = rounds) -> str:
            return f"{median(1e6 * part(each) / each.num_groups for each in rounds):.0f}"

        report.row(
            f"{name}, {size}: groups/s, and µs of CPU a group in producers / middle / consumers",
            f"{rate:.0f}, {cost(lambda r: r.producer_cpu_s)} / {cost(lambda r: r.middle_cpu_s)}"
            f" / {cost(lambda r: r.consumer_cpu_s)}",
        )


def measure_rates(report: Report, stage: Stage, sizes: Sizes) -> None:
    import ray

    # Ray's workers are started by Ray, not by us: this is how they find the benchmark.
    os.environ["PYTHONPATH"] = str(_HERE.parent)
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, object_store_memory=2 << 30)
    try:
        if sizes.groups_1k:
            report.say("rates of groups of 8 x 1k tokens")
            played = interleaved(
                {
                    "leash": leash_team(stage.url, 1024, 32, stage.cpu_s),
                    "ray queue": RayTeam(1024, is_lean=False),
                    "lean ray queue": RayTeam(1024, is_lean=True),
                },
                sizes.groups_1k,
                sizes.rounds,
            )
            tell_rates(report, "8 x 1k", played)
            _compare_with_ray(report, "1k", played, 20)
        report.say("rates of groups of 8 x 16k tokens")
        played = interleaved(
            {
                "leash": leash_team(stage.url, 16_384, 16, stage.cpu_s),
                "ray queue": RayTeam(16_384, is_lean=False),
                "lean ray queue": RayTeam(16_384, is_lean=True),
                "SET + GET": raw_team(stage.url, 16_384, 32, stage.cpu_s),
            },
            sizes.groups_16k,
            sizes.rounds,
        )
        tell_rates(report, "8 x 16k", played)
    finally:
        ray.shutdown()
    _compare_with_ray(report, "16k", played, 3)
    vs_raw = ratio(played["leash"], played["SET + GET"])
    report.target(
        "vs_raw_set_get", vs_raw, ">=", 0.8, "of bare SET and GET of encoded groups, 8 x 16k"
    )


def _compare_with_ray(
    report: Report, size: str, played: dict[str, list[Round]], bound: float
) -> None:
    how = f"times verl's Ray queue, 8 x {size}, 2 + 2 clients, {IN_FLIGHT} pushes in flight each"
    report.target(f"vs_ray_{size}", ratio(played["leash"], played["ray queue"]), ">=", bound, how)
    lean = ratio(played["leash"], played["lean ray queue"])
    report.result[f"vs_ray_{size}_lean"] = round(lean, 3)
    report.row(
        f"times a Ray queue of numpy groups that is asked for {IN_FLIGHT} at once", f"{lean:.3g}"
    )


def measure_depth(report: Report, stage: Stage, sizes: Sizes) -> None:
    shallow, deep = f"shallow-{uuid4().hex[:6]}", f"deep-{uuid4().hex[:6]}"
    depth.fill(stage.url, shallow, depth.SHALLOW)
    report.say(f"filling a buffer with {sizes.depth} groups")
    seconds = depth.fill(stage.url, deep, sizes.depth)
    report.row(f"pushes a second while filling {sizes.depth}", f"{sizes.depth / seconds:.0f}")
    asyncio.run(depth.wait_until_quiet(stage.url))
    report.say("latencies")
    latencies = asyncio.run(depth.latencies(stage.url, shallow, deep, sizes.latency_rounds))
    for each in latencies:
        report.row(
            f"{each.verb}: p50 / p99 ms at depth {depth.SHALLOW}, and at {sizes.depth}",
            f"{each.shallow_p50_ms:.2f} / {each.shallow_p99_ms:.2f}, "
            f"{each.deep_p50_ms:.2f} / {each.deep_p99_ms:.2f}",
        )
    report.target(
        "p99_growth_1e6",
        max(each.growth for each in latencies),
        "<=",
        1.5,
        f"p99 at depth {sizes.depth} over that at {depth.SHALLOW}, worst of push, lease, ack",
    )
    report.say("eviction")
    asyncio.run(depth.wait_until_quiet(stage.url))
    evicted = asyncio.run(depth.evict(stage.url, deep, stage.cpu_s))
    report.row(
        f"eviction of {evicted.num_groups} groups: µs a group, of them CPU of the server; "
        "longest PING beside it, ms",
        f"{1e6 * evicted.seconds / max(1, evicted.num_groups):.1f}, "
        f"{1e6 * evicted.server_cpu_s / max(1, evicted.num_groups):.1f}; "
        f"{evicted.longest_ping_ms:.1f}",
    )
    report.row(
        "its scripts: median / p99 ms",
        f"{evicted.median_script_ms:.2f} / {evicted.p99_script_ms:.2f}",
    )
    report.target(
        "max_script_ms",
        evicted.longest_script_ms,
        "<=",
        10,
        f"longest script while {evicted.num_groups} groups are evicted (SLOWLOG)",
    )


def measure_waiting(report: Report, stage: Stage, sizes: Sizes) -> None:
    report.say("wake-ups")
    wake_ups = asyncio.run(waiting.wake_ups(stage.url, sizes.wake_rounds))
    for each in wake_ups:
        report.row(
            f"wake-up of a blocked {each.who}: median / p99 ms",
            f"{each.median_ms:.2f} / {each.p99_ms:.2f}",
        )
    report.target(
        "wakeup_ms",
        max(each.median_ms for each in wake_ups),
        "<=",
        10,
        "from the call that wakes to the waiter's return, worst median",
    )
    report.say(f"idle for {sizes.idle_s:g} s")
    rate, commands = asyncio.run(waiting.idle_commands_per_s(stage.url, sizes.idle_s))
    report.target(
        "idle_commands_per_s",
        rate,
        "<=",
        0,
        f"while a lease, a push and an admit are blocked for {sizes.idle_s:g} s: {commands}",
    )


def measure_memory(report: Report, stage: Stage, sizes: Sizes) -> None:
    report.say("memory")
    footprints = {
        "8 x 1k tokens": asyncio.run(memory.footprint(stage.url, sizes.memory_groups, 1024, 8)),
        "1 x 8 tokens": asyncio.run(memory.footprint(stage.url, sizes.tiny_groups, 8, 1)),
    }
    for name, each in footprints.items():
        report.row(
            f"{each.num_groups} groups of {name}: payload bytes a group; used beyond it; "
            "used_memory_dataset beyond it; used over what may be",
            f"{each.payload_bytes / each.num_groups:.0f}; {each.beyond_payload:.0f}; "
            f"{(each.dataset_bytes - each.payload_bytes) / each.num_groups:.0f}; {each.ratio:.3f}",
        )
    report.target(
        "memory_ratio",
        max(each.ratio for each in footprints.values()),
        "<=",
        1,
        "used_memory over 1.1 x payload + 400 B a group, worst of both",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--short", action="store_true", help="every part once, quickly")
    parser.add_argument("--depth", type=int, help="groups in the deep buffer (default 1,000,000)")
    parser.add_argument("--url", help="measure this server; default: start one")
    parser.add_argument(
        "--only", choices=["rates", "depth", "waiting", "memory"], help="one part of it"
    )
    arguments = parser.parse_args()
    sizes = SHORT if arguments.short else Sizes()
    if arguments.depth is not None:
        sizes = replace(sizes, depth=arguments.depth)
    parts = {
        "waiting": measure_waiting,
        "memory": measure_memory,
        "rates": measure_rates,
        "depth": measure_depth,
    }
    report = Report("replay buffer")
    with tempfile.TemporaryDirectory(prefix="leash-bench-") as folder:
        stage = Stage(arguments.url, Path(folder))
        try:
            for name, measure in parts.items():
                if arguments.only in (None, name):
                    measure(report, stage, sizes)
        finally:
            stage.close()
    report.close()


if __name__ == "__main__":
    main()
