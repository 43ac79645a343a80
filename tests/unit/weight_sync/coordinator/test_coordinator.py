"""Receivers that fail affect only themselves: real processes, killed and stopped."""

from __future__ import annotations

import signal

import pytest

from tests.support.weights.scene import TIMEOUT_S, Receivers, Scene, scene, set_layout

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="session")]


async def test_catch_up_is_reported_though_the_receivers_answer_was_lost(
    receivers: Receivers,
) -> None:
    async with scene(receivers) as s:
        await s.add("a")
        await s.deliver(0)
        b = await s.get("b")
        await set_layout(b.process, s.layout)
        await b.start(loses_answers_to="/catch_up")
        await s.event("catch_up")
        assert [event["who"] for event in s.board.events("catch_up_failed")] == ["b"]
        assert ("b", 0) in s.board.staged
        await s.check(b, 0)


@pytest.mark.parametrize("is_registered", [False, True])
async def test_joiner_gets_the_trainers_snapshot_when_no_peer_lives(
    receivers: Receivers, is_registered: bool
) -> None:
    async with scene(receivers) as s:
        (a,) = await s.add("a")
        await s.deliver(0)
        await a.die()
        if not is_registered:
            del s.board.registered["a"]
        (b,) = await s.add("b")
        await s.event("catch_up")
        await s.check(b, 0)
        assert s.board.events("catch_up")[0]["detail"] == "version 0 from the trainer"
        assert s.board.available == [0]


async def test_receiver_without_the_base_makes_the_next_version_full(receivers: Receivers) -> None:
    async with scene(receivers, full_every=10) as s:
        (a,) = await s.add("a")
        await s.deliver(0)
        await a.die()
        del s.board.registered["a"]
        # Pending before b is there: else b might have got version 0 from the trainer meanwhile.
        await s.publish(1)
        (b,) = await s.add("b")
        await s.committed(1)
        await s.check(b, 1)
        assert [r["mode"] for r in await s.publish_records(1)] == ["full", "full"]


@pytest.mark.parametrize(("victim", "full_every"), [(0, 1), (1, 10)])
async def test_receiver_that_dies_during_a_transfer_affects_only_itself(
    receivers: Receivers, victim: int, full_every: int
) -> None:
    async with scene(receivers, full_every=full_every) as s:
        s.share = 0.2
        nodes = await s.add("a", "b")
        if full_every > 1:
            await s.deliver(0)
        async with s.publishing(1):
            await nodes[victim].die()
        survivor = nodes[1 - victim]
        await s.committed(1)
        await s.check(survivor, 1)
        assert s.board.events("excluded")[0]["who"] == nodes[victim].name
        assert [e["who"] for e in s.board.events("epoch")] == ["a, b", survivor.name]
        # It comes back, in another process, and gets the version from the survivor.
        await nodes[victim].start()
        await s.event("catch_up")
        await s.check(nodes[victim], 1)


async def test_receiver_that_stalls_costs_itself_until_it_answers_again(
    receivers: Receivers,
) -> None:
    async with scene(receivers, timeout_s=3.0, min_bandwidth=10_000.0, bucket_bytes=4096) as s:
        a, b = await s.add("a", "b")
        await s.deliver(0)
        async with s.publishing(1):
            b.signal(signal.SIGSTOP)
        del s.board.engines["engine-of-b"]
        await s.committed(1)
        await s.check(a, 1)
        (excluded,) = s.board.events("excluded")
        assert excluded["who"] == "b"
        # It was not waited for as long as its bytes might have taken, and is not waited for again:
        # the next version has only the one that answers.
        await s.deliver(2)
        assert len(s.board.events("excluded")) == 1
        b.signal(signal.SIGCONT)
        await s.event("catch_up")
        await s.check(b, 2)
        assert [event["who"] for event in s.board.events("came_back")] == ["b"]


async def test_receiver_without_a_free_slot_costs_itself(receivers: Receivers) -> None:
    async with scene(receivers) as s:
        a, b = await s.add("a", "b")
        await s.deliver(0)
        assert b.client is not None
        await b.client.hold(0, "a-reader", 600.0, timeout_s=TIMEOUT_S)
        await s.publish(1)
        await s.board.wait_until(lambda: s.board.available[-1:] == [1], TIMEOUT_S)
        await s.board.wait_until(lambda: ("b", 1) in s.board.staged, TIMEOUT_S)
        # Version 0 is held and version 1 is the newest: no slot is free at b.
        await s.publish(2)
        await s.event("left_out")
        assert s.board.events("left_out")[0]["who"] == "b"
        await s.board.wait_until(lambda: s.board.available[-1:] == [2], TIMEOUT_S)
        await s.check(a, 2)
        await b.client.let_go(0, "a-reader", timeout_s=TIMEOUT_S)
        await s.board.wait_until(lambda: ("b", 2) in s.board.staged, TIMEOUT_S)
        await s.check(b, 2)


async def test_version_that_no_receiver_could_take_is_sent_when_one_can(
    receivers: Receivers,
) -> None:
    async with scene(receivers) as s:
        (a,) = await s.add("a")
        async with s.publishing(0):
            await a.die()
        await s.event("excluded")
        assert s.board.available == []
        await a.start()
        await s.committed(0)
        await s.check(a, 0)


async def test_bytes_that_were_changed_on_the_way_are_sent_again_and_never_seen(
    receivers: Receivers,
) -> None:
    async with scene(receivers) as s:
        (a,) = await s.add("a")
        s.board.on_record = lambda record: _flip(s, record)
        await s.deliver(0, a)
        (torn,) = s.board.events("torn")
        assert torn["who"] == "a" and "embed" in torn["detail"]
        assert s.board.available == [0] and s.board.staged == [("a", 0)]


async def test_rank_that_has_no_memory_for_it_now_sends_the_version_later(
    receivers: Receivers, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with scene(receivers) as s:
        (a,) = await s.add("a")
        rank, failures = s.engine._coordinator._sending, [MemoryError()]
        encode = rank._encode

        def fail_once(command):
            if failures:
                raise failures.pop()
            return encode(command)

        monkeypatch.setattr(rank, "_encode", fail_once)
        await s.deliver(0, a)
        (unsent,) = s.board.events("unsent")
        assert "MemoryError" in unsent["detail"]


def _flip(s: Scene, record: dict[str, object]) -> None:
    """Another bit from when the checksums were made until a receiver has noticed."""
    if record.get("event") == "epoch" or record.get("event") == "torn":
        _, checksums = s.engine._coordinator._sending._checksums
        checksums.result(60)
        slot = s.engine._snapshots._buffers[0].stream
        slot[12345] ^= 64
