"""Detection of engines that are stopped or silent; real processes and real HTTP."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from rollout_pool.engines.lifecycle import engine_pulse
from tests.support.rollout import until, until_read


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


async def test_engine_is_alive_while_its_scheduler_runs_and_not_while_it_is_stopped(client, server):
    responds = engine_pulse(client, server.pid)
    assert await responds(60.0)
    (scheduler,) = psutil.Process(server.pid).children()
    scheduler.send_signal(signal.SIGSTOP)
    # Although the HTTP process answers.
    await until_read(lambda: responds(5.0), lambda answered: not answered)
    assert await client.responds(60.0)
    scheduler.send_signal(signal.SIGCONT)
    await until(lambda: responds(60.0))


async def test_engine_whose_http_process_is_silent_does_not_answer(fake, client, server):
    responds = engine_pulse(client, server.pid)
    fake.slow["/model_info"] = 60.0
    assert not await responds(0.2)
    fake.slow["/model_info"] = 0.3
    assert await responds(60.0)  # it is only busy
