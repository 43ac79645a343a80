"""Pinning an engine to a version, step by step."""

from __future__ import annotations

import asyncio

import pytest

from rollout_pool.engines.follower import VersionPin


@pytest.fixture
def pin() -> VersionPin:
    pin = VersionPin()
    assert pin.take(4)
    pin.note_served(4)
    return pin


async def test_pin_is_refused_while_another_version_is_being_committed(
    pin: VersionPin,
) -> None:
    assert pin.take(5)
    assert not await pin.want(4, 60.0)
    wanting = asyncio.create_task(pin.want(5, 60.0))
    await asyncio.sleep(0)
    pin.note_served(5)
    assert await wanting


async def test_version_that_was_passed_can_no_longer_be_pinned(pin: VersionPin) -> None:
    wanting = asyncio.create_task(pin.want(5, 60.0))
    await asyncio.sleep(0)
    assert pin.take(6)
    assert not await wanting
    pin.note_served(6)
    assert not await pin.want(5, 60.0)


async def test_commit_that_could_not_begin_leaves_the_version_before(pin: VersionPin) -> None:
    assert pin.take(5)
    pin.note_served(4)
    assert await pin.want(4, 0.0)


async def test_pin_allows_only_one_evaluation(pin: VersionPin) -> None:
    wanting = asyncio.create_task(pin.want(5, 60.0))
    await asyncio.sleep(0)
    assert not await pin.want(4, 60.0)
    pin.release()
    assert not await wanting


async def test_pin_wait_ends_in_time_and_leaves_the_engine_free(pin: VersionPin) -> None:
    assert not await pin.want(5, 0.01)
    assert pin.take(6)


async def test_cancelled_want_leaves_the_engine_free(pin: VersionPin) -> None:
    wanting = asyncio.create_task(pin.want(5, 60.0))
    await asyncio.sleep(0)
    wanting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await wanting
    assert pin.take(5)
    pin.note_served(5)
    assert not pin.is_pinned


async def test_lost_engine_is_not_pinned(pin: VersionPin) -> None:
    wanting = asyncio.create_task(pin.want(5, 60.0))
    await asyncio.sleep(0)
    pin.note_lost()
    assert not await wanting
    async with asyncio.timeout(60):
        await pin.wait_free()
