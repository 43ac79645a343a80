"""Part WIRE: one model from a trainer to a receiver over loopback, each path in turn; with --full
also to two.

A path's rate is the model's bytes over the seconds until every receiver has them in place, whatever
their number; both ends' work shares the same few cores, so compare paths, not machines. Ratios are
medians over the rounds of what was measured right after each other.

- vs_per_tensor: `send` until visible, snapshot and checksums included, against gather and
  broadcast of each tensor, both with two ZeRO-3 ranks; the worse of 1 and 2 receivers.
- vs_per_tensor_one_rank: the same with one trainer rank, which has nothing to gather.
- vs_raw_wire: the transfer behind the snapshot, until visible, against bare gloo sends down the
  same chain; the worst of 1 and 2 receivers.
- cpu_vs_raw_wire: the CPU seconds of bare gloo sends, in all their processes, over those of the
  same transfer; unlike the rates it hardly depends on what else the machine does.
- trainer_stall_vs_memcpy: the whole `send` call against one memcpy of as many bytes in the same
  process; the worst of all.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

from rich.table import Table

from benchmarks.report import Report
from benchmarks.team import Round, Team, Worker, local_ray
from benchmarks.weights.bounds import GlooMember, Memcpy, SocketMember, Stage
from benchmarks.weights.model import QWEN_HALF_B, SMALL, SharedWeights, folder_in_memory
from benchmarks.weights.ours import OurTeam, Publish
from benchmarks.weights.rivals import BucketMember, RayTeam, per_tensor_member

AnyTeam = Team | RayTeam | OurTeam
Rounds = list[Any]
"""Rounds of one path, in the order in which they were played."""


def measure(report: Report, *, is_short: bool, is_full: bool) -> None:
    shape, rounds, fleets = (SMALL, 1, [2]) if is_short else (QWEN_HALF_B, 3, [1])
    fleets = [1, 2] if is_full else fleets
    ratios: dict[str, list[float]] = defaultdict(list)
    with folder_in_memory() as folder:
        weights = SharedWeights.write(folder / "weights", shape, "bfloat16")
        with local_ray(2 * weights.num_bytes + (256 << 20)):
            for num_receivers in fleets:
                stage = Stage(
                    weights=weights,
                    folder=folder,
                    num_receivers=num_receivers,
                    bucket_bytes=min(32 << 20, weights.num_bytes // 8),
                )
                played: dict[str, Rounds] = {}
                for teams in (_one_rank(stage), _two_ranks(stage)):
                    size = f"{weights.num_bytes / 1e6:.0f} MB to {num_receivers} receivers"
                    report.say(f"{size}: {', '.join(teams)}")
                    rounds_of = _play_in_turns(teams, rounds)
                    _show(report, stage, rounds_of)
                    played |= rounds_of
                for name, ratio in _ratios(played).items():
                    ratios[name].append(ratio)
    _show_ratios(report, ratios)


def _one_rank(stage: Stage) -> dict[str, Callable[[], AnyTeam]]:
    chain = partial(_team_of, stage, 1 + stage.num_receivers)
    return {
        "memcpy": lambda: Team([partial(Memcpy, stage)]),
        "socket": lambda: chain("socket", SocketMember),
        "gloo": lambda: chain("gloo", GlooMember),
        "per_tensor": lambda: _per_tensor(stage, 1),
        "buckets": lambda: chain("buckets", BucketMember),
        "ray": lambda: RayTeam(stage),
        "ours": lambda: OurTeam(stage, 1),
    }


def _two_ranks(stage: Stage) -> dict[str, Callable[[], AnyTeam]]:
    return {
        "per_tensor_2_ranks": lambda: _per_tensor(stage, 2),
        "ours_2_ranks": lambda: OurTeam(stage, 2),
    }


def _team_of(stage: Stage, size: int, name: str, member: Callable[..., Worker]) -> Team:
    meeting = f"{name}-{stage.num_receivers}"
    return Team([partial(member, stage, meeting, rank) for rank in range(size)])


def _per_tensor(stage: Stage, num_trainers: int) -> Team:
    member = partial(per_tensor_member, num_trainers=num_trainers)
    size = num_trainers + stage.num_receivers
    return _team_of(stage, size, f"tensors-{num_trainers}", member)


def _play_in_turns(makers: dict[str, Callable[[], AnyTeam]], rounds: int) -> dict[str, Rounds]:
    """Two rounds to warm up (there are two snapshot buffers), then rounds of all paths in turn."""
    teams: dict[str, AnyTeam] = {}
    played: dict[str, Rounds] = {name: [] for name in makers}
    try:
        for name, make in makers.items():
            teams[name] = make()
        for team in teams.values():
            for _ in range(2):
                team.play(2)
        for _ in range(rounds):
            for name, team in teams.items():
                played[name].append(team.play(2))
    finally:
        for team in teams.values():
            team.close()
    return played


def _with_snapshot(rounds: list[Publish]) -> list[Round]:
    return [each.with_snapshot() for each in rounds]


def _times_faster(ours: Rounds, theirs: Rounds) -> float:
    ratios: list[float] = [b.seconds / a.seconds for a, b in zip(ours, theirs, strict=True)]
    return median(ratios)


def _cpu_s(played: Round) -> float:
    return played.producer_cpu_s + played.consumer_cpu_s


def _show(report: Report, stage: Stage, played: dict[str, Rounds]) -> None:
    """Prints a table, and adds every rate to the result."""
    num_bytes, receivers = stage.weights.num_bytes, stage.num_receivers
    bounds = [name for name in ("socket", "gloo", "memcpy") if name in played]
    columns = ("path", "GB/s median", "best", "CPU s/GB", *(f"of {name}" for name in bounds))
    table = Table(*columns)
    publishes = {name: each for name, each in played.items() if isinstance(each[0], Publish)}
    whole = {f"{name}_with_snapshot": _with_snapshot(each) for name, each in publishes.items()}
    for name, each in (played | whole).items():
        rates = [num_bytes / one.seconds / 1e9 for one in each]
        report.note(f"{name}_gb_per_s_{receivers}", median(rates))
        shares = (f"{_times_faster(each, played[bound]):.2f}" for bound in bounds)
        cpu_s = median(_cpu_s(one) for one in each)
        cpu = f"{1e9 * cpu_s / num_bytes:.2f}" if cpu_s and name in played else ""
        table.add_row(name, f"{median(rates):.2f}", f"{max(rates):.2f}", cpu, *shares)
    report.show(table)
    for name, each in publishes.items():
        medians = (
            f"{part} {1e3 * median(one.parts[part] for one in each):.0f} ms"
            for part in each[0].parts
        )
        report.say(f"{name}: {', '.join(medians)}")


def _ratios(played: dict[str, Rounds]) -> dict[str, float]:
    """Ratios of speeds that have targets."""
    ours, ours_2 = played["ours"], played["ours_2_ranks"]
    return {
        "vs_per_tensor": _times_faster(_with_snapshot(ours_2), played["per_tensor_2_ranks"]),
        "vs_per_tensor_one_rank": _times_faster(_with_snapshot(ours), played["per_tensor"]),
        "vs_raw_wire": _times_faster(ours, played["gloo"]),
        "cpu_vs_raw_wire": median(
            _cpu_s(b) / _cpu_s(a) for a, b in zip(ours, played["gloo"], strict=True)
        ),
        "stall": max(
            median(each.publish_s / each.memcpy_s for each in rounds) for rounds in (ours, ours_2)
        ),
    }


def _show_ratios(report: Report, ratios: dict[str, list[float]]) -> None:
    report.target(
        "vs_per_tensor",
        min(ratios["vs_per_tensor"]),
        ">=",
        1.5,
        "times gather + broadcast of each tensor; snapshot and checksums included",
    )
    report.figure(
        "vs_per_tensor_one_rank",
        min(ratios["vs_per_tensor_one_rank"]),
        "the same with one trainer rank: broadcasts alone",
    )
    report.target(
        "vs_raw_wire",
        min(ratios["vs_raw_wire"]),
        ">=",
        0.9,
        "of bare gloo sends, until verified and visible",
    )
    report.figure("cpu_vs_raw_wire", min(ratios["cpu_vs_raw_wire"]), "the same in CPU seconds")
    report.target(
        "trainer_stall_vs_memcpy",
        max(ratios["stall"]),
        "<=",
        1.3,
        "times one memcpy of the rank's shards",
    )
