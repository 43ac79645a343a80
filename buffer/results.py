"""Results of the buffer's verbs: credits, leases, a group's events, the buffer's statistics."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from enum import Enum
from itertools import accumulate
from math import inf
from typing import Any, NamedTuple

from buffer.admission import admission_limit
from buffer.redis.replies import Reply, is_number, setting_number
from buffer.types import PromptRef, TrajectoryGroup


@dataclass(kw_only=True, slots=True, frozen=True)
class GroupEvent:
    """One change of one group's state."""

    at: float
    """Unix time by the server's clock."""
    event: str
    """admitted, begun, abandoned, rerun, prompt_quarantined, full, pushed, leased, expired, nacked,
    requeued, consumed, acked, dropped, quarantined or reconciled."""
    group_id: str
    detail: Mapping[str, str]
    """s: step, v: version, r: reason, o: owner, p: prompt; those that apply."""


class EventsPart(Reply):
    """The events of one group in one part of the audit stream."""

    next: str
    """The entry to read on from; empty at the end."""
    entries: list[tuple[str, list[str]]]
    """Id, and names and values: g (group), e (event) and details."""

    def events(self) -> Iterator[GroupEvent]:
        for entry_id, words in self.entries:
            detail = dict(zip(words[::2], words[1::2], strict=True))
            if {"g", "e"} <= detail.keys():  # else we did not write the entry
                yield GroupEvent(
                    at=int(entry_id.split("-")[0]) / 1000,
                    event=detail.pop("e"),
                    group_id=detail.pop("g"),
                    detail=detail,
                )


@dataclass(kw_only=True, slots=True, frozen=True)
class BufferStats:
    """Numbers of groups by state, read atomically.

    pushed = acked + consumed + dropped + quarantined + ready + leased, at any moment.
    """

    pushed: int
    acked: int
    consumed: int
    """Trained, but not in a durable checkpoint yet."""
    dropped: Mapping[str, int]
    """By reason."""
    quarantined: int
    """Leased too often, or undecodable."""
    ready: int
    leased: int
    running: int
    """Being generated."""
    abandoned: int
    """Were running and will never be pushed; not part of the equation above."""
    abandoned_by_reason: Mapping[str, int]
    requeued: int
    """Prompts queued again because their group went stale."""
    retries_waiting: int
    expired: int
    """Groups that returned from a lease that was not renewed."""
    by_staleness: Mapping[int, int]
    """Ready groups by how far their gate version lags behind the trainer's."""
    trainer_version: int
    engine_versions: Mapping[str, int]
    """Version that each live engine serves."""
    rerun: int = 0
    """Prompts queued again because their group failed, their worker died, or the external agent
    that ran their group left."""
    prompts_quarantined: int = 0
    """Prompts in quarantine: they failed too often or killed two workers."""
    oversampling: float = 1.0
    paused: bool = False
    """No group begins and no batch is formed."""
    engines_gone: bool
    """Engines have served but none does now; nothing is admitted until one serves again."""
    max_staleness: int
    max_staleness_largest: int = 0
    """The largest max_staleness of the run; 0 if it was never changed."""
    max_staleness_trained: int | None
    """The largest staleness of any consumed group; None before the first."""
    groups_per_step: int
    gradient_accumulation_steps: int = 1
    """Batches that one version trains: trainer.gradient_accumulation_steps."""
    bytes: int
    """Size of the stored payloads."""
    tokens: int
    """Tokens of the ready, leased and consumed groups."""
    tokens_pushed: int
    tokens_trained: int
    """Trainable tokens of all groups ever consumed, without masked ones."""
    tokens_masked: int
    """Trainable tokens masked because of their age (on_stale=mask_tokens)."""
    dropped_tokens: Mapping[str, int]
    """By reason."""
    tokens_dropped: int = 0
    """Trainable tokens of all dropped groups."""
    bytes_consumed: int
    """Part of `bytes` that is consumed; it takes no capacity."""
    bytes_quarantined: int
    """Part of `bytes` that is in quarantine; it takes no capacity."""
    capacity_groups: int | None
    capacity_bytes: int | None
    num_shards: int
    oldest_ready_age_s: float | None
    """Time since the stalest ready group was pushed; None if no group is ready."""
    push_blocked: int
    """Pushes that waited for room before they were stored."""
    push_blocked_s: float
    lineage: str
    """Lineage of the trainer that owns the buffer; "" before the first reconcile."""
    trained_by_staleness: Mapping[int, int]
    """All groups ever consumed, by staleness."""
    trained_by_age: Mapping[float, int]
    """Groups consumed up to so many seconds after their push; cumulative, ends in inf."""
    trained_age_sum_s: float
    counters: Mapping[str, int]
    """All counters of `stats` as stored in Redis."""

    def limit(self, lag: int = 0) -> int:
        """The most groups that may be running, ready or leased at this lag of the engines."""
        return admission_limit(
            max_staleness=self.max_staleness,
            lag=lag,
            groups_per_version=self.groups_per_version,
            oversampling=self.oversampling,
        )

    @property
    def groups_per_version(self) -> int:
        return self.groups_per_step * self.gradient_accumulation_steps

    @property
    def trained(self) -> int:
        return self.acked + self.consumed

    @property
    def num_dropped(self) -> int:
        return sum(self.dropped.values())

    @property
    def is_conserved(self) -> bool:
        """Every pushed group is in exactly one state."""
        return self.pushed == self.num_placed

    @property
    def num_placed(self) -> int:
        """Sum of the groups in each state after the push."""
        return self.trained + self.num_dropped + self.quarantined + self.ready + self.leased


