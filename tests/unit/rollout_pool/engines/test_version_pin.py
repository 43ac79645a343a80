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


async def test_version_is_pinned_once_it_is_served(pin: VersionPin) -> None:
    wanting = asyncio.create_task(pin.want(5, 60.0))
    await asyncio.sleep(0)
    assert not pin.pinned.is_set() and pin.take(5)
    pin.note_served(5)
    assert await wanting and not pin.take(6)


async def test_pin_waits_for_the_end_of_a_commit(pin: VersionPin) -> None:
    """Also where the version wanted is the one before it."""
    assert pin.take(5)
    wanting = asyncio.create_task(pin.want(4, 60.0))
    await asyncio.sleep(0)
    assert not pin.pinned.is_set()
    pin.note_served(5)
    assert await wanting and not pin.take(6)


@pytest.mark.parametrize("served", [6, 7])
async def test_where_the_version_was_skipped_a_later_one_is_pinned(
    pin: VersionPin, served: int
) -> None:
    """The answers of an evaluation have one version even then."""
    if served == 7:  # before it was wanted
        assert pin.take(7)
        pin.note_served(7)
    wanting = asyncio.create_task(pin.want(5, 60.0))
    await asyncio.sleep(0)
    if served == 6:
        assert pin.take(6)
        pin.note_served(6)
    assert await wanting and not pin.take(8)


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
    assert not pin.pinned.is_set()


async def test_lost_engine_is_not_pinned(pin: VersionPin) -> None:
    wanting = asyncio.create_task(pin.want(5, 60.0))
    await asyncio.sleep(0)
    pin.note_lost()
    assert not await wanting
    async with asyncio.timeout(60):
        await pin.free.wait()
