"""A trainer that starts or restores takes the buffer over, and a zombie is fenced."""

from __future__ import annotations

from typing import Any

import pytest

from buffer.errors import NotOwnerError
from buffer.results import PushResult, Reconciled

STEP: dict[str, Any] = {"share": 0, "num_shares": 1, "timeout_s": 0}


async def _train(buffer: Any, step: int, version: int, num_groups: int = 1) -> Any:
    lease = await buffer.lease(step=step, version=version, num_groups=num_groups, **STEP)
    assert await buffer.consume(lease, lease.group_ids) == num_groups
    return lease


@pytest.mark.parametrize("shards", [1, 3])
async def test_restore_acks_what_the_checkpoint_contains_and_returns_the_rest(
    checked_buffer: Any, make_group: Any, shards: int
) -> None:
    buffer = await checked_buffer(max_staleness=5, shards=shards)
    await buffer.reconcile("first", step=0, version=0, resume_version=0)
    for name in "abcde":
        await buffer.push(make_group(name))
    in_checkpoint = await _train(buffer, 1, 0)
    named = await _train(buffer, 2, 0)
    lost = await _train(buffer, 3, 0)
    await buffer.lease(step=4, version=0, num_groups=1, **STEP)
    await buffer.publish_version(3)
    done = await buffer.reconcile(
        "second", step=1, version=0, resume_version=4, consumed_group_ids=named.group_ids
    )
    assert done == Reconciled(acked=2, requeued=2, dropped=0, quarantined=0)
    again = await buffer.reconcile(
        "second", step=1, version=0, resume_version=4, consumed_group_ids=named.group_ids
    )
    assert again == done
    stats = await buffer.stats()
    assert (stats.acked, stats.ready, stats.consumed, stats.leased) == (2, 3, 0, 0)
    assert stats.trainer_version == 4 and stats.lineage == "second"
    assert in_checkpoint.group_ids != lost.group_ids
    with pytest.raises(ValueError, match="step=1"):
        await buffer.lease(step=1, version=4, num_groups=1, **STEP)
    lease = await buffer.lease(step=2, version=4, num_groups=3, **STEP)
    assert set(lost.group_ids) <= set(lease.group_ids)
    # Their distance to the restored weights is what it was: 0, though the numbers are other ones.
    assert [group.min_version for group in lease.groups] == [4, 4, 4]
    assert await buffer.validate(lease, 4) == set(lease.group_ids)
    await buffer.consume(lease, lease.group_ids)
    assert (await buffer.stats()).max_staleness_trained == 0


@pytest.mark.parametrize("shards", [1, 3])
async def test_zombie_trainer_changes_nothing(
    checked_buffer: Any, make_group: Any, shards: int
) -> None:
    zombie = await checked_buffer(max_staleness=5, shards=shards)
    await zombie.reconcile("old", step=0, version=0, resume_version=0)
    for name in "abc":
        await zombie.push(make_group(name))
    await _train(zombie, 1, 0)
    held = await zombie.lease(step=2, version=0, num_groups=1, **STEP)
    heir = await checked_buffer(shards=shards)
    await heir.reconcile("new", step=0, version=0, resume_version=1)
    with pytest.raises(NotOwnerError, match="acknowledges step 1, but another trainer"):
        await zombie.ack(1, "old")
    with pytest.raises(NotOwnerError, match="step=3: another trainer"):
        await zombie.lease(step=3, version=0, num_groups=1, **STEP)
    with pytest.raises(NotOwnerError, match="lineage='old'"):
        await zombie.reconcile("old", step=0, version=0, resume_version=2)
    assert await zombie.validate(held, 0) == frozenset()
    assert await zombie.consume(held, held.group_ids) == 0
    assert await zombie.renew(held) == await zombie.nack(held, "late") == 0
    stats = await heir.stats()
    assert (stats.ready, stats.acked, stats.consumed) == (3, 0, 0)
    await _train(heir, 1, 1)
    assert await heir.ack(1, "new") == 1