AGE_BOUNDS_S = (1.0, 5.0, 15.0, 60.0, 300.0, 900.0, 3600.0, inf)
"""Bounds of the histogram of ages; the same in consume_groups.lua."""


class StatsReply(Reply):
    """A shard's counts; settings, counters and versions are names and values in turn."""

    running: int
    ready: int
    leased: int
    consumed: int
    quarantined: int
    retries_waiting: int
    settings: list[str]
    counters: list[str]
    engine_versions: list[str]
    ready_by_version: list[tuple[int, int]]
    oldest_ready_ms: int
    """-1 if no group is ready."""
    prompts_quarantined: int


def read_stats(reply: StatsReply) -> BufferStats:
    """Raises DamagedRunError for an unreadable setting.

    Counters and engine versions that are not numbers are left out: `is_conserved` reveals the
    former, and admission ignores the latter.
    """
    settings, counters = _pairs(reply.settings), _numbers(reply.counters)
    abandoned = _by_reason(counters, "abandoned:")

    def setting(name: str) -> float:
        return setting_number(name, settings.get(name, ""))

    def limit(name: str) -> int | None:
        # Older versions wrote "" for no limit.
        return None if settings.get(name) in (None, "", "null") else int(setting(name))

    trainer_version = int(setting("trainer_version"))
    by_age = _by_reason(counters, "trained_age:")
    up_to_age = accumulate(by_age.get(f"{bound:g}", 0) for bound in AGE_BOUNDS_S)
    return BufferStats(
        **{name: counters.get(name, 0) for name in _COUNTERS},
        **{name: getattr(reply, name) for name in _SIZES},
        **{name: int(setting(name)) for name in _SETTINGS},
        dropped=_by_reason(counters, "dropped:"),
        abandoned=sum(abandoned.values()),
        abandoned_by_reason=abandoned,
        by_staleness={
            trainer_version - version: number for version, number in reply.ready_by_version
        },
        engine_versions=_numbers(reply.engine_versions),
        oversampling=setting("oversampling"),
        paused=settings.get("paused") == "True",
        engines_gone="engines_gone" in settings,
        max_staleness_trained=counters.get("max_staleness_trained"),
        dropped_tokens=_by_reason(counters, "dropped_tokens:"),
        capacity_groups=limit("capacity_groups"),
        capacity_bytes=limit("capacity_bytes"),
        oldest_ready_age_s=None if reply.oldest_ready_ms < 0 else reply.oldest_ready_ms / 1000,
        push_blocked_s=counters.get("push_blocked_ms", 0) / 1000,
        lineage=settings.get("lineage", ""),
        trained_by_staleness={
            int(age): n
            for age, n in sorted(_by_reason(counters, "trained_staleness:").items())
            if is_number(age)
        },
        trained_by_age=dict(zip(AGE_BOUNDS_S, up_to_age, strict=True)),
        trained_age_sum_s=counters.get("trained_age_ms", 0) / 1000,
        counters=counters,
    )


_COUNTERS = (
    *("pushed", "push_blocked", "acked", "requeued", "rerun", "expired", "max_staleness_largest"),
    *("tokens", "tokens_pushed", "tokens_trained", "tokens_masked", "tokens_dropped"),
    *("bytes", "bytes_consumed", "bytes_quarantined"),
)
"""Fields of BufferStats that are counters of that name."""
_SIZES = (
    *("running", "ready", "leased", "consumed", "quarantined"),
    *("retries_waiting", "prompts_quarantined"),
)
"""Fields of BufferStats that a script has counted."""
_SETTINGS = (
    *("trainer_version", "max_staleness", "num_shards"),
    *("groups_per_step", "gradient_accumulation_steps"),
)


def _numbers(flat: Sequence[str]) -> dict[str, int]:
    return {name: int(text) for name, text in _pairs(flat).items() if is_number(text)}


def _pairs(flat: Sequence[str]) -> dict[str, str]:
    return dict(zip(flat[::2], flat[1::2], strict=True))


def _by_reason(counters: Mapping[str, int], prefix: str) -> dict[str, int]:
    return {
        name.removeprefix(prefix): number
        for name, number in counters.items()
        if name.startswith(prefix)
    }


def sum_stats(parts: Sequence[BufferStats]) -> BufferStats:
    """The sum over all shards; values of the whole run are the home shard's."""
    home = parts[0]
    summed = {
        field.name: _summed(field.name, [getattr(part, field.name) for part in parts])
        for field in fields(BufferStats)
        if field.name not in _OF_THE_RUN
    }
    return replace(home, **summed)


