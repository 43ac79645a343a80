"""Prompts outlive their groups: a death, a failure and a shard too many cost none of them."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from buffer.admission import admission_limit
from buffer.dump.export import dump_buffer
from buffer.dump.load import restore_buffer
from buffer.results import PushResult, read_prompt, write_prompt
from buffer.staleness import Leash, parse_rollbacks
from buffer.types import PromptRef, Rerun
from configs.choices import OnStale
from configs.schema import BufferConfig
from tests.support.buffer.groups import lease_batch, make_group, next_retry
from tests.support.invariants import find_violations

PROMPT = PromptRef(task="long words", index=7)


async def _begun(buffer: Any, name: str, prompt: PromptRef = PROMPT, position: int = 1) -> str:
    admission = await buffer.admit(name, 60)
    assert admission.prompt is None
    assert await buffer.begin(admission.group_id, prompt, 0, position)
    group_id: str = admission.group_id
    return group_id


async def test_prompt_of_dead_workers_becomes_a_suspect_and_is_then_quarantined(
    checked_buffer: Any,
) -> None:
    buffer = await checked_buffer(on_stale=OnStale.drop)  # it is no stale group
    await _begun(buffer, "3-0-a")
    await _begun(buffer, "30-0-a", PromptRef(task="long words", index=1))  # another worker's
    assert await buffer.reclaim(3) == 1
    assert await buffer.reclaim(3) == 0
    for number in (1, 2):  # any worker may die twice
        again, prompt, _ = await buffer.admit(f"3-{number}-b", 60)
        assert prompt == PromptRef(task="long words", index=7, reruns=number)
        assert prompt.is_suspect == (number == 2)
        assert await buffer.reclaim(3) == 1
    assert await next_retry(buffer) is None
    (poisonous,) = await buffer.quarantined_prompts()
    assert (poisonous.task, poisonous.index) == ("long words", 7)
    assert (poisonous.reason, poisonous.times) == ("worker_died", 3)
    stats = await buffer.stats()
    assert stats.abandoned_by_reason == {"worker_died": 3}
    assert (stats.running, stats.rerun, stats.prompts_quarantined) == (1, 2, 1)
    events = [event.event for event in await buffer.events(again)]
    assert events == ["admitted", "begun", "abandoned", "prompt_quarantined"]
    assert await buffer.release_prompt("long words", 7)
    assert not await buffer.release_prompt("long words", 7)
    assert await next_retry(buffer) == PROMPT


async def test_end_of_a_whole_run_is_no_death_that_counts_against_a_prompt(
    checked_buffer: Any,
) -> None:
    buffer = await checked_buffer()
    await _begun(buffer, "3-0-a")
    for number in range(1, 5):  # a long answer may be under way at any number of ends
        assert await buffer.reclaim(3, counts_as_death=False) == 1
        assert (await buffer.admit(f"3-{number}-b", 60)).prompt == PROMPT
    assert not await buffer.quarantined_prompts()


async def test_abandoned_group_may_leave_the_prompt_that_it_has_begun(checked_buffer: Any) -> None:
    buffer = await checked_buffer(on_stale=OnStale.drop)
    group_id = await _begun(buffer, "0-0-a")
    await buffer.admit("0-1-a", 60)  # has no prompt yet
    assert await buffer.abandon(group_id, "stopped", Rerun.always)
    assert await buffer.abandon("0-1-a", "stopped", Rerun.always)
    assert await next_retry(buffer) == PROMPT
    assert await next_retry(buffer) is None


async def test_credit_that_expires_queues_its_prompt_again(checked_buffer: Any) -> None:
    buffer = await checked_buffer(lease_timeout_s=0.02)
    group_id = await _begun(buffer, "0-0-a")
    await buffer.admit("0-1-a", 60)  # has no prompt yet
    await asyncio.sleep(0.03)
    assert await buffer.sweep() == 2
    assert await next_retry(buffer) == PromptRef(task="long words", index=7, reruns=1)
    assert await next_retry(buffer) is None
    assert (await buffer.stats()).abandoned_by_reason == {"expired": 2}
    assert not await buffer.begin(group_id, PROMPT, 0, 9)


async def test_late_push_of_a_group_whose_prompt_runs_again_is_a_duplicate(
    checked_buffer: Any, redis: Any, run_name: str
) -> None:
    buffer = await checked_buffer()
    await _begun(buffer, "0-0-a")
    await buffer.reclaim(0)
    assert await buffer.push(make_group("0-0-a")) is PushResult.duplicate
    stats = await buffer.stats()
    assert (stats.pushed, stats.ready) == (0, 0)
    assert not await redis.exists(f"{{leash:{run_name}}}:payload:0-0-a")


@pytest.mark.parametrize("prompt", [PROMPT, PromptRef(task="a b", index=1, attempt=2, reruns=3)])
def test_prompts_are_read_as_they_were_written(prompt: PromptRef) -> None:
    assert read_prompt(write_prompt(prompt)) == prompt


def test_prompts_of_older_runs_can_be_read() -> None:
    assert read_prompt("1 7 long words") == PromptRef(task="long words", index=7, attempt=1)


def test_limit_rounds_like_exact_arithmetic() -> None:
    def limit(oversampling: float, lag: int = 0) -> int:
        return admission_limit(
            max_staleness=1, lag=lag, groups_per_version=50, oversampling=oversampling
        )

    assert [limit(1.0), limit(1.15), limit(1.155), limit(1.15, lag=2)] == [100, 115, 115, 0]


@pytest.mark.parametrize("shards", [1, 3])
async def test_prompts_that_no_checkpoint_contains_run_again_in_an_empty_server(
    buffer_factory: Any, redis: Any, run_name: str, shards: int
) -> None:
    buffer = await buffer_factory(shards=shards, groups_per_step=3, max_staleness=8)
    ids = []
    for n in range(12):
        ids.append((await buffer.admit(f"{n % 2}-{n}-a", 60)).group_id)
        assert await buffer.begin(ids[n], PromptRef(task="sums", index=n), n % 2, n // 2 + 1)
    for n in range(9):
        attempt = int(n == 8)
        group = make_group(ids[n], version=0, index=n, attempt=attempt)
        assert await buffer.push(group) is PushResult.stored
    await buffer.reconcile("one", step=0, version=0, resume_version=0)
    trained = list[str]()
    for step in (1, 2):
        lease = await lease_batch(buffer, step, 3, version=step - 1)
        await buffer.announce_version(step)
        await buffer.consume(lease, lease.group_ids)
        trained += lease.group_ids if step == 1 else ()
    await lease_batch(buffer, 3, 3, version=2)
    await buffer.fail(ids[11], PromptRef(task="sums", index=11), 5)  # it waits to run again
    in_checkpoint = {ids.index(group_id) for group_id in trained}
    progress = await buffer.task_progress(1)
    assert progress.positions == {0: 6, 1: 6}
    untrained = sorted(progress.untrained, key=lambda prompt: prompt.index)
    assert [prompt.index for prompt in untrained] == sorted({*range(12)} - in_checkpoint)
    attempts = {prompt.index: prompt.attempt for prompt in untrained}
    assert attempts.get(8, 1) == 1 and sum(attempts.values()) <= 1
    keys = [key async for key in redis.scan_iter(f"*leash:{run_name}*")]
    await redis.delete(*keys)
    await buffer.open(BufferConfig(shards=shards), 3)
    await buffer.restore_progress(progress)
    await buffer.restore_progress(progress)  # after a lost reply
    again = await buffer.task_progress(1)
    assert again.positions == progress.positions
    assert sorted(p.index for p in again.untrained) == [prompt.index for prompt in untrained]


@pytest.mark.parametrize("shards", [1, 3])
async def test_dump_of_a_checkpoint_fills_an_empty_server(
    redis: Any, buffer_factory: Any, run_name: str, tmp_path: Path, shards: int
) -> None:
    buffer = await buffer_factory(shards=shards, groups_per_step=2, max_staleness=20)
    await buffer.reconcile("one", step=0, version=0, resume_version=0)
    await buffer.announce_version(3)
    await buffer.reconcile("two", step=0, version=1, resume_version=4)  # 0, 1 are 3, 4 now
    ids = []
    for n in range(12):
        ids.append((await buffer.admit(f"0-{n}-a", 60)).group_id)
        assert await buffer.begin(ids[n], PromptRef(task="sums", index=n), 0, n + 1)
    for n in range(8):  # the last of a version after the checkpoint's
        assert await buffer.push(make_group(ids[n], 6 if n == 7 else n % 2, index=n))
    for n in (8, 9):
        assert await buffer.keep_tokens(ids[n], 0, {"0.0.0": b"tokens of %d" % n})
    trained = []
    for step in (1, 2, 3):
        lease = await lease_batch(buffer, step, 2, version=step + 3)
        if step < 3:
            await buffer.announce_version(step + 4)
            await buffer.consume(lease, lease.group_ids)
        trained += lease.group_ids if step == 1 else ()
    await buffer.fail(ids[10], PromptRef(task="sums", index=10), 1)  # in quarantine
    assert await buffer.fail(ids[11], PromptRef(task="sums", index=11), 5)  # will run again
    at_checkpoint = await buffer.task_progress(1)
    late = (await buffer.admit("0-12-a", 60)).group_id  # the checkpoint does not know of it
    assert await buffer.begin(late, PromptRef(task="sums", index=12), 0, 13)
    await buffer.push(make_group(late, 0, index=12))
    await dump_buffer(redis, run_name, tmp_path / "groups.dump")
    leash = await buffer.get_leash()
    await redis.delete(*[key async for key in redis.scan_iter(f"*leash:{run_name}*")])

    await buffer.open(BufferConfig(shards=shards, max_staleness=20), 2)
    for _ in range(2):  # the second time after a crash
        path = tmp_path / "groups.dump"
        restored = await restore_buffer(redis, buffer, run_name, path, at_checkpoint, trained)
        assert restored == 8 - len(trained)
    assert await find_violations(buffer) == []
    assert [prompt.index for prompt in await buffer.quarantined_prompts()] == [10]
    await buffer.reconcile("three", step=1, version=5, resume_version=9, consumed_group_ids=trained)
    stats = await buffer.stats()
    assert (stats.pushed, stats.ready, dict(stats.dropped)) == (6, 5, {"lineage": 1})
    # Versions 0 and 1, which were 3 and 4, are 7 and 8 after the second rollback.
    assert set(stats.by_staleness) <= {1, 2}
    assert (await buffer.get_leash()).rollbacks == (*leash.rollbacks, (5, 9))
    untrained = await buffer.task_progress(1)
    names = {n for n in range(12) if ids[n] not in trained} - {10}
    assert sorted(prompt.index for prompt in untrained.untrained) == sorted(names)
    found = {}
    while True:
        group_id, prompt, _ = await buffer.admit(f"0-{20 + len(found)}-a", 60)
        if prompt is None:
            break
        found[prompt.index] = await buffer.kept_tokens(group_id, prompt)
    assert {7, 8, 9, 11} == found.keys() and found[9] == {"0.0.0": b"tokens of 9"}
    assert found[8] == {"0.0.0": b"tokens of 8"} and not found[11]


# Kept tokens --------------------------------------------------------------------------------------


async def _kept(buffer: Any, name: str, parts: dict[str, bytes], oldest: int | None = 0) -> str:
    group_id = await _begun(buffer, name)
    assert await buffer.keep_tokens(group_id, oldest, parts)
    return group_id


async def _next_owner(buffer: Any, name: str, prompt: PromptRef = PROMPT) -> str:
    admission = await buffer.admit(name, 60)
    assert admission.prompt == prompt
    return str(admission.group_id)


async def test_tokens_of_a_prompt_outlive_the_worker_that_dies_and_the_one_that_stops(
    checked_buffer: Any, redis: Any
) -> None:
    buffer = await checked_buffer()
    parts = {"0.0.0": b"\x00first", "1.0.0": b"other" * 300_000, "0.0.64": b"second"}
    await _kept(buffer, "3-0-a", parts)
    assert await buffer.reclaim(3) == 1
    assert not await buffer.keep_tokens("3-0-a", 0, {"0.0.70": b"late"}), "it is not running"
    again = await _next_owner(buffer, "3-1-b", replace(PROMPT, reruns=1))
    assert await buffer.kept_tokens(again, PROMPT) == parts
    assert await buffer.keep_tokens(again, 0, {"0.0.70": b"third"})
    assert await buffer.abandon(again, "stopped", Rerun.always)
    third = await _next_owner(buffer, "3-2-c", replace(PROMPT, reruns=1))
    assert await buffer.kept_tokens(third, PROMPT) == {**parts, "0.0.70": b"third"}
    assert await buffer.abandon(third, "zero_variance")
    assert [name async for name in redis.scan_iter(f"{buffer.keys('kept')}*")] == []


@pytest.mark.parametrize("end", ["push", "too_old", "failed", "other_prompt", "third_death"])
async def test_kept_tokens_go_with_their_group_or_with_the_trust_in_their_prompt(
    checked_buffer: Any, redis: Any, end: str
) -> None:
    buffer = await checked_buffer()
    group_id = await _kept(buffer, "3-0-a", {"0.0.0": b"tokens"})
    if end == "push":
        assert await buffer.push(make_group(group_id, 0)) is PushResult.stored
    elif end == "too_old":
        assert await buffer.abandon(group_id, "too_old", Rerun.as_stale, PROMPT)
    elif end == "failed":
        await buffer.fail(group_id, PROMPT, 2)
    elif end == "other_prompt":  # the worker refuses the prompt, which is too long for it
        assert await buffer.begin(group_id, PromptRef(task="long words", index=8), 3, 9)
    else:
        await buffer.reclaim(3)
        await _next_owner(buffer, "3-1-b", replace(PROMPT, reruns=1))
        await buffer.reclaim(3)
    assert [name async for name in redis.scan_iter(f"{buffer.keys('kept')}*")] == []


async def test_group_that_begins_with_old_tokens_counts_as_one_of_their_version(
    checked_buffer: Any, redis: Any
) -> None:
    buffer = await checked_buffer(max_staleness=4, on_stale=OnStale.wait)
    await buffer.announce_version(3)
    group_id = await _begun(buffer, "3-0-a")
    running = buffer.keys("running")
    assert await redis.zscore(running, group_id) == 3
    assert await buffer.keep_tokens(group_id, 2, {})
    assert await redis.zscore(running, group_id) == 2
    assert await buffer.keep_tokens(group_id, 3, {"0.0.0": b"tokens"})
    assert await redis.zscore(running, group_id) == 2
    await buffer.reconcile("later", step=1, version=2, resume_version=4)
    assert (await buffer.get_leash()).rollbacks == ((2, 4),)
    assert await buffer.keep_tokens(group_id, 1, {})  # as engines called it before the rollback
    assert await redis.zscore(running, group_id) == 3
    assert await buffer.keep_tokens(group_id, 3, {})  # it is gone
    assert await redis.zscore(running, group_id) == 3


async def test_trainer_waits_for_old_tokens_only_if_they_can_be_trained_in_time(
    checked_buffer: Any, redis: Any
) -> None:
    buffer = await checked_buffer(groups_per_step=2, max_staleness=3, on_stale=OnStale.wait)
    await buffer.announce_version(5)
    names = [await _begun(buffer, f"3-{n}-a", replace(PROMPT, index=n)) for n in range(6)]

    async def count_as(number: int, version: int) -> bool:
        return bool(await buffer.keep_tokens(names[number], version, {}))

    assert not await count_as(0, 1), "no step to come may train it"
    assert await count_as(0, 2) and await count_as(1, 2)
    assert not await count_as(2, 2), "step 5 takes two"
    assert await count_as(2, 3)
    for number in (0, 1):
        assert await buffer.push(make_group(names[number], 2)) is PushResult.stored
    assert not await count_as(3, 2)
    assert await count_as(3, 3)
    assert not await count_as(4, 3), "steps 5 and 6 take four"
    assert await buffer.abandon(names[3], "stopped", Rerun.always)
    lease = await lease_batch(buffer, 5, 2, version=5, min_groups=1)
    assert not await count_as(4, 2), "the batch of step 5 is formed"
    assert await count_as(4, 3)
    assert await buffer.nack(lease, "a rank died") == 2
    assert not await count_as(5, 3), "they need the next two places"
    assert await count_as(5, 4)
    running = await redis.zrange(buffer.keys("running"), 0, -1, withscores=True)
    assert [score for _, score in running] == [3, 3, 4]


def test_leash_counts_versions_through_rollbacks() -> None:
    leash = Leash(max_staleness=2, rollbacks=parse_rollbacks("-1:3 5:9 9:12"))
    assert [leash.current(version) for version in (2, 3, 5, 6, 8, 9, 10, 12)] == [
        *(None, 10, 12, None, None, 12, None, 12)
    ]
    assert leash.is_fresh(12, 3) and not leash.is_fresh(13, 3) and not leash.is_fresh(12, 6)
    assert parse_rollbacks("") == ()


async def test_steps_whose_gradients_add_up_are_admitted_as_one(buffer_factory: Any) -> None:
    buffer = await buffer_factory(groups_per_step=2, gradient_accumulation_steps=3, max_staleness=1)
    for number in range(12):
        await buffer.admit(f"g{number}", 60)
    with pytest.raises(TimeoutError, match="12 groups are running, ready or leased and 12 may be"):
        await buffer.admit("one-more", 0.01)
    stats = await buffer.stats()
    assert (stats.groups_per_version, stats.limit(), stats.limit(lag=1)) == (6, 12, 6)
