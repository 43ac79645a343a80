"""What the verbs of a shard reply: NamedTuples, with a `word` where several things can happen."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, cast

from buffer.redis.client import DamagedRunError


class Admitted(NamedTuple):
    version: int
    """The trainer's version now."""


class NoRoom(NamedTuple):
    last_wake: str
    """Entry of wake:room to wait behind."""
    in_use: int
    limit: int


@dataclass(slots=True, frozen=True)
class PushRecord:
    """What the server keeps of a group besides its payload."""

    group_id: str
    min_version: int
    max_version: int
    """Oldest and newest version that sampled a trainable token."""
    versions: str
    """'version:count version:count', ascending: trainable tokens by version."""
    tokens: int
    trainable: int
    bytes: int
    """Of all chunks."""
    task: str
    index: int
    attempt: int

    @property
    def arguments(self) -> tuple[str | int, ...]:
        """As push_groups.lua lists them."""
        versions = (self.min_version, self.max_version, self.versions)
        sizes = (self.tokens, self.trainable, self.bytes)
        return (self.group_id, *versions, *sizes, self.task, self.index, self.attempt)


PushWord = Literal[
    "stored", "duplicate", "stale", "abandoned_lineage", "full", "too_large", "missing", "again"
]


class PushReply(NamedTuple):
    word: PushWord
    """missing: the payload expired before the commit, send all again. again: call again (the bound
    of evictions was reached). full: nothing was stored and the payload is gone."""
    last_wake: str = "0-0"
    groups: int = 0
    bytes: int = 0
    """In use (ready and leased), for full and too_large."""
    capacity_groups: int | None = None
    capacity_bytes: int | None = None
    """This shard's quotas, for full and too_large."""
    on_full: str = ""
    """The mode, for full: block, drop_stalest (all that is left is leased: wait) or error."""


class Space(NamedTuple):
    has_room: bool
    last_wake: str
    groups: int
    bytes: int


class Formed(NamedTuple):
    """A batch that an owner holds."""

    owner: str
    deadline_ms: int
    ids: tuple[str, ...]
    """The whole batch as it was formed."""
    tokens: tuple[int, ...]
    """Of each of `ids`."""
    held: frozenset[str]
    """Those that are still leased by `owner`."""
    oldest: int | None
    """Tokens sampled before this version are to be masked; None unless on_stale is mask_tokens."""
    renumbered: Mapping[str, tuple[int, ...]]
    """Held groups whose payload has the numbers of before a rollback: the numbers to use for its
    distinct versions with trainable tokens, in ascending order of those in the payload."""


class NotFormed(NamedTuple):
    word: Literal["wait", "busy", "again", "done", "conflict", "not_owner"]
    """again: call again at once. done: the step is trained. conflict: leased with other arguments.
    not_owner: another lineage took over."""
    last_wake: str = "0-0"
    """Entry to wait behind: of wake:batch (wait), or wake:forming (busy: another is forming it)."""
    ready: int = 0
    until_ms: int = -1
    """Milliseconds until a lease expires that may bring groups back; -1 if there is none."""
    blocking: str = ""
    """The oldest running group that the lease waits for (on_stale=wait), and its version."""
    blocking_version: int = 0
    version: int = 0
    num_groups: int = 0
    num_shares: int = 0
    """What the step was leased with (conflict)."""


class StepRecord(NamedTuple):
    """What the home shard keeps of a step's batch, which may lie in several shards."""

    owner: str
    version: int
    num_groups: int
    num_shares: int
    ids: tuple[str, ...]
    tokens: tuple[int, ...]
    oldest: int | None
    is_done: bool


class Locked(NamedTuple):
    """The step has no batch, and the caller has the lock to form it."""


class Candidate(NamedTuple):
    key: float
    """Smaller is given first; comparable across shards."""
    group_id: str


class Peek(NamedTuple):
    word: Literal["ready", "again"]
    """again: more to tidy up than one call may; call again."""
    candidates: tuple[Candidate, ...] = ()
    ready: int = 0
    last_wake: str = "0-0"
    until_ms: int = -1
    blocking: str = ""
    blocking_version: int = 0


class TakenReply(NamedTuple):
    ids: tuple[str, ...]
    """Those that were ready and fresh, in the order asked for."""
    tokens: tuple[int, ...]
    deadline_ms: int
    oldest: int | None
    renumbered: Mapping[str, tuple[int, ...]]


class HeldReply(NamedTuple):
    ids: frozenset[str]
    """Still leased by the owner."""
    num_consumed: int
    """Consumed by the owner: the step is done if any is."""
    deadline_ms: int
    renumbered: Mapping[str, tuple[int, ...]]


@dataclass(slots=True, frozen=True)
class AckReply:
    count: int
    is_owner: bool
    is_more: bool
    """The bound was reached: call again."""


class PublishReply(NamedTuple):
    word: str
    """published, same, older (a newer one is there) or not_owner (another lineage took over)."""
    version: int
    """The trainer's version now."""


class ReconcileBegun(NamedTuple):
    word: Literal["begun", "not_owner", "behind"]
    """behind: resume_version is not above what was published; `trainer_version` says what."""
    trainer_version: int = 0


class ReconcileReply(NamedTuple):
    """Totals of this lineage's reconcile so far: the same when a finished one is sent again."""

    is_owner: bool
    is_more: bool
    acked: int = 0
    requeued: int = 0
    """Groups that went back to ready."""
    dropped: int = 0
    quarantined: int = 0


