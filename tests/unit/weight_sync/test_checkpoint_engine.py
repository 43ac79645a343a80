"""The checkpoint engine of one rank: real receiver processes, a real gloo group, real files."""

from __future__ import annotations

import asyncio

import pytest

from tests.support.weights.scene import TIMEOUT_S, Receivers, scene
from weight_sync.types import WeightSyncError

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="session")]


async def test_versions_reach_every_receiver_bit_by_bit(receivers: Receivers) -> None:
    async with scene(receivers) as s:
        nodes = await s.add("a", "b")
        for version in (0, 1, 5):
            report = await s.publish(version)
            assert report.version == version
            assert report.snapshot_s > 0 and report.wait_s >= 0
            await s.committed(version)
            for node in nodes:
                await s.check(node, version)
        assert s.board.available == [0, 1, 5]
        assert sorted(s.board.staged) == [(name, v) for name in "ab" for v in (0, 1, 5)]
        assert len(s.board.events("epoch")) == 1  # one group for all of them
        records = await s.publish_records(5)
        assert [record["version"] for record in records] == [0, 1, 5]
        for record in records:
            assert record["mode"] == "full" and record["density"] == 1.0
            assert record["bytes"] == record["wire_bytes"] == s.layout.num_bytes
            assert record["num_receivers"] == 2 and record["epoch"] == 1
            times = [record[f"{name}_at"] for name in ("snapshot", "encode", "wire", "verify")]
            times += [record["available_at"], record["converged_at"]]
            assert times == sorted(times)
            assert record["convergence_s"] >= record["wire_s"] + record["verify_s"] > 0


async def test_newest_of_versions_in_quick_succession_wins(receivers: Receivers) -> None:
    async with scene(receivers) as s:
        a, b = await s.add("a", "b")
        async with s.publishing(0):  # while its bytes are on the way
            await s.publish_at_once(range(1, 6))
        await s.committed(5)
        await s.check(a, 5)
        await s.check(b, 5)
        available, records = s.board.available, await s.publish_records(5)
        skipped = [record["version"] for record in records if record["mode"] == "skipped"]
        assert (available, skipped) == ([0, 5], [1, 2, 3, 4])


async def test_deltas_are_sent_between_full_versions(receivers: Receivers) -> None:
    async with scene(receivers, full_every=3) as s:
        a, b = await s.add("a", "b")
        for version in range(5):
            await s.deliver(version, a, b)
        records = await s.publish_records(4)
        assert [r["mode"] for r in records] == ["full", "delta", "delta", "full", "delta"]
        for record in records:
            if record["mode"] == "delta":
                assert 0.005 < record["density"] < 0.015
                assert record["wire_bytes"] < 0.05 * record["bytes"]


async def test_version_with_too_many_changes_is_sent_in_full(receivers: Receivers) -> None:
    async with scene(receivers, full_every=10, max_delta_density=0.3) as s:
        (a,) = await s.add("a")
        s.share = 0.5
        for version in range(2):
            await s.deliver(version)
        await s.check(a, 1)
        assert [r["mode"] for r in await s.publish_records(1)] == ["full", "full"]


async def test_version_waits_for_the_first_receiver_that_responds(receivers: Receivers) -> None:
    async with scene(receivers) as s:
        await s.publish(0)
        with pytest.raises(
            WeightSyncError, match=r"version 0 was not available within 0\.2 s: no receiver is reg"
        ):
            await s.committed(0, timeout_s=0.2)
        s.board.registered["gone"] = "http://127.0.0.1:9"
        await s.event("excluded")
        with pytest.raises(WeightSyncError, match="no receiver responds: gone"):
            await s.committed(0, timeout_s=0.2)
        (a,) = await s.add("a")
        await s.committed(0)
        await s.check(a, 0)
        assert [event["who"] for event in s.board.events("excluded")] == ["gone"]


async def test_engine_that_does_not_serve_a_version_is_named(receivers: Receivers) -> None:
    async with scene(receivers) as s:
        await s.add("a")
        s.board.set_engine("the-slow-one", -1)
        await s.publish(0)
        await s.board.wait_until(lambda: s.board.available == [0], TIMEOUT_S)
        with pytest.raises(WeightSyncError, match=r"behind version 0: .*'the-slow-one': -1"):
            await s.committed(0, timeout_s=3.0)


async def test_loss_of_the_board_reaches_the_trainer_with_its_cause(receivers: Receivers) -> None:
    async with scene(receivers) as s:
        await s.add("a")
        await s.deliver(0)
        s.board.is_lost = True
        with pytest.raises(WeightSyncError, match="cannot be sent: the board is lost") as caught:
            await s.deliver(1)
        assert isinstance(caught.value.__cause__, ConnectionError)
        with pytest.raises(WeightSyncError, match="cannot be sent: the board is lost"):
            await s.publish(2)


async def test_trainer_that_waits_for_engines_learns_why_versions_cannot_be_sent(
    receivers: Receivers,
) -> None:
    async with scene(receivers) as s:
        await s.add("a")
        s.board.set_engine("the-slow-one", -1)
        await s.publish(0)
        waiting = asyncio.create_task(s.committed(0))
        # The record of the publish waits for the engines, too.
        await s.board.wait_until(lambda: s.board.num_waits == 2, TIMEOUT_S)
        s.board.is_lost = True
        with pytest.raises(WeightSyncError, match="cannot be sent: the board is lost"):
            await waiting


async def test_versions_only_grow(receivers: Receivers) -> None:
    async with scene(receivers) as s:
        await s.publish(3)
        with pytest.raises(ValueError, match="version 3 was sent after 3"):
            await s.publish(3)


async def test_closed_engine_says_so(receivers: Receivers) -> None:
    async with scene(receivers) as s:
        s.engine.close()
        with pytest.raises(WeightSyncError, match="the checkpoint engine was closed"):
            await s.publish(0)
        with pytest.raises(WeightSyncError, match="the checkpoint engine was closed"):
            await s.committed(0)
