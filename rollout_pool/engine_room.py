"""One engine as the router sees it: who may go there, how many are there, and how well it does."""

from __future__ import annotations

import math
from dataclasses import dataclass

from rollout_pool.breaker import Breaker, BreakerState
from rollout_pool.concurrency import AdaptiveLimit, LoadSample
from rollout_pool.generation import EngineClient, EngineLoad
from rollout_pool.samples import Priority

EVALUATION_SHARE = 1 / 8
"""Of an engine's limit: places that evaluation samples have beside the rollouts'."""


@dataclass(kw_only=True, slots=True, frozen=True)
class RoomReport:
    """How an engine is used by this process, as errors tell it."""

    serves: int | None
    """The version that it serves; None while it serves nothing."""
    may_roll_out: bool
    """Whether its tokens are new enough to be trained on."""
    limit: int
    """Samples that may be in flight at once."""
    num_in_flight: int
    num_waiting: int
    """Samples that would go there if there were room; they may be waiting for others too."""
    breaker: BreakerState
    kv_usage: float | None
    """None while the engine has told no load."""
    num_queued: int | None
    """By the engine itself, of all its clients."""


class EngineRoom:
    """Places, load and health of one engine."""

    def __init__(self, client: EngineClient, max_running_requests: int, num_workers: int) -> None:
        self.client = client
        self.breaker = Breaker()
        self.serves: int | None = None
        self.may_roll_out = False
        self.last_progress = float("-inf")
        """When a sample got room or tokens here."""
        self._limit = AdaptiveLimit(math.ceil(max_running_requests / num_workers))
        self._has_others = num_workers > 1
        self._num_in_flight = dict.fromkeys(Priority, 0)
        self._tokens = 0
        self._others_tokens = 0.0
        self._load: EngineLoad | None = None
        self._is_silent = False

    @property
    def name(self) -> str:
        return self.client.name

    @property
    def tokens(self) -> float:
        """Expected of all that is here, by other workers too."""
        return self._tokens + self._others_tokens

    @property
    def own_tokens(self) -> int:
        return self._tokens

    @property
    def num_in_flight(self) -> int:
        return sum(self._num_in_flight.values())

    def has_place(self, priority: Priority) -> bool:
        """Evaluation samples have places beside the limit: an evaluation neither waits until the
        rollouts leave room nor takes any from them."""
        beside = max(1, int(EVALUATION_SHARE * self._limit.value))
        num_evaluations = self._num_in_flight[Priority.evaluation]
        if priority is Priority.evaluation and num_evaluations < beside:
            return True
        return self.num_in_flight - min(beside, num_evaluations) < self._limit.value

    def may_serve(self, min_version: int, *, is_pinned: bool) -> bool:
        """Whether it serves what such a sample needs, whatever its health.

        One that is asked for by name need not serve what can be trained on, nor be known to serve
        at all: somebody holds it at a version of their own.
        """
        if self.serves is None:
            return is_pinned
        return self.serves >= min_version and (self.may_roll_out or is_pinned)

    def is_healthy(self, now: float) -> bool:
        """An engine that has failed and does not even tell its load is not worth a sample."""
        if self._is_silent and self.breaker.state is not BreakerState.closed:
            return False
        return self.breaker.admits(now)

    def take(self, priority: Priority, tokens: int, now: float) -> bool:
        """Whether the sample is on trial: what becomes of it decides about the engine."""
        self._num_in_flight[priority] += 1
        self._tokens += tokens
        self.last_progress = now
        return self.breaker.begin()

    def give_back(self, priority: Priority, tokens: int) -> None:
        self._num_in_flight[priority] -= 1
        self._tokens -= tokens

    def follow(self, serves: int | None, *, may_roll_out: bool, now: float) -> None:
        if self.serves is None and serves is not None:
            self.breaker.expect(now)
            self._is_silent = False
        if serves is None:
            self._limit.restart()
        else:
            self.client.note_version(serves)
        self.serves = serves
        self.may_roll_out = may_roll_out

    def note_load(self, load: EngineLoad | None, num_preempted: int) -> None:
        """`load` is None if the engine lives but cannot tell."""
        self._is_silent = False
        self._load = load
        if load is None or not load.capacity:
            return
        self._others_tokens = self._estimate_others(load) if self._has_others else 0.0
        self._limit.update(
            LoadSample(
                num_in_flight=self.num_in_flight,
                num_running=load.num_running,
                num_queued=load.num_queued,
                kv_usage=load.kv_usage,
                expected_usage=self.tokens / load.capacity,
                num_preempted=num_preempted,
            )
        )

    def note_silence(self) -> None:
        """It did not tell its load."""
        self._is_silent = True
        self._load = None

    def _estimate_others(self, load: EngineLoad) -> float:
        """Requests that are not ours are taken to be like ours, or as the engine's average."""
        number = load.num_running + load.num_queued
        own = self.num_in_flight
        if number <= own:
            return 0.0
        each = self._tokens / own if own else load.num_tokens / number
        return (number - own) * each

    def report(self, num_waiting: int) -> RoomReport:
        return RoomReport(
            serves=self.serves,
            may_roll_out=self.may_roll_out,
            limit=self._limit.value,
            num_in_flight=self.num_in_flight,
            num_waiting=num_waiting,
            breaker=self.breaker.state,
            kv_usage=None if self._load is None else self._load.kv_usage,
            num_queued=None if self._load is None else self._load.num_queued,
        )