class QuarantinedRecord(NamedTuple):
    group_id: str
    at_ms: int
    reason: str
    attempts: int
    num_tokens: int


class SweptReply(NamedTuple):
    expired: int
    dropped: int
    credits: int
    is_more: bool


def readable(raw: bytes) -> str:
    """Text that the server holds. What is no UTF-8 was not written by us, and is shown as such."""
    return raw.decode(errors="replace")


def is_number(text: str | bytes) -> bool:
    """Whether it is a whole number of a size that we write."""
    digits = text.lstrip(b"-") if isinstance(text, bytes) else text.lstrip("-")
    return len(text) <= 20 and digits.isdigit() and digits.isascii()


def number(text: str | bytes | None, otherwise: int = 0) -> int:
    """The whole number that the server holds, or another one where it holds none."""
    return int(text) if text is not None and is_number(text) else otherwise


def setting_number(name: str, text: str) -> float:
    """A setting of the run as a number. Raises DamagedRunError if it is none."""
    try:
        found = float(text)
    except ValueError:
        found = math.nan
    if not abs(found) <= 2**53:
        raise DamagedRunError(
            f"the run's setting {name} in Redis is {text[:40]!r}, which is no number: something "
            "else than Leash wrote it. Launch the run anew under another run.name"
        )
    return found


def texts(items: Sequence[bytes]) -> tuple[str, ...]:
    return tuple(map(readable, items))


def optional_int(text: bytes | None) -> int | None:
    """A number, or None for the empty text by which the scripts say so."""
    return int(text) if text else None


def parse_renumbered(flat: Sequence[bytes]) -> dict[str, tuple[int, ...]]:
    """Reads [id, 'version:tokens version:tokens', id, ...].

    Of versions that cannot be read nothing is left, which fits no payload.
    """
    return {
        readable(group_id): _renumbered(versions)
        for group_id, versions in zip(flat[::2], flat[1::2], strict=True)
    }


def _renumbered(versions: bytes) -> tuple[int, ...]:
    try:
        return tuple(int(part.split(b":")[0]) for part in versions.split())
    except ValueError:
        return ()


def parse_push(reply: Sequence[Any]) -> PushReply:
    word = cast("PushWord", reply[0].decode())
    if len(reply) == 1:
        return PushReply(word)
    _, last_wake, groups, num_bytes, capacity_groups, capacity_bytes, on_full = reply
    return PushReply(
        word,
        last_wake.decode(),
        int(groups),
        int(num_bytes),
        optional_int(capacity_groups),
        optional_int(capacity_bytes),
        on_full.decode(),
    )


def parse_formed(reply: Sequence[Any]) -> Formed | NotFormed:
    word = reply[0].decode()
    if word == "leased":
        _, owner, deadline, ids, tokens, held, oldest, moved = reply
        return Formed(
            owner=readable(owner),
            deadline_ms=int(deadline),
            ids=texts(ids),
            tokens=tuple(map(int, tokens)),
            held=frozenset(texts(held)),
            oldest=optional_int(oldest),
            renumbered=parse_renumbered(moved),
        )
    if word == "wait":
        _, last_wake, ready, until_ms, blocking, version = reply
        return NotFormed(
            word, last_wake.decode(), int(ready), int(until_ms), readable(blocking), int(version)
        )
    if word == "conflict":
        version, num_groups, num_shares = map(int, reply[1:])
        return NotFormed(word, version=version, num_groups=num_groups, num_shares=num_shares)
    return NotFormed(word)


def parse_locked(reply: Sequence[Any]) -> Locked | StepRecord | NotFormed:
    word = reply[0].decode()
    if word == "locked":
        return Locked()
    if word in ("wait", "busy"):
        return NotFormed(word, reply[1].decode(), until_ms=int(reply[2]))
    if word != "batch":
        return NotFormed(word)
    _, owner, version, num_groups, num_shares, ids, tokens, oldest, is_done = reply
    return StepRecord(
        owner=readable(owner),
        version=int(version),
        num_groups=int(num_groups),
        num_shares=int(num_shares),
        ids=texts(ids),
        tokens=tuple(map(int, tokens)),
        oldest=optional_int(oldest),
        is_done=bool(is_done),
    )


def parse_peek(reply: Sequence[Any]) -> Peek:
    if reply[0] == b"again":
        return Peek("again")
    _, chosen, ready, last_wake, until_ms, blocking, version = reply
    candidates = tuple(
        Candidate(float(key), readable(group_id))
        for group_id, key in zip(chosen[::2], chosen[1::2], strict=True)
    )
    return Peek(
        "ready",
        candidates,
        int(ready),
        last_wake.decode(),
        int(until_ms),
        readable(blocking),
        int(version),
    )


def parse_taken(reply: Sequence[Any]) -> TakenReply:
    ids, tokens, deadline, oldest, moved = reply
    return TakenReply(
        ids=texts(ids),
        tokens=tuple(map(int, tokens)),
        deadline_ms=int(deadline),
        oldest=optional_int(oldest),
        renumbered=parse_renumbered(moved),
    )


def parse_held(reply: Sequence[Any]) -> HeldReply:
    ids, num_consumed, deadline, moved = reply
    return HeldReply(
        frozenset(texts(ids)), int(num_consumed), int(deadline), parse_renumbered(moved)
    )
