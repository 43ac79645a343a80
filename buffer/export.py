"""Takes groups out of the buffer to look at: one group's picture, or all of them in a dump file.

A dump changes nothing, and may be loaded into another run. The groups in it are those that each
shard held at one moment (of all shards, if there are several, within milliseconds). Each appears
once, with the state and hash of the moment when its turn came. One that was acked or dropped until
then is left out and counted as gone. Groups that arrive meanwhile are not in it. The file:

    header   one line of text: LEASH-DUMP <format version> <CRC-32 of the JSON, 8 hex digits> <JSON>
    record   4s b"LSHR", u32 CRC-32, u32 bytes of metadata, u64 bytes of payload, metadata, payload
    ...      one record a group
    end      4s b"LSHE", u32 CRC-32, u32 bytes of metadata, u64 0, metadata

The header's JSON object holds `run`, `created` (Unix seconds), and `shards`: for each of the
buffer's shards its `settings` and `stats`, as Redis had them. `head -n 1 FILE` shows it.

A record's metadata is a JSON object with `group_id`, `state` (ready, leased, consumed or
quarantined) and `fields`, the group's hash as Redis had it. The payload is the group in the wire
format (see codec.py), joined if it was stored in chunks; no bytes if it was gone.

The end record's metadata holds `groups` (number of records by state), `gone` (groups that were
finished while the dump was made, and are not in it) and `checksum`: the CRC-32 of the CRCs of the
header and of all records, in order. Nothing follows it, so that a file that was cut off is noticed.

Numbers are little-endian, JSON is UTF-8. The CRC of a record is of everything in it that follows.
"""

from __future__ import annotations

import json
import os
import struct
import time
import zlib
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self, cast

from redis.asyncio import Redis

from buffer.redis.client import DamagedRunError
from buffer.redis.keys import Keys
from buffer.redis.replies import number, readable, setting_number
from buffer.redis.scripts import RunNotOpenError
from buffer.roles import WorkerBuffer
from buffer.sharded import shard_of
from buffer.staleness import renumber
from buffer.types import TrajectoryGroup
from buffer.wire.chunks import MAX_CHUNKS, join_payload, num_chunks
from buffer.wire.codec import decode_group

FORMAT_VERSION = 1
STATES = ("ready", "leased", "consumed", "quarantined")

_MAGIC = b"LEASH-DUMP"
_GROUP, _END = b"LSHR", b"LSHE"
_FRAME = struct.Struct("<4sIIQ")
_CHECKED = struct.Struct("<IQ")
_CRC = struct.Struct("<I")
_MAX_HEADER_BYTES = 2**24


@dataclass(kw_only=True, slots=True, frozen=True)
class DumpedShard:
    """What one shard knew besides its groups."""

    settings: Mapping[str, str]
    stats: Mapping[str, str]


@dataclass(kw_only=True, slots=True, frozen=True)
class DumpHeader:
    """What a dump says of its buffer."""

    run: str
    created: float
    """Unix seconds."""
    shards: Sequence[DumpedShard]


@dataclass(kw_only=True, slots=True, frozen=True)
class DumpedGroup:
    """One group as it was in Redis."""

    group_id: str
    state: str
    """ready, leased, consumed or quarantined."""
    fields: Mapping[str, str]
    """Its hash."""
    payload: bytes
    """The group in the wire format; empty if it was gone."""


