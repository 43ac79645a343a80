"""Load without a pool: the same requests, sent to the engine by a loop that keeps nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence

import aiohttp

from benchmarks import KEY
from benchmarks.rollouts.work import Job, Tally, now


async def run_bare(jobs: Sequence[Job], url: str, num_running: int, *, prefix: str) -> Tally:
    """A call a group, `num_running` samples at once, with log-probabilities as rollouts need them.

    Answers are read as bytes and thrown away.
    """
    tally = Tally(now())
    waiting = iter(jobs)
    at_once = max(1, num_running // len(jobs[0].lengths))
    async with aiohttp.ClientSession(
        url,
        headers={"Authorization": f"Bearer {KEY}"},
        timeout=aiohttp.ClientTimeout(300),
        connector=aiohttp.TCPConnector(limit=0),
    ) as http:
        loops = [_ask_on(http, waiting, tally, prefix) for _ in range(at_once)]
        await asyncio.gather(*loops)
    return tally


async def _ask_on(
    http: aiohttp.ClientSession, jobs: Iterator[Job], tally: Tally, prefix: str
) -> None:
    for job in jobs:
        body = {
            "rid": [f"{prefix}-{job.index}.{member}!" for member in range(len(job.lengths))],
            "input_ids": [job.prompt] * len(job.lengths),
            "sampling_params": [
                {"temperature": 1.0, "max_new_tokens": length} for length in job.lengths
            ],
            "return_logprob": True,
        }
        async with http.post("/generate", json=body) as response:
            response.raise_for_status()
            await response.read()
        tally.deliver([job.num_tokens])