async def test_groups_of_an_abandoned_lineage_are_dropped_and_counted(
    checked_buffer: Any, make_group: Any
) -> None:
    buffer = await checked_buffer(max_staleness=9, max_retries=0)
    for version in range(1, 5):
        await buffer.publish_version(version)
    await buffer.push(make_group("kept", 2))
    await buffer.push(make_group("mixed", 1, newest=2))
    await buffer.push(make_group("gone", 3, index=7))
    await buffer.push(make_group("half-gone", 2, newest=4))
    done = await buffer.reconcile("next", step=0, version=2, resume_version=5)
    assert done.dropped == 2
    stats = await buffer.stats()
    assert stats.dropped == {"lineage": 2} and stats.by_staleness == {0: 1, 1: 1}
    prompt = await buffer.take_retry()
    assert prompt is not None and prompt.attempt == 0  # no fault of its own: it costs no attempt
    assert await buffer.push(make_group("late", 4)) is PushResult.abandoned_lineage
    assert await buffer.push(make_group("late-but-good", 2)) is PushResult.stored
    assert await buffer.push(make_group("across", 2, newest=5)) is PushResult.stored
    lease = await buffer.lease(step=1, version=5, num_groups=4, **STEP)
    versions = {g.group_id: tuple(g.tokens_by_version) for g in lease.groups}
    assert versions == {"kept": (5,), "mixed": (4, 5), "late-but-good": (5,), "across": (5,)}
    assert await buffer.consume(lease, lease.group_ids) == 4
    assert (await buffer.stats()).max_staleness_trained == 1


@pytest.mark.parametrize("shards", [1, 3])
async def test_version_that_was_published_is_never_used_again(
    checked_buffer: Any, shards: int
) -> None:
    buffer = await checked_buffer(shards=shards)
    await buffer.reconcile("first", step=0, version=0, resume_version=0)
    await buffer.publish_version(3)
    with pytest.raises(ValueError, match="resume_version=3: version 3 was published before"):
        await buffer.reconcile("second", step=0, version=2, resume_version=3)
    assert (await buffer.stats()).lineage == "first"
    await buffer.reconcile("second", step=3, version=3, resume_version=3)  # nothing newer was
    assert (await buffer.stats()).lineage == "second"


async def test_trainer_that_died_while_it_published_is_resumed_above_that(
    buffer_factory: Any,
) -> None:
    buffer = await buffer_factory(shards=3)
    await buffer.shards[2].publish_version(1)  # the other two do not know it
    with pytest.raises(ValueError, match="resume_version=1: version 1 was published"):
        await buffer.reconcile("next", step=0, version=0, resume_version=1)
    assert (await buffer.stats()).lineage == ""
    await buffer.reconcile("next", step=0, version=0, resume_version=2)
    assert (await buffer.stats()).trainer_version == 2


async def test_group_that_is_leased_again_and_again_goes_to_quarantine(
    checked_buffer: Any, make_group: Any
) -> None:
    buffer = await checked_buffer(max_attempts=2)
    await buffer.push(make_group("poison"))
    for step in (1, 2):
        lease = await buffer.lease(step=step, version=0, num_groups=1, **STEP)
        await buffer.nack(lease, "the step crashed")
    (found,) = await buffer.quarantined()
    assert (found.group_id, found.attempts, found.num_tokens) == ("poison", 2, 16)
    assert await buffer.release("poison") and not await buffer.release("poison")
    for step in (3, 4):
        lease = await buffer.lease(step=step, version=0, num_groups=1, **STEP)
        await buffer.nack(lease, "the step crashed")
    assert await buffer.discard("poison") and not await buffer.discard("poison")
    stats = await buffer.stats()
    assert stats.dropped == {"discarded": 1} and stats.quarantined == stats.bytes == 0
    assert [event.event for event in await buffer.events("poison")][-1] == "dropped"


@pytest.mark.parametrize("shards", [1, 3])
async def test_zombie_cannot_publish_a_version(
    checked_buffer: Any, make_group: Any, shards: int
) -> None:
    zombie = await checked_buffer(max_staleness=0, shards=shards)
    await zombie.reconcile("first", step=0, version=0, resume_version=0)
    buffer = await checked_buffer(max_staleness=0, shards=shards)
    await buffer.reconcile("second", step=0, version=0, resume_version=0)
    await buffer.push(make_group("a"))
    with pytest.raises(NotOwnerError, match="publishes version 1"):
        await zombie.publish_version(1)
    await buffer.sweep()
    stats = await buffer.stats()
    assert (stats.trainer_version, stats.ready) == (0, 1)