class DumpWriter:
    """Writes a dump: `with DumpWriter(path, header) as dump: dump.write(group)`.

    The file appears under its name when it is complete and on the disk; until then it is
    `path` + ".part", which is removed if anything fails. Raises OSError that names the file.
    """

    def __init__(self, path: Path, header: DumpHeader) -> None:
        self.path = path
        self.num_gone = 0
        """Groups to be counted as finished meanwhile."""
        self.num_bytes = 0
        self._part = path.with_name(path.name + ".part")
        self._header = header
        self._counts: Counter[str] = Counter()
        self._checksum = 0
        self._file: BinaryIO | None = None

    @property
    def counts(self) -> Mapping[str, int]:
        """Groups written, by state."""
        return dict(self._counts)

    def __enter__(self) -> Self:
        try:
            self._file = self._part.open("wb")
            text = _json(asdict(self._header))
            crc = zlib.crc32(text)
            self._checksum = zlib.crc32(_CRC.pack(crc))
            self._write(b"%s %d %08x %s\n" % (_MAGIC, FORMAT_VERSION, crc, text))
        except OSError as error:
            self._discard()
            raise self._told(error) from error
        return self

    def write(self, group: DumpedGroup) -> None:
        """Adds a group. Raises ValueError for an unknown state."""
        if group.state not in STATES:
            raise ValueError(f"group {group.group_id}: state {group.state!r} is none of {STATES}")
        metadata = {"group_id": group.group_id, "state": group.state, "fields": dict(group.fields)}
        try:
            crc = self._write_frame(_GROUP, _json(metadata), group.payload)
        except OSError as error:
            raise self._told(error) from error
        self._checksum = zlib.crc32(_CRC.pack(crc), self._checksum)
        self._counts[group.state] += 1

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if kind is not None:
            self._discard()
            return
        try:
            self._finish()
        except OSError as failure:
            self._discard()
            raise self._told(failure) from failure

    def _finish(self) -> None:
        assert self._file is not None
        end = {"groups": dict(self._counts), "gone": self.num_gone, "checksum": self._checksum}
        self._write_frame(_END, _json(end), b"")
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        self._part.replace(self.path)
        folder = os.open(self.path.parent, os.O_RDONLY)  # the new name must reach the disk too
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def _write_frame(self, magic: bytes, metadata: bytes, payload: bytes) -> int:
        crc = _crc_of(metadata, payload)
        self._write(_FRAME.pack(magic, crc, len(metadata), len(payload)))
        self._write(metadata)
        self._write(payload)
        return crc

    def _write(self, data: bytes) -> None:
        assert self._file is not None, "use it in a with statement"
        self._file.write(data)
        self.num_bytes += len(data)

    def _discard(self) -> None:
        if self._file is None:  # the partial file could not be made, so one there is not ours
            return
        with suppress(OSError):  # what is left in its buffer does not fit the disk either
            self._file.close()
        self._part.unlink(missing_ok=True)

    def _told(self, error: OSError) -> OSError:
        return OSError(
            error.errno,
            f"the dump could not be written ({error.strerror}); no partial file is left. Make room "
            "or choose another place",
            str(self.path),
        )


def read_header(path: Path) -> DumpHeader:
    """The header alone. Raises ValueError if the file is no dump, and OSError."""
    with path.open("rb") as file:
        return _Source(path, file).header()[0]


def read_dump(path: Path) -> Iterator[DumpedGroup]:
    """The groups of a dump, one after the other, each checked before it is given out.

    Raises ValueError, which names file and record, where the file is damaged. That it was cut off
    shows only at the end, so use `check_dump` first if nothing may be done by halves.
    """
    with path.open("rb") as file:
        source = _Source(path, file)
        _, crc = source.header()
        checksum = zlib.crc32(_CRC.pack(crc))
        counts: Counter[str] = Counter()
        while True:
            magic, crc, metadata, payload = source.frame()
            if magic == _END:
                break
            group = source.group(metadata, payload)
            checksum = zlib.crc32(_CRC.pack(crc), checksum)
            counts[group.state] += 1
            yield group
        source.check_end(metadata, {"groups": dict(counts), "checksum": checksum})


def check_dump(path: Path) -> Mapping[str, int]:
    """Reads all of a dump; groups by state. Raises ValueError if it is damaged or incomplete."""
    return dict(Counter(group.state for group in read_dump(path)))


class _Source:
    """An open dump, with errors that say where."""

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self._path, self._file = path, file
        self._size = os.fstat(file.fileno()).st_size
        self._record = 0

    def header(self) -> tuple[DumpHeader, int]:
        line = self._file.readline(_MAX_HEADER_BYTES)
        words = line.split(b" ", 3)
        if words[0] != _MAGIC or len(words) < 4:
            raise ValueError(f"{self._path} is no dump of a replay buffer: check the file's name")
        if words[1] != b"%d" % FORMAT_VERSION:
            raise ValueError(
                f"{self._path} is a dump in format {words[1].decode(errors='replace')}; "
                f"this program reads format {FORMAT_VERSION}: update it"
            )
        text = words[3].removesuffix(b"\n")
        crc = zlib.crc32(text)
        if not line.endswith(b"\n") or words[2] != b"%08x" % crc:
            raise self._broken("the header is damaged")
        try:
            fields = json.loads(text)
            shards = [DumpedShard(**shard) for shard in fields.pop("shards")]
            return DumpHeader(**fields, shards=shards), crc
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise self._broken(f"the header cannot be read: {error}") from None

    def frame(self) -> tuple[bytes, int, dict[str, Any], bytes]:
        """Magic, CRC, metadata and payload of the next record."""
        self._record += 1
        head = self._file.read(_FRAME.size)
        if len(head) < _FRAME.size:
            raise self._broken("the file ends before the end record: it was cut off")
        magic, crc, metadata_bytes, payload_bytes = _FRAME.unpack(head)
        if magic not in (_GROUP, _END):
            raise self._broken(f"a record cannot begin with {magic!r}")
        # Compared before reading: a damaged length must not ask for more memory than there is file.
        if metadata_bytes + payload_bytes > self._size - self._file.tell():
            raise self._broken(
                "it is longer than the rest of the file, which is damaged or cut off"
            )
        metadata, payload = self._file.read(metadata_bytes), self._file.read(payload_bytes)
        if _crc_of(metadata, payload) != crc:
            raise self._broken("its checksum does not agree: its bytes were damaged")
        try:
            fields = json.loads(metadata)
        except (ValueError, RecursionError) as error:
            raise self._broken(f"its metadata cannot be read: {error}") from None
        if not isinstance(fields, dict):
            raise self._broken("its metadata is no JSON object")
        return magic, crc, fields, payload

    def group(self, metadata: dict[str, Any], payload: bytes) -> DumpedGroup:
        try:
            group = DumpedGroup(**metadata, payload=payload)
        except TypeError as error:
            raise self._broken(f"its metadata is not that of a group: {error}") from None
        if group.state not in STATES or not isinstance(group.fields, dict):
            raise self._broken(f"a group cannot be {group.state!r} with {group.fields!r}")
        return group

    def check_end(self, metadata: dict[str, Any], found: dict[str, Any]) -> None:
        if any(metadata.get(name) != value for name, value in found.items()):
            raise self._broken(f"the end record says {metadata}, but the file holds {found}")
        if self._file.read(1):
            raise self._broken("bytes follow the end record")

    def _broken(self, why: str) -> ValueError:
        place = f"record {self._record}" if self._record else "header"
        return ValueError(f"{self._path}, {place}: {why}. Copy or make the dump again")


