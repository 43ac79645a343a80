"""Random sequences of verbs at a real server, compared with a plain Python model after each.

LEASH_SOAK_SEQUENCES says how many sequences there are; 10,000 take some minutes. Most of the time
client and server wait for each other's turn on a busy machine: `make test` has a few sequences.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar
from uuid import uuid4

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from redis.asyncio import Redis

from buffer.connect import Buffer, buffer_on
from buffer.errors import BufferFullError, NotOwnerError, RunPausedError
from buffer.redis.connection import connect
from buffer.redis.keys import Keys
from buffer.redis.server import EmbeddedServer
from buffer.results import Lease, NewGroup
from buffer.run_state import RunState
from buffer.types import PromptRef, Rerun
from buffer.wire.codec import encode_group
from configs.checks import live_text
from configs.choices import OnFull, OnStale, Selector
from configs.schema import BufferConfig
from tests.support.buffer.copies import Copies
from tests.support.buffer.groups import make_group, next_retry
from tests.support.buffer.plain_buffer import Batch, PlainBuffer
from tests.support.invariants import find_violations

T = TypeVar("T")

NUM_SEQUENCES = int(os.environ.get("LEASH_SOAK_SEQUENCES", "75"))
FEW_SEQUENCES = 40
SEQUENCES_A_ROUND = 1000
"""Hypothesis remembers every sequence of a round; all at once would take a gigabyte."""
GROUPS_PER_STEP = 2
FIRST_VERSION = 4
"""Not 0, so that groups can be old from the start."""
LONG_S = 600.0
AGES = st.sampled_from([0, 0, 0, 1, 1, 2, 3])


class Client:
    """One connected client in one event loop, used by all sequences: connecting takes longer."""

    def __init__(self, url: str) -> None:
        self.loop = asyncio.new_event_loop()
        self.redis: Redis = self.run(connect(url))

    def run(self, reply: Awaitable[T]) -> T:
        return self.loop.run_until_complete(reply)

    def close(self) -> None:
        async def end() -> None:
            keepers = asyncio.all_tasks() - {asyncio.current_task()}
            for keeper in keepers:
                keeper.cancel()
            await asyncio.gather(*keepers, return_exceptions=True)
            await self.redis.aclose()

        self.run(end())
        self.loop.close()


class BufferMachine(RuleBasedStateMachine):
    def __init__(self, client: Client, copies: Copies) -> None:
        super().__init__()
        self.client, self.copies = client, copies
        copies.calls.clear()
        self.run = client.run
        self.name = f"model-{uuid4().hex[:12]}"
        self.leases: list[tuple[Lease, Batch]] = []
        self.has_leased = False
        self.num_groups = 0

    @initialize(
        shards=st.sampled_from([1, 1, 3]),
        on_stale=st.sampled_from(OnStale),
        selector=st.sampled_from(Selector),
        on_full=st.sampled_from(OnFull),
        capacity_groups=st.sampled_from([None, None, 5, 9]),
        max_attempts=st.sampled_from([1, 2, 5]),
        oversampling=st.sampled_from([1.0, 1.0, 1.3]),
    )
    def open(self, oversampling: float, **drawn: Any) -> None:
        self.config = BufferConfig(max_staleness=1, max_retries=1, **drawn)
        self.model = PlainBuffer(self.config, GROUPS_PER_STEP, oversampling)
        self.keys = [Keys(self.name, shard) for shard in range(self.config.shards)]
        self.state = RunState(self.client.redis, self.name, shards=self.config.shards)
        self.buffer, self.lineage = self.new_buffer(), ""
        self.rollout = self.buffer  # of the workers, which outlive trainers
        self.run(self.buffer.open(self.config, GROUPS_PER_STEP, oversampling))
        self.run(self.buffer.announce_version(FIRST_VERSION))
        self.model.announce(FIRST_VERSION)

    def new_buffer(self) -> Buffer:
        settings = replace(self.config, lease_timeout_s=LONG_S)
        return buffer_on(self.client.redis, self.name, settings)

    def teardown(self) -> None:
        if hasattr(self, "buffer"):
            self.prompts_agree()
            assert self.run(self.state.task_positions()) == self.model.positions
            assert self.run(find_violations(self.buffer)) == []
        self.run(self.client.redis.flushdb())  # this test's own server

    def agree(self, real: Awaitable[T], plain: Callable[[], T]) -> T:
        """The result of both, which must be equal, or both raise the same error."""
        try:
            expected = plain()
        except (TimeoutError, ValueError, NotOwnerError, BufferFullError, RunPausedError) as error:
            with pytest.raises(type(error), match=str(error)):
                self.run(real)
            raise Refused from error
        reply = self.run(real)
        assert reply == expected
        return reply

    def key(self, name: str, group_id: str) -> str:
        return self.keys[self.model.shard_of(group_id)](name)

    # Rollout side ----------------------------------------------------------------------------

    def new_id(self) -> str:
        self.num_groups += 1
        return f"{self.num_groups % 2}-{self.num_groups}"

    @rule(worker=st.integers(0, 1), have_prompts=st.lists(st.booleans(), min_size=1, max_size=3))
    def admit(self, worker: int, have_prompts: list[bool]) -> None:
        groups = list[NewGroup]()
        for has_prompt in have_prompts:
            name = self.new_id()
            prompt = PromptRef(task="sums", index=self.num_groups)
            groups.append(NewGroup(name, prompt, self.num_groups) if has_prompt else NewGroup(name))
        with may_refuse():
            self.agree(
                self.rollout.admit_groups(groups, 0, worker),
                lambda: self.model.admit(groups, worker),
            )

    @precondition(lambda self: self.copies.calls)
    @rule(data=st.data())
    def deliver_an_admission_once_more(self, data: st.DataObject) -> None:
        self.run(data.draw(st.sampled_from(self.copies.calls))())

    @precondition(lambda self: self.model.ids("running"))
    @rule(data=st.data(), rerun=st.sampled_from(Rerun))
    def abandon(self, data: st.DataObject, rerun: Rerun) -> None:
        name = data.draw(st.sampled_from(self.model.ids("running")))
        prompt = self.model.groups[name].prompt
        for _ in range(2):
            self.agree(
                self.buffer.abandon(
                    name,
                    "test",
                    rerun,
                    None if rerun is Rerun.never else prompt,
                ),
                lambda: self.model.abandon(name, rerun),
            )

    @precondition(lambda self: self.model.ids("running"))
    @rule(data=st.data(), is_renewed=st.booleans())
    def lose_a_credit(self, data: st.DataObject, is_renewed: bool) -> None:
        name = data.draw(st.sampled_from(self.model.ids("running")))
        self.run(self.client.redis.zadd(self.key("credits", name), {name: 1}, xx=True))
        self.model.groups[name].has_lost_credit = True
        if is_renewed:
            names = [name, *self.model.ids("abandoned")[:1]]
            self.agree(self.buffer.renew_credits(names), lambda: self.model.renew_credits(names))

    @rule(
        data=st.data(),
        ages=st.lists(st.tuples(AGES, AGES), min_size=1, max_size=5),
        attempt=st.integers(0, 1),
    )
    def push(self, data: st.DataObject, ages: list[tuple[int, int]], attempt: int) -> None:
        for age, spread in ages:
            names = self.model.ids("running", "abandoned")
            name = data.draw(st.sampled_from(names)) if names else self.new_id()
            newest = max(0, self.model.version - age)
            self.push_one(name, max(0, newest - spread), newest, attempt)

    def push_one(self, name: str, oldest: int, newest: int, attempt: int) -> None:
        prompt_length = 3 + self.num_groups % 3  # of 8 tokens: three lengths of responses
        group = make_group(
            name,
            oldest,
            newest=newest,
            prompt_length=prompt_length,
            index=self.num_groups,
            attempt=attempt,
        )
        trainable = 2 * (8 - prompt_length)
        numbers = [(oldest, trainable)]
        if oldest != newest:
            numbers = [(oldest, trainable - 4), (newest, 4)]
        num_bytes = len(encode_group(group))
        with may_refuse():
            self.agree(
                self.buffer.push(group, 0),
                lambda: self.model.push(name, group.prompt, numbers, num_bytes),
            )

    @precondition(lambda self: self.model.pushed)
    @rule(data=st.data())
    def push_again(self, data: st.DataObject) -> None:
        known = set(self.model.groups) - set(self.model.ids("running", "abandoned"))
        self.push_one(data.draw(st.sampled_from(sorted(known))), 99, 99, 0)

    @rule()
    def take_retry(self) -> None:
        self.agree(next_retry(self.buffer), self.model.take_retry)

    @precondition(lambda self: self.model.ids("running"))
    @rule(
        data=st.data(),
        worker=st.integers(0, 1),
        position=st.integers(0, 9),
        reruns=st.integers(0, 1),
        attempt=st.integers(0, 1),
    )
    def begin(
        self, data: st.DataObject, worker: int, position: int, reruns: int, attempt: int
    ) -> None:
        name = data.draw(st.sampled_from(self.model.ids("running", "abandoned", "lost")))
        index = self.model.groups[name].prompt.index
        prompt = PromptRef(task="sums", index=index, attempt=attempt, reruns=reruns)
        for _ in range(2):
            self.agree(
                self.buffer.begin(name, prompt, worker, position),
                lambda: self.model.begin(name, prompt, worker, position),
            )

    @precondition(lambda self: self.model.ids("running"))
    @rule(data=st.data(), max_failures=st.integers(1, 2))
    def fail(self, data: st.DataObject, max_failures: int) -> None:
        name = data.draw(st.sampled_from(self.model.ids("running")))
        prompt = self.model.groups[name].prompt
        for _ in range(2):
            self.agree(
                self.buffer.fail(name, prompt, max_failures),
                lambda: self.model.fail(name, prompt, max_failures),
            )

    @rule(worker=st.integers(0, 1))
    def reclaim(self, worker: int) -> None:
        for _ in range(2):
            self.agree(self.rollout.reclaim(worker), lambda: self.model.reclaim(worker))

    @precondition(lambda self: self.model.poisonous)
    @rule(data=st.data(), run_again=st.booleans())
    def let_a_prompt_go(self, data: st.DataObject, run_again: bool) -> None:
        self.prompts_agree()
        _, task, index = data.draw(st.sampled_from(sorted(self.model.poisonous)))
        leave = self.buffer.release_prompt if run_again else self.buffer.discard_prompt
        for _ in range(2):
            self.agree(
                leave(task, index),
                lambda: self.model.end_quarantine(task, index, run_again=run_again),
            )

    # Trainer side ----------------------------------------------------------------------------

    @rule(
        back=st.sampled_from([0, 0, 1, 2]),
        num_groups=st.integers(1, 3),
        num_missing=st.integers(0, 2),
        num_shares=st.integers(1, 2),
        spreads=st.lists(AGES, max_size=4),
    )
    def lease(
        self, back: int, num_groups: int, num_missing: int, num_shares: int, spreads: list[int]
    ) -> None:
        for spread in spreads:
            newest = self.model.version
            self.push_one(self.new_id(), max(0, newest - spread), newest, 0)
        newest = max([*self.model.batches, self.model.acked_step, -1])
        enough = max(1, num_groups - num_missing)
        arguments = (self.model.version, num_groups, min(num_shares, enough))
        with may_refuse():
            self.lease_step(max(0, newest + 1 - back), arguments, enough)

    def lease_step(self, step: int, arguments: tuple[int, int, int], enough: int) -> None:
        version, num_groups, num_shares = arguments
        leases: list[Lease] = []

        async def ask() -> tuple[str, ...]:
            for share in range(num_shares):
                leases.append(
                    await self.buffer.lease(
                        step=step,
                        version=version,
                        num_groups=num_groups,
                        share=share,
                        num_shares=num_shares,
                        timeout_s=0,
                        min_groups=enough,
                        batch_timeout_s=0,
                    )
                )
            return leases[0].group_ids

        def expect() -> tuple[str, ...]:
            nonlocal batch
            batch = self.model.lease(step, arguments, self.lineage, enough)
            return batch.ids

        batch: Batch | None = None
        if any(self.model.groups[name].is_damaged for name in self.model.groups):
            num_shares, arguments = 1, (version, num_groups, 1)  # else ranks would not agree
        self.agree(ask(), expect)
        assert batch is not None
        got = {g.group_id: Counter(g.tokens_by_version) for lease in leases for g in lease.groups}
        assert got == self.model.fetch(batch)
        assert leases[0].mask_below_version == batch.oldest
        self.leases.append((leases[0], batch))
        self.has_leased = True

    @rule(spreads=st.lists(AGES, min_size=1, max_size=4))
    def train_a_step(self, spreads: list[int]) -> None:
        before = len(self.leases)
        self.lease(0, len(spreads), 0, 1, spreads)
        for lease, batch in self.leases[before:]:
            self.consume_of(lease, batch, set(lease.group_ids))

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def let_a_lease_expire(self, data: st.DataObject) -> None:
        """Its deadline is set to the past, which is quicker than to wait for it."""
        _, batch = data.draw(st.sampled_from(self.leases[-3:]))
        for name in self.model.still_leased(batch.owner, batch.ids):
            self.run(self.client.redis.zadd(self.key("leased", name), {name: 1}, xx=True))
            self.model.groups[name].is_expired = True

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def validate(self, data: st.DataObject) -> None:
        lease, batch = data.draw(st.sampled_from(self.leases[-3:]))
        self.agree(
            self.buffer.validate(lease, self.model.version), lambda: self.model.validate(batch)
        )

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def renew(self, data: st.DataObject) -> None:
        lease, batch = data.draw(st.sampled_from(self.leases[-3:]))
        self.agree(self.buffer.renew(lease), lambda: self.model.renew(batch))

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def consume(self, data: st.DataObject) -> None:
        lease, batch = data.draw(st.sampled_from(self.leases[-3:]))
        self.consume_of(lease, batch, data.draw(st.sets(st.sampled_from(lease.group_ids))))

    def consume_of(self, lease: Lease, batch: Batch, names: set[str]) -> None:
        for _ in range(2):
            self.agree(
                self.buffer.consume(lease, names),
                lambda: self.model.consume(lease.step, batch, names),
            )

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def nack(self, data: st.DataObject) -> None:
        lease, batch = data.draw(st.sampled_from(self.leases[-3:]))
        self.agree(self.buffer.nack(lease, "test"), lambda: self.model.nack(batch))

    @rule(back=st.integers(0, 3))
    def ack(self, back: int) -> None:
        upto = max(self.model.batches, default=0) - back
        self.agree(self.buffer.ack(upto, self.lineage), lambda: self.model.ack(upto, self.lineage))

    @rule(growth=st.integers(-1, 2))
    def announce(self, growth: int) -> None:
        version = self.model.version + growth
        with may_refuse():
            self.agree(self.buffer.announce_version(version), lambda: self.model.announce(version))

    @precondition(lambda self: self.has_leased)
    @rule(back=st.integers(0, 3), jump=st.integers(0, 2))
    def restore(self, back: int, jump: int) -> None:
        """A new trainer takes over at some checkpoint; the old one becomes a zombie."""
        model, self.has_leased = self.model, False
        step = max([-1, *(model.groups[name].step for name in model.ids("consumed"))]) - back
        version = max(0, model.version - back)
        inside = [
            name
            for name in model.ids("ready", "leased", "consumed", "quarantined")
            if name.endswith(("1", "5", "@1"))
        ]
        lineage, heir = f"lineage-{len(model.lineages)}", self.new_buffer()
        resume = model.version + jump
        with may_refuse():
            for _ in range(2):
                self.agree(
                    heir.reconcile(
                        lineage,
                        step=step,
                        version=version,
                        resume_version=resume,
                        consumed_group_ids=inside,
                    ),
                    lambda: model.reconcile(lineage, step, version, resume, inside),
                )
            zombie, old = self.buffer, self.lineage
            self.buffer, self.lineage = heir, lineage
            if old:
                with pytest.raises(NotOwnerError):
                    self.run(zombie.ack(100, old))
                with pytest.raises(NotOwnerError):
                    self.run(zombie.reconcile(old, step=0, version=0, resume_version=resume + 9))

    # Either side -----------------------------------------------------------------------------

    @rule()
    def sweep(self) -> None:
        self.agree(self.buffer.sweep(), self.model.sweep)

    @rule(value=st.integers(0, 3))
    def tune(self, value: int) -> None:
        self.run(self.buffer.change_settings({"max_staleness": value}))
        self.model.max_staleness = value

    @precondition(lambda self: self.model.settings.on_stale is not OnStale.mask_tokens)
    @rule(
        on_stale=st.sampled_from([one for one in OnStale if one is not OnStale.mask_tokens]),
        capacity=st.sampled_from([None, 5, 9]),
    )
    def tune_rules(self, on_stale: OnStale, capacity: int | None) -> None:
        changed = {"on_stale": on_stale.name, "capacity_groups": live_text(capacity)}
        self.run(self.buffer.change_settings(changed))
        self.model.settings = replace(
            self.model.settings, on_stale=on_stale, capacity_groups=capacity
        )

    @rule(back=st.sampled_from([0, 0, 1, 2]), spread=AGES)
    def pause(self, back: int, spread: int) -> None:
        """Pushes go on, and so does a batch that a rank has."""
        self.model.is_paused = True
        self.run(self.buffer.change_settings({"paused": "True"}))
        self.admit(0, [True])
        self.lease(back, 1, 0, 1, [spread])
        self.model.is_paused = False
        self.run(self.buffer.change_settings({"paused": "False"}))

    @rule(engine=st.sampled_from(["e0", "e1"]), lag=st.integers(0, 4))
    def commit(self, engine: str, lag: int) -> None:
        version = max(0, self.model.version - lag)
        self.run(self.state.record_commits({engine: version}))
        self.model.engines[engine] = version

    @precondition(lambda self: self.model.ids("ready"))
    @rule(data=st.data())
    def damage(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(self.model.ids("ready")))
        key = self.keys[self.model.shard_of(name)].payload(name)
        self.run(self.client.redis.set(key, b"no group at all"))
        self.model.groups[name].is_damaged = True

    @precondition(lambda self: self.model.ids("quarantined"))
    @rule(data=st.data(), is_released=st.booleans())
    def look_into_quarantine(self, data: st.DataObject, is_released: bool) -> None:
        found = {group.group_id for group in self.run(self.buffer.quarantined())}
        assert found == set(self.model.ids("quarantined"))
        name = data.draw(st.sampled_from(sorted(found)))
        for _ in range(2):
            if is_released:
                self.agree(self.buffer.release(name), lambda: self.model.release(name))
            else:
                self.agree(self.buffer.discard(name), lambda: self.model.discard(name))

    @invariant()
    def numbers_agree(self) -> None:
        stats, model = self.run(self.buffer.stats()), self.model
        assert stats.is_conserved, stats
        for state in ("running", "ready", "leased", "consumed", "acked", "quarantined"):
            assert getattr(stats, state) == len(model.ids(state)), state
        assert stats.dropped == {reason: n for reason, n in model.dropped.items() if n}
        assert (stats.pushed, stats.abandoned) == (model.pushed, model.abandoned)
        assert stats.retries_waiting == sum(map(len, model.retries))
        assert stats.prompts_quarantined == len(model.poisonous)
        assert stats.max_staleness_trained == model.max_trained()
        assert stats.trained_by_staleness == dict(model.trained)
        assert stats.tokens_trained == model.tokens_trained
        assert stats.tokens_masked == model.tokens_masked
        assert stats.tokens_dropped == model.tokens_dropped
        assert stats.by_staleness == model.by_staleness()
        held = [model.groups[n] for n in model.ids("ready", "leased", "consumed", "quarantined")]
        assert stats.tokens == 16 * len(held)
        assert stats.bytes == sum(group.num_bytes for group in held)
        assert (stats.trainer_version, stats.lineage) == (model.version, model.lineages[-1])

    def prompts_agree(self) -> None:
        poisonous = self.run(self.buffer.quarantined_prompts())
        assert sorted((p.task, p.index, p.reason, p.times) for p in poisonous) == sorted(
            (task, index, *why) for (_, task, index), why in self.model.poisonous.items()
        )


class Refused(Exception):
    """Both said no, in the same way."""


def may_refuse() -> contextlib.AbstractContextManager[None]:
    return contextlib.suppress(Refused)


@pytest.fixture
def client(tmp_path: Path) -> Iterator[Client]:
    """Connection to a server for this test alone, which it may flush."""
    server = EmbeddedServer.start(tmp_path, BufferConfig(), "127.0.0.1", tmp_path / "redis.log")
    client = Client(server.url)
    yield client
    client.close()
    server.stop(timeout_s=60)


@pytest.mark.slow
@pytest.mark.timeout(36_000)
@pytest.mark.parametrize(
    "number", [FEW_SEQUENCES, pytest.param(NUM_SEQUENCES, marks=pytest.mark.long)]
)
def test_verbs_in_any_sequence_agree_with_the_model(
    client: Client, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    copies = Copies(monkeypatch, are_twice=True)
    for done in range(0, number, SEQUENCES_A_ROUND):
        run_state_machine_as_test(
            lambda: BufferMachine(client, copies),
            settings=settings(
                max_examples=min(SEQUENCES_A_ROUND, number - done),
                stateful_step_count=40,
                suppress_health_check=list(HealthCheck),
            ),
        )
