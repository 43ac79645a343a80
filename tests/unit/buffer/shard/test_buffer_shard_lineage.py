"""Rollbacks: who owns the buffer, which groups survive, and under which numbers."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from plain_buffer import Gap, parse_gaps, renumber_version

from buffer.redis.replies import Formed, ReconcileBegun
from buffer.types import PromptRef
from configs.choices import OnStale, Selector
from tests.support.invariants import find_violations_of_shard


def test_versions_after_a_gap_are_moved_kept_or_gone() -> None:
    gaps = [Gap(10, 13), Gap(11, 16)]  # the second restores version 8, which is 11 by then
    assert [renumber_version(v, gaps) for v in (8, 7, 9, 10, 11, 13, 15, 16, 20)] == [
        16,
        15,
        None,
        None,
        None,
        None,
        None,
        16,
        20,
    ]
    assert parse_gaps("10:13 11:16") == tuple(gaps) and parse_gaps("") == ()


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 5)), max_size=4), st.integers(0, 30))
def test_numbers_never_fall_and_keep_their_distance(
    jumps: list[tuple[int, int]], version: int
) -> None:
    gaps, newest = [], 0
    for back, ahead in jumps:
        last = max(0, newest - back)
        newest = max(newest, last) + ahead + 1
        gaps.append(Gap(last, newest))
    moved = renumber_version(version, gaps)
    assert moved is None or moved >= version
    older = renumber_version(version - 1, gaps)
    if (
        moved is not None
        and older is not None
        and version <= min((g.last for g in gaps), default=0)
    ):
        assert moved - older == 1


async def test_a_restore_acks_what_the_checkpoint_has_and_returns_the_rest(
    open_shard: Any,
) -> None:
    shard = await open_shard(max_staleness=5)
    await shard.fill("abcdef")
    await shard.train(1, 0, 1)
    await shard.publish(1)
    await shard.train(2, 1, 1)
    await shard.publish(2)
    await shard.train(3, 2, 1)
    await shard.lease(4, 2, 1, "old")
    begun = await shard.reconcile_begin("b", step=1, version=1, resume_version=3)
    assert begun == ReconcileBegun("begun")
    assert await shard.reconcile_acked("b", ["b", "lost"])
    assert await shard.reconcile_acked("b", ["b", "lost"])  # the reply was lost
    calls = 1
    while (reply := await shard.reconcile("b", bound=1)).is_more:
        calls += 1
    assert calls > 6
    expected = (2, 2, 0, 0)
    assert (reply.acked, reply.requeued, reply.dropped, reply.quarantined) == expected
    assert await shard.reconcile("b") == reply  # the same again
    assert await shard.reconcile_begin("b", step=1, version=1, resume_version=3) == begun
    stats = await shard.stats()
    assert (stats.acked, stats.ready, stats.trainer_version, stats.lineage) == (2, 4, 3, "b")
    assert stats.by_staleness == {1: 4}  # 0 was one behind version 1, and is one behind 3
    assert (await shard.put("lost")).word == "duplicate"
    assert (await shard.lease(1, 3, 1)).word == "done"
    again = await shard.lease(2, 3, 4, "new")
    assert isinstance(again, Formed) and again.renumbered == dict.fromkeys("cdef", (2,))


async def test_a_zombie_changes_nothing_after_a_takeover(open_shard: Any) -> None:
    shard = await open_shard()
    await shard.restore("a", 0, 0, 0)
    await shard.fill("xy")
    await shard.lease(1, 0, 2, "old", lineage="a")
    await shard.reconcile_begin("b", step=0, version=0, resume_version=0)
    # In the middle, before its groups are back:
    trained = {"owner": "old", "step": 1, "version": 0, "oldest": None, "ids": ["x", "y"]}
    assert await shard.consume(**trained) == 0
    assert await shard.renew("old", 60_000, ["x", "y"]) == 0
    kept = {"version": 0, "owner": "old", "lease_ms": 1, "oldest": None, "ids": ["x", "y"]}
    assert await shard.validate(**kept) == []
    assert await shard.nack("old", "late", ["x"]) == 0
    assert (await shard.lease(1, 0, 2, lineage="a")).word == "not_owner"
    assert (await shard.lease(1, 0, 2, lineage="b")).word == "wait"
    assert (await shard.lock_step(1, "t", 1000, lineage="a")).word == "not_owner"
    assert not (await shard.ack(9, "a")).is_owner
    assert not (await shard.reconcile("a")).is_owner
    assert not await shard.reconcile_acked("a", ["x"])
    assert (await shard.reconcile_begin("a", step=0, version=0, resume_version=0)).word == (
        "not_owner"
    )
    while (await shard.reconcile("b", bound=1)).is_more:
        pass
    assert await shard.consume(**trained) == 0
    assert isinstance(await shard.lease(1, 0, 2, "new", lineage="b"), Formed)
    assert (await shard.ack(9, "b")).is_owner


async def test_groups_of_versions_that_are_gone_are_dropped_and_run_again(
    open_shard: Any,
) -> None:
    shard = await open_shard(max_staleness=9)
    await shard.publish(6)
    for name, versions in (("kept", (1, 3)), ("mixed", (3, 4)), ("gone", (5,))):
        await shard.put(name, *versions, index=len(name), attempt=1)
    reply = await shard.restore("b", 3, 3, 7)
    assert (reply.dropped, reply.requeued) == (2, 0)
    stats = await shard.stats()
    assert stats.dropped == {"lineage": 2} and stats.requeued == 2
    assert {await shard.take_retry("1"), await shard.take_retry("2")} == {
        PromptRef(task="sums", index=5, attempt=1),
        PromptRef(task="sums", index=4, attempt=1),
    }
    group = await shard.group("kept")
    assert (group["min_version"], group["max_version"], group["versions"]) == ("5", "7", "5:4 7:4")
    formed = await shard.lease(4, 7, 1)
    assert formed.renumbered == {"kept": (5, 7)}
    held = await shard.held("o", ["kept"])
    assert held.renumbered == {"kept": (5, 7)}
    assert (await shard.lease(4, 7, 1)).renumbered == {"kept": (5, 7)}


async def test_a_push_from_before_the_rollback_is_renumbered_alike(open_shard: Any) -> None:
    shard = await open_shard(max_staleness=2, on_stale=OnStale.mask_tokens)
    await shard.publish(6)
    await shard.restore("b", 3, 3, 7)
    assert (await shard.put("both", 3, 7)).word == "stored"
    assert (await shard.put("new", 7)).word == "stored"
    assert (await shard.put("old", 2)).word == "stored"  # one behind 3, so one behind 7
    assert (await shard.put("older", 0)).word == "stale"
    assert (await shard.put("gone", 3, 5)).word == "abandoned_lineage"
    assert (await shard.stats()).by_staleness == {0: 2, 1: 1}
    formed = await shard.lease(4, 7, 3)
    assert formed.renumbered == {"both": (7, 7), "old": (6,)}


async def test_quarantined_groups_are_renumbered_when_they_are_released(open_shard: Any) -> None:
    shard = await open_shard(max_staleness=9)
    await shard.publish(5)
    await shard.fill(["keep"], 3)
    await shard.fill(["gone"], 4)
    await shard.lease(4, 5, 2)
    for name in ("keep", "gone"):
        await shard.quarantine("o", "undecodable", name)
    await shard.restore("b", 3, 3, 6)
    assert await shard.release("keep") and await shard.release("gone")
    assert (await shard.group("keep"))["min_version"] == "6"
    assert await shard.state("gone") == "dropped:lineage"


@pytest.mark.parametrize("selector", list(Selector))
async def test_a_restore_that_is_cut_off_is_finished_by_the_next(
    open_shard: Any, selector: Selector
) -> None:
    shard = await open_shard(max_staleness=9, selector=selector)
    await shard.publish(4)
    for number in range(6):
        await shard.put(f"g{number}", number % 4)
    await shard.reconcile_begin("b", step=3, version=3, resume_version=5)
    for _ in range(3):
        await shard.reconcile("b", bound=1)
    # Pushes and sweeps go on meanwhile; nothing is dropped as stale by half of a renumbering.
    await shard.put("late", 2)
    await shard.tune(4)
    await shard.sweep()
    # Its trainer dies; another one restores the same checkpoint.
    reply = await shard.restore("c", 3, 3, 6)
    assert reply.dropped == 0
    moved = {f"g{number}": number % 4 + 3 for number in range(6)} | {"late": 5}
    for name, version in moved.items():
        assert (await shard.group(name))["min_version"] == str(version), name
    assert (await shard.stats()).by_staleness == {0: 1, 1: 2, 2: 2, 3: 2}


async def test_numbers_are_not_used_again(open_shard: Any) -> None:
    shard = await open_shard()
    await shard.publish(5)
    behind = {"step": 3, "version": 3}
    assert await shard.reconcile_begin("b", **behind, resume_version=4) == ReconcileBegun(
        "behind", 5
    )
    assert await shard.reconcile_begin("b", **behind, resume_version=5) == ReconcileBegun(
        "behind", 5
    )
    assert (await shard.stats()).lineage == ""
    assert (await shard.restore("b", 5, 5, 5)).is_owner  # nothing newer was published
    assert await shard.redis.hget(shard.keys("settings"), "gaps") == b""
    assert await shard.publish(4) == ("older", 5)
    assert await shard.publish(5) == ("same", 5)
    assert await shard.publish(6) == ("published", 6)


async def test_restoring_a_checkpoint_of_a_lost_branch_drops_all(open_shard: Any) -> None:
    shard = await open_shard(max_staleness=9)
    await shard.publish(5)
    await shard.fill("a", 3)
    await shard.restore("b", 3, 3, 6)
    await shard.fill("b", 6)
    reply = await shard.restore("c", 4, 4, 7)  # version 4 was given up by lineage b
    assert (reply.dropped, await shard.state("a")) == (2, "dropped:lineage")


async def test_only_the_last_rollbacks_are_kept_and_older_versions_count_as_gone(
    open_shard: Any,
) -> None:
    shard = await open_shard(max_staleness=99)
    await shard.fill(["kept"], 0)
    shard.should_check = False
    for number in range(40):
        await shard.restore(f"l{number}", 0, number, number + 1)
    gaps = parse_gaps((await shard.redis.hget(shard.keys("settings"), "gaps")).decode())
    assert len(gaps) == 32 and gaps[0].last == -1
    assert (await shard.group("kept"))["min_version"] == "40"
    assert (await shard.put("late", 0)).word == "abandoned_lineage"
    assert (await shard.put("recent", 39)).word == "stored"
    assert (await shard.group("recent"))["min_version"] == "40"
    assert await find_violations_of_shard(shard) == []


async def test_a_poison_group_is_put_aside_by_the_restore(open_shard: Any) -> None:
    shard = await open_shard(max_attempts=1)
    await shard.fill("g")
    await shard.lease(1, 0, 1)
    reply = await shard.restore("b", 0, 0, 0)
    assert (reply.requeued, reply.quarantined) == (0, 1)
    assert (await shard.stats()).quarantined == 1
    begun = await shard.reconcile_begin("c", step=1, version=0, resume_version=0)
    assert begun.word == "begun" and await shard.reconcile_acked("c", ["g"])
    assert (await shard.stats()).bytes_quarantined == 0  # the checkpoint had it all the same
