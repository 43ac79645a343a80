"""The dump file: a whole buffer in one file, to be moved, looked at or replayed offline.

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
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

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
