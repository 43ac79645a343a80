"""Reads groups out of the buffer for inspection: one group, or all of them into a dump file.

A dump changes nothing and may be loaded into another run. It holds the groups that each shard held
at one moment (the moments of several shards are milliseconds apart), each once, with its state and
hash at the time it was read. A group that was acked or dropped before it was read is left out and
counted as gone. Groups that arrive meanwhile are not included.

A checkpoint has a dump too: with it `restore_buffer` fills an empty server of a run that goes on.

The file is a zip archive whose members are stored as they are, in this order:

    header.json   `format`, `run`, `created` (Unix seconds), and `shards`: for each of the buffer's
                  shards its `settings`, `stats`, `failures` and `quarantined_prompts`, as Redis had
                  them
    groups/0 ...  one per group: a line of JSON with `group_id`, `state` (ready, leased, consumed or
                  quarantined) and `fields`, the group's hash as Redis had it; then the payload, the
                  group in the wire format (see codec.py), joined if it was stored in chunks; no
                  bytes if it was gone
    kept/0 ...    one per prompt with tokens of its unfinished group: a line of JSON with `prompt`
                  ('index task') and `parts` (name and number of bytes of each); then the parts
    end.json      `groups` (their number by state), `gone` (groups that were acked or dropped while
                  the dump was made, and are not in it) and `kept` (the number of such prompts)
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import (
    AsyncIterator,
    Collection,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Protocol, Self, TypeVar, cast, get_args
from zipfile import ZIP_STORED, BadZipFile, ZipFile

import msgspec
from redis.asyncio import Redis

from buffer.errors import BufferFullError
from buffer.redis.client import DamagedRunError
from buffer.redis.keys import Keys
from buffer.redis.replies import number, readable, setting_number
from buffer.redis.scripts import RunNotOpenError
from buffer.results import PushResult, TaskProgress
from buffer.roles import WorkerBuffer
from buffer.sharded import shard_of
from buffer.staleness import renumber
from buffer.types import TrajectoryGroup
from buffer.wire.chunks import MAX_CHUNKS, join_payload, num_chunks
from buffer.wire.codec import decode_group

FORMAT_VERSION = 3
State = Literal["ready", "leased", "consumed", "quarantined"]
STATES: tuple[str, ...] = get_args(State)
T = TypeVar("T")

_MAGIC_OF_FORMAT_1 = b"LEASH-DUMP 1"
_HEADER, _END = "header.json", "end.json"
_UNREADABLE = (BadZipFile, EOFError, NotImplementedError, OSError, ValueError)
"""What zipfile raises for a damaged archive; OSError for an offset outside the file."""


@dataclass(kw_only=True, slots=True, frozen=True)
class DumpedShard:
    """One shard's settings, counters, and what it knows of prompts that failed."""

    settings: Mapping[str, str]
    stats: Mapping[str, str]
    failures: Mapping[str, str]
    quarantined_prompts: Mapping[str, str]


@dataclass(kw_only=True, slots=True, frozen=True)
class DumpHeader:
    """Which buffer a dump was made from."""

    run: str
    created: float
    """Unix seconds."""
    shards: Sequence[DumpedShard]
    format: int = FORMAT_VERSION


@dataclass(kw_only=True, slots=True, frozen=True)
class DumpedGroup:
    """One group as it was in Redis."""

    group_id: str
    state: State
    fields: Mapping[str, str]
    """The group's hash."""
    payload: bytes = b""
    """The group in the wire format; empty if it was gone."""


@dataclass(kw_only=True, slots=True, frozen=True)
class DumpedTokens:
    """Tokens of a prompt's unfinished group, as `ReplayBuffer.keep_tokens` got them."""

    prompt: str
    """'index task'."""
    parts: Mapping[str, bytes]


class _TokensLine(msgspec.Struct):
    prompt: str
    parts: list[tuple[str, int]]


class _End(msgspec.Struct):
    groups: dict[str, int]
    gone: int
    kept: int


