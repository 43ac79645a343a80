"""The router's state of one engine: slots, load, version and health.

AdaptiveLimit    how many samples may be in flight there
Breaker          keeps requests away from a failing engine
EngineState      its slots, load, version and health
Slot             one sample's place, taken by the router and released by the sampler
StickySessions   which engine holds the prefix of a session
"""

from __future__ import annotations

import math
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

from rollout_pool.sampling.engine_client import EngineClient, EngineLoad
from rollout_pool.sampling.sample import Priority

START = 16
"""The limit at the first load report, unless more samples are in flight."""
KV_FULL = 0.95
KV_ROOM = 0.85
"""KV usage below which there is room for more; running samples still grow."""
FACTOR_FULL = 0.8
FACTOR_QUEUE = 0.9
QUEUE_SHARE = 0.05
"""Fraction of the running requests; a shorter queue is normal."""
QUEUE_PATIENCE = 3
"""Reports that a longer queue must last: a commit briefly requeues all requests."""
GROWTH_STEPS = 32
"""Number of steps from 0 to the maximum."""
CAREFUL_FROM = 0.9
CAREFUL_TO = 1.25
"""Fractions of the limit from which it last fell: between them the next fall is near, unless the
lengths have changed."""
IN_USE = 0.9


@dataclass(kw_only=True, slots=True, frozen=True)
class LoadSample:
    num_in_flight: int
    """Samples of this process."""
    peak_in_flight: int
    """The most in the time of the last two reports. Samples that are interrupted are not in flight
    any more when their preemptions are heard of."""
    num_running: int
    num_queued: int
    kv_usage: float
    expected_usage: float
    """Share of the KV cache that the samples in flight will hold at their expected lengths."""
    num_preempted: int = 0
    """Since the last report."""


