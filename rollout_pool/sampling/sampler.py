"""Completes samples, retrying at other engines when one fails.

complete(sample): slot ──► engine ──► ended
                    ▲          │ engine lost, sample refused: its tokens are kept, the rest is
                    └──────────┘ requested elsewhere, `max_retries` times
                               │ interrupt(): the same, when `complete` is called again
"""

from __future__ import annotations

import asyncio
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field

from opentelemetry import trace
from opentelemetry.trace import Span, StatusCode

from rollout_pool.cancelling import end_tasks
from rollout_pool.sampling.constraint import Guide
from rollout_pool.sampling.engine_client import BadLogprobs, EngineError, SampleRefused
from rollout_pool.sampling.engine_state import Slot
from rollout_pool.sampling.grammars import Grammars
from rollout_pool.sampling.router import Router
from rollout_pool.sampling.sample import Clock, Interrupted, Sample, SampleFailed
from rollout_pool.sampling.stop import find_stop
from rollout_pool.sampling.tracing import open_span, tracer

TIME_BOUNDS_S = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, float("inf"))
"""Upper bounds in seconds of the buckets in which the times of requests are counted."""
_BOUNDS = [f"{bound:g}" for bound in TIME_BOUNDS_S]


@dataclass(eq=False)
class Sampler:
    """Completes samples at the engines of one router, any number at once.

    Setting: rollout.max_request_retries.

    Example, of a sample that is interrupted after 12 tokens and later goes on:

        await sampler.complete(sample)   # raises Interrupted: len(sample.output_ids) == 12
        await sampler.complete(sample)   # its prompt is sent with those 12: finish_reason "stop"
    """

    router: Router
    max_retries: int
    decode: Callable[[Sequence[int]], str] | None = None
    """The text of tokens, special ones included; needed for `Sample.stop`."""
    grammars: Grammars | None = None
    """Needed for `Sample.constraint`."""
    counted: Counter[str] = field(default_factory=Counter, init=False)
    """Totals over all requests so far, as counters of the run: their number, the tokens that have
    arrived, the time that they waited for a slot, from there to their first token, and to the end.
    """
    _running: dict[Sample, _Completion] = field(default_factory=dict, init=False)

    async def complete(self, sample: Sample, clock: Clock | None = None) -> None:
        """Implements Completer.complete."""
        assert sample not in self._running, f"{sample.sample_id} is in progress already"
        completion = self._running[sample] = _Completion(self, sample, clock)
        about = {"sample": sample.sample_id}
        # An interruption is no error; failures are noted one by one.
        with open_span("sample", about, sample.span_context, fails=False) as span:
            try:
                if sample.constraint is not None:
                    assert self.grammars is not None, "this sampler has no grammars"
                    completion.guide = await Guide.of(sample, self.grammars)
                await completion.run()
            finally:
                del self._running[sample]
                if completion.guide is not None:
                    completion.guide.close()
                span.set_attribute("finish_reason", sample.finish_reason or "none")

    def interrupt(self, sample: Sample) -> None:
        """Implements Completer.interrupt."""
        if (completion := self._running.get(sample)) is not None:
            completion.interrupt()

    def count_time(self, what: str, engine: str, seconds: float) -> None:
        bound = _BOUNDS[bisect_left(TIME_BOUNDS_S, seconds)]
        self.counted[f"{what}_within:{bound}"] += 1
        self.counted[f"{what}_s:{engine}"] += max(0.0, seconds)  # type: ignore[assignment]