def _crc_of(metadata: bytes, payload: bytes) -> int:
    lengths = _CHECKED.pack(len(metadata), len(payload))
    return zlib.crc32(payload, zlib.crc32(metadata, zlib.crc32(lengths)))


def _json(fields: Mapping[str, Any]) -> bytes:
    return json.dumps(fields, ensure_ascii=False, separators=(",", ":")).encode()


__all__ = [
    "DumpHeader",
    "DumpReport",
    "DumpWriter",
    "DumpedGroup",
    "DumpedShard",
    "LoadReport",
    "check_dump",
    "dump_buffer",
    "load_buffer",
    "read_dump",
    "read_header",
]

_BATCH_GROUPS = 256
_BATCH_BYTES = 32 * 2**20
"""Bounds of what is asked for at once, so that others' commands come in between."""
_MAX_SHARDS = 16_384  # as many as a cluster has slots


@dataclass(kw_only=True, slots=True, frozen=True)
class DumpReport:
    """What `dump_buffer` wrote."""

    groups: Mapping[str, int]
    """By state."""
    gone: int
    """Groups that were acked or dropped before their turn came."""
    bytes: int
    """Size of the file."""


@dataclass(kw_only=True, slots=True, frozen=True)
class LoadReport:
    """What became of the groups of a dump: every one is counted once."""

    pushed: Mapping[str, int]
    """By what the push replied: stored, duplicate, stale, ..."""
    skipped: Mapping[str, int]
    """Not asked for, by state."""
    unreadable: Mapping[str, str]
    """What is wrong with the payload, by group id."""


async def dump_buffer(redis: Redis, run: str, path: Path) -> DumpReport:
    """Writes all groups that the run's buffer holds to a new file.

    Only reads. The list of ids is taken in one transaction a shard, which holds the server for
    about 5 ms per 100,000 groups; payloads follow in batches. Raises RunNotOpenError, and
    OSError that names the file.
    """
    held = cast("bytes", await redis.hget(Keys(run)("settings"), "num_shards") or b"1")
    num_shards = setting_number("num_shards", readable(held))
    if not 1 <= num_shards <= _MAX_SHARDS:
        raise DamagedRunError(f"{run}: no run has {num_shards:g} shards, as its settings say")
    shards = [Keys(run, shard) for shard in range(int(num_shards))]
    pictures = [await _picture(redis, keys) for keys in shards]
    header = DumpHeader(run=run, created=time.time(), shards=[picture for picture, _ in pictures])
    with DumpWriter(path, header) as dump:
        for keys, (_, ids) in zip(shards, pictures, strict=True):
            async for group in _read_groups(redis, keys, ids):
                if group is None:
                    dump.num_gone += 1
                else:
                    dump.write(group)
    return DumpReport(groups=dump.counts, gone=dump.num_gone, bytes=dump.num_bytes)