class AdaptiveLimit:
    """A limit on the samples in flight at an engine, between 1 and `most`; `most` until the first
    load report. Pure; one step per report.

    Too few leave the engine idle; too many fill its KV cache, and then it preempts running samples
    and recomputes them later. The best number depends on lengths that are unknown beforehand, so
    the limit adapts like TCP's window:

        until it first falls   doubles while twice the tokens would still fit
        room again             half the way back to where it last fell; near that, and slightly
                               above, + 1 per step; beyond, a little more
        preemption, KV full    x 0.8
        a queue that stays     x 0.9

    It grows only while all slots are taken. After a fall it does not fall again before enough
    samples have ended to meet it.
    """

    def __init__(self, most: int) -> None:
        assert most >= 1
        self._most = most
        self.value = most
        self.restart()

    def restart(self) -> None:
        """Call when the engine was restarted."""
        self._has_begun = False
        self._fell_from: int | None = None
        self._is_settling = False
        """It has fallen, and more samples than allowed are still in flight."""
        self._queue_age = 0

    def update(self, seen: LoadSample) -> None:
        if not self._has_begun:
            self._has_begun = True
            self.value = min(self._most, max(START, seen.num_in_flight))
        has_queue = seen.num_queued > max(1, QUEUE_SHARE * seen.num_running)
        self._queue_age = self._queue_age + 1 if has_queue else 0
        if seen.num_in_flight <= self.value:
            self._is_settling = False
        if seen.num_preempted or seen.kv_usage >= KV_FULL:
            self._fall(seen, FACTOR_FULL)
        elif self._queue_age >= QUEUE_PATIENCE:
            self._fall(seen, FACTOR_QUEUE)
        elif not has_queue and seen.num_in_flight >= IN_USE * self.value:
            usage = max(seen.kv_usage, seen.expected_usage)
            if usage < KV_ROOM:
                self.value = min(self._most, self.value + self._step(usage))

    def _fall(self, seen: LoadSample, factor: float) -> None:
        if self._is_settling:
            return
        base = min(self.value, max(1, seen.peak_in_flight))
        self.value = max(1, int(base * factor))
        self._fell_from = base
        self._is_settling = seen.num_in_flight > self.value
        self._queue_age = 0

    def _step(self, usage: float) -> int:
        value, mark = self.value, self._fell_from
        if mark is None:
            return value if 2 * usage < KV_ROOM else max(1, self._most // GROWTH_STEPS)
        if value < CAREFUL_FROM * mark:
            return max(1, (mark - value) // 2)
        return 1 if value <= CAREFUL_TO * mark else max(1, self._most // GROWTH_STEPS)


THRESHOLD = 3
FIRST_DELAY_S = 0.5
MAX_DELAY_S = 30.0


class BreakerState(Enum):
    closed = "closed"
    open = "open"
    half_open = "half_open"


class Breaker:
    """Circuit breaker of one engine (pure: the time is passed in).

    closed ──3 failures in a row──► open ──delay over──► half open ──first tokens──► closed
                                     ▲                     │ one request on trial
                                     └─────it fails────────┘ twice the delay, up to 30 s
    """

    def __init__(self) -> None:
        self.state = BreakerState.closed
        self._num_failures = 0
        self._num_delays = 0
        self._last_failure = self._last_success = float("-inf")
        self._is_on_trial = False
        self.retry_at = float("-inf")
        """When a failed engine may be tried again."""

    def admits(self, now: float) -> bool:
        if self.state is BreakerState.closed:
            return True
        return now >= self.retry_at and not self._is_on_trial

    def has_recovered(self, failed_at: float, now: float) -> bool:
        """Returns whether a sample that failed here at `failed_at` may be sent again."""
        return self._last_success > failed_at or now >= self.retry_at

    def begin(self) -> bool:
        """A request is sent, as `admits` allowed. Returns whether it is on trial."""
        if self.state is BreakerState.closed:
            return False
        self.state = BreakerState.half_open
        self._is_on_trial = True
        return True

    def succeed(self, now: float) -> None:
        self.state = BreakerState.closed
        self._num_failures = self._num_delays = 0
        self._last_success = now
        self._is_on_trial = False

    def fail(self, begun: float, now: float) -> None:
        """A request that began at `begun` failed.

        Requests that were in flight when the engine failed fail together and count as one failure.
        """
        is_new = begun >= self._last_failure
        self._last_failure = now
        if not is_new and self.state is not BreakerState.closed:
            return
        self._num_failures += 1
        if is_new:
            delay = min(MAX_DELAY_S, FIRST_DELAY_S * 2.0**self._num_delays)
            self._num_delays = min(self._num_delays + 1, 16)
            self.retry_at = now + delay
        if self._num_failures >= THRESHOLD or self.state is not BreakerState.closed:
            self.state = BreakerState.open
        self._is_on_trial = False

    def withdraw(self) -> None:
        """The trial request ended; if without a result, another may be sent."""
        self._is_on_trial = False

    def expect(self, now: float) -> None:
        """The engine is reported back: skip the delay, but send one trial request first."""
        self.retry_at = now
        self._num_delays = 0


MAX_SESSIONS = 65_536
"""Beyond this the least recently used are dropped, which only costs a prefill."""


class StickySessions:
    """For each session the name of the engine that holds its prefix."""

    def __init__(self, max_sessions: int = MAX_SESSIONS) -> None:
        self._max_sessions = max_sessions
        self._homes: OrderedDict[str, str] = OrderedDict()

    def home(self, session: str) -> str | None:
        return self._homes.get(session)

    def settle(self, session: str, engine: str) -> None:
        self._homes[session] = engine
        self._homes.move_to_end(session)
        if len(self._homes) > self._max_sessions:
            self._homes.popitem(last=False)

    def lose(self, engine: str) -> None:
        """The engine has lost its prefixes."""
        for session in [s for s, home in self._homes.items() if home == engine]:
            del self._homes[session]


EVALUATION_SHARE = 1 / 8
"""Slots for evaluation samples, beside those for rollouts, as a share of an engine's limit."""


class EngineState:
    def __init__(self, client: EngineClient, max_running_requests: int, num_workers: int) -> None:
        self.client = client
        self.breaker = Breaker()
        self.serves: int | None = None
        self.may_roll_out = False
        self.load: EngineLoad | None = None
        """The last report; None before it, and while the engine does not respond."""
        self.last_progress = float("-inf")
        """When a sample last got a slot or tokens here."""
        self._limit = AdaptiveLimit(math.ceil(max_running_requests / num_workers))
        self._has_others = num_workers > 1
        self._num_in_flight = [0] * len(Priority)
        self.num_in_flight = 0
        self.tokens = 0.0
        """Expected tokens of all samples here, including other workers'."""
        self.has_slot = [True] * len(Priority)
        """By priority, whether such a sample would get a slot. Kept, as the tokens are: the router
        looks at each engine for each sample. Evaluation samples have their own slots, so that they
        neither wait for rollouts nor delay them."""
        self._peak = self._peak_before = 0
        """The most in flight since the last load report, and in the time before it."""
        self._tokens = 0
        self._others_tokens = 0.0
        self._is_silent = False

    @property
    def name(self) -> str:
        return self.client.name

    @property
    def limit(self) -> int:
        return self._limit.value

    @property
    def num_evaluating(self) -> int:
        return self._num_in_flight[Priority.evaluation]

    def _sum_up(self) -> None:
        """Call after a change of the samples here, those of other workers, or the limit."""
        num_rollouts, num_evaluations = self._num_in_flight
        self.num_in_flight = num_rollouts + num_evaluations
        self.tokens = self._tokens + self._others_tokens
        beside = max(1, int(EVALUATION_SHARE * self.limit))
        has_slot = self.num_in_flight - min(beside, num_evaluations) < self.limit
        self.has_slot[Priority.rollout] = has_slot
        self.has_slot[Priority.evaluation] = has_slot or num_evaluations < beside

    def may_serve(self, min_version: int, *, is_pinned: bool) -> bool:
        """Returns whether it serves what such a sample needs, regardless of its health.

        An engine requested by name need not be registered as serving, nor serve a version that can
        be trained on: an evaluation holds it at its own version.
        """
        if self.serves is None:
            return is_pinned
        return self.serves >= min_version and (self.may_roll_out or is_pinned)

    def is_healthy(self, now: float) -> bool:
        """False for an engine that has failed and does not report its load either."""
        if self.breaker.state is BreakerState.closed:
            return True
        return not self._is_silent and self.breaker.admits(now)

    def take(self, priority: Priority, tokens: int, now: float) -> bool:
        """Takes a slot. Returns whether the sample is the breaker's trial request."""
        self._num_in_flight[priority] += 1
        self._tokens += tokens
        self._sum_up()
        self._peak = max(self._peak, self.num_in_flight)
        self.last_progress = now
        return self.breaker.begin()

    def give_back(self, priority: Priority, tokens: int) -> None:
        self._num_in_flight[priority] -= 1
        self._tokens -= tokens
        self._sum_up()

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
        self._is_silent = False
        self.load = load
        peak = max(self._peak, self._peak_before)
        self._peak, self._peak_before = self.num_in_flight, self._peak
        if load is None or not load.capacity:
            return
        self._others_tokens = self._estimate_others(load) if self._has_others else 0.0
        self._sum_up()
        self._limit.update(
            LoadSample(
                num_in_flight=self.num_in_flight,
                peak_in_flight=peak,
                num_running=load.num_running,
                num_queued=load.num_queued,
                kv_usage=load.kv_usage,
                expected_usage=self.tokens / load.capacity,
                num_preempted=num_preempted,
            )
        )
        self._sum_up()

    def note_silence(self) -> None:
        self._is_silent = True
        self.load = None

    def _estimate_others(self, load: EngineLoad) -> float:
        """Tokens of other workers' requests, assumed to be like ours or the engine's average."""
        number = load.num_running + load.num_queued
        own = self.num_in_flight
        if number <= own:
            return 0.0
        each = self._tokens / own if own else load.num_tokens / number
        return (number - own) * each


@dataclass(eq=False)
class Slot:
    """The place of one sample at one engine, until `release`."""

    _engine: EngineState
    _priority: Priority
    _tokens: int
    begun: float
    _on_release: Callable[[], None]
    _is_released: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self._is_trial = self._engine.take(self._priority, self._tokens, self.begun)

    @property
    def engine(self) -> EngineClient:
        return self._engine.client

    @property
    def may_go_on(self) -> bool:
        """The engine takes further requests: it neither drains nor leaves."""
        return self._engine.may_roll_out or self._priority is Priority.evaluation

    def progress(self) -> None:
        now = time.monotonic()
        self._engine.last_progress = now
        self._engine.breaker.succeed(now)

    def fail(self) -> float:
        """Call when the engine failed. Returns the time, for `assign`'s `failed`."""
        now = time.monotonic()
        self._engine.breaker.fail(self.begun, now)
        return now

    def release(self) -> None:
        if not self._is_released:
            self._is_released = True
            self._engine.give_back(self._priority, self._tokens)
            if self._is_trial:
                self._engine.breaker.withdraw()
            self._on_release()
