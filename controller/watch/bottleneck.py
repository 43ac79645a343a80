"""The bottleneck of a run, with the next thing to try (pure).

Pools record their waits as (waiter, waited on) -> seconds, summed over a pool's processes:

    ("trainer", "rollout")       a lease found too few fresh groups
    ("trainer", "weight_sync")   weights were copied, or waited for a free snapshot buffer
    ("rollout", "trainer")       admission gave no credit: the leash was fully used
    ("rollout", "rewards")       episodes had ended and no scoring process was free

Admission follows the slowest engine, so weights that arrive late show up as waiting rollouts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from controller.metrics.history import Waits
from controller.metrics.weights import WeightsPace, behind_words
from controller.units import format_duration
from controller.watch.finding import MUCH, Finding, enough, hint

K = TypeVar("K")

MOST = 0.5
"""Fraction of the episodes' time above which engines are not what they wait for."""
NOT_OWN = ("siblings", "held", "push")
"""Stages in which an episode has ended, or gave way to others."""


@dataclass(kw_only=True, slots=True, frozen=True)
class WaitFractions:
    """Fractions of the time, each between 0 and 1."""

    trainer_for_rollout: float
    trainer_for_weights: float
    rollout_for_trainer: float
    rollout_for_rewards: float = 0.0


def wait_fractions(waits: Waits, elapsed_s: float, num_workers: int = 1) -> WaitFractions:
    """Fractions of `elapsed_s`; the waits of rollout are sums over `num_workers` workers."""

    def fraction(waiter: str, waited_on: str, num_processes: int) -> float:
        seconds = waits.get((waiter, waited_on), 0.0)
        return min(1.0, seconds / (elapsed_s * num_processes)) if elapsed_s > 0 else 0.0

    return WaitFractions(
        trainer_for_rollout=fraction("trainer", "rollout", 1),
        trainer_for_weights=fraction("trainer", "weight_sync", 1),
        rollout_for_trainer=fraction("rollout", "trainer", num_workers),
        rollout_for_rewards=fraction("rollout", "rewards", num_workers),
    )


@dataclass(kw_only=True, slots=True, frozen=True)
class Sizes:
    """How many there are of each part of the run."""

    engines: int = 1
    ranks: int | None = None
    """None: unknown, or nobody here knows whether there is room for more."""
    rank_step: int = 1
    """The number of ranks is a multiple of it."""
    most_ranks: int = 2**31
    reward_actors: int = 0
    reward_processes: int = 1


def bottleneck(
    fractions: WaitFractions,
    max_staleness: int,
    when: str = "so far",
    weights: WeightsPace = WeightsPace(),  # noqa: B008 (it is frozen)
    sizes: Sizes = Sizes(),
) -> Finding:
    """The largest wait and what to change; `when` is for example "of the last 2 minutes"."""
    trainer, rollout = fractions.trainer_for_rollout, fractions.rollout_for_trainer
    if rollout >= MUCH and rollout > trainer and (late := _late_weights(weights)):
        words = f"weights are the bottleneck: rollouts waited {rollout:.0%} {when} for room"
        return hint("weights", words, late)
    # If rollouts wait for the trainer, faster rewards would not help.
    if (rewards := fractions.rollout_for_rewards) >= MUCH and rollout < max(MUCH, trainer):
        name, number = "reward_processes", sizes.reward_processes
        if sizes.reward_actors:
            name, number = "reward_actors", sizes.reward_actors
        return hint(
            "rewards",
            f"the reward pool is too small: episodes waited {rewards:.0%} {when} for a scoring "
            "process",
            f"raise rollout.{name}",
            f"rollout.{name}={enough(number, rewards)}",
        )
    if max_staleness == 0 and trainer >= MUCH:
        return hint(
            "trainer",
            "trainer and rollouts take turns, as max_staleness=0 requires: the trainer waited "
            f"{trainer:.0%} {when}",
            "buffer.max_staleness=1 lets them overlap",
            "buffer.max_staleness=1",
        )
    if fractions.trainer_for_weights >= max(MUCH, trainer):
        return hint(
            "weights",
            f"the trainer spent {fractions.trainer_for_weights:.0%} {when} on handing over weights"
            f"{_slower_words(weights)}",
            "train more groups per step (trainer.groups_per_step), send fewer versions "
            "(trainer.publish_every), or send less (weight_sync.full_every)",
        )
    if trainer >= MUCH and trainer >= rollout:
        return hint(
            "rollout",
            f"rollouts are the bottleneck: the trainer waited {trainer:.0%} {when} for them",
            "add engines (rollout.num_engines), or give the trainer fewer ranks",
            f"rollout.num_engines={enough(sizes.engines, trainer)}",
        )
    if rollout >= MUCH:
        return hint(
            "trainer",
            f"the trainer is the bottleneck: rollouts waited {rollout:.0%} {when} for room within "
            "the leash",
            "add ranks (trainer.num_ranks); more engines would not help",
            *_more_ranks(sizes, rollout),
        )
    return hint(
        "",
        f"well balanced: the trainer waited {trainer:.0%} {when} for rollouts, and rollouts "
        f"{rollout:.0%} for the trainer",
        "there is nothing to change",
    )