class DumpWriter:
    """Adds groups to a dump; created by `write_dump`."""

    def __init__(self, file: ZipFile) -> None:
        self.counts: Counter[str] = Counter()
        """Groups written, by state."""
        self.num_gone = 0
        """Groups that were acked or dropped before they were read."""
        self.num_kept = 0
        """Prompts with tokens of an unfinished group."""
        self._file = file

    def write(self, group: DumpedGroup) -> None:
        """Adds a group. Raises ValueError for an unknown state."""
        if group.state not in STATES:
            raise ValueError(f"group {group.group_id}: state {group.state!r} is none of {STATES}")
        fields = {"group_id": group.group_id, "state": group.state, "fields": group.fields}
        line = msgspec.json.encode(fields)
        self._file.writestr(f"groups/{self.counts.total()}", b"%b\n%b" % (line, group.payload))
        self.counts[group.state] += 1

    def write_tokens(self, tokens: DumpedTokens) -> None:
        """Adds a prompt's tokens, after the last group."""
        sizes = [(name, len(part)) for name, part in tokens.parts.items()]
        line = msgspec.json.encode(_TokensLine(tokens.prompt, sizes))
        content = b"".join([line, b"\n", *tokens.parts.values()])
        self._file.writestr(f"kept/{self.num_kept}", content)
        self.num_kept += 1


@contextmanager
def write_dump(path: Path, header: DumpHeader) -> Iterator[DumpWriter]:
    """Writes a dump: `with write_dump(path, header) as dump: dump.write(group)`.

    The file appears at `path` once it is complete and on disk; until then it is `path` + ".part",
    which is removed on failure. Raises OSError that names the file.
    """
    part = path.with_name(path.name + ".part")
    try:
        with ZipFile(part, "w") as file:
            file.writestr(_HEADER, msgspec.json.encode(header))
            dump = DumpWriter(file)
            yield dump
            end = _End(dict(dump.counts), dump.num_gone, dump.num_kept)
            file.writestr(_END, msgspec.json.encode(end))
        _sync(part)
        part.replace(path)
        _sync(path.parent)  # the new name must reach the disk too
    except BaseException as error:
        with suppress(OSError):
            part.unlink()
        if not isinstance(error, OSError) or isinstance(error, ConnectionError):
            raise  # not of the file: the server's
        raise OSError(
            error.errno,
            f"the dump could not be written ({error.strerror}); no partial file is left. Make "
            "room or choose another place",
            str(path),
        ) from error


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_header(path: Path) -> DumpHeader:
    """The header alone. Raises ValueError if the file is not a dump, and OSError."""
    with _Source(path) as source:
        return source.header()


def read_dump(path: Path) -> Iterator[DumpedGroup | DumpedTokens]:
    """Yields the groups of a dump, then the tokens of prompts, each checked first.

    Raises ValueError, which names file and member, at the first damage. Call `check_dump` first if
    a partly processed dump would do harm.
    """
    with _Source(path) as source:
        source.header()
        counts: Counter[str] = Counter()
        num_kept = 0
        while (name := source.next_name()) != _END:
            if name.startswith("kept/"):
                yield source.tokens(f"kept/{num_kept}")
                num_kept += 1
                continue
            group = source.group(f"groups/{counts.total()}")
            counts[group.state] += 1
            yield group
        source.check_end(counts, num_kept)


def check_dump(path: Path) -> Mapping[str, int]:
    """Number of groups by state. Raises ValueError if the dump is damaged or incomplete."""
    return dict(Counter(group.state for group in read_groups(path)))


def read_groups(path: Path) -> Iterator[DumpedGroup]:
    """The groups alone; see `read_dump`."""
    return (item for item in read_dump(path) if isinstance(item, DumpedGroup))


