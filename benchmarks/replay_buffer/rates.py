"""Part RATES: groups a second through our buffer, Ray queues and bare Redis, in turn."""

from __future__ import annotations

from statistics import median
from typing import Protocol

from benchmarks.replay_buffer.leash_rate import leash_team
from benchmarks.replay_buffer.raw_rate import raw_team
from benchmarks.replay_buffer.ray_rate import ray_teams
from benchmarks.replay_buffer.stage import Sizes, Stage
from benchmarks.report import Report
from benchmarks.team import IN_FLIGHT, Round, local_ray

Played = dict[str, list[Round]]
"""The rounds of each path, in the order in which they were played."""


class AnyTeam(Protocol):
    def play(self, num_groups: int) -> Round: ...

    def close(self) -> None: ...


def measure_rates(report: Report, stage: Stage, sizes: Sizes) -> None:
    teams: dict[str, AnyTeam]
    with local_ray(2 << 30):
        if sizes.groups_1k:
            report.say("rates of groups of 8 x 1k tokens")
            teams = {"leash": leash_team(stage, 1024, 32), **ray_teams(1024)}
            played = _interleaved(teams, sizes.groups_1k, sizes.rounds)
            _compare_with_ray(report, "1k", played, 20)
        report.say("rates of groups of 8 x 16k tokens")
        teams = {
            "leash": leash_team(stage, 16_384, 16),
            **ray_teams(16_384),
            "SET + GET": raw_team(stage, 16_384, 32),
        }
        played = _interleaved(teams, sizes.groups_16k, sizes.rounds)
    _compare_with_ray(report, "16k", played, 3)
    report.target(
        "vs_raw_set_get",
        _ratio(played, "SET + GET"),
        ">=",
        0.8,
        "of bare SET and GET of encoded groups, 8 x 16k",
    )


def _interleaved(teams: dict[str, AnyTeam], num_groups: int, rounds: int) -> Played:
    """Rounds of all teams in turn, after one to warm up."""
    for team in teams.values():
        team.play(num_groups // 4 // 32 * 32 or 32)
    played: Played = {name: [] for name in teams}
    for _ in range(rounds):
        for name, team in teams.items():
            played[name].append(team.play(num_groups))
    for team in teams.values():
        team.close()
    return played


def _ratio(played: Played, other: str) -> float:
    pairs = zip(played["leash"], played[other], strict=True)
    return median(ours.groups_per_s / theirs.groups_per_s for ours, theirs in pairs)


def _compare_with_ray(report: Report, size: str, played: Played, bound: float) -> None:
    for name, rounds in played.items():
        rate = median(each.groups_per_s for each in rounds)
        costs = " / ".join(
            f"{median(1e6 * getattr(each, part) / each.num_groups for each in rounds):.0f}"
            for part in ("producer_cpu_s", "middle_cpu_s", "consumer_cpu_s")
        )
        report.row(
            f"{name}, 8 x {size}: groups/s, and µs of CPU a group in producers / middle / "
            "consumers",
            f"{rate:.0f}, {costs}",
        )
    how = f"times verl's Ray queue, 8 x {size}, 2 + 2 clients, {IN_FLIGHT} pushes in flight each"
    report.target(f"vs_ray_{size}", _ratio(played, "ray queue"), ">=", bound, how)
    report.figure(
        f"vs_ray_{size}_lean",
        _ratio(played, "lean ray queue"),
        f"times a Ray queue of numpy groups that is asked for {IN_FLIGHT} at once",
    )