_OUTSIDE = {"environment": "environments", "rewards": "rewards"}


def outside_engines(
    episodes: Mapping[str, float], trainer_waited: float, when: str, *changes: str
) -> Finding | None:
    """A hint if episodes spend most of their time in environments or rewards while the trainer
    waits. `episodes`: their seconds by stage; `changes` let more of them run at a time."""
    own_s = sum(taken for stage, taken in episodes.items() if stage not in NOT_OWN)
    stage = max(_OUTSIDE, key=lambda name: episodes.get(name, 0.0))
    if trainer_waited < MUCH or episodes.get(stage, 0.0) <= MOST * own_s:
        return None
    words = f"{_OUTSIDE[stage]} are the bottleneck: episodes spent {episodes[stage] / own_s:.0%} "
    words += f"of their time in them, and the trainer waited {trainer_waited:.0%} {when}"
    advice = "make them faster, or have more groups at a time; more engines would not help"
    return hint(stage, words, advice, *changes)


def _more_ranks(sizes: Sizes, waited: float) -> Iterator[str]:
    """The change, if more of them are possible."""
    if sizes.ranks is not None:
        step = sizes.rank_step
        more = min(sizes.most_ranks, step * enough(sizes.ranks // step, waited))
        if more > sizes.ranks:
            yield f"trainer.num_ranks={more}"


def _late_weights(weights: WeightsPace) -> str:
    """How the weights delay admission, and what to change; "" if they do not."""
    if weights.behind:
        return (
            f"admission follows the slowest engine, and {behind_words(weights.behind)}"
            f"{_slower_words(weights)}: look at its log, send less (weight_sync.full_every), or "
            "let more engines commit at once (weight_sync.max_concurrent_commits)"
        )
    if weights.is_too_slow:
        return (
            f"admission follows the slowest engine{_slower_words(weights)}: send less "
            "(weight_sync.full_every) or fewer versions (trainer.publish_every), or train more "
            "groups per step (trainer.groups_per_step)"
        )
    return ""


def _slower_words(weights: WeightsPace) -> str:
    if not weights.is_too_slow:
        return ""
    assert weights.convergence_s is not None and weights.seconds_per_publish is not None
    return (
        "; weights travel slower than they are made (convergence "
        f"{format_duration(weights.convergence_s)}, a publish every "
        f"{format_duration(weights.seconds_per_publish)})"
    )


class Window(Generic[K]):
    """The recent growth of totals, kept as about a hundred samples."""

    def __init__(self, horizon_s: float) -> None:
        self._horizon_s = horizon_s
        self._samples: deque[tuple[float, Mapping[K, float]]] = deque()

    def add(self, t: float, totals: Mapping[K, float]) -> None:
        """Add the totals at time `t` (seconds of any monotonic clock)."""
        if self._samples and any(totals.get(k, 0.0) < v for k, v in self._samples[-1][1].items()):
            self.clear()  # a server without its data counts anew
        if len(self._samples) > 1 and t - self._samples[-2][0] < self._horizon_s / 100:
            self._samples.pop()
        self._samples.append((t, totals))
        # The oldest sample stays just outside the horizon, so the window is never shorter.
        while len(self._samples) > 2 and self._samples[1][0] <= t - self._horizon_s:
            self._samples.popleft()

    def clear(self) -> None:
        """Begin anew: nothing grew in the time since the last sample."""
        self._samples.clear()

    def last(self, seconds: float) -> Window[K]:
        """A window of the last `seconds` of this one."""
        found = Window[K](seconds)
        for t, totals in self._samples:
            found.add(t, totals)
        return found

    @property
    def elapsed_s(self) -> float:
        return self._samples[-1][0] - self._samples[0][0] if self._samples else 0.0

    def growth(self) -> dict[K, float]:
        """How much each total grew in the window."""
        if not self._samples:
            return {}
        before, now = self._samples[0][1], self._samples[-1][1]
        return {name: total - before.get(name, 0.0) for name, total in now.items()}
