"""A model of the replay buffer in plain Python: no Redis, no clock, no client.

What a verb refuses it raises, as the real one does; of the message it knows the part that matters.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import NamedTuple
from zlib import crc32

from buffer.admission import admission_limit, engine_lag
from buffer.errors import BufferFullError, NotOwnerError, RunPausedError
from buffer.replay_buffer import quota
from buffer.results import Admission, Failure, NewGroup, PushResult, Reconciled
from buffer.shard_routes import id_in_shard, shard_of
from buffer.types import PromptRef, Rerun
from configs.choices import OnFull, OnStale, Selector
from configs.schema import BufferConfig


class Rollback(NamedTuple):
    """One rollback: version `last` became `resume`, and nothing between them is valid."""

    last: int
    resume: int


def renumber_version(version: int, rollbacks: Iterable[Rollback]) -> int | None:
    """The number of `version` after these rollbacks, in their order; None if it is gone."""
    for rollback in rollbacks:
        if version <= rollback.last:
            version += rollback.resume - rollback.last
        elif version < rollback.resume:
            return None
    return version


DONE = "consumed before"
OTHER_ARGUMENTS = "was leased with"
NO_PROMPT = PromptRef(task="sums", index=0)
"""For a group that has not begun."""


@dataclass
class Group:
    """`state` as in the scripts; `numbers` are (version, trainable tokens), oldest first."""

    prompt: PromptRef
    state: str = "running"
    oldest_possible: int = 0
    has_lost_credit: bool = False
    has_begun: bool = False
    numbers: list[tuple[int, int]] = field(default_factory=list)
    known_rollbacks: int = 0
    num_bytes: int = 0
    order: int = 0
    owner: int | None = None
    is_expired: bool = False
    is_damaged: bool = False
    leases: int = 0
    step: int = -1

    @property
    def oldest(self) -> int:
        return self.numbers[0][0]

    @property
    def newest(self) -> int:
        return self.numbers[-1][0]

    def tokens_from(self, oldest: int | None) -> Counter[int]:
        """Trainable tokens by version, without what is masked."""
        counts: Counter[int] = Counter()
        for version, tokens in self.numbers:
            if oldest is None or version >= oldest:
                counts[version] += tokens
        return counts


class Batch(NamedTuple):
    owner: int
    arguments: tuple[int, int, int]
    """version, groups, shares"""
    ids: tuple[str, ...]
    oldest: int | None


class PlainBuffer:
    def __init__(
        self, settings: BufferConfig, groups_per_step: int, oversampling: float = 1.0
    ) -> None:
        self.settings = settings
        self.oversampling = oversampling
        self.groups_per_step = groups_per_step
        self.max_staleness = settings.max_staleness
        self.is_paused = False
        self.groups: dict[str, Group] = {}
        self.batches: dict[int, Batch] = {}
        self.done_steps: set[int] = set()
        self.retries: list[list[PromptRef]] = [[] for _ in range(settings.shards)]
        self.orders = [0] * settings.shards
        self.positions: dict[int, int] = {}
        self.failures: Counter[tuple[int, str, int]] = Counter()
        """By shard, task and index of the prompt."""
        self.poisonous: dict[tuple[int, str, int], tuple[str, int]] = {}
        """Reason and number of times, by the same."""
        self.engines: dict[str, int] = {}
        self.version = 0
        self.acked_step = -1
        self.num_owners = 0
        self.rollbacks: list[Rollback] = []
        self.lineages: list[str] = [""]
        self.reconciled = Reconciled(acked=0, requeued=0, dropped=0, quarantined=0)
        self.pushed = self.abandoned = self.tokens_masked = 0
        self.dropped: Counter[str] = Counter()
        self.trained: Counter[int] = Counter()
        self.tokens_trained = self.tokens_dropped = 0

    # Looking ---------------------------------------------------------------------------------

    def ids(self, *states: str, shard: int | None = None) -> list[str]:
        return [
            name
            for name, group in self.groups.items()
            if group.state in states and (shard is None or self.shard_of(name) == shard)
        ]

    def shard_of(self, name: str) -> int:
        return shard_of(name, self.settings.shards)

    def gate(self, group: Group) -> int:
        masks = self.settings.on_stale is OnStale.mask_tokens
        return group.newest if masks else group.oldest

    def score(self, name: str) -> tuple[int, int]:
        return self.gate(self.groups[name]), self.groups[name].order

    def by_staleness(self) -> dict[int, int]:
        return dict(Counter(self.version - self.gate(self.groups[n]) for n in self.ids("ready")))

    def still_leased(self, owner: int, names: Iterable[str]) -> list[str]:
        return [
            name
            for name in names
            if (group := self.groups[name]).state == "leased" and group.owner == owner
        ]

    def max_trained(self) -> int | None:
        return max(self.trained, default=None)

    # Moving ----------------------------------------------------------------------------------

    def requeue(self, name: str, is_counted: bool) -> None:
        if is_counted and self.settings.on_stale is not OnStale.requeue:
            return
        prompt: PromptRef | None = self.groups[name].prompt
        if is_counted and prompt is not None:
            is_last = prompt.attempt >= self.settings.max_retries
            prompt = None if is_last else replace(prompt, attempt=prompt.attempt + 1)
        if prompt is not None:
            self.retries[self.shard_of(name)].append(prompt)

    def drop(self, name: str, reason: str) -> None:
        self.groups[name].state, self.groups[name].owner = "dropped", None
        self.tokens_dropped += self.groups[name].tokens_from(None).total()
        self.dropped[reason] += 1
        if reason in ("stale", "lineage"):
            self.requeue(name, is_counted=reason == "stale")

    def to_ready(self, name: str) -> None:
        self.groups[name].state, self.groups[name].owner = "ready", None

    def to_quarantine(self, name: str) -> None:
        self.groups[name].state, self.groups[name].owner = "quarantined", None

    def return_leased(self, name: str) -> bool:
        if self.groups[name].leases < self.settings.max_attempts:
            self.to_ready(name)
            return True
        self.to_quarantine(name)
        return False

    def expire(self) -> None:
        for name in self.ids("leased"):
            if self.groups[name].is_expired:
                self.return_leased(name)

    def drop_stale_ready(self, version: int) -> None:
        for name in sorted(self.ids("ready"), key=self.score):
            if self.gate(self.groups[name]) < version - self.max_staleness:
                self.drop(name, "stale")

    def renumber(self, group: Group) -> bool:
        """False if the group holds a token of a version that is gone."""
        later, group.known_rollbacks = self.rollbacks[group.known_rollbacks :], len(self.rollbacks)
        moved = [(renumber_version(version, later), tokens) for version, tokens in group.numbers]
        if any(version is None for version, _ in moved):
            return False
        group.numbers = [(version, tokens) for version, tokens in moved if version is not None]
        return True

    # The rollout side's verbs ----------------------------------------------------------------

    def admit(self, groups: list[NewGroup], worker: int) -> list[Admission]:
        lag = engine_lag(self.version, self.engines.values(), self.max_staleness)
        num_shards = self.settings.shards
        limit = admission_limit(
            max_staleness=self.max_staleness,
            lag=lag,
            groups_per_version=self.groups_per_step,
            oversampling=self.oversampling,
        )
        if self.is_paused:
            raise RunPausedError("the run is paused")
        for number in range(num_shards):
            shard = (crc32(groups[0].group_id.encode()) + number) % num_shards
            in_use = len(self.ids("running", "ready", "leased", shard=shard))
            room, waiting = quota(limit, shard, num_shards) - in_use, self.retries[shard]
            if room > 0:
                again = waiting.pop(0) if waiting else None
                return [
                    self.admit_one(one, again, shard, worker, self.version - lag)
                    for one in groups[: 1 if again else room]
                ]
        raise TimeoutError("no room")

    def admit_one(
        self, one: NewGroup, again: PromptRef | None, shard: int, worker: int, oldest: int
    ) -> Admission:
        name, prompt = id_in_shard(one.group_id, shard, self.settings.shards), again or one.prompt
        self.groups[name] = Group(prompt or NO_PROMPT, oldest_possible=oldest)
        if prompt is not None:
            self.begin(name, prompt, worker, 0 if again else one.position)
        return Admission(name, prompt, self.version)

    def begin(self, name: str, prompt: PromptRef, worker: int, position: int) -> bool:
        if self.groups[name].state != "running":
            return False
        self.groups[name].prompt, self.groups[name].has_begun = prompt, True
        self.positions[worker] = max(self.positions.get(worker, 0), position)
        return True

    def fail(self, name: str, prompt: PromptRef, max_failures: int) -> Failure | None:
        if self.groups[name].state != "running":
            return None
        self.groups[name].state = "abandoned"
        self.abandoned += 1
        key = self.shard_of(name), prompt.task, prompt.index
        self.failures[key] += 1
        times = self.failures[key]
        if times >= max_failures:
            del self.failures[key]
            self.poisonous[key] = "failed", times
            return Failure(num_failures=times, is_quarantined=True)
        self.retries[key[0]].append(prompt)
        return Failure(num_failures=times, is_quarantined=False)

    def lose(self, name: str) -> None:
        """Its worker is gone."""
        group, shard = self.groups[name], self.shard_of(name)
        self.abandoned += 1
        group.state = "lost" if group.has_begun else "abandoned"
        if not group.has_begun:
            return
        prompt = replace(group.prompt, reruns=group.prompt.reruns + 1)
        if prompt.reruns > 2:
            self.poisonous[shard, prompt.task, prompt.index] = "worker_died", prompt.reruns
        else:
            self.retries[shard].append(prompt)

    def reclaim(self, worker: int) -> int:
        lost = [name for name in self.ids("running") if name.startswith(f"{worker}-")]
        for name in lost:
            self.lose(name)
        return len(lost)

    def end_quarantine(self, task: str, index: int, *, run_again: bool) -> bool:
        found = [key for key in self.poisonous if key[1:] == (task, index)]
        for key in [key for key in self.failures if key[1:] == (task, index)]:
            del self.failures[key]
        for key in found:
            del self.poisonous[key]
            if run_again:
                self.retries[key[0]].append(PromptRef(task=task, index=index))
        return bool(found)

    def renew_credits(self, names: Iterable[str]) -> int:
        running = [name for name in names if self.groups[name].state == "running"]
        for name in running:
            self.groups[name].has_lost_credit = False
        return len(running)

    def abandon(self, name: str, rerun: Rerun) -> bool:
        group = self.groups[name]
        if group.state != "running":
            return False
        group.state = "abandoned" if rerun is Rerun.never else "lost"
        self.abandoned += 1
        if rerun is Rerun.as_stale:
            self.requeue(name, is_counted=True)
        elif rerun is Rerun.always:
            self.retries[self.shard_of(name)].append(group.prompt)
        return True

    def push(
        self, name: str, prompt: PromptRef, numbers: list[tuple[int, int]], num_bytes: int
    ) -> PushResult:
        known = self.groups.get(name)
        if known is not None and known.state not in ("running", "abandoned"):
            return PushResult.duplicate
        group = Group(prompt, state="ready", numbers=numbers, num_bytes=num_bytes)
        is_valid, shard = self.renumber(group), self.shard_of(name)
        if is_valid and self.gate(group) >= self.version - self.max_staleness:
            self.make_room(shard)
            group.order = self.orders[shard] = self.orders[shard] + 1
            self.groups[name] = group
            self.pushed += 1
            return PushResult.stored
        self.groups[name] = group
        self.pushed += 1
        self.drop(name, "stale" if is_valid else "lineage")
        return PushResult.stale if is_valid else PushResult.abandoned_lineage

    def make_room(self, shard: int) -> None:
        if self.settings.capacity_groups is None:
            return
        capacity = quota(self.settings.capacity_groups, shard, self.settings.shards)
        # None is evicted where even that would leave no room, as after the capacity was lowered.
        fits_beside_leased = len(self.ids("leased", shard=shard)) < capacity
        if self.settings.on_full is OnFull.drop_stalest and fits_beside_leased:
            for name in sorted(self.ids("ready", shard=shard), key=self.score):
                if len(self.ids("ready", "leased", shard=shard)) >= capacity:
                    self.drop(name, "full")
        if len(self.ids("ready", "leased", shard=shard)) >= capacity:
            if self.settings.on_full is OnFull.error:
                raise BufferFullError("no room")
            raise TimeoutError("no room")

    def take_retry(self) -> PromptRef | None:
        return next((waiting.pop(0) for waiting in self.retries if waiting), None)

    # The trainer side's verbs ----------------------------------------------------------------

    def lease(self, step: int, arguments: tuple[int, int, int], lineage: str, enough: int) -> Batch:
        if lineage and lineage != self.lineages[-1]:
            raise NotOwnerError("another trainer")
        if self.settings.shards == 1:
            self.expire()
        batch = self.batches.get(step)
        if batch is not None and step in self.done_steps:
            raise ValueError(DONE)
        if batch is not None and self.still_leased(batch.owner, batch.ids):
            if batch.arguments != arguments:
                raise ValueError(OTHER_ARGUMENTS)
            return batch
        self.batches.pop(step, None)
        if step <= self.acked_step:
            raise ValueError(DONE)
        if self.is_paused:
            raise RunPausedError("the run is paused")
        return self.form(step, arguments, enough)

    def form(self, step: int, arguments: tuple[int, int, int], enough: int) -> Batch:
        version, num_groups, _ = arguments
        self.expire()
        self.drop_stale_ready(version)
        chosen = self.choose(version)[:num_groups]
        if len(chosen) < enough or self.is_held_back(version):
            raise TimeoutError(f"step {step}")
        self.num_owners += 1
        for name in chosen:
            group = self.groups[name]
            group.state, group.owner, group.is_expired = "leased", self.num_owners, False
            group.leases += 1
        is_masking = self.settings.on_stale is OnStale.mask_tokens
        oldest = version - self.max_staleness if is_masking else None
        self.batches[step] = Batch(self.num_owners, arguments, tuple(chosen), oldest)
        return self.batches[step]

    def is_held_back(self, version: int) -> bool:
        if self.settings.on_stale is not OnStale.wait:
            return False
        return any(
            self.is_crowded(shard, version - self.max_staleness, later)
            for shard in range(self.settings.shards)
            for later in range(max(1, self.max_staleness))
        )

    def is_crowded(self, shard: int, brink: int, later: int) -> bool:
        """Whether `later` further steps could not take all that run and are of these versions."""
        share, last = self.groups_per_step / self.settings.shards, brink + later
        running, ready = (
            [self.groups[n] for n in self.ids(state) if self.shard_of(n) == shard]
            for state in ("running", "ready")
        )
        num_running = sum(group.oldest_possible <= last for group in running)
        num_ready = sum(self.gate(group) <= last for group in ready)
        return num_running > later * share and (not later or num_ready < share)

    def choose(self, version: int) -> list[str]:
        brink, selector = version - self.max_staleness, self.settings.selector
        is_urgent = selector is Selector.shortest or self.settings.on_stale is OnStale.wait

        def key(name: str) -> tuple[object, ...]:
            gate, order = self.score(name)
            if is_urgent and gate <= brink:
                return 0, gate, order, name
            match selector:
                case Selector.shortest:
                    return 1, self.groups[name].tokens_from(None).total(), order, name
                case Selector.fifo:
                    return 1, order, name
                case Selector.freshest:
                    return 1, -gate, -order, name
                case _:
                    return 1, gate, order, name

        return sorted(self.ids("ready"), key=key)

    def fetch(self, batch: Batch) -> dict[str, Counter[int]]:
        """Trainable tokens of each group that the ranks get; unreadable ones go to quarantine."""
        held = self.still_leased(batch.owner, batch.ids)
        for name in held:
            if self.groups[name].is_damaged:
                self.to_quarantine(name)
        return {
            name: self.groups[name].tokens_from(batch.oldest)
            for name in self.still_leased(batch.owner, batch.ids)
        }

    def validate(self, batch: Batch) -> frozenset[str]:
        oldest, fresh = self.version - self.max_staleness, set()
        for name in self.still_leased(batch.owner, batch.ids):
            group = self.groups[name]
            if self.gate(group) < oldest:
                self.drop(name, "stale")
            elif min(group.tokens_from(batch.oldest)) < oldest:
                self.to_ready(name)
            else:
                group.is_expired = False
                fresh.add(name)
        return frozenset(fresh)

    def renew(self, batch: Batch) -> int:
        held = self.still_leased(batch.owner, batch.ids)
        for name in held:
            self.groups[name].is_expired = False
        return len(held)

    def consume(self, step: int, batch: Batch, names: Iterable[str]) -> int:
        for name in self.still_leased(batch.owner, names):
            group = self.groups[name]
            group.state, group.step, group.leases = "consumed", step, 0
            trained = group.tokens_from(batch.oldest)
            self.trained[batch.arguments[0] - min(trained)] += 1
            self.tokens_trained += trained.total()
            self.tokens_masked += group.tokens_from(None).total() - trained.total()
        done = [
            name
            for name in names
            if self.groups[name].state == "consumed" and self.groups[name].owner == batch.owner
        ]
        if done:
            self.done_steps.add(step)
        return len(done)

    def nack(self, batch: Batch) -> int:
        held = self.still_leased(batch.owner, batch.ids)
        for name in held:
            self.return_leased(name)
        return len(held)

    def ack(self, upto_step: int, lineage: str) -> int:
        if lineage and lineage != self.lineages[-1]:
            raise NotOwnerError("another trainer")
        due = [name for name in self.ids("consumed") if self.groups[name].step <= upto_step]
        steps = {step for step in self.done_steps & set(self.batches) if step <= upto_step}
        steps |= {self.groups[name].step for name in due}
        self.acked_step = max(steps | {self.acked_step})
        for name in due:
            self.groups[name].state, self.groups[name].owner = "acked", None
        for step in [s for s in self.batches if s <= min(upto_step, self.acked_step)]:
            del self.batches[step]
        return len(due)

    # Either side's verbs ---------------------------------------------------------------------

    def announce(self, version: int) -> None:
        if version < self.version:
            raise ValueError("versions only grow")
        self.version = version

    def sweep(self) -> int:
        before = {name: group.state for name, group in self.groups.items()}
        for name in self.ids("running"):
            if self.groups[name].has_lost_credit:
                self.lose(name)
        self.expire()
        moved = sum(before[name] != group.state for name, group in self.groups.items())
        ready = self.ids("ready")
        self.drop_stale_ready(self.version)
        return moved + sum(self.groups[name].state == "dropped" for name in ready)

    def release(self, name: str) -> bool:
        group = self.groups[name]
        if group.state != "quarantined":
            return False
        if self.renumber(group):
            group.leases = 0
            self.to_ready(name)
        else:
            self.drop(name, "lineage")
        return True

    def discard(self, name: str) -> bool:
        if self.groups[name].state != "quarantined":
            return False
        self.drop(name, "discarded")
        return True

    def reconcile(
        self, lineage: str, step: int, version: int, resume_version: int, acked: Iterable[str]
    ) -> Reconciled:
        if lineage in self.lineages[:-1]:
            raise NotOwnerError("another trainer")
        if lineage != self.lineages[-1]:
            self.begin_lineage(lineage, step, version, resume_version)
            self.reconciled = self.sort_out(step, set(acked))
        return self.reconciled

    def begin_lineage(self, lineage: str, step: int, version: int, resume_version: int) -> None:
        last = renumber_version(version, self.rollbacks)
        last = -1 if last is None else last
        is_newest = last == resume_version == self.version
        if resume_version <= self.version and not is_newest:
            raise ValueError("announced before")
        if resume_version > last:
            self.rollbacks.append(Rollback(last, resume_version))
            for name in self.ids("running"):
                moved = renumber_version(self.groups[name].oldest_possible, self.rollbacks[-1:])
                self.groups[name].oldest_possible = resume_version if moved is None else moved
        self.lineages.append(lineage)
        self.version, self.acked_step = resume_version, step

    def sort_out(self, step: int, acked: set[str]) -> Reconciled:
        num_acked = requeued = quarantined = 0
        acked |= {name for name in self.ids("consumed") if self.groups[name].step <= step}
        for name in acked & set(self.ids("ready", "leased", "consumed", "quarantined")):
            self.groups[name].state, self.groups[name].owner = "acked", None
            num_acked += 1
        for name in self.ids("leased", "consumed"):
            if self.groups[name].state == "consumed":
                self.to_ready(name)
                requeued += 1
            elif self.return_leased(name):
                requeued += 1
            else:
                quarantined += 1
        self.batches.clear()
        self.done_steps.clear()
        before = self.dropped["lineage"]
        for name in sorted(self.ids("ready"), key=self.score, reverse=True):
            if not self.renumber(self.groups[name]):
                self.drop(name, "lineage")
        return Reconciled(
            acked=num_acked,
            requeued=requeued,
            dropped=self.dropped["lineage"] - before,
            quarantined=quarantined,
        )
