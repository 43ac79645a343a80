"""Moves max_staleness by one where the run's own numbers say so: `buffer.autotune` (pure).

    raise   the trainer waits for rollouts that have room, or long answers are trained too rarely
    lower   few tokens carry the updates, or the trainer does not wait: its groups may be fresher

A lower bound gives up the groups of one age, about a batch, so it never falls by more. A run at an
edge does not go to and fro: for some time no value that was left is tried again for nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from buffer.results import BufferStats
from configs.schema import AutotuneConfig
from controller.metrics.history import Scalar, series
from controller.watch.faults import is_busy
from controller.watch.finding import MUCH
from controller.watch.length_bias import length_bias
from controller.watch.run_view import RunView

SETTING, WHO = "buffer.max_staleness", "autotune"
WAITS, FREE = 0.05, 0.02
"""Fractions of its time that the trainer waits for rollouts: from the first on a raise is made, up
to the second a lower bound may cost nothing."""
MARGIN = 0.1
"""The effective sample size must be so far above its floor for a raise."""
REMEMBERED = 20
"""Times the `steps` of the settings for which a value that was left is known."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Measured:
    """A window of steps with one max_staleness."""

    waited: float
    """Fraction of its time that the trainer waited for rollouts."""
    idle: float = 0.0
    """Fraction of their time that rollouts waited for room within the leash."""
    ess: float = math.nan
    """Mean effective sample size, as a fraction of the tokens."""
    is_full: bool = False
    """More groups would only wait: engines, workers or rewards have as many as they take."""
    is_biased: bool = False
    """Long answers are trained too rarely."""
    enough: int | None = None
    """The smallest max_staleness that gives hardly any up, if it is known."""


def find_move(view: RunView) -> tuple[int, dict[str, Scalar]] | None:
    """The max_staleness to be, if it is to change, and what its record says besides."""
    config = None if view.config is None else view.config.buffer.autotune
    if config is None or view.stats is None or (now := _measured(view, config.steps)) is None:
        return None
    # Several changes, however long the leash takes to fill.
    memory = 3 * (2 * _filling(view, view.stats) + config.steps)
    left = _left(view, max(REMEMBERED * config.steps, memory))
    move = next_move(view.stats.max_staleness, now, left, config)
    ess = {} if math.isnan(now.ess) else {"ess": now.ess}
    return None if move is None else (move[0], {"why": move[1], **ess})


def next_move(
    bound: int, now: Measured, left: Mapping[int, float], config: AutotuneConfig
) -> tuple[int, str] | None:
    """The same with why. `left`: the effective sample size with values that autotune has left."""
    lowest, highest, floor = config.min_staleness, config.max_staleness, config.min_ess
    if not lowest <= bound <= highest:  # a person has set it: it stays
        return None
    ess = f"effective sample size {now.ess:.2f}"
    waited = f"the trainer waited {now.waited:.0%} for rollouts, they {now.idle:.0%} for it"
    # Comparisons with NaN are false: a value that is not measured forbids nothing.
    is_uneven = now.ess < floor + MARGIN or left.get(bound + 1, math.nan) < floor
    can_lower, can_raise = bound > lowest, bound < highest and not is_uneven
    if now.ess < floor:
        return (bound - 1, f"{ess}, below {floor:g}") if can_lower else None
    if now.is_biased and now.enough is not None and now.enough > bound:
        why = f"long answers are given up, which less than {now.enough} does; {ess}"
        return (bound + 1, why) if can_raise else None
    if now.waited >= WAITS and can_raise and not now.is_full:
        return bound + 1, f"{waited}; {ess}"
    is_needed = bound - 1 in left or now.is_biased or (now.enough or 0) >= bound
    if now.waited <= FREE and can_lower and not is_needed:
        return bound - 1, f"{waited}: its groups may be fresher; {ess}"
    return None


def _measured(view: RunView, num_steps: int) -> Measured | None:
    """None if something is amiss, or too soon after a change of the run's conditions."""
    stats = view.stats
    if stats is None or stats.paused or view.phase != "training" or view.stall is not None:
        return None
    away = view.workers_away or view.weights.lost_engines
    filling = _filling(view, stats)
    num_steps += filling  # waits come and go with what is in flight
    steps = view.steps[-(filling + num_steps + 1) :]
    is_long = len(steps) > filling + num_steps and steps[0].t > view.changed_at
    if away or not is_long or len(stats.engine_versions) < view.num_engines:
        return None
    start, *window = steps[-(num_steps + 1) :]
    waited_s, ess = sum(series(window, "lease_wait_s")), series(window, "ess")
    lengths, busy = view.lengths, [is_busy(engine) for engine in view.recent_engines]
    waits_elsewhere = view.wait_fractions.rollout_for_rewards >= MUCH or (busy and all(busy))
    is_unused = stats.running + stats.ready + stats.leased < stats.limit(lag=1)
    return Measured(
        waited=min(1.0, waited_s / max(window[-1].t - start.t, 1e-9)),
        idle=view.wait_fractions.rollout_for_trainer,
        ess=sum(ess) / len(ess) if ess else math.nan,
        is_full=bool(is_unused or waits_elsewhere),
        is_biased=bool(lengths and length_bias(lengths, stats.max_staleness, view.on_stale)),
        enough=lengths.sufficient_staleness if lengths else None,
    )


def _filling(view: RunView, stats: BufferStats) -> int:
    """Steps in which the leash fills."""
    return (stats.max_staleness + 1) * view.steps_per_version


def _left(view: RunView, num_steps: int) -> dict[int, float]:
    """Nothing from before a change by a person, who may have changed what it rests on."""
    oldest, found = view.steps[-num_steps:][0].t, dict[int, float]()
    for change in reversed(view.changes):
        if change.values.get("who") != WHO or change.t < oldest:
            break
        found.setdefault(int(str(change.values["before"])), change.number("ess"))
    return found