async def load_buffer(
    buffer: WorkerBuffer, path: Path, *, include_consumed: bool = False
) -> LoadReport:
    """Pushes the ready and leased groups of a dump into a run that is open; both become ready.

    May be repeated: a group that is there already is a duplicate. Consumed groups are trained
    already, so they come along only if asked for; quarantined ones never do. Nothing is pushed
    from a file that is damaged: ValueError names the record. A full buffer raises what a push does.
    """
    check_dump(path)
    wanted = {"ready", "leased"} | ({"consumed"} if include_consumed else set())
    pushed: Counter[str] = Counter()
    skipped: Counter[str] = Counter()
    unreadable: dict[str, str] = {}
    for dumped in read_dump(path):
        if dumped.state not in wanted:
            skipped[dumped.state] += 1
            continue
        try:
            group = _restored(dumped)
        except ValueError as error:
            unreadable[dumped.group_id] = str(error)
            continue
        pushed[(await buffer.push(group)).value] += 1
    return LoadReport(pushed=dict(pushed), skipped=dict(skipped), unreadable=unreadable)


async def _picture(redis: Redis, keys: Keys) -> tuple[DumpedShard, list[str]]:
    """The shard's settings and counters and the ids of its groups, all of one moment."""
    async with redis.pipeline(transaction=True) as pipe:
        pipe.hgetall(keys("settings"))
        pipe.hgetall(keys("stats"))
        for state in STATES:
            pipe.zrange(keys(state), 0, -1)
        settings, stats, *ids = await pipe.execute()
    if not settings:
        raise RunNotOpenError(
            f"there is no {keys('settings')} in this Redis: check the run's name and the URL"
        )
    picture = DumpedShard(settings=_texts(settings), stats=_texts(stats))
    return picture, [readable(group_id) for of_state in ids for group_id in of_state]


async def _read_groups(
    redis: Redis, keys: Keys, ids: Sequence[str]
) -> AsyncIterator[DumpedGroup | None]:
    """Each group, or None if it is not held any more."""
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


def _sizes(num_bytes: bytes | None, chunks: bytes | None) -> tuple[int, int]:
    return number(num_bytes), min(number(chunks), MAX_CHUNKS)


def _batches(groups: Sequence[tuple[str, tuple[int, int]]]) -> Iterable[list[tuple[str, int]]]:
    """(id, number of chunks) of groups that together have few enough bytes; at least one."""
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
    # The payload first: it does not change while the group is held, so if the hash says afterwards
    # that it is, they belong together.
    async with redis.pipeline(transaction=False) as pipe:
        for group_id, num_chunks in batch:
            payload = keys.payload(group_id)
            pipe.mget([payload, *(f"{payload}:{i}" for i in range(1, num_chunks + 1))])
            pipe.hgetall(keys(f"group:{group_id}"))
        replies = await pipe.execute(raise_on_error=False)
    return [
        # A key that holds something else than we put there is as good as gone.
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
    except ValueError:  # what is left of it would not help anybody
        payload = b""
    return DumpedGroup(group_id=group_id, state=state, fields=fields, payload=payload)


def _restored(dumped: DumpedGroup) -> TrajectoryGroup:
    """The group with the numbers that its versions had after the run's last rollback."""
    if not dumped.payload:
        raise ValueError("its payload was gone when the dump was made")
    group = decode_group(dumped.payload)
    if group.group_id != dumped.group_id:
        raise ValueError(f"its payload is that of group {group.group_id!r}")
    if "moved" in dumped.fields:
        entries = dumped.fields.get("versions", "").split()
        group = renumber(group, [int(entry.split(":")[0]) for entry in entries])
    return group


def _texts(fields: Mapping[Any, Any]) -> dict[str, str]:
    return {readable(name): readable(value) for name, value in fields.items()}


async def read_group(redis: Redis, run: str, group_id: str, num_shards: int) -> Mapping[str, str]:
    """The fields of the group's hash, `state` among them; empty if nothing is known of it.

    A running group has nothing but its state, and so has one that is acked or dropped.
    """
    keys = Keys(run, shard_of(group_id, num_shards))
    async with redis.pipeline(transaction=True) as pipe:
        pipe.hgetall(keys(f"group:{group_id}"))
        pipe.zscore(keys("running"), group_id)
        fields, running = await pipe.execute()
    if not fields and running is not None:
        return {"state": "running"}
    return {readable(name): readable(value) for name, value in fields.items()}


async def read_payload(
    redis: Redis, run: str, group_id: str, num_shards: int
) -> TrajectoryGroup | None:
    """The group itself, with the versions that it was pushed with; None if it is not held (any
    more). Raises ValueError for bytes that are none."""
    key = Keys(run, shard_of(group_id, num_shards)).payload(group_id)
    first = cast("bytes | None", await redis.get(key))
    if first is None:
        return None
    rest = [f"{key}:{number}" for number in range(1, num_chunks(first) + 1)]
    chunks = cast("list[bytes | None]", await redis.mget(rest) if rest else [])
    if None in chunks:
        return None  # it was dropped between the two
    return decode_group(join_payload(first, chunks))
