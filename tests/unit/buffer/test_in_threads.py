"""Trainer ranks, which are threads, use the buffer through a loop thread."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from buffer.connect import Buffer, connect_buffer
from buffer.redis.client import BufferClosedError
from buffer.redis.connection import connect
from buffer.results import Lease, PushResult
from configs.schema import BufferConfig
from host.loop_thread import LoopThread
from tests.support.buffer.blocked import until_blocked
from tests.support.buffer.groups import make_group


@pytest.fixture
def loop() -> Iterator[LoopThread]:
    loop = LoopThread("test")
    yield loop
    loop.stop()


@pytest.fixture
def buffer(loop: LoopThread, redis_url: str, run_name: str) -> Buffer:
    buffer = loop.run(connect_buffer(redis_url, run_name, BufferConfig(lease_timeout_s=60)))
    loop.run(buffer.open(BufferConfig(), 2))
    return buffer


def test_ranks_in_threads_share_a_batch(loop: LoopThread, buffer: Buffer) -> None:
    leases: list[Lease] = []

    def rank(share: int) -> None:
        lease = buffer.lease(
            step=0, version=0, num_groups=2, share=share, num_shares=2, timeout_s=60
        )
        leases.append(loop.run(lease))

    threads = [threading.Thread(target=rank, args=(share,)) for share in range(2)]
    for thread in threads:
        thread.start()
    assert [loop.run(buffer.push(make_group(name))) for name in "ab"] == [PushResult.stored] * 2
    for thread in threads:
        thread.join(timeout=60)
    assert sorted(g.group_id for lease in leases for g in lease.groups) == ["a", "b"]
    assert loop.run(buffer.validate(leases[0], 0)) == {"a", "b"}
    assert loop.run(buffer.consume(leases[0], leases[0].group_ids)) == 2
    assert loop.run(buffer.ack(0)) == 2
    assert loop.run(buffer.stats()).is_conserved
    loop.stop(buffer.close())


async def _until_it_waits_at(url: str) -> None:
    probe = await connect(url)
    await until_blocked(probe, 1)
    await probe.aclose()


def test_close_from_another_thread_ends_a_lease(
    loop: LoopThread, buffer: Buffer, redis_url: str
) -> None:
    errors: list[Exception] = []

    def wait() -> None:
        try:
            loop.run(
                buffer.lease(step=0, version=0, num_groups=1, share=0, num_shares=1, timeout_s=300)
            )
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    loop.run(_until_it_waits_at(redis_url))
    loop.stop(buffer.close())
    thread.join(timeout=60)
    assert [type(error) for error in errors] == [BufferClosedError]