_OF_THE_RUN = {
    "engine_versions",
    "engines_gone",
    "max_staleness",
    "max_staleness_largest",
    "groups_per_step",
    "gradient_accumulation_steps",
    "oversampling",
    "paused",
    "num_shards",
    "lineage",
}
# A trainer that died while it announced one left a version that only some shards know; it counts.
_LARGEST = {"trainer_version", "max_staleness_trained", "oldest_ready_age_s"}


def _summed(name: str, values: Sequence[Any]) -> Any:
    known = [value for value in values if value is not None]
    if not known:
        return None
    if name in _LARGEST:
        return max(known)
    if not isinstance(known[0], Mapping):
        return sum(known)
    merged: Counter[Any] = Counter()
    for mapping in known:
        merged.update(mapping)
    return dict(merged)


def write_prompt(prompt: PromptRef) -> str:
    """'attempt index task', or 'attempt+reruns index task' if a worker died while running it."""
    reruns = f"+{prompt.reruns}" if prompt.reruns else ""
    return f"{prompt.attempt}{reruns} {prompt.index} {prompt.task}"


def read_prompt(text: str) -> PromptRef:
    counts, index, task = text.split(" ", 2)
    attempt, _, reruns = counts.partition("+")
    return PromptRef(task=task, index=int(index), attempt=int(attempt), reruns=int(reruns or 0))


def quarantined_prompt(name: str, text: str) -> QuarantinedPrompt:
    """Parses 'index task' and 'ms times reason'."""
    index, task = name.split(" ", 1)
    at_ms, times, reason = text.split(" ", 2)
    if not is_number(at_ms):
        raise ValueError(f"{at_ms!r} is not a time in milliseconds")
    return QuarantinedPrompt(
        task=task, index=int(index), reason=reason, times=int(times), at=int(at_ms) / 1000
    )


class Failure(Reply):
    """The fate of the prompt of a group that could not be completed."""

    num_failures: int
    """Failed groups of the prompt so far, including this one."""
    is_quarantined: bool
    """The prompt failed too often and is quarantined; otherwise it runs again."""


class PushResult(Enum):
    """Outcome of a push."""

    stored = "stored"
    duplicate = "duplicate"
    """It was pushed before; nothing changed. Every retry of a push returns this."""
    stale = "stale"
    """Too old for every later step: pushed and dropped, its prompt possibly requeued."""
    abandoned_lineage = "abandoned_lineage"
    """Sampled from weights that a restore discarded: pushed and dropped."""


@dataclass(kw_only=True, slots=True, frozen=True)
class QuarantinedPrompt:
    """A prompt that is not run until an operator releases it."""

    task: str
    index: int
    reason: str
    """failed (its groups failed too often, or the process of its environment died while it ran
    alone) or worker_died (thrice while it ran, at last alone)."""
    times: int
    """How often that happened."""
    at: float
    """Unix time at which it was quarantined."""


class NewGroup(NamedTuple):
    """A group that is to get a credit."""

    group_id: str
    prompt: PromptRef | None = None
    """Its prompt, unless another waits to run again."""
    position: int = 0
    """The worker's position in its tasks behind that prompt."""


class Admission(NamedTuple):
    """A credit to generate one group."""

    group_id: str
    """The group's id from now on; with several shards it also names the shard."""
    prompt: PromptRef | None
    """None if it was given none, and none waited to run again."""
    version: int
    """The trainer's current version."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Lease:
    """One rank's share of a step's batch."""

    step: int
    version: int
    """Version of the weights that the step starts from."""
    lease_token: str
    """Fences the lease: without it consume and nack have no effect."""
    group_ids: tuple[str, ...]
    """The whole batch as it was formed, in the same order at every rank."""
    groups: tuple[TrajectoryGroup, ...]
    """This rank's share, without groups dropped since the batch was formed."""
    mask_below_version: int | None
    """Tokens sampled before this version are masked; None unless on_stale=mask_tokens."""


class Reconciled(Reply):
    """Number of groups by what a takeover at a checkpoint did with them."""

    acked: int
    """In the checkpoint."""
    requeued: int
    """Consumed or leased after the checkpoint; ready again."""
    dropped: int
    """Sampled from weights that no longer exist."""
    quarantined: int
    """Leased too often to be retried."""


@dataclass(kw_only=True, slots=True, frozen=True)
class TaskProgress:
    """The prompts of a task that were begun: enough to go on with an empty server."""

    positions: Mapping[int, int]
    """Each worker's position in its stream."""
    untrained: tuple[PromptRef, ...]
    """Prompts before these positions that no step up to the checkpoint's has trained."""


@dataclass(kw_only=True, slots=True, frozen=True)
class QuarantinedGroup:
    """A group that could not be trained and is kept for inspection by an operator."""

    group_id: str
    at: float
    """Unix time at which it was quarantined."""
    reason: str
    attempts: int
    """How often it was leased."""
    num_tokens: int
