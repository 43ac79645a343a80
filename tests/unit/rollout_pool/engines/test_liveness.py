"""Detection of silent servers whose processes live; real processes and real HTTP."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from processes.silence import wait_silent
from rollout_pool.cancelling import end_tasks
from rollout_pool.engines.lifecycle import EnginePulse
from tests.support.rollout import until


async def no(timeout_s):
    return False


async def test_missing_answers_for_the_whole_time_are_silence():
    async with asyncio.timeout(60):
        assert await wait_silent(no, 0.2) >= 0.2


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
    await end_tasks({waiting})


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
    await end_tasks({waiting})


@pytest.fixture
def server():
    """A process with a child, as SGLang's server has its scheduler."""
    child = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'input()'])"
    process = subprocess.Popen([sys.executable, "-c", child], stdin=subprocess.PIPE)
    while not psutil.Process(process.pid).children():
        time.sleep(0.01)
    yield process
    for each in [process.pid, *(c.pid for c in psutil.Process(process.pid).children())]:
        os.kill(each, signal.SIGKILL)
    process.stdin.close()
    process.wait()


async def test_engine_is_alive_while_its_scheduler_works_or_waits_and_not_while_it_is_stopped(
    client, server
):
    pulse = EnginePulse(client, server.pid)
    assert await pulse.answers(60.0)
    (scheduler,) = psutil.Process(server.pid).children()
    scheduler.send_signal(signal.SIGSTOP)

    async def is_silent():
        return not await pulse.answers(5.0)

    await until(is_silent)  # although the HTTP process answers
    assert await client.answers(60.0)
    scheduler.send_signal(signal.SIGCONT)
    await until(lambda: pulse.answers(60.0))


async def test_engine_whose_http_process_is_silent_does_not_answer(fake, client, server):
    pulse = EnginePulse(client, server.pid)
    fake.slow["/model_info"] = 60.0
    assert not await pulse.answers(0.2)
    fake.slow["/model_info"] = 0.3
    assert await pulse.answers(60.0)  # it is only busy


async def test_task_that_swallows_a_cancellation_is_still_ended():
    async def swallow():
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            await asyncio.Event().wait()

    task = asyncio.create_task(swallow())
    await asyncio.sleep(0)
    async with asyncio.timeout(60):
        await end_tasks({task}, again_s=0.05)
    assert task.cancelled()