class _Source:
    """An open dump, read member by member; errors name the file and member."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._size = path.stat().st_size
        with path.open("rb") as file:
            if file.read(len(_MAGIC_OF_FORMAT_1)) == _MAGIC_OF_FORMAT_1:
                raise self._other_format(1)
        try:
            self._zip = ZipFile(path)
        except _UNREADABLE as error:
            raise ValueError(
                f"{path} is not a replay buffer dump, or it was truncated or damaged: {error}. "
                "Check the file's name, or copy or make the dump again"
            ) from None
        self._members = self._zip.infolist()
        self._at = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._zip.close()

    def next_name(self) -> str:
        if self._at == len(self._members):
            raise self._broken(_END, "it is missing: the file was damaged")
        return self._members[self._at].filename

    def header(self) -> DumpHeader:
        header = self._parsed(_HEADER, self._next(_HEADER), DumpHeader)
        if header.format != FORMAT_VERSION:
            raise self._other_format(header.format)
        return header

    def group(self, name: str) -> DumpedGroup:
        text, _, payload = self._next(name).partition(b"\n")
        return replace(self._parsed(name, text, DumpedGroup), payload=payload)

    def tokens(self, name: str) -> DumpedTokens:
        text, _, content = self._next(name).partition(b"\n")
        line = self._parsed(name, text, _TokensLine)
        parts, at = dict[str, bytes](), 0
        for part, size in line.parts:
            parts[part] = content[at : at + size]
            at += size
        if at != len(content) or any(size < 0 for _, size in line.parts):
            raise self._broken(name, f"its parts have {at} bytes, but it holds {len(content)}")
        return DumpedTokens(prompt=line.prompt, parts=parts)

    def check_end(self, counts: Mapping[str, int], num_kept: int) -> None:
        end = self._parsed(_END, self._next(_END), _End)
        is_whole = end.groups == counts and end.kept == num_kept
        if not is_whole or self._at < len(self._members):
            raise self._broken(
                _END,
                f"it says {end.groups} and {end.kept} prompts with tokens, but the file holds "
                f"{dict(counts)} and {num_kept}",
            )

    def _next(self, name: str) -> bytes:
        """The next member, which must have this name."""
        if self.next_name() != name:
            raise self._broken(name, f"found {self.next_name()!r} instead")
        member = self._members[self._at]
        self._at += 1
        # Checked before reading: a damaged length must not allocate more memory than the file has.
        is_stored = member.compress_type == ZIP_STORED and member.file_size == member.compress_size
        if not is_stored or member.file_size > self._size or member.flag_bits & ~0x800:
            raise self._broken(name, "its entry in the archive's directory is damaged")
        try:
            return self._zip.read(member)
        except _UNREADABLE as error:
            raise self._broken(name, f"its bytes were damaged: {error}") from None

    def _parsed(self, name: str, text: bytes, kind: type[T]) -> T:
        try:
            return msgspec.json.decode(text, type=kind)
        except ValueError as error:
            raise self._broken(name, f"it cannot be read: {error}") from None

    def _broken(self, name: str, why: str) -> ValueError:
        return ValueError(f"{self._path}, {name}: {why}. Copy or make the dump again")

    def _other_format(self, version: object) -> ValueError:
        return ValueError(
            f"{self._path} is a dump in format {version}; this program reads format "
            f"{FORMAT_VERSION}: use the version of Leash that wrote it"
        )


_BATCH_GROUPS = 256
_BATCH_BYTES = 32 * 2**20
"""Bounds of one request, so that other clients' commands run in between."""
_MAX_SHARDS = 16_384  # as many as a cluster has slots


@dataclass(kw_only=True, slots=True, frozen=True)
class DumpReport:
    """What `dump_buffer` wrote."""

    groups: Mapping[str, int]
    """By state."""
    gone: int
    """Groups that were acked or dropped before they were read."""
    bytes: int
    """Size of the file."""


@dataclass(kw_only=True, slots=True, frozen=True)
class LoadReport:
    """What happened to each group of a dump; every group is counted once."""

    pushed: Mapping[str, int]
    """By result of the push: stored, duplicate, stale, ..."""
    skipped: Mapping[str, int]
    """Not requested, by state."""
    unreadable: Mapping[str, str]
    """The payload's error, by group id."""


