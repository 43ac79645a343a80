"""What trainer ranks ask of a shard: batches, staleness, fencing, quarantine."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from buffer.redis.replies import Candidate, Formed, Locked, NotFormed, StepRecord
from buffer.types import PromptRef, Rerun
from configs.choices import OnStale, Selector


async def test_a_batch_is_formed_once(open_shard: Any) -> None:
    shard = await open_shard()
    await shard.fill("abc")
    first = await shard.lease(1, 0, 2, "o1")
    again = await shard.lease(1, 0, 2, "o2")
    assert isinstance(first, Formed) and first == again
    assert first.ids == ("a", "b") and first.tokens == (10, 10) and first.held == {"a", "b"}
    assert first.oldest is None and first.renumbered == {}
    assert await shard.lease(1, 0, 3) == NotFormed(
        "conflict", version=0, num_groups=2, num_shares=1
    )
    assert (await shard.group("a"))["leases"] == "1"
    assert await shard.redis.zrange(shard.keys("batches"), 0, -1) == [b"1"]


async def test_a_lease_that_finds_too_few_is_woken_by_the_push_that_completes_it(
    open_shard: Any,
) -> None:
    shard = await open_shard()
    await shard.fill("a")
    wait = await shard.lease(1, 0, 3)
    assert isinstance(wait, NotFormed) and (wait.word, wait.ready, wait.until_ms) == ("wait", 1, -1)
    newest = shard.redis.xrevrange
    stream = shard.keys("wake:batch")
    await shard.put("b")
    assert await newest(stream) == []
    await shard.put("c")
    assert len(await newest(stream)) == 1


async def test_every_verb_of_a_lease_may_be_sent_twice(open_shard: Any) -> None:
    shard = await open_shard()
    await shard.fill("abcd")
    await shard.lease(1, 0, 4)
    ids = ["a", "b", "c", "d"]
    held = {"owner": "o", "ids": ids}
    for _ in range(2):
        assert await shard.renew("o", 60_000, ids) == 4
        assert await shard.validate(version=0, lease_ms=60_000, oldest=None, **held) == ids
    trained = {"owner": "o", "step": 1, "version": 0, "oldest": None}
    for _ in range(2):
        assert await shard.consume(ids=["a", "b"], **trained) == 2
    assert await shard.nack("o", "half", ids) == 2
    assert await shard.nack("o", "half", ids) == 0
    first = await shard.ack(1)
    assert (first.count, first.is_owner, first.is_more) == (2, True, False)
    assert (await shard.ack(1)).count == 0
    stats = await shard.stats()
    assert (stats.acked, stats.ready, stats.tokens_trained) == (2, 2, 8)
    assert stats.counters["nacked:half"] == 2
    assert stats.trained_by_staleness == {0: 2} and stats.trained_by_age[1.0] == 2
    assert stats.trained_by_age[float("inf")] == 2
    assert await shard.group("a") == {"state": "acked"}
    assert await shard.redis.exists(shard.keys("lease:1")) == 0


async def test_ack_works_in_bounded_parts(open_shard: Any) -> None:
    shard = await open_shard()
    await shard.fill("abc")
    await shard.train(1, 0, 3)
    replies = [await shard.ack(5, bound=2) for _ in range(2)]
    assert [(r.count, r.is_more) for r in replies] == [(2, True), (1, False)]
    assert (await shard.lease(1, 0, 1)).word == "done"


async def test_an_expired_owner_is_fenced(open_shard: Any) -> None:
    shard = await open_shard()
    await shard.fill("ab")
    await shard.lease(1, 0, 2, "zombie", lease_ms=5)
    await asyncio.sleep(0.01)
    assert (await shard.sweep()).expired == 2
    assert (await shard.sweep()).expired == 0
    await shard.lease(1, 0, 2, "healthy")
    ids = ["a", "b"]
    trained = {"step": 1, "version": 0, "oldest": None, "ids": ids}
    assert await shard.renew("zombie", 60_000, ids) == 0
    assert await shard.consume(owner="zombie", **trained) == 0
    assert await shard.nack("zombie", "late", ids) == 0
    assert not await shard.quarantine("zombie", "undecodable", "a")
    assert isinstance(await shard.lease(1, 0, 2), Formed)  # the zombie did not mark it as done
    assert await shard.consume(owner="healthy", **trained) == 2
    assert (await shard.lease(1, 0, 2)).word == "done"


# on_stale -------------------------------------------------------------------------------------


async def test_mask_tokens_gates_by_the_newest_token_and_counts_what_is_masked(
    open_shard: Any,
) -> None:
    shard = await open_shard(max_staleness=1, on_stale=OnStale.mask_tokens)
    await shard.publish(4)
    assert (await shard.put("mixed", 1, 3, 4)).word == "stored"
    assert (await shard.put("old", 1, 2)).word == "stale"
    assert (await shard.stats()).by_staleness == {0: 1}
    formed = await shard.lease(1, 4, 1)
    assert formed.ids == ("mixed",) and formed.oldest == 3
    kept = {"version": 4, "owner": "o", "lease_ms": 60_000, "oldest": 3, "ids": ["mixed"]}
    assert await shard.validate(**kept) == ["mixed"]
    await shard.consume(owner="o", step=1, version=4, oldest=3, ids=["mixed"])
    stats = await shard.stats()
    assert (stats.tokens_masked, stats.tokens_trained) == (4, 8)
    assert stats.trained_by_staleness == {1: 1} and stats.max_staleness_trained == 1


async def test_validate_returns_groups_that_would_need_more_masking(open_shard: Any) -> None:
    shard = await open_shard(max_staleness=2, on_stale=OnStale.mask_tokens)
    await shard.publish(4)
    for name, versions in (("more", (2, 4)), ("fine", (4,)), ("gone", (2, 3)), ("gap", (1, 4))):
        await shard.put(name, *versions)
    formed = await shard.lease(1, 4, 4)
    assert formed.oldest == 2
    await shard.tune(0)
    kept = {"version": 4, "owner": "o", "lease_ms": 60_000, "oldest": 2, "ids": formed.ids}
    assert set(await shard.validate(**kept)) == {"fine", "gap"}  # gap: only its 1 was masked
    assert await shard.state("more") == "ready" and await shard.state("gone") == "dropped:stale"
    assert (await shard.lease(2, 4, 1, "p")).oldest == 4


async def test_wait_holds_a_lease_back_for_the_oldest_running_group(open_shard: Any) -> None:
    shard = await open_shard(max_staleness=1, on_stale=OnStale.wait)
    await shard.admit("slow", 60_000)
    await shard.publish(1)
    await shard.fill("ab", 1)
    waiting = await shard.lease(1, 1, 1)
    assert (waiting.word, waiting.blocking, waiting.blocking_version) == ("wait", "slow", 0)
    await shard.put("slow", 0)
    assert len(await shard.redis.xrevrange(shard.keys("wake:batch"))) == 1
    assert (await shard.lease(1, 1, 1)).ids == ("slow",)


@pytest.mark.parametrize("way", ["abandon", "expire"])
async def test_wait_goes_on_when_the_group_will_never_come(open_shard: Any, way: str) -> None:
    shard = await open_shard(max_staleness=0, on_stale=OnStale.wait)
    await shard.admit("lost", 5)
    await shard.fill("a")
    assert (await shard.lease(1, 0, 1)).blocking == "lost"
    if way == "abandon":
        await shard.abandon("lost", "died")
    else:
        await asyncio.sleep(0.01)
        await shard.sweep()
    assert len(await shard.redis.xrevrange(shard.keys("wake:batch"))) == 1
    assert (await shard.lease(1, 0, 1)).ids == ("a",)


@pytest.mark.parametrize("selector", [Selector.freshest, Selector.fifo])
async def test_wait_takes_those_first_whose_last_chance_it_is(
    open_shard: Any, selector: Selector
) -> None:
    shard = await open_shard(max_staleness=1, on_stale=OnStale.wait, selector=selector)
    await shard.publish(1)
    for name, version in (("a", 1), ("b", 1), ("brink", 0), ("c", 1)):
        await shard.put(name, version)
    second = "c" if selector is Selector.freshest else "a"
    assert (await shard.lease(1, 1, 2)).ids == ("brink", second)


# Quarantine -----------------------------------------------------------------------------------


async def test_a_group_that_fails_too_often_is_put_aside(open_shard: Any) -> None:
    shard = await open_shard(max_attempts=2)
    await shard.fill("g")
    await shard.lease(1, 0, 1)
    assert await shard.nack("o", "crash", ["g"]) == 1
    assert await shard.state("g") == "ready"
    await shard.lease(1, 0, 1, "p", lease_ms=5)
    await asyncio.sleep(0.01)
    assert (await shard.sweep()).expired == 1
    [record] = await shard.quarantined()
    assert (record.group_id, record.reason, record.attempts, record.num_tokens) == (
        "g",
        "attempts",
        2,
        10,
    )
    assert await shard.redis.exists(shard.keys.payload("g")) == 1
    assert await shard.release("g") and not await shard.release("g")
    assert "leases" not in await shard.group("g")
    assert await shard.train(1, 0, 1) == ["g"]


async def test_training_a_group_clears_it_of_suspicion(open_shard: Any) -> None:
    shard = await open_shard(max_attempts=1)
    await shard.fill("g")
    await shard.train(1, 0, 1)
    reply = await shard.restore("b", step=0, version=0, resume_version=0)
    assert (reply.requeued, reply.quarantined) == (1, 0)


async def test_quarantine_and_discard_by_hand(open_shard: Any) -> None:
    shard = await open_shard()
    await shard.fill("g")
    await shard.lease(1, 0, 1)
    assert await shard.quarantine("o", "undecodable", "g")
    assert await shard.quarantine("o", "undecodable", "g")
    stats = await shard.stats()
    assert (stats.quarantined, stats.bytes_quarantined, stats.leased) == (1, 100, 0)
    assert (await shard.put("g")).word == "duplicate"
    assert await shard.discard("g") and not await shard.discard("g")
    assert (await shard.stats()).dropped == {"discarded": 1}
    assert not await shard.discard("unknown") and not await shard.release("unknown")


# Several shards -------------------------------------------------------------------------------


async def test_a_batch_is_taken_under_the_lock_of_its_step(open_shard: Any) -> None:
    home = await open_shard(num_shards=2)
    await home.fill("abc")
    assert await home.lock_step(1, "t1", 60_000) == Locked()
    assert await home.lock_step(1, "t1", 60_000) == Locked()
    waiting = await home.lock_step(1, "t2", 60_000)
    assert isinstance(waiting, NotFormed) and waiting.word == "busy" and waiting.until_ms > 0
    peek = await home.peek(0, 2)
    assert [c.group_id for c in peek.candidates] == ["a", "b"] and peek.ready == 3
    for _ in range(2):
        taken = await home.take(0, ["a", "b", "unknown"], "t1", 60_000, 1)
        assert taken.ids == ("a", "b") and taken.tokens == (10, 10)
    assert (await home.group("a"))["leases"] == "1"
    batch = {"step": 1, "version": 0, "num_groups": 3, "num_shares": 1, "owner": "t1"}
    what = {"ids": ["a", "b", "far"], "tokens": [10, 10, 5], "oldest": None}
    assert not await home.record(**batch, **what, token="t2")
    for _ in range(2):
        assert await home.record(**batch, **what, token="t1")
    found = await home.lock_step(1, "t2", 60_000)
    assert isinstance(found, StepRecord) and found.ids == ("a", "b", "far")
    assert found.tokens == (10, 10, 5) and not found.is_done
    held = await home.held("t1", ["a", "b", "c"])
    assert held.ids == {"a", "b"} and held.num_consumed == 0 and held.deadline_ms > 0
    assert await home.consume(owner="t1", step=1, version=0, oldest=None, ids=[]) == 0
    done = await home.lock_step(1, "t2", 60_000)
    assert isinstance(done, StepRecord) and done.is_done


async def test_a_void_record_makes_way(open_shard: Any) -> None:
    home = await open_shard(num_shards=2)
    await home.lock_step(1, "t1", 60_000)
    batch = {"version": 0, "num_groups": 1, "num_shares": 1, "owner": "t1", "ids": ["x"]}
    await home.record(step=1, tokens=[1], oldest=None, token="t1", **batch)
    assert isinstance(await home.lock_step(1, "t2", 60_000, void_owner="other"), StepRecord)
    assert await home.lock_step(1, "t2", 60_000, void_owner="t1") == Locked()
    assert await home.unlock("t2") and not await home.unlock("t2")


async def test_a_lock_ends_by_itself(open_shard: Any) -> None:
    home = await open_shard(num_shards=2)
    await home.lock_step(1, "dead", 5)
    await asyncio.sleep(0.01)
    assert await home.lock_step(1, "t", 60_000) == Locked()


async def test_peek_tidies_up_and_names_who_is_waited_for(open_shard: Any) -> None:
    shard = await open_shard(num_shards=2, max_staleness=0, on_stale=OnStale.wait)
    await shard.fill("a")
    await shard.admit("slow", 60_000)
    await shard.publish(1)
    peek = await shard.peek(1, 5)
    assert (peek.word, peek.candidates, peek.blocking) == ("ready", (), "slow")
    assert (await shard.stats()).dropped == {"stale": 1}
    await shard.abandon("slow", "late", Rerun.as_stale, PromptRef(task="sums", index=0))
    assert len(await shard.redis.xrevrange(shard.keys("wake:batch"))) == 1


@pytest.mark.parametrize(
    ("selector", "order"),
    [(Selector.stalest, "bac"), (Selector.freshest, "cab"), (Selector.fifo, "abc")],
)
async def test_candidates_can_be_merged_by_their_keys(
    open_shard: Any, selector: Selector, order: str
) -> None:
    shard = await open_shard(selector=selector, max_staleness=5)
    for name, version in (("a", 2), ("b", 1), ("c", 3)):
        await shard.put(name, version)
    candidates = (await shard.peek(3, 5)).candidates
    assert "".join(c.group_id for c in candidates) == order
    assert list(candidates) == sorted(candidates) and isinstance(candidates[0], Candidate)


async def test_take_refuses_what_went_stale_since_the_peek(open_shard: Any) -> None:
    shard = await open_shard(max_staleness=0)
    await shard.fill("a")
    await shard.publish(1)
    assert (await shard.take(1, ["a"], "t", 60_000, 1)).ids == ()


async def test_a_group_of_which_nothing_is_left_counts_as_masked(open_shard: Any) -> None:
    shard = await open_shard(on_stale=OnStale.mask_tokens)
    await shard.fill("g", 0)
    await shard.lease(1, 0, 1)
    await shard.consume(owner="o", step=1, version=3, oldest=2, ids=["g"])
    stats = await shard.stats()
    assert (stats.tokens_masked, stats.tokens_trained) == (4, 0)
    assert stats.trained_by_staleness == {1: 1}
