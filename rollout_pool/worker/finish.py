"""Dynamic sampling: groups whose rewards are all equal teach nothing and may be left out (pure).

How a group gets to the buffer, and what the buffer is told if it does not.

    whole     ──► pushed
              └─► left out: its rewards are all equal
    failed    ──► its prompt runs again, until it has failed too often
              └─► played from outside: its prompt runs again, and nothing is held against it
    cancelled ──► too old: its prompt runs again as that of a stale group
              └─► stopped with the run

Whichever it is, the group's credit is free afterwards.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from buffer.replay_buffer import ReplayBuffer
from buffer.types import TrajectoryGroup
from configs.rollout_schema import RolloutConfig
from rollout_pool.worker.counters import (
    Tally,
    count_completed,
    count_flight,
    count_given_up,
    count_stopped,
)
from rollout_pool.worker.generate import Flight, GroupFailed, GroupGenerator
from rollout_pool.worker.player import Player

SAVED_UP = 32
"""So many kept groups' worth of budget is saved at most: a run of luck must not let the trainer be
starved for long afterwards."""


class Verdict(Enum):
    keep = "keep"
    leave_out = "leave_out"
    keep_all_equal = "keep_all_equal"
    """Its rewards are all equal, but the budget is used up."""


class VarianceFilter:
    """Judges one worker's groups in their order. Setting: rollout.max_filtered_ratio.

    Each kept group adds `max_ratio` to a budget, each that is left out takes 1 from it.
    """

    def __init__(self, max_ratio: float) -> None:
        self._max_ratio = max_ratio
        self._budget = max_ratio

    def judge(self, group: TrajectoryGroup, num_unscored: int) -> Verdict:
        """`num_unscored` episodes lack a part of their reward, which then counts as 0.

        A group with any of them is kept: that its rewards are equal may be the scorer's doing, and
        says nothing of the prompt.
        """
        all_equal = not num_unscored and has_zero_variance(group)
        if all_equal and self._budget >= 1:
            self._budget -= 1
            return Verdict.leave_out
        self._budget = min(self._budget + self._max_ratio, self._max_ratio * SAVED_UP)
        return Verdict.keep_all_equal if all_equal else Verdict.keep


def has_zero_variance(group: TrajectoryGroup) -> bool:
    """Whether all episodes have the same reward."""
    return len({trajectory.reward for trajectory in group.trajectories}) == 1


log = logging.getLogger(__name__)

MAX_FAILURES_IN_A_ROW = 16
"""So many groups failing one after the other are no accident: the worker ends with the error."""


class GroupLog(Protocol):
    """Writes down what the worker made, for people to read."""

    async def write(self, group: TrajectoryGroup, prompt_text: str) -> None: ...


class Wish(Player, Protocol):
    """A group that somebody outside plays: each of its episodes is `run`."""

    def refuse(self, why: str) -> None:
        """There will be no such group; nothing happens if it has begun."""
        ...

    def give_up(self, why: str) -> None:
        """The group has begun and will not be finished."""
        ...


@dataclass(kw_only=True, slots=True, eq=False)
class Trip:
    """A group on its way into the buffer."""

    flight: Flight
    wish: Wish | None = None
    """That it fulfils."""
    group: TrajectoryGroup | None = None
    """Once it is whole."""
    verdict: Verdict = Verdict.keep
    is_too_old: bool = False
    """No later step could train its oldest token."""


class Landing:
    """Gets the groups of one worker into the buffer, any number at once."""

    def __init__(
        self,
        *,
        config: RolloutConfig,
        generator: GroupGenerator,
        buffer: ReplayBuffer,
        tally: Tally,
        group_log: GroupLog | None,
    ) -> None:
        self._config = config
        self._generator = generator
        self._buffer = buffer
        self._tally = tally
        self._group_log = group_log
        self._filter: VarianceFilter | None = None
        if config.filter_zero_variance:
            self._filter = VarianceFilter(config.max_filtered_ratio)
        self._failures_in_a_row = 0
        self.num_groups = 0
        """Pushed."""
        self.num_failed = 0
        self.num_too_old = 0

    async def deliver(self, trip: Trip) -> None:
        """Makes the group and pushes it, unless it is to be left out. May be cancelled any time.

        `land` must follow, however this ends.
        """
        group = trip.group = await self._generator.run(trip.flight)
        self._failures_in_a_row = 0
        if self._filter is not None:
            trip.verdict = self._filter.judge(group, trip.flight.num_unscored)
        if trip.verdict is not Verdict.leave_out:
            await self._buffer.push(group)

    async def land(self, trip: Trip, delivery: asyncio.Task[None]) -> bool:
        """What follows from the end of `delivery`; whether the group came to its end.

        Not to be cancelled: a credit that is not given back is missed until it expires. Raises what
        is to end the worker.
        """
        is_done = False
        try:
            is_done = await self._close(trip, delivery)
        finally:
            if trip.wish is not None:
                trip.wish.refuse("its group was given up")
            count_flight(self._tally, trip.flight)
            if is_done:
                assert trip.group is not None
                count_completed(self._tally, trip.flight, trip.group)
            elif delivery.cancelled() and not trip.is_too_old:
                count_stopped(self._tally, trip.flight)
            else:
                count_given_up(self._tally, trip.flight)
        return is_done

    async def _close(self, trip: Trip, delivery: asyncio.Task[None]) -> bool:
        if delivery.cancelled():
            return await self._give_up(trip)
        error = delivery.exception()
        if error is None:
            await self._finish(trip)
            return True
        if isinstance(error, GroupFailed):
            await self._fail(trip, error)
            return False
        # Of the push, or one of ours: whichever, the credit is not needed.
        await self._buffer.abandon(trip.flight.group_id, "failed")
        raise error

    async def _finish(self, trip: Trip) -> None:
        flight, group = trip.flight, trip.group
        assert group is not None
        if trip.verdict is Verdict.leave_out:
            await self._buffer.abandon(group.group_id, "zero_variance")
            self._tally.add("groups_filtered")
            self._tally.add("tokens_filtered", flight.num_tokens)
            return
        if trip.verdict is Verdict.keep_all_equal:
            self._tally.add("zero_variance_kept")
        self.num_groups += 1
        if self._group_log is not None:
            await self._group_log.write(group, flight.prompt.prompt.text)

    async def _fail(self, trip: Trip, error: GroupFailed) -> None:
        log.warning("%s", error)
        flight = trip.flight
        if trip.wish is not None:  # whoever played it may be to blame: no fault of the prompt
            await self._buffer.abandon(flight.group_id, "outside", rerun=flight.ref)
            return
        most = self._config.max_group_failures
        if await self._buffer.fail(flight.group_id, flight.ref, most) < 0:
            self._tally.add("prompts_quarantined")
            log.warning("prompt %d failed %d times: put aside", flight.ref.index, most)
        self.num_failed += 1
        self._failures_in_a_row += 1
        if self._failures_in_a_row >= MAX_FAILURES_IN_A_ROW:
            raise error

    async def _give_up(self, trip: Trip) -> bool:
        """Whether the group is in the buffer all the same."""
        flight = trip.flight
        if trip.is_too_old:
            was_running = await self._buffer.abandon(flight.group_id, "too_old", requeue=flight.ref)
        else:
            was_running = await self._buffer.abandon(flight.group_id, "stopped")
        if trip.group is not None and not was_running:  # its push had arrived
            await self._finish(trip)
            return True
        self.num_too_old += trip.is_too_old
        return False