async def dump_buffer(redis: Redis, run: str, path: Path) -> DumpReport:
    """Writes all groups that the run's buffer holds to a new file.

    Only reads. The ids are read in one transaction per shard, which blocks the server for about
    5 ms per 100,000 groups; payloads follow in batches. Raises RunNotOpenError, and OSError that
    names the file.
    """
    held = cast("bytes", await redis.hget(Keys(run)("settings"), "num_shards") or b"1")
    num_shards = setting_number("num_shards", readable(held))
    if not 1 <= num_shards <= _MAX_SHARDS:
        raise DamagedRunError(f"{run}: no run has {num_shards:g} shards, as its settings say")
    shards = [Keys(run, shard) for shard in range(int(num_shards))]
    pictures = [await _picture(redis, keys) for keys in shards]
    header = DumpHeader(run=run, created=time.time(), shards=[picture for picture, _ in pictures])
    with write_dump(path, header) as dump:
        for keys, (_, ids) in zip(shards, pictures, strict=True):
            async for group in _fetch_groups(redis, keys, ids):
                if group is None:
                    dump.num_gone += 1
                else:
                    dump.write(group)
        for keys in shards:
            async for tokens in _fetch_tokens(redis, keys):
                dump.write_tokens(tokens)
    return DumpReport(groups=dict(dump.counts), gone=dump.num_gone, bytes=path.stat().st_size)


async def load_buffer(
    buffer: WorkerBuffer, path: Path, *, include_consumed: bool = False
) -> LoadReport:
    """Pushes the ready and leased groups of a dump into an open run; all become ready.

    May be repeated: a group that is in the buffer already is a duplicate. Consumed groups were
    trained already and are pushed only with `include_consumed`; quarantined ones never are. Raises
    ValueError, with nothing pushed, if the file is damaged, and what `push` raises.
    """
    check_dump(path)
    wanted = {"ready", "leased"} | ({"consumed"} if include_consumed else set())
    pushed: Counter[str] = Counter()
    skipped: Counter[str] = Counter()
    unreadable: dict[str, str] = {}
    for dumped in read_groups(path):
        if dumped.state not in wanted:
            skipped[dumped.state] += 1
            continue
        try:
            group = _renumbered(dumped)
        except ValueError as error:
            unreadable[dumped.group_id] = str(error)
            continue
        pushed[(await buffer.push(group)).value] += 1
    return LoadReport(pushed=dict(pushed), skipped=dict(skipped), unreadable=unreadable)


class EmptyBuffer(Protocol):
    """What `restore_buffer` fills."""

    async def push(self, group: TrajectoryGroup, timeout_s: float | None = None) -> PushResult: ...

    async def restore_progress(self, progress: TaskProgress) -> None: ...


