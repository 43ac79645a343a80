"""Random sequences of verbs at a real server, compared with a model in plain Python after each."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from buffer.admission import admission_limit, engine_lag, has_room
from buffer.blocking import BlockingReplayBuffer, BlockingRunState
from buffer.lease import Lease, PushResult
from buffer.staleness import is_fresh, next_attempt
from buffer.types import PromptRef
from configs.schema import BufferConfig

GROUPS_PER_STEP = 2
MAX_RETRIES = 1
HASTY_S = 0.002


@dataclass
class Group:
    """What the model knows of one group; `state` as in the scripts."""

    prompt: PromptRef
    min_version: int = 0
    order: int = 0
    state: str = "running"
    owner: str | None = None
    is_expired: bool = False
    step: int = -1


@dataclass
class Batch:
    owner: str
    arguments: tuple[int, int, int]
    ids: tuple[str, ...]
    is_done: bool = False


@dataclass
class Model:
    """The buffer as DESIGN.md tells it, without Redis."""

    groups: dict[str, Group] = field(default_factory=dict)
    batches: dict[int, Batch] = field(default_factory=dict)
    retries: list[PromptRef] = field(default_factory=list)
    engines: dict[str, int] = field(default_factory=dict)
    version: int = 0
    max_staleness: int = 1
    acked_step: int = -1
    pushed: int = 0
    abandoned: int = 0
    max_trained: int | None = None

    def ids(self, state: str) -> list[str]:
        return [name for name, group in self.groups.items() if group.state == state]

    def has_room(self) -> bool:
        lag = engine_lag(self.version, self.engines.values())
        limit = admission_limit(
            max_staleness=self.max_staleness, lag=lag, groups_per_step=GROUPS_PER_STEP
        )
        counts = {state: len(self.ids(state)) for state in ("running", "ready", "leased")}
        return has_room(**counts, limit=limit)

    def drop_if_stale(self, group: Group, version: int) -> bool:
        if is_fresh(version, group.min_version, self.max_staleness):
            return False
        group.state, group.owner = "dropped", None
        again = next_attempt(group.prompt, MAX_RETRIES)
        if again is not None:
            self.retries.append(again)
        return True

    def ready_in_order(self) -> list[str]:
        key = lambda name: (self.groups[name].min_version, self.groups[name].order)  # noqa: E731
        return sorted(self.ids("ready"), key=key)

    def expire(self) -> None:
        for name in self.ids("leased"):
            if self.groups[name].is_expired:
                self.release(name)

    def release(self, name: str) -> None:
        self.groups[name].state, self.groups[name].owner = "ready", None

    def drop_stale_ready(self, version: int) -> None:
        for name in self.ready_in_order():
            self.drop_if_stale(self.groups[name], version)

    def held(self, owner: str, names: tuple[str, ...] | list[str]) -> list[str]:
        return [
            name
            for name in names
            if (group := self.groups[name]).state == "leased" and group.owner == owner
        ]


class BufferMachine(RuleBasedStateMachine):
    def __init__(self, redis_url: str, make_group: Any) -> None:
        super().__init__()
        self.make_group = make_group
        run = f"model-{uuid4().hex[:12]}"
        self.calm = BlockingReplayBuffer(redis_url, run, lease_timeout_s=600)
        self.hasty = BlockingReplayBuffer(redis_url, run, lease_timeout_s=HASTY_S)
        self.state = BlockingRunState(redis_url, run)
        config = BufferConfig(max_staleness=1, max_retries=MAX_RETRIES)
        self.calm.open(config, GROUPS_PER_STEP)
        self.model = Model()
        self.leases: list[Lease] = []
        self.num_groups = 0

    def teardown(self) -> None:
        for client in (self.calm, self.hasty, self.state):
            client.close()

    def new_id(self) -> str:
        self.num_groups += 1
        return f"g{self.num_groups}"

    @rule()
    def admit(self) -> None:
        name = self.new_id()
        if self.model.has_room():
            assert self.calm.admit(name, 0) == self.model.version
            self.model.groups[name] = Group(PromptRef(task="sums", index=self.num_groups))
        else:
            with pytest.raises(TimeoutError):
                self.calm.admit(name, 0)

    @precondition(lambda self: self.model.ids("running"))
    @rule(data=st.data(), is_stale=st.booleans())
    def abandon(self, data: st.DataObject, is_stale: bool) -> None:
        name = data.draw(st.sampled_from(self.model.ids("running")))
        group = self.model.groups[name]
        for _ in range(2):
            self.calm.abandon(name, "test", requeue=group.prompt if is_stale else None)
        group.state = "abandoned"
        self.model.abandoned += 1
        again = next_attempt(group.prompt, MAX_RETRIES)
        if is_stale and again is not None:
            self.model.retries.append(again)

    @rule(
        data=st.data(),
        ages=st.lists(st.integers(0, 3), min_size=1, max_size=4),
        attempt=st.integers(0, MAX_RETRIES),
    )
    def push(self, data: st.DataObject, ages: list[int], attempt: int) -> None:
        for age in ages:
            self.push_one(data, age, attempt)

    def push_one(self, data: st.DataObject, age: int, attempt: int) -> None:
        names = self.model.ids("running")
        name = data.draw(st.sampled_from(names)) if names else self.new_id()
        prompt = PromptRef(task="sums", index=self.num_groups, attempt=attempt)
        group = Group(prompt, max(0, self.model.version - age), self.model.pushed, "ready")
        self.model.groups[name] = group
        self.model.pushed += 1
        is_stale = self.model.drop_if_stale(group, self.model.version)
        pushed = self.make_group(name, group.min_version, index=prompt.index, attempt=attempt)
        assert self.calm.push(pushed) is (PushResult.stale if is_stale else PushResult.stored)

    @precondition(lambda self: self.model.pushed)
    @rule(data=st.data())
    def push_again(self, data: st.DataObject) -> None:
        known = [n for n, g in self.model.groups.items() if g.state not in ("running", "abandoned")]
        name = data.draw(st.sampled_from(known))
        assert self.calm.push(self.make_group(name, 99)) is PushResult.duplicate

    @rule(
        back=st.integers(0, 2),
        num_groups=st.integers(1, 3),
        num_shares=st.integers(1, 2),
        is_hasty=st.booleans(),
    )
    def lease(self, back: int, num_groups: int, num_shares: int, is_hasty: bool) -> None:
        step = max(0, max(self.model.batches, default=-1) + 1 - back)
        num_shares = min(num_shares, num_groups)
        model, version = self.model, self.model.version
        arguments = (version, num_groups, num_shares)
        model.expire()
        batch = model.batches.get(step)
        if batch is not None and not batch.is_done and not model.held(batch.owner, batch.ids):
            batch = None
        if (batch is not None and batch.is_done) or (batch is None and step <= model.acked_step):
            with pytest.raises(ValueError, match="consumed before"):
                self.ask(self.calm, step, arguments)
            return
        if batch is not None:
            if batch.arguments != arguments:
                with pytest.raises(ValueError, match="was leased with"):
                    self.ask(self.calm, step, arguments)
                return
            again = self.ask(self.calm, step, arguments)
            assert (again.owner, again.group_ids) == (batch.owner, batch.ids)
            return
        model.drop_stale_ready(version)
        expected = model.ready_in_order()[:num_groups]
        client = self.hasty if is_hasty else self.calm
        if len(expected) < num_groups:
            with pytest.raises(TimeoutError):
                self.ask(client, step, arguments)
            return
        lease = self.ask(client, step, arguments)
        assert list(lease.group_ids) == expected
        model.batches[step] = Batch(lease.owner, arguments, lease.group_ids)
        for name in expected:
            group = model.groups[name]
            group.state, group.owner, group.is_expired = "leased", lease.owner, is_hasty
        self.leases.append(lease)
        self.let_expire(is_hasty)

    @rule(num_groups=st.integers(1, 3))
    def train_a_step(self, num_groups: int) -> None:
        before = len(self.leases)
        self.lease(0, num_groups, 1, False)
        for lease in self.leases[before:]:
            self.consume_of(lease, set(lease.group_ids))

    def ask(
        self, client: BlockingReplayBuffer, step: int, arguments: tuple[int, int, int]
    ) -> Lease:
        version, num_groups, num_shares = arguments
        shares = [
            client.lease(
                step=step,
                version=version,
                num_groups=num_groups,
                share=share,
                num_shares=num_shares,
                timeout_s=0,
            )
            for share in range(num_shares if client is self.calm else 1)
        ]
        if client is self.calm:
            got = sorted(g.group_id for share in shares for g in share.groups)
            held = self.model.held(shares[0].owner, shares[0].group_ids)
            assert got == sorted(held or shares[0].group_ids)
        return shares[0]

    def let_expire(self, is_hasty: bool) -> None:
        if is_hasty:
            time.sleep(2 * HASTY_S)

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), is_hasty=st.booleans())
    def validate(self, data: st.DataObject, is_hasty: bool) -> None:
        lease = data.draw(st.sampled_from(self.leases))
        model, fresh = self.model, set()
        for name in model.held(lease.owner, lease.group_ids):
            if not model.drop_if_stale(model.groups[name], model.version):
                model.groups[name].is_expired = is_hasty
                fresh.add(name)
        client = self.hasty if is_hasty else self.calm
        assert client.validate(lease, model.version) == fresh
        self.let_expire(is_hasty)

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def consume(self, data: st.DataObject) -> None:
        lease = data.draw(st.sampled_from(self.leases))
        self.consume_of(lease, data.draw(st.sets(st.sampled_from(lease.group_ids))))

    def consume_of(self, lease: Lease, names: set[str]) -> None:
        model, done = self.model, 0
        for name in sorted(names):
            group = model.groups[name]
            if group.owner == lease.owner and group.state == "leased":
                group.state, group.step = "consumed", lease.step
                staleness = lease.version - group.min_version
                model.max_trained = max(staleness, model.max_trained or staleness)
                model.batches[lease.step].is_done = True
            done += group.owner == lease.owner and group.state == "consumed"
        assert self.calm.consume(lease, names) == done
        assert self.calm.consume(lease, names) == done

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def nack(self, data: st.DataObject) -> None:
        lease = data.draw(st.sampled_from(self.leases))
        held = self.model.held(lease.owner, lease.group_ids)
        for name in held:
            self.model.release(name)
        assert self.calm.nack(lease, "test") == len(held)

    @rule(back=st.integers(0, 3))
    def ack(self, back: int) -> None:
        model = self.model
        upto = max(model.batches, default=0) - back
        due = [name for name in model.ids("consumed") if model.groups[name].step <= upto]
        for name in due:
            model.groups[name].state, model.groups[name].owner = "acked", None
            model.acked_step = max(model.acked_step, model.groups[name].step)
        assert self.calm.ack(upto) == len(due)

    @rule()
    def sweep(self) -> None:
        self.model.expire()
        self.model.drop_stale_ready(self.model.version)
        self.calm.sweep()

    @rule(growth=st.integers(-1, 2))
    def publish(self, growth: int) -> None:
        version = self.model.version + growth
        if growth < 0:
            with pytest.raises(ValueError, match="only grow"):
                self.calm.publish_version(version)
            return
        self.calm.publish_version(version)
        self.model.version = version

    @rule(value=st.integers(0, 3))
    def tune(self, value: int) -> None:
        self.calm.set_max_staleness(value)
        self.model.max_staleness = value

    @rule(engine=st.sampled_from(["e0", "e1"]), lag=st.integers(0, 2))
    def commit(self, engine: str, lag: int) -> None:
        version = max(0, self.model.version - lag)
        self.state.record_commits({engine: version})
        self.model.engines[engine] = version

    @rule()
    def take_retry(self) -> None:
        expected = self.model.retries.pop(0) if self.model.retries else None
        assert self.calm.take_retry() == expected

    @invariant()
    def numbers_agree(self) -> None:
        stats, model = self.calm.stats(), self.model
        assert stats.is_conserved, stats
        for state in ("running", "ready", "leased", "consumed", "acked"):
            assert getattr(stats, state) == len(model.ids(state)), state
        assert stats.num_dropped == len(model.ids("dropped"))
        assert (stats.pushed, stats.abandoned) == (model.pushed, model.abandoned)
        assert stats.retries_waiting == len(model.retries)
        assert stats.max_staleness_trained == model.max_trained
        ages = [model.version - model.groups[name].min_version for name in model.ids("ready")]
        assert stats.by_staleness == {age: ages.count(age) for age in ages}
        held = len(model.ids("ready")) + len(model.ids("leased")) + len(model.ids("consumed"))
        assert stats.tokens == 16 * held and (stats.bytes > 0) == (held > 0)


@pytest.mark.slow
def test_any_sequence_of_verbs_agrees_with_the_model(redis_url: str, make_group: Any) -> None:
    run_state_machine_as_test(  # type: ignore[no-untyped-call]
        lambda: BufferMachine(redis_url, make_group),
        settings=settings(
            max_examples=60,
            stateful_step_count=40,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
