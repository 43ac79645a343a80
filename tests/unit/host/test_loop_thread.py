"""An event loop in a thread runs the coroutines of other threads."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator

import pytest

from host.loop_thread import LoopClosedError, LoopThread


@pytest.fixture
def loop() -> Iterator[LoopThread]:
    loop = LoopThread("test")
    yield loop
    loop.stop()


def test_stop_from_another_thread_ends_a_wait(loop: LoopThread) -> None:
    started = threading.Event()
    errors: list[Exception] = []

    async def work() -> None:
        started.set()
        await asyncio.sleep(300)

    def wait() -> None:
        try:
            loop.run(work())
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    assert started.wait(60)
    loop.stop(asyncio.sleep(0))
    thread.join(timeout=60)
    assert [type(error) for error in errors] == [LoopClosedError]
    with pytest.raises(LoopClosedError, match="before this call"):
        loop.run(asyncio.sleep(0))
    loop.stop(asyncio.sleep(0))


def test_stop_leaves_no_call_waiting_at_whatever_moment_it_comes() -> None:
    for _ in range(20):
        loop, begun = LoopThread("test"), threading.Barrier(5)

        def call(loop: LoopThread = loop, begun: threading.Barrier = begun) -> None:
            begun.wait(60)
            with contextlib.suppress(LoopClosedError):
                while True:
                    loop.run(asyncio.sleep(0))

        threads = [threading.Thread(target=call, daemon=True) for _ in range(4)]
        for thread in threads:
            thread.start()
        begun.wait(60)
        loop.run(asyncio.sleep(0.001))
        loop.stop()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive()


def test_running_cancels_its_coroutine_at_the_end_of_the_block(loop: LoopThread) -> None:
    started, ended = threading.Event(), threading.Event()

    async def work() -> None:
        started.set()
        try:
            await asyncio.sleep(60)
        finally:
            ended.set()

    with loop.running(work()):
        assert started.wait(60) and not ended.is_set()
    assert ended.wait(60)
