"""Runs that autotune moves: fed step by step, or simulated. As a program it prints how long they
take beside every fixed max_staleness: python -m tests.support.controller.autotune_works"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from statistics import mean

import numpy as np

from buffer.results import BufferStats
from configs.choices import OnStale
from configs.schema import AutotuneConfig, BufferConfig, Config, ModelConfig
from controller.metrics.history import TUNED, Record
from controller.simulate.events import Outcome, Setting, _Run
from controller.simulate.machine import Machine
from controller.watch.autotune import SETTING, WHO, Move, find_move
from controller.watch.run_view import RunView
from controller.watch.verdict import wanted_engines
from tests.support.controller.records import STATS, step_record

BOUNDS = AutotuneConfig(min_staleness=1, max_staleness=4, min_ess=0.5, steps=5)
WIDE = AutotuneConfig(min_staleness=0, max_staleness=8)


class Tuned:
    """A run that is fed step by step, whose changes are recorded as the controller does."""

    def __init__(self, bound: int, config: AutotuneConfig = BOUNDS) -> None:
        buffer = BufferConfig(max_staleness=bound, autotune=config)
        whole = Config(model=ModelConfig(path="m"), buffer=buffer)
        self.view = RunView(run="night", config=whole, started=0.0)
        self.view.phase = "training"
        self.bounds = [bound]
        """The one in force in each step."""
        self.whys = list[str]()

    @property
    def num_engines(self) -> int:
        return self.view.config.rollout.num_engines

    def see(self, **changes: object) -> None:
        full = (self.bounds[-1] + 1) * STATS.groups_per_step
        usual = {"max_staleness": self.bounds[-1], "ready": 0, "leased": 0, "running": full}
        usual["engine_versions"] = {f"engine-{i}": 136 for i in range(self.num_engines)}
        stats: BufferStats = replace(STATS, **{**usual, **changes})
        self.view.stats = stats

    def step(self, t: float, waited_s: float, ess: float = 0.9) -> int:
        number = self.view.step
        self.view.apply(step_record(number, t, lease_wait_s=waited_s, ess=ess))
        self.see()
        return self.look(t)

    def look(self, t: float) -> int:
        move = find_move(self.view, wanted_engines)
        self.bounds.append(self.bounds[-1])
        if isinstance(move, Move):
            if move.setting == SETTING:
                self.bounds[-1] = move.after
            self.change(t, str(move.before), str(move.after), setting=move.setting, **move.said)
        return self.bounds[-1]

    def change(
        self,
        t: float,
        before: str,
        after: str,
        who: str = WHO,
        setting: str = SETTING,
        **said: object,
    ) -> None:
        values = {"setting": setting, "before": before, "after": after, "who": who, **said}
        self.whys.append(str(said.get("why")))
        self.view.apply(Record(t=t, kind=TUNED, values=values))

    @property
    def changes(self) -> list[int]:
        """Steps after which it changed."""
        pairs = zip(self.bounds, self.bounds[1:], strict=False)
        return [number for number, (a, b) in enumerate(pairs, start=1) if a != b]


@dataclass(frozen=True)
class Work:
    """A simulated run: the answers it samples, and the machines that serve and train them."""

    engines: int
    trainers: int
    lengths: tuple[int, int]
    """The median and the 99th percentile of the answers' tokens, lognormal."""
    loss: float
    """The effective sample size is exp(-loss * staleness), on average over a batch."""
    groups: int = 8
    size: int = 8
    running: int = 256
    """Requests that an engine takes."""
    on_stale: OnStale = OnStale.wait
    reward_s: float = 0.0

    def setting(self, bound: int, num_steps: int) -> Setting:
        machine = Machine(
            gpu="H100",
            num_params=9e9,
            active_params=9e9,
            kv_elements=65536,
            tp_size=1,
            max_running=self.running,
        )
        return Setting(
            machine=machine,
            num_engines=self.engines,
            num_trainer_gpus=self.trainers,
            num_steps=num_steps,
            groups_per_step=self.groups,
            prompt_tokens=256,
            max_staleness=bound,
            on_stale=self.on_stale,
            max_commits=8,
            reward_s=self.reward_s,
        )

    def draws(self, seed: int) -> Iterator[tuple[int, ...]]:
        median, p99 = self.lengths
        numbers, sigma = np.random.default_rng(seed), math.log(p99 / median) / 2.326
        while True:
            drawn = median * np.exp(sigma * numbers.standard_normal((256, self.size)))
            yield from map(tuple, np.clip(drawn.round(), 1, 30_000).astype(int).tolist())

    def ess(self, outcome: Outcome) -> np.ndarray:
        """The effective sample size of each step."""
        staleness = np.array(outcome.staleness, float).reshape(-1, self.groups)
        return np.exp(-self.loss * staleness).mean(axis=1)


