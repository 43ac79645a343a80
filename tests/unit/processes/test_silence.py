"""When missing answers are a silence."""

from __future__ import annotations

import asyncio
import time
from itertools import chain, repeat

from processes import silence
from processes.silence import wait_silent


async def no(timeout_s):
    return False


async def test_missing_answers_for_the_whole_time_are_silence():
    async with asyncio.timeout(60):
        assert await wait_silent(no, 0.2) >= 0.2


async def test_limit_may_become_known_later(monkeypatch):
    monkeypatch.setattr(silence, "INTERVAL_S", 0.05)
    limits = chain([60.0], repeat(0.1))
    async with asyncio.timeout(60):
        assert await wait_silent(no, lambda: next(limits)) >= 0.1


async def test_single_answer_in_the_time_is_no_silence():
    number = 0

    async def sometimes(timeout_s):
        nonlocal number
        number += 1
        return number % 2 == 0

    waiting = asyncio.create_task(wait_silent(sometimes, 0.2))
    while number < 8 and not waiting.done():
        await asyncio.sleep(0.01)
    assert not waiting.done()
    waiting.cancel()
    await asyncio.wait({waiting})


async def test_standstill_of_the_polling_process_proves_nothing():
    number = 0

    async def after_a_standstill(timeout_s):
        nonlocal number
        number += 1
        if number == 1:
            time.sleep(0.3)  # of the whole process: nothing of this loop runs
            return False
        return True

    waiting = asyncio.create_task(wait_silent(after_a_standstill, 0.2))
    while number < 3 and not waiting.done():
        await asyncio.sleep(0.01)
    assert not waiting.done()
    waiting.cancel()
    await asyncio.wait({waiting})
