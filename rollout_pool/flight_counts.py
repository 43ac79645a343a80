"""What is counted of one group when it has ended, whichever way."""

from __future__ import annotations

import time

from buffer.types import TrajectoryGroup
from rollout_pool.generate import Flight
from rollout_pool.tally import Tally, length_bucket


def count_flight(tally: Tally, flight: Flight) -> None:
    """What its samples cost."""
    tally.add("tokens_generated", flight.num_tokens + flight.num_wasted)
    tally.add("tokens_wasted", flight.num_wasted)
    tally.add("samples_retried", flight.num_failures)
    tally.add("logprobs_refused", flight.num_refused)
    tally.add("rewards_failed", flight.num_unscored)


def count_completed(tally: Tally, flight: Flight, group: TrajectoryGroup) -> None:
    """A group that came to its end, by the length of its longest sample; how its episodes ended."""
    _count_length(tally, "completed", flight)
    ends = {trajectory.episode: trajectory.finish_reason for trajectory in group.trajectories}
    for end in ends.values():
        tally.add(f"episodes_ended:{end}")


def count_given_up(tally: Tally, flight: Flight) -> None:
    """A group that will never be pushed: all its tokens were in vain."""
    _count_length(tally, "given_up", flight)
    tally.add("tokens_wasted", flight.num_tokens)


def count_stopped(tally: Tally, flight: Flight) -> None:
    """A group that the end of the run cut short: nothing was wrong with it."""
    tally.add("groups_stopped")
    tally.add("tokens_stopped", flight.num_tokens)


def _count_length(tally: Tally, what: str, flight: Flight) -> None:
    bucket = length_bucket(flight.longest)
    tally.add(f"{what}:{bucket}")
    tally.add(f"{what}_s:{bucket}", time.monotonic() - flight.started)
