"""A failing receiver delays the others only briefly, and not at every version."""

from __future__ import annotations

import time
from typing import Any

import pytest

from tests.support.weights.known_weights import scene_layout
from tests.support.weights.scene import TIMEOUT_S, Node, Receivers, Scene, scene

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="session")]

SLOW_S = 3 * TIMEOUT_S
"""Every limit that grows with the bytes is longer here than any wait of these tests."""


SO_SLOW = scene_layout(1).num_bytes / SLOW_S
"""A `min_bandwidth` at which a version may take so long."""


def stop_engine_of(s: Scene, node: Node) -> None:
    """Nobody waits for its commits any more."""
    s.board.engines.pop(f"engine-of-{node.name}", None)


@pytest.mark.parametrize("step", ["/layout", "/join", "/receive", "/verify"])
async def test_receiver_that_stalls_at_any_step_is_not_waited_for(
    receivers: Receivers, step: str
) -> None:
    async with scene(receivers, timeout_s=3.0, min_bandwidth=SO_SLOW) as s:
        a, b = await s.add("a", "b")
        gate = await b.put_gate()
        gate.stalls_at = step
        await s.publish(0)
        await s.board.wait_until(lambda: s.board.engines.get("engine-of-a") == 0, TIMEOUT_S)
        stop_engine_of(s, b)
        await s.event("excluded")
        assert [e["who"] for e in s.board.events("excluded")] == ["b"]
        assert s.board.available == [0]
        gate.go_on()
        await s.event("came_back")
        await s.board.wait_until(lambda: ("b", 0) in s.board.staged, TIMEOUT_S)
        await s.check(a, 0)
        await s.check(b, 0)


async def test_receiver_that_takes_no_bytes_though_it_answers_is_left_out(
    receivers: Receivers,
) -> None:
    async with scene(receivers, timeout_s=3.0, min_bandwidth=SO_SLOW, bucket_bytes=4096) as s:
        a, b = await s.add("a", "b")
        gate = await b.put_gate()
        gate.withholds = "/receive"
        await s.publish(0)
        await s.board.wait_until(lambda: s.board.engines.get("engine-of-a") == 0, TIMEOUT_S)
        (event,) = s.board.events("left_out")
        assert event["who"] == "b" and "after the others had given up" in event["detail"]
        # It can still be served by its peer.
        await s.event("catch_up")
        await s.check(a, 0)
        await s.check(b, 0)


async def test_receiver_that_cannot_be_served_is_backed_off_and_left_to_its_peers(
    receivers: Receivers,
) -> None:
    async with scene(receivers, timeout_s=3.0) as s:
        (a,) = await s.add("a")
        await s.deliver(0)
        # It answers all questions, but under this name it will not join a group.
        (b,) = await s.add("b")
        s.board.registered["c"] = s.board.registered.pop("b")
        await s.board.wait_until(lambda: ("c", 0) in s.board.staged, TIMEOUT_S)
        available_before: list[bool] = []

        def note(record: dict[str, Any]) -> None:
            if record.get("event") == "epoch" and record["who"] == "c":
                available_before.append(1 in s.board.available)

        s.board.on_record = note
        await s.publish(1)
        await s.event("set_aside")
        assert available_before == [True]  # `a` had its engines take it before `c` was tried alone
        assert [e["who"] for e in s.board.events("set_aside")] == ["c"]
        epochs = len(s.board.events("epoch"))
        for version in (2, 3):
            await s.deliver(version, a)
            await s.check(b, version)  # from its peer
        assert [e["who"] for e in s.board.events("epoch")[epochs:]] == ["a"]
        assert len(s.board.events("set_aside")) == 1


async def test_late_joiner_does_not_make_the_others_take_every_byte(receivers: Receivers) -> None:
    async with scene(receivers, full_every=100) as s:
        (a,) = await s.add("a")
        for version in (0, 1):
            await s.deliver(version)
        (b,) = await s.add("b")
        await s.deliver(2, a, b)
        # It began to catch up before that version was on its way, and is a member by now.
        caught_up, *_ = s.board.events("catch_up")
        assert f"version 1 from {s.board.registered['a']}" in caught_up["detail"]
        await s.deliver(3)
        assert s.board.events("epoch")[-1]["who"] == "a, b"
        modes = [record["mode"] for record in await s.publish_records(3)]
        assert modes == ["full", "delta", "delta", "delta"]


async def test_version_that_no_receiver_can_take_yet_is_encoded_and_reported_once(
    receivers: Receivers,
) -> None:
    async with scene(receivers, full_every=10) as s:
        (a,) = await s.add("a")
        gate = await a.put_gate()
        assert a.client is not None
        await s.deliver(0)
        await a.client.hold(0, "a-reader", 600.0, timeout_s=TIMEOUT_S)
        await s.deliver(1)
        refused_at: list[float] = []
        tries = gate.num_requests["/status"]

        def note(record: dict[str, Any]) -> None:
            if record.get("event") == "left_out":
                refused_at.append(time.time())

        s.board.on_record = note
        await s.publish(2)  # version 0 is held and version 1 is the newest: no slot is free
        await s.event("left_out")
        await gate.wait_requests("/status", tries + 3, TIMEOUT_S)
        await a.client.let_go(0, "a-reader", timeout_s=TIMEOUT_S)
        await s.committed(2)
        await s.check(a, 2)
        assert len(refused_at) == 1
        record = (await s.publish_records(2))[-1]
        assert record["mode"] == "delta" and record["encode_at"] < refused_at[0]


async def test_epochs_that_are_over_leave_nothing_in_the_store(receivers: Receivers) -> None:
    async with scene(receivers) as s:
        await s.add("a")
        store = s.engine._coordinator._coordinator._broadcaster._store  # type: ignore[union-attr]
        for name in ("b", "c"):
            (node,) = await s.add(name)
            version = s.board.available[-1] + 1 if s.board.available else 0
            await s.deliver(version)
            await s.deliver(version + 1)
            assert {key.split("/")[1] for key in store.list_keys()} == {
                s.board.events("epoch")[-1]["detail"].split()[1]
            }
            await node.die()
            del s.board.registered[name]
