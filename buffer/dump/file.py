"""The file of a dump: its layout, a writer and a reader that checks every byte.

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

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, Self, TypeVar, get_args
from zipfile import ZIP_STORED, BadZipFile, ZipFile

import msgspec

from host.machine import sync

FORMAT_VERSION = 4
State = Literal["ready", "leased", "consumed", "quarantined"]
STATES: tuple[str, ...] = get_args(State)
T = TypeVar("T")

_HEADER, _END = "header.json", "end.json"
_UNREADABLE = (BadZipFile, EOFError, NotImplementedError, OSError, ValueError)
"""Errors of zipfile for a damaged archive; OSError for an offset outside the file."""


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
        sync(part)
        part.replace(path)
        sync(path.parent)  # the new name must reach the disk too
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
            raise ValueError(
                f"{self._path} is a dump in format {header.format}; this program reads format "
                f"{FORMAT_VERSION}: use the version of Leash that wrote it"
            )
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