TAIL, REQUEUE, DROP = (1000, 8000), OnStale.requeue, OnStale.drop
SEEN = {
    "balanced": Work(4, 2, (500, 1000), 0.01),
    "long tail": Work(6, 1, TAIL, 0.01),
    "trainer-bound": Work(4, 1, (500, 1000), 0.05),
    "staleness costs": Work(6, 1, TAIL, 0.12),
    "engine-bound": Work(1, 3, (1500, 5000), 0.02, running=48),
    "engine-bound, tail": Work(2, 4, (800, 9000), 0.02, size=4, running=64),
}
"""On these the rules were set; the others were looked at when they stood."""
HELD_OUT = {
    "short, even": Work(3, 2, (300, 600), 0.02, groups=16, size=4),
    "heavy tail": Work(8, 2, (800, 12000), 0.02),
    "very heavy tail": Work(6, 1, (400, 16000), 0.03, size=16),
    "trainer-bound, mixed": Work(6, 1, (1000, 4000), 0.05, groups=12),
    "slow rewards": Work(4, 2, (600, 2000), 0.02, reward_s=30.0),
    "staleness costs more": Work(6, 1, (1200, 10000), 0.15),
    "requeue": Work(4, 2, (500, 2000), 0.02, on_stale=REQUEUE),
    "wide groups": Work(10, 2, (700, 6000), 0.03, groups=16, size=16),
    "rewards of 12 s": Work(3, 1, (300, 3000), 0.04, reward_s=12.0),
    "requeue, staleness costs": Work(5, 2, (400, 1500), 0.06, size=4, on_stale=REQUEUE),
    "drop": Work(4, 1, (900, 2700), 0.01, groups=12, on_stale=DROP),
    "small batch": Work(1, 1, (100, 800), 0.03, groups=4, size=4),
}
GOAL = 300
"""Effective steps: a step counts as much as its effective sample size."""


class Scaled(Exception):
    """A simulated run is to have another number of engines, which it cannot change."""


def simulated(
    work: Work,
    num_steps: int,
    bound: int,
    *,
    is_tuned: bool,
    seed: int = 0,
    config: AutotuneConfig = WIDE,
) -> tuple[Outcome, Tuned]:
    """The run with this max_staleness, or with one that autotune moves from there. Raises
    Scaled."""
    run, groups = Tuned(bound, config), work.groups
    waited_s = [0.0]
    rollout = run.view.config.rollout
    rollout.num_engines, rollout.group_size = work.engines, work.size
    left_ready = [0]

    def tune(outcome: Outcome) -> int:
        begin, end = [0.0, *outcome.ends][-2:]
        run.view.now = end
        run.view._least_ready = left_ready[0]  # after the lease of this step
        left_ready[0] = max(0, len(simulation._ready) - groups)
        queued = bool(simulation._line)
        values = {"engine": "all", "worker": 0, "queued": int(queued), "in_flight": 0}
        places = {"limit": work.engines * work.running}
        run.view.apply(Record(t=end, kind="engine", values={**values, **places}))
        waited_s[0] += max(0.0, end - begin - outcome.train_s[-1])
        run.view.waits.add(end, {("trainer", "rollout"): waited_s[0]})
        ess = np.exp(-work.loss * np.array(outcome.staleness[-groups:])).mean()
        assert max(outcome.staleness[-groups:]) <= run.bounds[-1]
        after = run.step(end, max(0.0, end - begin - outcome.train_s[-1]), float(ess))
        if run.num_engines != work.engines:
            raise Scaled(run)
        return after

    setting, draws = work.setting(bound, num_steps), work.draws(seed)

    class Simulation(_Run):
        def _drop_stale(self, now: float) -> None:
            if is_tuned:
                self._setting = replace(self._setting, max_staleness=tune(self._outcome))
            super()._drop_stale(now)

    simulation = Simulation(setting, lambda: next(draws))
    return simulation.run(), run


