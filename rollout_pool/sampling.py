"""Gets a sample for every prompt of a call, from whichever engines can give one."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from rollout_pool.generation import EngineError, Event, Generation, Refused, SampleRequest, Sampling
from rollout_pool.router import Router

SAME_ENGINE_PAUSE_S = 1.0
"""Before an engine that has just failed is asked again. If it has died, the router knows by then,
and the call waits for it or goes elsewhere instead of failing once more at once."""


class SamplesFailed(RuntimeError):
    """Some prompts got no usable sample in the attempts that they had."""


class Sampler:
    """Asks again for samples that fail, up to `max_retries` times, elsewhere if there is a choice.

    Setting: rollout.max_request_retries.
    """

    def __init__(self, router: Router, sampling: Sampling, max_retries: int) -> None:
        self._router = router
        self._sampling = sampling
        self._max_retries = max_retries

    async def run(
        self, call: str, prompts: Sequence[Sequence[int]], min_version: int = 0
    ) -> AsyncGenerator[Event]:
        """Events of all prompts, by their place in `prompts`: in the end one Generation each.

        `call` is unique in the run; request ids are made from it. No token is older than
        `min_version`. Raises SamplesFailed.
        """
        missing = list(range(len(prompts)))
        avoid: set[str] = set()
        last_error: Exception | None = None
        has_failed = False
        for attempt in range(1 + self._max_retries):
            asked = list(missing)
            requests = [
                SampleRequest(request_id=f"{call}.{place}.{attempt}", tokens=prompts[place])
                for place in asked
            ]
            if has_failed and not self._router.has_other(avoid):
                await asyncio.sleep(SAME_ENGINE_PAUSE_S)
            async with self._router.assign(self._weight(requests), avoid, min_version) as engine:
                avoid.add(engine.name)
                try:
                    async with aclosing(engine.generate(requests, self._sampling)) as events:
                        async for event in events:
                            place = asked[event.index]
                            if isinstance(event, Generation):
                                missing.remove(place)
                            elif isinstance(event, Refused):
                                last_error = event.error
                            yield dataclasses.replace(event, index=place)
                except EngineError as error:
                    last_error, has_failed = error, True
            if not missing:
                return
        raise SamplesFailed(
            f"{call}: {len(missing)} of {len(prompts)} samples failed {1 + self._max_retries} "
            f"times (rollout.max_request_retries={self._max_retries}); the last: {last_error}"
        )

    def _weight(self, requests: Sequence[SampleRequest]) -> int:
        """Tokens that the samples may come to hold at the engine."""
        return sum(len(request.tokens) + self._sampling.max_new_tokens for request in requests)
