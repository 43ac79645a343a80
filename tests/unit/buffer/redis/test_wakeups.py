"""Waits: woken by events and not by polling, ended by time-outs and by close."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from buffer.redis.client import BufferClosedError
from buffer.redis.wakeups import MAX_BLOCK_S
from buffer.run_state import RunState
from configs.choices import OnStale
from tests.support.buffer.blocked import still_waits, until_blocked
from tests.support.buffer.groups import lease_batch, make_group


async def test_push_that_completes_a_batch_wakes_the_lease(buffer_factory: Any) -> None:
    buffer = await buffer_factory()
    waiting = asyncio.create_task(lease_batch(buffer, 0, 2, timeout_s=300))
    await buffer.push(make_group("a"))
    await still_waits(waiting)
    await buffer.push(make_group("b"))
    async with asyncio.timeout(MAX_BLOCK_S / 2):
        assert (await waiting).group_ids == ("a", "b")


@pytest.mark.parametrize("shards", [1, 3])
async def test_ranks_get_the_same_short_batch_when_the_first_has_waited_long_enough(
    buffer_factory: Any, shards: int
) -> None:
    clients = [await buffer_factory(shards=shards) for _ in range(2)]
    for name in "abc":
        await clients[0].push(make_group(name))
    waiting = [
        asyncio.create_task(
            client.lease(
                step=0,
                version=0,
                num_groups=9,
                min_groups=2,
                share=share,
                num_shares=2,
                batch_timeout_s=batch_timeout_s,
                timeout_s=300,
            )
        )
        for share, (client, batch_timeout_s) in enumerate(zip(clients, (3.0, 200.0), strict=True))
    ]
    await still_waits(waiting[0])  # still for a full batch
    leases = await asyncio.wait_for(asyncio.gather(*waiting), 60)
    assert leases[0].lease_token == leases[1].lease_token
    trained = [[group.group_id for group in lease.groups] for lease in leases]
    assert sorted(len(share) for share in trained) == [1, 2]
    assert sorted(trained[0] + trained[1]) == ["a", "b", "c"]
    assert await clients[0].consume(leases[0], leases[0].group_ids) == 3


@pytest.mark.parametrize("shards", [1, 3])
async def test_short_batch_waits_for_its_smallest_number_and_holds_at_most_a_full_one(
    buffer_factory: Any, shards: int
) -> None:
    buffer = await buffer_factory(shards=shards)
    request = {
        "version": 0,
        "share": 0,
        "num_shares": 1,
        "num_groups": 4,
        "min_groups": 2,
        "batch_timeout_s": 0.001,
    }
    await buffer.push(make_group("a"))
    with pytest.raises(TimeoutError, match=r"step 0 waited 0.05 s for 2 fresh groups .*: 1 are"):
        await buffer.lease(step=0, timeout_s=0.05, **request)
    waiting = asyncio.create_task(buffer.lease(step=0, timeout_s=300, **request))
    await still_waits(waiting)
    await buffer.push(make_group("b"))
    assert set((await asyncio.wait_for(waiting, 60)).group_ids) == {"a", "b"}
    for name in "cdefg":
        await buffer.push(make_group(name))
    assert len((await buffer.lease(step=1, timeout_s=300, **request)).group_ids) == 4
    with pytest.raises(ValueError, match=r"min_groups=5, num_shares=1, num_groups=4"):
        await buffer.lease(step=2, timeout_s=0, **{**request, "min_groups": 5})


@pytest.mark.parametrize("event", ["consume", "abandon", "stale", "publish", "commit", "tune"])
async def test_admission_is_woken_by_everything_that_makes_room(
    buffer_factory: Any, redis: Any, run_name: str, event: str
) -> None:
    buffer = await buffer_factory(groups_per_step=1, max_staleness=1)
    state = RunState(redis, run_name)
    await buffer.push(make_group("a"))
    await buffer.admit("b", 0)
    if event == "commit":
        await state.record_commits({"engine": 0})
        await buffer.announce_version(1)
        lease = await lease_batch(buffer, version=1)
        await buffer.consume(lease, lease.group_ids)  # 1 running, limit (1 + 1 - 1) * 1
    else:
        lease = await lease_batch(buffer)
    waiting = asyncio.create_task(buffer.admit("c", 300))
    await still_waits(waiting)
    if event == "consume":
        await buffer.consume(lease, ["a"])
    elif event == "abandon":
        await buffer.abandon("b", "test")
    elif event == "stale":
        await buffer.announce_version(2)
        await buffer.validate(lease, 2)
    elif event == "publish":
        await buffer.nack(lease, "test")
        await buffer.announce_version(2)
        await buffer.sweep()
    elif event == "commit":
        await state.record_commits({"engine": 1})
    else:
        await buffer.change_settings({"max_staleness": 2})
    await asyncio.wait_for(waiting, 60)


@pytest.mark.parametrize("event", ["push", "abandon", "tune"])
@pytest.mark.parametrize("shards", [1, 3])
async def test_on_stale_wait_delays_a_lease_until_no_running_group_would_become_too_old(
    buffer_factory: Any, shards: int, event: str
) -> None:
    buffer = await buffer_factory(max_staleness=1, on_stale=OnStale.wait, shards=shards)
    slow = (await buffer.admit("slow", 0)).group_id
    await buffer.announce_version(1)
    for name in "ab":
        await buffer.push(make_group(name, 1))
    request = {"step": 0, "num_groups": 2, "share": 0, "num_shares": 1, "version": 1}
    with pytest.raises(TimeoutError, match=f"waited 0 s .* for group {slow}, which started at"):
        await buffer.lease(timeout_s=0, **request)
    waiting = asyncio.create_task(buffer.lease(timeout_s=300, **request))
    await still_waits(waiting)
    if event == "push":
        await buffer.push(make_group(slow, 0))
    elif event == "abandon":
        await buffer.abandon(slow, "test")
    else:
        await buffer.change_settings({"max_staleness": 5})
    lease = await asyncio.wait_for(waiting, 60)
    assert (lease.group_ids[0] == slow) is (event == "push")  # the last step that can train it


async def test_blocked_workers_never_exceed_the_admission_bound(buffer_factory: Any) -> None:
    async def work(worker: int) -> int:
        buffer = await buffer_factory(groups_per_step=2, max_staleness=1)
        most = 0
        for number in range(5):
            await buffer.admit(f"g{worker}-{number}", 60)
            most = max(most, (await buffer.stats()).running)
            await buffer.abandon(f"g{worker}-{number}", "test")
        return most

    most = await asyncio.gather(*(work(worker) for worker in range(8)))
    assert max(most) == 4
    stats = await (await buffer_factory()).stats()
    assert (stats.abandoned, stats.running) == (40, 0)


async def test_wait_timeout_says_what_was_missing(buffer_factory: Any) -> None:
    buffer = await buffer_factory(groups_per_step=1, max_staleness=0)
    with pytest.raises(TimeoutError, match=r"step 4 waited 0.05 s for 2 fresh groups .*: 0 are"):
        await lease_batch(buffer, 4, 2, timeout_s=0.05)
    await buffer.admit("a", 0)
    with pytest.raises(TimeoutError, match=r"no room for group b within 0.05 s: 1 groups"):
        await buffer.admit("b", 0.05)


async def test_close_ends_every_wait(buffer_factory: Any) -> None:
    buffer = await buffer_factory(groups_per_step=1, max_staleness=0, capacity_groups=1)
    await buffer.push(make_group("a"))
    waiting = [
        asyncio.create_task(buffer.admit("b", 300)),
        asyncio.create_task(lease_batch(buffer, 0, 9, timeout_s=300)),
        *(asyncio.create_task(buffer.push(make_group(name), 300)) for name in "bcd"),
    ]
    await still_waits(waiting[-1])
    await buffer.close()
    for task in waiting:
        with pytest.raises(BufferClosedError):
            await asyncio.wait_for(task, 60)


async def test_blocked_clients_send_no_commands(buffer_factory: Any, redis: Any) -> None:
    buffer = await buffer_factory(groups_per_step=1, max_staleness=0)
    await buffer.admit("a", 0)
    waiting = [
        asyncio.create_task(buffer.admit("b", 300)),
        asyncio.create_task(lease_batch(buffer, timeout_s=300)),
    ]
    await until_blocked(redis, 2)
    before = (await redis.info("stats"))["total_commands_processed"]
    await asyncio.sleep(0.5)
    after = (await redis.info("stats"))["total_commands_processed"]
    assert after - before <= 1  # INFO itself
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)


async def test_cancelled_wait_ends_at_whatever_point_the_cancellation_arrives(
    buffer_factory: Any,
) -> None:
    buffer = await buffer_factory(groups_per_step=1, max_staleness=0)
    await buffer.admit("holds-the-only-credit", 60)
    for num_turns in range(12):
        waiting = asyncio.create_task(buffer.admit("waits", 300))
        for _ in range(num_turns):
            await asyncio.sleep(0)
        waiting.cancel()
        done, _ = await asyncio.wait({waiting}, timeout=60)
        assert waiting in done and waiting.cancelled()