async def restore_buffer(
    redis: Redis,
    buffer: EmptyBuffer,
    run: str,
    path: Path,
    progress: TaskProgress,
    trained: Collection[str],
) -> int:
    """Fills the open, empty buffer of a run with what a checkpoint's dump holds; returns how many
    groups that are.

    Groups of prompts that are untrained in the checkpoint's `progress` become ready, unless they
    are among the `trained`; the other prompts run again, with the tokens that they have. Rollbacks
    and what is known of prompts that failed are as they were. Call it before `reconcile`, which
    sorts out groups of versions after the checkpoint's; after a crash, call it again. Raises
    ValueError, with nothing changed, if the file is damaged.
    """
    check_dump(path)
    shards = read_header(path).shards
    for place, shard in enumerate(shards):
        keys = Keys(run, place)
        rollbacks = {name: shard.settings[name] for name in ("gaps", "num_gaps")}
        await _set_fields(redis, keys("settings"), rollbacks)
        await _set_fields(redis, keys("failures"), shard.failures)
        await _set_fields(redis, keys("quarantined_prompts"), shard.quarantined_prompts)
    # By place in the stream: a prompt may have gone stale and run again since the checkpoint
    # listed it. Prompts that it does not list had not begun, and come from their worker's stream.
    untrained = {(prompt.task, prompt.index): prompt for prompt in progress.untrained}
    kept: dict[tuple[str, int], Mapping[str, bytes]] = {}
    num_groups, has_room = 0, True
    for item in read_dump(path):
        if isinstance(item, DumpedTokens):
            index, _, task = item.prompt.partition(" ")
            kept[task, number(index)] = item.parts
        elif has_room and item.state != "quarantined" and item.group_id not in trained:
            with suppress(ValueError):  # it is damaged, and sampled again
                group = _decoded(item)
                if (prompt := (group.prompt.task, group.prompt.index)) not in untrained:
                    continue
                try:
                    result = await buffer.push(group, timeout_s=0)  # nothing frees room yet
                except (BufferFullError, TimeoutError):
                    has_room = False  # a smaller capacity than before: the rest is sampled again
                    continue
                num_groups += result in (PushResult.stored, PushResult.duplicate)
                del untrained[prompt]
    rest = tuple(untrained.values())
    await buffer.restore_progress(replace(progress, untrained=rest))
    for place, ref in enumerate(rest):
        if parts := kept.get((ref.task, ref.index)):
            # On the shard where `restore_progress` queues the prompt: nothing else looks there.
            keys, name = Keys(run, place % len(shards)), f"{ref.index} {ref.task}"
            await _set_fields(redis, keys(f"kept:{name}"), parts)
            await _set_fields(redis, keys("kept"), {name: "1"})
    return num_groups


async def _set_fields(
    redis: Redis, key: str, fields: Mapping[str, str] | Mapping[str, bytes]
) -> None:
    if fields:
        await redis.hset(key, items=[part for pair in fields.items() for part in pair])


async def _picture(redis: Redis, keys: Keys) -> tuple[DumpedShard, list[str]]:
    """The shard's settings, counters and group ids at one moment."""
    async with redis.pipeline(transaction=True) as pipe:
        pipe.hgetall(keys("settings"))
        pipe.hgetall(keys("stats"))
        pipe.hgetall(keys("failures"))
        pipe.hgetall(keys("quarantined_prompts"))
        for state in STATES:
            pipe.zrange(keys(state), 0, -1)
        settings, stats, failures, quarantined, *ids = await pipe.execute()
    if not settings:
        raise RunNotOpenError(
            f"there is no {keys('settings')} in this Redis: check the run's name and the URL"
        )
    picture = DumpedShard(
        settings=_texts(settings),
        stats=_texts(stats),
        failures=_texts(failures),
        quarantined_prompts=_texts(quarantined),
    )
    return picture, [readable(group_id) for of_state in ids for group_id in of_state]


async def _fetch_groups(
    redis: Redis, keys: Keys, ids: Sequence[str]
) -> AsyncIterator[DumpedGroup | None]:
    """Each group, or None if it is no longer held."""
    for first in range(0, len(ids), _BATCH_GROUPS):
        some = ids[first : first + _BATCH_GROUPS]
        async with redis.pipeline(transaction=False) as pipe:
            for group_id in some:
                pipe.hmget(keys(f"group:{group_id}"), ["bytes", "chunks"])
            replies = await pipe.execute(raise_on_error=False)
        sizes = [
            (0, 0) if isinstance(of_group, Exception) else _sizes(*of_group) for of_group in replies
        ]
        for batch in _batches(list(zip(some, sizes, strict=True))):
            for group in await _fetch(redis, keys, batch):
                yield group


async def _fetch_tokens(redis: Redis, keys: Keys) -> AsyncIterator[DumpedTokens]:
    for name in cast("dict[bytes, bytes]", await redis.hgetall(keys("kept"))):
        prompt = readable(name)
        parts = cast("dict[bytes, bytes]", await redis.hgetall(keys(f"kept:{prompt}")))
        if parts:
            found = {readable(part): tokens for part, tokens in parts.items()}
            yield DumpedTokens(prompt=prompt, parts=found)


def _sizes(num_bytes: bytes | None, chunks: bytes | None) -> tuple[int, int]:
    return number(num_bytes), min(number(chunks), MAX_CHUNKS)