class _Completion:
    """One call of `complete`."""

    def __init__(self, sampler: Sampler, sample: Sample, clock: Clock | None) -> None:
        self._sampler = sampler
        self._sample = sample
        self._clock = clock
        self.guide: Guide | None = None
        """Applies the constraint, if it has one."""
        self._failed: dict[str, float] = {}
        """Engines that failed it, with the time."""
        self._num_failures = 0
        self._last_error: Exception | None = None
        self._is_interrupted = False
        self._slot: Slot | None = None
        """While a request is in flight."""
        self._request_id = ""
        self._first_token_at: float | None = None
        self._num_arrived = self._num_looked_at = 0
        """Tokens so far; those among which a text of `stop` was looked for."""
        self._following: asyncio.Task[None] | None = None
        """Applies the constraint to what has arrived."""

    async def run(self) -> None:
        self._look_for_stop(0)  # a worker before may have found it
        while not self._has_ended():
            await self._attempt()

    def interrupt(self) -> None:
        self._is_interrupted = True
        if self._slot is None:
            self._sampler.router.withdraw(self._sample)
        else:
            self._slot.engine.stop(self._request_id)

    def _has_ended(self) -> bool:
        sample = self._sample
        if sample.finish_reason is None and (sample.ends_at is not None or sample.num_left <= 0):
            # The engine died after the last token, before the end. (What a constraint refuses is
            # corrected after each request.)
            if sample.ends_at is not None:
                sample.end_at_stop()
            else:
                sample.finish_reason = "length"
            self._sampler.router.note_end(sample)
            self._report()
        return sample.finish_reason is not None

    async def _attempt(self) -> None:
        """Requests at one engine. Raises if the sample must not be requested elsewhere."""
        sample, router = self._sample, self._sampler.router
        began, num_before = time.monotonic(), len(sample.output_ids)
        with open_span("request", fails=False) as span:
            with self._clock.paused() if self._clock else nullcontext():
                slot = await router.assign(sample, self._failed)
            name, self._first_token_at = slot.engine.name, None
            self._sampler.count_time("queue", name, slot.begun - began)
            try:
                goes_on = not self._is_interrupted
                while goes_on:
                    num_failures = self._num_failures
                    await self._ask(slot)
                    await self._correct()
                    has_ended = sample.finish_reason is not None or sample.ends_at is not None
                    is_over = has_ended or self._is_interrupted
                    goes_on = slot.may_go_on and self._num_failures == num_failures and not is_over
            finally:
                slot.release()
                if (since := self._first_token_at) is not None:
                    took_s = time.monotonic() - since
                    self._sampler.counted[f"decode_s:{name}"] += took_s
                times = (began, slot.begun, self._first_token_at)
                _describe_request(span, sample, name, num_before, times)
        if sample.ends_at is not None:
            sample.end_at_stop()
        if sample.finish_reason is not None:
            router.note_end(sample)
        elif self._is_interrupted:
            raise Interrupted(sample.sample_id)
        elif self._num_failures > self._sampler.max_retries:
            raise SampleFailed(
                f"{sample.sample_id} failed {self._num_failures} times "
                f"(rollout.max_request_retries={self._sampler.max_retries}); the last: "
                f"{self._last_error}"
            )

    async def _ask(self, slot: Slot) -> None:
        """One request, until all that has arrived is followed."""
        sample = self._sample
        sample.num_attempts += 1
        self._sampler.counted[f"requests:{slot.engine.name}"] += 1
        # SGLang aborts all requests whose ids begin with the given one: the mark at the end keeps
        # an abort of sample 1 from ending sample 10.
        self._request_id = f"{sample.sample_id}.{sample.num_attempts}!"
        self._num_arrived = self._num_looked_at = len(sample.output_ids)
        self._slot = slot
        try:
            await self._generate(slot)
            if self._following is not None:
                await self._following
        finally:
            if self._following is not None:
                await end_tasks([self._following])
                self._following = None

    async def _generate(self, slot: Slot) -> None:
        name = slot.engine.name
        try:
            await slot.engine.generate_tokens(self._sample, self._request_id, self._arrived)
        except (SampleRefused, BadLogprobs) as error:
            self._sample.num_refused += isinstance(error, BadLogprobs)
            self._note_failure(name, slot.begun, error)
        except EngineError as error:
            self._failed[name] = slot.fail()
            self._note_failure(name, slot.begun, error)
        finally:
            self._slot = None

    def _note_failure(self, engine: str, begun: float, error: Exception) -> None:
        self._failed.setdefault(engine, begun)
        trace.get_current_span().set_status(StatusCode.ERROR, str(error))
        self._last_error = error
        self._num_failures += 1
        self._sample.num_failures += 1

    # What arrives ---------------------------------------------------------------------------------

    def _arrived(self) -> None:
        assert self._slot is not None
        counted, num_tokens = self._sampler.counted, len(self._sample.output_ids)
        counted["tokens_arrived"] += num_tokens - self._num_arrived
        self._num_arrived = num_tokens
        if self._first_token_at is None:
            self._first_token_at = time.monotonic()
            waited_s = self._first_token_at - self._slot.begun
            self._sampler.count_time("first_token", self._slot.engine.name, waited_s)
        self._slot.progress()
        if self.guide is None:
            self._look()
        elif self._following is None:
            self._following = asyncio.create_task(self._follow(self.guide, self._slot))

    async def _follow(self, guide: Guide, slot: Slot) -> None:
        try:
            while self._sample.guidance.alternatives and self._sample.ends_at is None:
                await guide.follow(self._sample)
                self._look()
        except Exception:
            slot.engine.stop(self._request_id)
            raise
        self._following = None  # at its last moment: what arrives later begins another

    def _look(self) -> None:
        self._look_for_stop(self._num_looked_at)
        if self._slot and self._sample.ends_at is not None and self._sample.finish_reason is None:
            self._slot.engine.stop(self._request_id)
        self._num_looked_at = self._sample.num_ready
        self._report()

    async def _correct(self) -> None:
        """Puts right what the constraint has refused, if anything."""
        sample, guide = self._sample, self.guide
        num_before = sample.num_ready
        goes_on = guide is not None and guide.correct(sample)
        while guide is not None and goes_on:
            self._look_for_stop(num_before)
            self._report()
            num_before = sample.num_ready
            is_over = sample.ends_at is not None or self._is_interrupted
            goes_on = not is_over and await guide.extend(sample)

    def _look_for_stop(self, num_seen: int) -> None:
        """Among the tokens that stay; those from `num_seen` on are new."""
        sample = self._sample
        if not sample.stop or sample.num_ready <= num_seen:
            return
        assert self._sampler.decode is not None, "this sampler cannot read tokens"
        tokens = sample.output_ids[: sample.num_ready]
        end = find_stop(tokens, num_seen, sample.stop, self._sampler.decode)
        if end is not None:
            sample.ends_at = end
            if self.guide is not None:
                self.guide.forget()

    def _report(self) -> None:
        if self._sample.on_tokens is not None:
            self._sample.on_tokens(self._sample)


def _describe_request(
    span: Span,
    sample: Sample,
    engine: str,
    num_tokens_before: int,
    times: tuple[float, float, float | None],
) -> None:
    """Ends the description of a request: its attributes and its parts. `times`, monotonic: when it
    began to wait, when it got its slot, and its first token."""
    if not span.is_recording():
        return
    waited_from, began, first_token = times
    spans = [one for one in sample.version_spans if one.end > num_tokens_before]
    span.set_attributes(
        {
            "engine": engine,
            "prompt_tokens": len(sample.prompt) + num_tokens_before,
            "tokens": len(sample.output_ids) - num_tokens_before,
            "versions": sorted({one.version for one in spans}),
        }
    )
    now = time.monotonic()
    parts = [("queue", waited_from, began), ("prefill", began, first_token or now)]
    parts += [("decode", first_token, now)] if first_token else []
    wall, context = time.time() - now, trace.set_span_in_context(span)
    for name, start, end in parts:
        part = tracer.start_span(name, context, start_time=int((wall + start) * 1e9))
        part.end(int((wall + end) * 1e9))
