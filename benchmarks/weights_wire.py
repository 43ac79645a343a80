"""Part WIRE: one model from a trainer to 1 and to 2 receivers over loopback, each path in turn.

A path's rate is the model's bytes over the seconds until every receiver has them in place, whatever
their number; both ends' work shares the same few cores, so compare paths, not machines. Ratios are
medians over the rounds of what was measured right after each other.

- vs_per_tensor: `publish` until visible, snapshot and checksums included, against gather and
  broadcast of each tensor, both with two ZeRO-3 ranks; the worse of 1 and 2 receivers.
- vs_per_tensor_one_rank: the same with one trainer rank, which has nothing to gather.
- vs_raw_wire: the transfer behind the snapshot, until visible, against bare gloo sends down the
  same chain; the worst of 1 and 2 receivers.
- trainer_stall_vs_memcpy: the whole `publish` call against one memcpy of as many bytes in the same
  process; the worst of all.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median

from rich.table import Table

from benchmarks.report import Report
from benchmarks.team import Round, Team
from benchmarks.weights_model import QWEN_HALF_B, SMALL, SharedWeights
from benchmarks.weights_ours import OurTeam
from benchmarks.weights_rivals import MakeBucketMember, MakePerTensorMember, RayTeam
from benchmarks.weights_wires import MakeGlooMember, MakeMemcpy, MakeSocketMember, Stage, team_of

AnyTeam = Team | RayTeam | OurTeam
_TMPFS = Path("/dev/shm")


def measure_wire(report: Report, *, is_short: bool) -> None:
    import ray

    shape, rounds, fleets = (SMALL, 1, (2,)) if is_short else (QWEN_HALF_B, 5, (1, 2))
    with tempfile.TemporaryDirectory(prefix="leash-bench-", dir=_TMPFS) as folder:
        weights = SharedWeights.write(Path(folder) / "weights", shape, "bfloat16")
        # Ray's workers are started by Ray, not by us: this is how they find the benchmark.
        os.environ["PYTHONPATH"] = str(Path(__file__).resolve().parents[1])
        ray.init(
            num_cpus=4,
            include_dashboard=False,
            log_to_driver=False,
            object_store_memory=2 * weights.num_bytes + (256 << 20),
        )
        ratios = Ratios()
        try:
            for num_receivers in fleets:
                stage = Stage(
                    weights=weights,
                    folder=Path(folder),
                    num_receivers=num_receivers,
                    bucket_bytes=min(32 << 20, weights.num_bytes // 8),
                )
                for teams in (_one_rank(stage), _two_ranks(stage)):
                    report.say(
                        f"{weights.num_bytes / 1e6:.0f} MB to {num_receivers} receivers: "
                        + ", ".join(teams)
                    )
                    ratios.add(tell(report, stage, play_in_turns(teams, rounds)))
        finally:
            ray.shutdown()
    ratios.tell(report)


def _one_rank(stage: Stage) -> dict[str, Callable[[], AnyTeam]]:
    n = stage.num_receivers
    return {
        "memcpy": lambda: Team([MakeMemcpy(stage=stage)], lambda: 0.0),
        "socket": lambda: team_of(
            lambda rank: MakeSocketMember(stage=stage, name=f"socket-{n}", rank=rank), 1 + n
        ),
        "gloo": lambda: team_of(
            lambda rank: MakeGlooMember(stage=stage, name=f"gloo-{n}", rank=rank), 1 + n
        ),
        "per_tensor": lambda: _per_tensor(stage, 1),
        "buckets": lambda: team_of(
            lambda rank: MakeBucketMember(stage=stage, name=f"buckets-{n}", rank=rank), 1 + n
        ),
        "ray": lambda: RayTeam(stage),
        "ours": lambda: OurTeam(stage, 1),
    }


def _two_ranks(stage: Stage) -> dict[str, Callable[[], AnyTeam]]:
    return {
        "per_tensor_2_ranks": lambda: _per_tensor(stage, 2),
        "ours_2_ranks": lambda: OurTeam(stage, 2),
    }


def _per_tensor(stage: Stage, num_trainers: int) -> Team:
    name = f"tensors-{num_trainers}-{stage.num_receivers}"
    return team_of(
        lambda rank: MakePerTensorMember(
            stage=stage, name=name, rank=rank, num_trainers=num_trainers
        ),
        num_trainers + stage.num_receivers,
    )


@dataclass(slots=True)
class Played:
    """The rounds of one path, in the order in which they were played."""

    rounds: list[Round] = field(default_factory=list)
    stalls: list[tuple[float, float]] = field(default_factory=list)
    parts: list[dict[str, float]] = field(default_factory=list)

    def over(self, other: Played) -> float:
        """How many times faster than the other path."""
        pairs = zip(self.rounds, other.rounds, strict=True)
        return median(theirs.seconds / ours.seconds for ours, theirs in pairs)

    def with_snapshot(self) -> Played:
        pairs = zip(self.rounds, self.stalls, strict=True)
        return Played([replace(each, seconds=each.seconds + stall) for each, (stall, _) in pairs])


def play_in_turns(makers: dict[str, Callable[[], AnyTeam]], rounds: int) -> dict[str, Played]:
    """Two rounds to warm up (there are two snapshot buffers), then rounds of all paths in turn."""
    teams: dict[str, AnyTeam] = {}
    played = {name: Played() for name in makers}
    try:
        for name, make in makers.items():
            teams[name] = make()
            for _ in range(2):
                teams[name].play(2)
        for _ in range(rounds):
            for name, team in teams.items():
                played[name].rounds.append(team.play(2))
        for name, team in teams.items():
            if isinstance(team, OurTeam):
                played[name].stalls = team.stalls[-rounds:]
                played[name].parts = team.parts[-rounds:]
    finally:
        for team in teams.values():
            team.close()
    return played


def tell(report: Report, stage: Stage, played: dict[str, Played]) -> dict[str, Played]:
    """Prints a table, and adds every rate to the result."""
    num_bytes, receivers = stage.weights.num_bytes, stage.num_receivers
    bounds = [name for name in ("socket", "gloo", "memcpy") if name in played]
    table = Table("path", "GB/s median", "best", *(f"of {name}" for name in bounds))
    shown = dict(played)
    for name, each in played.items():
        if each.stalls:
            shown[f"{name}_with_snapshot"] = each.with_snapshot()
    for name, each in shown.items():
        rates = [num_bytes / one.seconds / 1e9 for one in each.rounds]
        report.note(f"{name}_gb_per_s_{receivers}", median(rates))
        shares = (f"{each.over(played[bound]):.2f}" for bound in bounds)
        table.add_row(name, f"{median(rates):.2f}", f"{max(rates):.2f}", *shares)
    report.show(table)
    for name, each in played.items():
        if each.parts:
            medians = (
                f"{part} {1e3 * median(one[part] for one in each.parts):.0f} ms"
                for part in each.parts[0]
            )
            report.say(f"{name}: {', '.join(medians)}")
    return played


@dataclass(slots=True)
class Ratios:
    """What our targets are about, from every part of the run."""

    vs_per_tensor: list[float] = field(default_factory=list)
    vs_per_tensor_one_rank: list[float] = field(default_factory=list)
    vs_raw_wire: list[float] = field(default_factory=list)
    stall: list[float] = field(default_factory=list)

    def add(self, played: dict[str, Played]) -> None:
        if (ours := played.get("ours")) is not None:
            against = played["per_tensor"]
            self.vs_per_tensor_one_rank.append(ours.with_snapshot().over(against))
            self.vs_raw_wire.append(ours.over(played["gloo"]))
        else:
            ours = played["ours_2_ranks"]
            self.vs_per_tensor.append(ours.with_snapshot().over(played["per_tensor_2_ranks"]))
        self.stall.append(median(publish / memcpy for publish, memcpy in ours.stalls))

    def tell(self, report: Report) -> None:
        report.target(
            "vs_per_tensor",
            min(self.vs_per_tensor),
            ">=",
            1.5,
            "times gather + broadcast of each tensor; snapshot and checksums included",
        )
        report.figure(
            "vs_per_tensor_one_rank",
            min(self.vs_per_tensor_one_rank),
            "the same with one trainer rank: broadcasts alone",
        )
        report.target(
            "vs_raw_wire",
            min(self.vs_raw_wire),
            ">=",
            0.9,
            "of bare gloo sends, until verified and visible",
        )
        report.target(
            "trainer_stall_vs_memcpy",
            max(self.stall),
            "<=",
            1.3,
            "times one memcpy of the rank's shards",
        )