def _batches(groups: Sequence[tuple[str, tuple[int, int]]]) -> Iterable[list[tuple[str, int]]]:
    """Splits the groups into batches of at most _BATCH_BYTES (or one group): (id, num_chunks)."""
    batch: list[tuple[str, int]] = []
    total = 0
    for group_id, (size, chunks) in groups:
        if batch and total + size > _BATCH_BYTES:
            yield batch
            batch, total = [], 0
        batch.append((group_id, chunks))
        total += size
    if batch:
        yield batch


async def _fetch(
    redis: Redis, keys: Keys, batch: Sequence[tuple[str, int]]
) -> list[DumpedGroup | None]:
    # Payload before hash: a payload does not change while its group is held, so if the hash then
    # says that the group is held, the two belong together.
    async with redis.pipeline(transaction=False) as pipe:
        for group_id, num_chunks in batch:
            payload = keys.payload(group_id)
            pipe.mget([payload, *(f"{payload}:{i}" for i in range(1, num_chunks + 1))])
            pipe.hgetall(keys(f"group:{group_id}"))
        replies = await pipe.execute(raise_on_error=False)
    return [
        # A key that was overwritten by someone else counts as gone.
        None if isinstance(fields, Exception) else _dumped(group_id, _texts(fields), values)
        for (group_id, _), values, fields in zip(batch, replies[::2], replies[1::2], strict=True)
    ]


def _dumped(
    group_id: str, fields: dict[str, str], values: Sequence[bytes | None]
) -> DumpedGroup | None:
    state = fields.get("state", "")
    if state not in STATES:
        return None
    first, *rest = values
    try:
        payload = b"" if first is None else bytes(join_payload(first, rest))
    except ValueError:  # incomplete: of no use
        payload = b""
    return DumpedGroup(
        group_id=group_id, state=cast("State", state), fields=fields, payload=payload
    )


def _decoded(dumped: DumpedGroup) -> TrajectoryGroup:
    """The group with the versions that it was pushed with."""
    if not dumped.payload:
        raise ValueError("its payload was gone when the dump was made")
    group = decode_group(dumped.payload)
    if group.group_id != dumped.group_id:
        raise ValueError(f"its payload is that of group {group.group_id!r}")
    return group


def _renumbered(dumped: DumpedGroup) -> TrajectoryGroup:
    """The group with its versions as renumbered by the run's last rollback."""
    group = _decoded(dumped)
    if "moved" in dumped.fields:
        entries = dumped.fields.get("versions", "").split()
        group = renumber(group, [int(entry.split(":")[0]) for entry in entries])
    return group


def _texts(fields: Mapping[Any, Any]) -> dict[str, str]:
    return {readable(name): readable(value) for name, value in fields.items()}


async def read_group(redis: Redis, run: str, group_id: str, num_shards: int) -> Mapping[str, str]:
    """The fields of the group's hash, `state` among them; empty for an unknown group.

    A running, acked or dropped group has only its state.
    """
    keys = Keys(run, shard_of(group_id, num_shards))
    async with redis.pipeline(transaction=True) as pipe:
        pipe.hgetall(keys(f"group:{group_id}"))
        pipe.zscore(keys("running"), group_id)
        fields, running = await pipe.execute()
    if not fields and running is not None:
        return {"state": "running"}
    return _texts(fields)


async def read_payload(
    redis: Redis, run: str, group_id: str, num_shards: int
) -> TrajectoryGroup | None:
    """The group with the versions it was pushed with; None if it is not held (any more).

    Raises ValueError if its payload is damaged.
    """
    key = Keys(run, shard_of(group_id, num_shards)).payload(group_id)
    first = cast("bytes | None", await redis.get(key))
    if first is None:
        return None
    rest = [f"{key}:{number}" for number in range(1, num_chunks(first) + 1)]
    chunks = cast("list[bytes | None]", await redis.mget(rest) if rest else [])
    if None in chunks:
        return None  # it was dropped between the two
    return decode_group(join_payload(first, chunks))
