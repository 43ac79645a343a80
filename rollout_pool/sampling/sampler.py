"""Completes samples, retrying at other engines when one fails.

complete(sample): slot ──► engine ──► ended
                    ▲          │ engine lost, sample refused: its tokens are kept, the rest is
                    └──────────┘ requested elsewhere, `max_retries` times
                               │ interrupt(): the same, when `complete` is called again
"""

from __future__ import annotations

from dataclasses import dataclass, field

from rollout_pool.sampling.engine_client import BadLogprobs, EngineError, SampleRefused
from rollout_pool.sampling.engine_state import Slot
from rollout_pool.sampling.router import Router
from rollout_pool.sampling.sample import Interrupted, Sample, SampleFailed


@dataclass(kw_only=True, slots=True)
class _Run:
    failed: dict[str, float] = field(default_factory=dict)
    """Engines that failed it, with the time."""
    num_failures: int = 0
    last_error: Exception | None = None
    is_interrupted: bool = False
    in_flight: tuple[Slot, str] | None = None


class Sampler:
    """Completes samples at the engines of one router, any number at once.

    Setting: rollout.max_request_retries.
    """

    def __init__(self, router: Router, max_retries: int) -> None:
        self._router = router
        self._max_retries = max_retries
        self._runs: dict[Sample, _Run] = {}

    async def complete(self, sample: Sample) -> None:
        """See Completer."""
        assert sample not in self._runs, f"{sample.sample_id} is in progress already"
        run = self._runs[sample] = _Run()
        try:
            while not self._has_ended(sample):
                await self._attempt(sample, run)
        finally:
            del self._runs[sample]

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
        if sample.finish_reason is None and sample.num_left <= 0:
            # The engine died after the last token, before the end.
            sample.finish_reason = "length"
            self._router.note_end(sample)
            self._report(sample)
        return sample.finish_reason is not None

    async def _attempt(self, sample: Sample, run: _Run) -> None:
        """One request. Raises if it must not be retried."""
        slot = await self._wait_for_slot(sample, run)
        try:
            if not run.is_interrupted:
                await self._ask(sample, run, slot)
        finally:
            slot.release()
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
        # SGLang aborts all requests whose ids begin with the given one: the mark at the end keeps
        # an abort of sample 1 from ending sample 10.
        request_id = f"{sample.sample_id}.{sample.num_attempts}!"

        def on_arrival() -> None:
            slot.progress()
            self._report(sample)

        run.in_flight = (slot, request_id)
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

    def _note_failure(self, sample: Sample, run: _Run, slot: Slot, error: Exception) -> None:
        run.failed.setdefault(slot.engine.name, slot.begun)
        run.last_error = error
        run.num_failures += 1
        sample.num_failures += 1

    def _report(self, sample: Sample) -> None:
        if sample.on_tokens is not None:
            sample.on_tokens(sample)
