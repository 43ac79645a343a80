"""Completes samples, retrying at other engines when one fails.

complete(sample): slot ──► engine ──► ended
                    ▲          │ engine lost, sample refused: its tokens are kept, the rest is
                    └──────────┘ requested elsewhere, `max_retries` times
                               │ interrupt(): the same, when `complete` is called again
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

from opentelemetry import trace
from opentelemetry.trace import Span, StatusCode

from rollout_pool.cancelling import end_tasks
from rollout_pool.sampling.constraint import Guide
from rollout_pool.sampling.engine_client import BadLogprobs, EngineError, SampleRefused
from rollout_pool.sampling.engine_state import Slot
from rollout_pool.sampling.grammars import Grammars
from rollout_pool.sampling.router import Router
from rollout_pool.sampling.sample import Interrupted, Sample, SampleFailed
from rollout_pool.sampling.stop import find_stop
from rollout_pool.sampling.tracing import describe_request, tracer

TIME_BOUNDS_S = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, float("inf"))
"""Upper bounds in seconds of the buckets in which the times of requests are counted."""


@dataclass(kw_only=True, slots=True)
class _Run:
    failed: dict[str, float] = field(default_factory=dict)
    """Engines that failed it, with the time."""
    num_failures: int = 0
    last_error: Exception | None = None
    is_interrupted: bool = False
    in_flight: tuple[Slot, str] | None = None
    first_token_at: float | None = None
    """Of the request in flight."""
    guide: Guide | None = None
    """Of a constrained sample."""
    following: asyncio.Task[None] | None = None
    """Applies the constraint to what has arrived."""


class Sampler:
    """Completes samples at the engines of one router, any number at once.

    Setting: rollout.max_request_retries.
    """

    def __init__(
        self,
        router: Router,
        max_retries: int,
        decode: Callable[[Sequence[int]], str] | None = None,
        grammars: Grammars | None = None,
    ) -> None:
        """`decode`: the text of tokens, special ones included; needed for `Sample.stop`.
        `grammars`: needed for `Sample.constraint`."""
        self._router = router
        self._max_retries = max_retries
        self._decode = decode
        self._grammars = grammars
        self._runs: dict[Sample, _Run] = {}
        self.counted: Counter[str] = Counter()
        """Totals over all requests so far, as counters of the run: their number, the tokens that
        have arrived, the time that they waited for a slot, and the time from there to their first
        token."""

    async def complete(self, sample: Sample) -> None:
        """See Completer."""
        assert sample not in self._runs, f"{sample.sample_id} is in progress already"
        run = self._runs[sample] = _Run()
        with _span("sample", sample) as span:
            try:
                if sample.constraint is not None:
                    assert self._grammars is not None, "this sampler has no grammars"
                    run.guide = await Guide.of(sample, self._grammars)
                self._look_for_stop(sample, run, 0)  # a worker before may have found it
                while not self._has_ended(sample):
                    await self._attempt(sample, run)
            finally:
                del self._runs[sample]
                if run.guide is not None:
                    run.guide.close()
                span.set_attribute("finish_reason", sample.finish_reason or "none")

    def interrupt(self, sample: Sample) -> None:
        """See Completer."""
        run = self._runs.get(sample)
        if run is None:
            return
        run.is_interrupted = True
        if run.in_flight is None:
            self._router.withdraw(sample)
        else:
            slot, request_id = run.in_flight
            slot.engine.stop(request_id)

    def _has_ended(self, sample: Sample) -> bool:
        if sample.finish_reason is None and (sample.ends_at is not None or sample.num_left <= 0):
            # The engine died after the last token, before the end. (What a constraint refuses is
            # corrected after each request.)
            if sample.ends_at is not None:
                sample.end_at_stop()
            else:
                sample.finish_reason = "length"
            self._router.note_end(sample)
            self._report(sample)
        return sample.finish_reason is not None

    async def _attempt(self, sample: Sample, run: _Run) -> None:
        """One request. Raises if it must not be retried."""
        began, num_before = time.monotonic(), len(sample.output_ids)
        with _span("request") as span:
            slot = await self._wait_for_slot(sample, run)
            name, run.first_token_at = slot.engine.name, None
            self._count_time("queue", name, slot.begun - began)
            try:
                goes_on = not run.is_interrupted
                while goes_on:
                    num_failures = run.num_failures
                    await self._ask(sample, run, slot)
                    await self._correct(sample, run)
                    has_failed = run.num_failures > num_failures
                    has_ended = sample.finish_reason is not None or sample.ends_at is not None
                    goes_on = slot.may_go_on and not (has_ended or has_failed or run.is_interrupted)
            finally:
                slot.release()
                times = (began, slot.begun, run.first_token_at)
                describe_request(span, sample, name, num_before, times)
        if sample.ends_at is not None:
            sample.end_at_stop()
        if sample.finish_reason is not None:
            self._router.note_end(sample)
        elif run.is_interrupted:
            raise Interrupted(sample.sample_id)
        elif run.num_failures > self._max_retries:
            raise SampleFailed(
                f"{sample.sample_id} failed {run.num_failures} times "
                f"(rollout.max_request_retries={self._max_retries}); the last: {run.last_error}"
            )

    async def _wait_for_slot(self, sample: Sample, run: _Run) -> Slot:
        if sample.on_wait is None:
            return await self._router.assign(sample, run.failed)
        sample.on_wait(True)
        try:
            return await self._router.assign(sample, run.failed)
        finally:
            sample.on_wait(False)

    async def _ask(self, sample: Sample, run: _Run, slot: Slot) -> None:
        sample.num_attempts += 1
        self.counted[f"requests:{slot.engine.name}"] += 1
        # SGLang aborts all requests whose ids begin with the given one: the mark at the end keeps
        # an abort of sample 1 from ending sample 10.
        request_id = f"{sample.sample_id}.{sample.num_attempts}!"
        num_arrived = num_looked_at = len(sample.output_ids)

        def on_arrival() -> None:
            nonlocal num_arrived
            self.counted["tokens_arrived"] += len(sample.output_ids) - num_arrived
            num_arrived = len(sample.output_ids)
            if run.first_token_at is None:
                run.first_token_at = time.monotonic()
                self._count_time("first_token", slot.engine.name, run.first_token_at - slot.begun)
            slot.progress()
            if run.guide is None:
                look()
            elif run.following is None:
                run.following = asyncio.create_task(follow(run.guide))

        def look() -> None:
            nonlocal num_looked_at
            self._look_for_stop(sample, run, num_looked_at)
            if sample.ends_at is not None and sample.finish_reason is None:
                slot.engine.stop(request_id)
            num_looked_at = sample.num_ready
            self._report(sample)

        async def follow(guide: Guide) -> None:
            try:
                while sample.alternatives and sample.ends_at is None:
                    await guide.follow(sample)
                    look()
            except Exception:
                slot.engine.stop(request_id)
                raise
            run.following = None  # at its last moment: what arrives later begins another

        run.in_flight = (slot, request_id)
        try:
            await self._generate(sample, run, slot, request_id, on_arrival)
            if run.following is not None:
                await run.following
        finally:
            if run.following is not None:
                await end_tasks([run.following])
                run.following = None

    async def _generate(
        self,
        sample: Sample,
        run: _Run,
        slot: Slot,
        request_id: str,
        on_arrival: Callable[[], None],
    ) -> None:
        try:
            await slot.engine.generate(sample, request_id, on_arrival)
        except SampleRefused as error:
            self._note_failure(sample, run, slot, error)
        except BadLogprobs as error:
            sample.num_refused += 1
            self._note_failure(sample, run, slot, error)
        except EngineError as error:
            run.failed[slot.engine.name] = slot.fail()
            self._note_failure(sample, run, slot, error)
        finally:
            run.in_flight = None

    async def _correct(self, sample: Sample, run: _Run) -> None:
        """Puts right what the constraint has refused, if anything."""
        num_before = sample.num_ready
        goes_on = run.guide is not None and run.guide.correct(sample)
        while run.guide is not None and goes_on:
            self._look_for_stop(sample, run, num_before)
            self._report(sample)
            num_before = sample.num_ready
            is_over = sample.ends_at is not None or run.is_interrupted
            goes_on = not is_over and await run.guide.extend(sample)

    def _look_for_stop(self, sample: Sample, run: _Run, num_seen: int) -> None:
        """Among the tokens that stay; those from `num_seen` on are new."""
        if not sample.stop or sample.num_ready <= num_seen:
            return
        assert self._decode is not None, "this sampler cannot read tokens"
        tokens = sample.output_ids[: sample.num_ready]
        end = find_stop(tokens, num_seen, sample.stop, self._decode)
        if end is not None:
            sample.ends_at = end
            if run.guide is not None:
                run.guide.forget()

    def _count_time(self, what: str, engine: str, seconds: float) -> None:
        bound = next(bound for bound in TIME_BOUNDS_S if seconds <= bound)
        self.counted[f"{what}_within:{bound:g}"] += 1
        self.counted[f"{what}_s:{engine}"] += max(0.0, seconds)  # type: ignore[assignment]

    def _note_failure(self, sample: Sample, run: _Run, slot: Slot, error: Exception) -> None:
        run.failed.setdefault(slot.engine.name, slot.begun)
        trace.get_current_span().set_status(StatusCode.ERROR, str(error))
        run.last_error = error
        run.num_failures += 1
        sample.num_failures += 1

    def _report(self, sample: Sample) -> None:
        if sample.on_tokens is not None:
            sample.on_tokens(sample)


def _span(name: str, sample: Sample | None = None) -> AbstractContextManager[Span]:
    """An interruption is no error; failures are noted one by one."""
    return tracer.start_as_current_span(
        name,
        context=sample.span_context if sample else None,
        attributes={"sample": sample.sample_id} if sample else None,
        record_exception=False,
        set_status_on_exception=False,
    )
