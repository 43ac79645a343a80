"""Moves max_staleness where the run's own numbers say so, and then the number of engines if it may:
`buffer.autotune` (pure).

    raise   the trainer waits for rollouts that have room, or long answers are trained too rarely
    lower   few tokens carry the updates, or groups lie ready or queued longer than they need to
    more engines    the trainer waits while engines are full, or the bound may go no further
    fewer engines   they have no group for much of their time, and the trainer hardly waits

How far follows from Little's law: a trainer that works for a fraction u of its time needs 1/u times
as many groups in flight. A run at an edge does not go to and fro: for some time no value that was
left upward is tried again for nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise

from buffer.results import BufferStats
from configs.run_files import Scalar
from configs.schema import AutotuneConfig
from controller.metrics.history import series
from controller.watch.bottleneck import wait_fractions
from controller.watch.finding import MUCH
from controller.watch.length_bias import length_bias
from controller.watch.run_view import RunView

SETTING, ENGINES, WHO = "buffer.max_staleness", "rollout.num_engines", "autotune"
WAITED = "lease_wait_s"
WAITS = 0.03
"""Fraction of its time for which the trainer must wait for rollouts, if a raise is to be made. What
it waits beyond that shortens the window."""
REMEMBERED = 20
"""Times the `steps` of the settings for which a value that was left is known."""
BUSIEST = 0.9
"""Fraction of its time for which an engine may have groups once there is one less."""
JOINS_S = 600.0
"""An engine that has not come so long after it was asked for holds up max_staleness no longer."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Move:
    """A change to be made."""

    setting: str
    before: int
    after: int
    said: Mapping[str, Scalar]
    """Its record says that too."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Measured:
    """Steps with one max_staleness."""

    waited: float
    """Fraction of its time that the trainer waited for rollouts."""
    usual: float
    """`waited` without the step of the longest wait: one slow group says nothing."""
    is_whole: bool = True
    """They are as many as the settings ask for."""
    has_waited: bool = True
    """The trainer has waited as long as in a whole window with WAITS."""
    idle: float = 0.0
    """Fraction of their time that rollouts waited for room within the leash."""
    ess: float = math.nan
    """Mean effective sample size, as a fraction of the tokens."""
    surplus: int = 0
    """Batches that lay ready beyond the one in training, at all times."""
    is_full: bool = False
    """More groups would only wait: engines, workers or rewards have as many as they take."""
    busy: float = 0.0
    """Fraction of the looks at which an engine had as many requests as it takes."""
    places: float = math.inf
    """Batches for whose requests engines have places, if it is known."""
    is_biased: bool = False
    """Long answers are trained too rarely."""
    enough: int | None = None
    """The smallest max_staleness that gives hardly any up, if it is known."""

    @property
    def is_queued(self) -> bool:
        """Engines have mostly as many requests as they take."""
        return self.busy > 0.5


def find_move(
    view: RunView, advised: Callable[[RunView], int | None], num_free: float = math.inf
) -> Move | str:
    """The next change, or why there is none, in words; "" without the setting. `advised`: the
    number of engines that the verdict would have. `num_free`: places for more engines."""
    config, num_engines = view.config.buffer.autotune, view.config.rollout.num_engines
    if config is None or view.stats is None:
        return ""
    if isinstance(now := _measured(view, view.stats, config), str):
        return now
    bound = view.stats.max_staleness
    # Several changes, however long the leash takes to fill.
    memory = 3 * (2 * _filling(view.stats) + config.steps)
    memory = max(REMEMBERED * config.steps, memory)
    after, why = next_move(bound, now, _left(view, memory, SETTING), config)
    said: dict[str, Scalar] = {} if math.isnan(now.ess) else {"ess": now.ess}
    # More engines rather than fewer requests for them.
    all_serve = len(view.stats.engine_versions) == num_engines
    is_due = all_serve and after <= bound and not now.ess < config.min_ess
    if config.max_engines is not None and is_due:
        left, wanted = _left(view, memory, ENGINES), advised(view)
        number, reason = _next_engines(num_engines, now, left, config.max_engines, wanted)
        number = int(min(number, num_engines + num_free))
        if number > num_engines or (number < num_engines and after == bound):
            said["why"] = reason
            return Move(setting=ENGINES, before=num_engines, after=number, said=said)
    if after == bound:
        return why
    return Move(setting=SETTING, before=bound, after=after, said={**said, "why": why})


def next_move(
    bound: int, now: Measured, left: Mapping[int, float], config: AutotuneConfig
) -> tuple[int, str]:
    """The value to be, or to stay, and why. `left`: the effective sample size with values that
    autotune has left."""
    lowest, highest, floor = config.min_staleness, config.max_staleness, config.min_ess
    if not lowest <= bound <= highest:
        return bound, f"it was set beside the bounds, {lowest} and {highest}"
    ess = f"effective sample size {now.ess:.2f}"

    def is_uneven(value: int) -> bool:
        """Its logarithm grows with the staleness. Comparisons with NaN are false: what is not
        measured forbids nothing."""
        return now.ess ** (value / max(1, bound)) < floor or left.get(value, math.nan) < floor

    if now.ess < floor:
        lower = next((v for v in range(bound - 1, lowest, -1) if not is_uneven(v)), lowest)
        return lower, f"{ess}, below {floor:g}"
    most = next((v - 1 for v in range(bound + 1, highest + 1) if is_uneven(v)), highest)
    at_most = "it is the largest" if bound == highest else f"a larger one is below {floor:g}"
    if now.is_biased and now.is_whole and now.enough is not None and now.enough > bound:
        why = f"long answers are given up, which less than {now.enough} does; {ess}"
        return (min(now.enough, most), why) if most > bound else (bound, f"{why}: {at_most}")
    waited = f"the trainer waited {now.waited:.0%} for rollouts, they {now.idle:.0%} for it"
    if now.has_waited and not now.is_full and most > bound:
        in_flight = (bound + 1) / max(1 - now.usual, 1e-3)
        # Engines do no more than they have places for, while one batch trains; nor is a value
        # passed over that was tried.
        needed = min([in_flight - 1, now.places, *(value for value in left if value > bound)])
        return min(max(math.ceil(needed), bound + 1), most), f"{waited}; {ess}"
    if now.is_queued and now.places < bound:
        # One batch queues beyond their places, but no more than half are given up at a time.
        fewest = max(bound // 2, math.ceil(now.places) + 1)
        lower, so = min(bound - 1, fewest), "requests queue at engines"
    elif now.waited < WAITS:
        lower, so = bound - max(1, now.surplus), f"batches that always lay ready: {now.surplus}"
    elif not now.has_waited:
        return bound, f"{waited}, for too short a time so far"
    else:
        full = "engines, workers or rewards have all that they take, or groups are lacking"
        return bound, f"{waited}, but {full if now.is_full else f'{ess}: {at_most}'}"
    needed = max([lowest, now.enough or 0, *(1 + value for value in left if value < bound)])
    if now.is_whole and not now.is_biased and needed < bound:
        return max(needed, lower), f"{waited}, {so}: its groups may be fresher; {ess}"
    reasons = {
        "it is the least": bound <= lowest,
        f"{bound - 1} was too little lately": bound - 1 in left,
        "it has not been measured for long enough": not now.is_whole,
    }
    but = next((words for words, holds in reasons.items() if holds), "long answers need it")
    return bound, f"{waited}, {so}, but {but}"


def _next_engines(
    number: int, now: Measured, left: Mapping[int, float], most: int, wanted: int | None
) -> tuple[int, str]:
    """The number of engines to be, or to stay, and why. `wanted`: what the verdict would have."""
    may_help = now.is_queued or not now.is_full
    if now.is_whole and now.has_waited and may_help and wanted is not None and number < most:
        why = "requests queue at engines" if now.is_queued else "max_staleness may not grow"
        return min(wanted, most), f"the trainer waited {now.waited:.0%} for rollouts, and {why}"
    load = (1 - now.idle) * number / max(1, number - 1)
    # A worker without groups says nothing about engines that have those of others.
    has_room = load <= BUSIEST and now.busy <= 1 - BUSIEST
    is_idle = now.idle >= MUCH and has_room and now.waited < WAITS
    if now.is_whole and is_idle and number > 1 and number - 1 not in left:
        why = f"engines had no groups for {now.idle:.0%} of their time, for lack of room in the "
        return number - 1, f"{why}leash; the trainer waited {now.waited:.0%} for them"
    return number, ""


def _measured(view: RunView, stats: BufferStats, config: AutotuneConfig) -> Measured | str:
    """Says why not if something is amiss, or too soon after a change of the run's conditions."""
    if stats.paused or view.phase != "training" or view.stall is not None:
        return "the run does not train now"
    if view.workers_away or view.weights.lost_engines:
        return "a worker or an engine is away"
    asked = [change.t for change in view.changes if change.values.get("setting") == ENGINES]
    late_s = view.now - max([view.started, view.resumed_at, view.engines_at, *asked])
    serving, number = len(stats.engine_versions), view.config.rollout.num_engines
    if serving != number and not (0 < serving < number and late_s > JOINS_S):
        return f"{serving} of {number} engines serve"
    filling = _filling(stats)
    whole = config.steps + filling  # waits come and go with what is in flight
    recent = [step for step in view.steps[-(filling + whole + 1) :] if step.t > view.changed_at]
    window = recent[filling:]
    count, least = len(window) - 1, max(2, min(whole, 2 * filling))
    if count < least:
        return (
            f"too little is measured: {max(0, count)} of {least} steps since the leash has filled"
        )
    waited_s, ess = sum(series(window[1:], WAITED)), series(window[1:], "ess")
    took = [(sum(series([b], WAITED)), max(b.t - a.t, 1e-9)) for a, b in pairwise(window)]
    took.remove(max(took))
    ready = min(view.least_ready[-count:])
    lengths, engines = view.lengths, view.recent_engines
    rollout, on_stale = view.config.rollout, view.config.buffer.on_stale
    places = sum(engine.number("limit") for engine in engines) / rollout.group_size
    looks = view.busy.growth()
    busy = looks.get("busy", 0.0) / max(1.0, looks.get("looks", 0.0))
    # A wait is booked at its end: in the short time of the verdict one long wait is much.
    waits = wait_fractions(view.waits.growth(), view.waits.elapsed_s, rollout.num_workers)
    waits_elsewhere = waits.rollout_for_rewards >= MUCH or busy > 0.5
    is_unused = stats.running + stats.ready + stats.leased < stats.limit(lag=1)
    return Measured(
        waited=min(1.0, waited_s / max(window[-1].t - window[0].t, 1e-9)),
        is_whole=count >= whole,
        usual=min(1.0, sum(waited for waited, _ in took) / sum(all_s for _, all_s in took)),
        has_waited=sum(waited / all_s for waited, all_s in took) >= WAITS * config.steps,
        idle=waits.rollout_for_trainer,
        ess=sum(ess) / len(ess) if ess else math.nan,
        surplus=0 if math.isinf(ready) else int(ready // stats.groups_per_version),
        is_full=bool(is_unused or waits_elsewhere),
        busy=busy,
        places=places / stats.groups_per_version if engines else math.inf,
        is_biased=bool(lengths and length_bias(lengths, stats.max_staleness, on_stale)),
        enough=lengths.sufficient_staleness if lengths else None,
    )


def _filling(stats: BufferStats) -> int:
    """Steps in which the leash fills. With 0 there is nothing to fill: trainer and rollouts take
    turns."""
    return (stats.max_staleness + 1) * stats.gradient_accumulation_steps * (stats.max_staleness > 0)


def _left(view: RunView, num_steps: int, setting: str) -> dict[int, float]:
    """Values of the setting. Nothing from before a change by a person, or of the engines, who may
    have changed what it rests on."""
    oldest, found = view.steps[-num_steps:][0].t, dict[int, float]()
    for change in reversed(view.changes):
        if change.values.get("who") != WHO or change.t < oldest:
            break
        if change.values.get("setting") != setting:
            if setting == SETTING:
                break
            continue
        before, after = (int(str(change.values[name])) for name in ("before", "after"))
        found.setdefault(before, change.number("ess"))
        for value in range(before + 1, after):
            found.setdefault(value, math.nan)
    return found