def scaled(work: Work, bound: int, most: int, num_steps: int) -> list[int]:
    """The numbers of engines that it goes through, each in a simulated run of its own."""
    numbers, config = [work.engines], replace(WIDE, max_engines=most)
    while len(numbers) < 12:
        try:
            simulated(work, num_steps, bound, is_tuned=True, config=config)
            break
        except Scaled as change:
            (run,) = change.args
            numbers.append(run.num_engines)
            work, bound = replace(work, engines=numbers[-1]), run.bounds[-1]
    return numbers


def time_to(goal: float, outcome: Outcome, worth: np.ndarray) -> float:
    """Seconds until the steps are worth `goal`; beyond their end at the pace of the later half."""
    total, ends = np.cumsum(worth), np.array(outcome.ends)
    if total[-1] >= goal:
        return float(np.interp(goal, total, ends))
    half = len(ends) // 2
    pace = (ends[-1] - ends[half]) / (total[-1] - total[half])
    return float(ends[-1] + (goal - total[-1]) * pace)


def pace(outcome: Outcome, worth: np.ndarray, num_last: int) -> float:
    """Worth a second, of the last steps."""
    return float(worth[-num_last:].sum() / (outcome.ends[-1] - outcome.ends[-1 - num_last]))


def main() -> None:
    num_steps, seeds = 480, range(3)
    print("| work | best | from | to | plain steps | effective steps | pace at the end |")
    for name, work in {**SEEN, **HELD_OUT}.items():
        plain, rows = np.ones(num_steps), dict[int, list[tuple[float, ...]]]()
        bests, lasts = list[int](), dict[int, list[int]]()
        for seed in seeds:
            fixed = {
                b: simulated(work, num_steps, b, is_tuned=False, seed=seed)[0] for b in range(9)
            }
            fair = {
                b: one for b, one in fixed.items() if work.ess(one)[-100:].mean() >= WIDE.min_ess
            }
            effective = {b: time_to(GOAL, one, work.ess(one)) for b, one in fair.items()}
            bests.append(min(effective, key=effective.__getitem__))
            steps = min(time_to(GOAL, one, plain) for one in fair.values())
            fastest = max(pace(one, work.ess(one), 100) for one in fair.values())
            for start in (0, 8):
                outcome, run = simulated(work, num_steps, start, is_tuned=True, seed=seed)
                worth = work.ess(outcome)
                took = time_to(GOAL, outcome, plain) / steps, time_to(GOAL, outcome, worth)
                row = (
                    took[0],
                    took[1] / min(effective.values()),
                    fastest / pace(outcome, worth, 100),
                )
                rows.setdefault(start, []).append(row)
                lasts.setdefault(start, []).append(run.bounds[-1])
        for start, found in rows.items():
            words = " | ".join(f"{mean(one) - 1:+.1%}" for one in zip(*found, strict=True))
            print(f"| {name} | {bests} | {start} | {lasts[start]} | {words} |", flush=True)


if __name__ == "__main__":
    main()
