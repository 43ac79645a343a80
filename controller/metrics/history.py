"""The run's history on disk: append-only JSON lines in `metrics.jsonl`.

    {"t": 1732190000.1, "kind": "step", "step": 3, "reward_mean": 0.41, ...}

A number that was not measured, or is not finite, is null.

Kinds: `phase` (of the run), `step` (one trained batch, from trainer rank 0), `ranks` (the times of
each trainer rank in that step), `eval` (held-out prompts), `eval_failed` (with `version` and
`why`), `buffer` (depth, versions and waits, sampled by the controller), `eval_command` (see
evaluation/outside.py), `engine` (an engine's load as a worker saw it), `publish`, `commit` and
`weights_event` (see weights.py), `agreement` (of an engine with the trainer: `error` if there is
none), `checkpoint` (with `error` if it failed), `tuned` (a `setting` that `who` changed from
`before` to `after`, with `why` and numbers if that was autotune), `lengths` (of the answers trained
and sampled), `stall` and `stall_ended` (see watch/stalls.py), `worker_lost`, `worker_back`,
`redis_restarted`, `attached` and `resumed` (the run goes on after `step`, `away_s` after its end).
Each is flat. `id` is the position of a record that came through Redis.
"""

from __future__ import annotations

import errno
import json
import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from buffer.results import BufferStats
from configs.run_files import Scalar, open_bytes, parse_json
from controller.metrics.catalogue import METRICS, Kind

log = logging.getLogger(__name__)

EVAL_FAILED = "eval_failed"
EVAL_COMMAND = "eval_command"
RESUMED = "resumed"
ATTACHED = "attached"
TUNED = "tuned"
WORKER_LOST, WORKER_BACK = "worker_lost", "worker_back"
STALL, STALL_ENDED = "stall", "stall_ended"
LENGTHS = "lengths"
READY_BY_STALENESS = "ready_by_staleness"
"""A histogram of a `buffer` record: groups that wait, by versions behind the trainer."""
Waits = Mapping[tuple[str, str], float]
"""Seconds by (waiter, waited on)."""
SAMPLED = (
    *(m.field for m in METRICS["buffer"] if not m.label and m.kind is not Kind.histogram),
    *("trained", "max_staleness_largest", "max_staleness_trained"),
)
"""Fields of BufferStats that a `buffer` record has by the same name, where they are not None."""
RESERVED_NAMES = frozenset({"t", "kind", "id"})
"""Names that no value may have."""


@dataclass(kw_only=True, slots=True)  # to make a frozen one takes three times as long
class Record:
    t: float
    """Unix time, seconds."""
    kind: str
    values: Mapping[str, Scalar]
    id: str = ""
    """Its position in the run's metrics stream; "" for the controller's own."""

    def number(self, name: str) -> float:
        """The value of `name`; NaN if it was not recorded or is not finite."""
        value = self.values.get(name)
        return math.nan if value is None or isinstance(value, str) else float(value)

    def count(self, name: str) -> int:
        """The value of `name` as an integer; 0 if it was not recorded."""
        value = self.number(name)
        return int(value) if math.isfinite(value) else 0

    def histogram(self, name: str) -> dict[int, int]:
        """A mapping of integers kept as a JSON string: `{"0": 12, "1": 4}`."""
        text = self.values.get(name)
        if not isinstance(text, str):
            return {}
        found = parse_json(text, dict[int, int], f"{name} of a record of kind {self.kind!r}")
        return dict(sorted(found.items()))

    @property
    def waits(self) -> dict[tuple[str, str], float]:
        """The waits of a `buffer` record."""
        pairs = {name: pair.partition(".") for name, pair in below(self.values, "wait_s.")}
        return {(who, on): self.number(name) for name, (who, _, on) in pairs.items()}

    @property
    def counters(self) -> dict[str, float]:
        """The workers' counters of a `buffer` record."""
        return {name: self.number(full) for full, name in below(self.values, "count.")}

    @property
    def dropped(self) -> dict[str, int]:
        """Dropped groups of a `buffer` record, by reason."""
        return {reason: self.count(full) for full, reason in below(self.values, "dropped.")}


def below(values: Iterable[str], prefix: str) -> Iterator[tuple[str, str]]:
    """The names that begin with `prefix`, with and without it."""
    return ((name, name.removeprefix(prefix)) for name in values if name.startswith(prefix))


def buffer_values(
    stats: BufferStats, waits: Waits, counters: Mapping[str, float]
) -> Mapping[str, Scalar]:
    """The values of a `buffer` record, made of one sample of Redis.

    {"ready": 12, "dropped.stale": 3, "count.turns": 90, "wait_s.trainer.rollout": 4.2, ...}
    """
    oldest = min(stats.engine_versions.values(), default=stats.trainer_version)
    return {
        **{name: value for name in SAMPLED if (value := getattr(stats, name)) is not None},
        "dropped": stats.num_dropped,
        "engine_lag": stats.trainer_version - oldest,
        "limit": stats.limit(),
        READY_BY_STALENESS: json.dumps(dict(stats.by_staleness)),
        **{f"dropped.{reason}": number for reason, number in stats.dropped.items()},
        "tokens_generated": int(counters.get("tokens_generated", 0)),
        **{f"count.{name}": value for name, value in counters.items()},
        **{f"wait_s.{who}.{on}": seconds for (who, on), seconds in waits.items()},
    }


class MetricsLog:
    """Appends records. Each line is in the file at once, or as soon as the disk has room for it."""

    def __init__(self, path: Path, hand_on: Sequence[Callable[[Record], None]] = ()) -> None:
        """`hand_on` are called with each record too."""
        self.path = path
        self._file = path.open("ab+", buffering=0)
        self._hand_on = hand_on
        self._waiting = b""
        """Lines for which the disk has had no room."""
        # The last writer may have been killed in the middle of a line: the next would be invalid.
        self._file.seek(0)
        whole = self._file.read().rfind(b"\n") + 1
        self._file.truncate(whole)

    def append(
        self, kind: str, values: Mapping[str, Scalar], t: float | None = None, *, id: str = ""
    ) -> Record:
        """Write one record (`t` None: now) and return it as `read_metrics` will."""
        assert not RESERVED_NAMES & values.keys(), (kind, sorted(values))
        known = finite_only(values)
        record = Record(t=time.time() if t is None else t, kind=kind, values=known, id=id)
        nulls = {name: None for name in values if name not in known}
        position = {"id": id} if id else {}
        line = {"t": round(record.t, 3), "kind": kind, **position, **known, **nulls}
        text = json.dumps(line, separators=(",", ":"), allow_nan=False, ensure_ascii=False)
        self._waiting += text.encode(errors="replace") + b"\n"
        self._write()
        for hand_on in self._hand_on:
            hand_on(record)
        return record

    def _write(self) -> None:
        was_full = self._waiting.count(b"\n") > 1
        try:
            while self._waiting:
                self._waiting = self._waiting[self._file.write(self._waiting) :]
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            if not was_full:
                log.warning("%s waits for room on its disk (%s)", self._file.name, error.strerror)

    def __enter__(self) -> MetricsLog:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()


def finite_only(values: Mapping[str, Scalar]) -> dict[str, Scalar]:
    """The values that every reader of JSON takes: no NaN, no integer of more than 64 bits, and no
    half of a surrogate pair."""
    return {name: _plain(value) for name, value in values.items() if _is_finite(value)}


def _is_finite(value: Scalar) -> bool:
    if isinstance(value, int):
        return abs(value) < 2**63
    return isinstance(value, str) or math.isfinite(value)


def _plain(value: Scalar) -> Scalar:
    return value.encode(errors="replace").decode() if isinstance(value, str) else value


def change_words(tuned: Record) -> str:
    """A `tuned` record in words."""
    setting, before, after, who = map(tuned.values.get, ("setting", "before", "after", "who"))
    why = f": {tuned.values['why']}" if "why" in tuned.values else ""
    return f"{setting} {before} -> {after}, by {who}{why}"


def of_kind(records: Sequence[Record], kind: str) -> list[Record]:
    return [record for record in records if record.kind == kind]


def fullest(samples: Sequence[Record], most: int) -> list[Record]:
    """At most so many `buffer` records: of each interval that with the most groups, as the
    staleness bound limits the peaks."""

    def held(sample: Record) -> int:
        return sum(map(sample.count, ("running", "ready", "leased")))

    size = -(-len(samples) // most) or 1
    return [max(samples[i : i + size], key=held) for i in range(0, len(samples), size)]


def numbers(records: Iterable[Record], name: str) -> list[float]:
    """The value of `name` in each record; NaN where it is missing."""
    return [record.number(name) for record in records]


def series(records: Iterable[Record], name: str) -> list[float]:
    """The finite values of `name`, in order."""
    return [x for record in records if math.isfinite(x := record.number(name))]


def training_seconds(steps: Sequence[Record]) -> float:
    """From the first batch's lease to the last step's end."""
    if not steps:
        return 0.0
    parts = ("lease_wait_s", "lease_ranks_s", "step_s")
    return steps[-1].t - steps[0].t + sum(sum(series(steps[:1], part)) for part in parts)


def read_metrics(path: Path, kind: str | None = None) -> list[Record]:
    """Every record (of `kind`), oldest first; see `MetricsTail`."""
    tail = MetricsTail(path)
    tail.read()
    return tail.records if kind is None else of_kind(tail.records, kind)


class MetricsTail:
    """The records of a file that grows. None if there is no file yet.

    Steps after the checkpoint from which the run was resumed are left out: they were undone. An
    incomplete last line is ignored: it is still being written, or its writer was killed.
    """

    def __init__(self, path: Path) -> None:
        self.records = list[Record]()
        self._path = path
        self._num_lines = self._num_bytes = 0

    def read(self) -> Sequence[Record]:
        """Returns what has come since the last call. Raises ValueError with the number of an
        invalid line."""
        try:
            with open_bytes(self._path) as file:
                file.seek(self._num_bytes)
                lines = file.read().split(b"\n")[:-1]
        except FileNotFoundError:
            return []
        new = list[Record]()
        for line in lines:
            try:
                new.append(_parse(line))
            except ValueError as error:
                where = f"{self._path}:{self._num_lines + len(new) + 1}"
                raise ValueError(f"{where} {error}") from error
        self._num_lines += len(lines)
        self._num_bytes += sum(map(len, lines)) + len(lines)
        for record in new:
            if record.kind == RESUMED:
                last = record.count("step")
                kept = [r for r in self.records if r.kind != "step" or r.count("step") <= last]
                self.records = kept
            self.records.append(record)
        return new


_Int64 = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
_LINE = msgspec.json.Decoder(dict[str, bool | float | _Int64 | str | None])


def _parse(line: bytes) -> Record:
    try:
        fields = _LINE.decode(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"is damaged: {error}; remove the line") from error
    t, kind, place = fields.pop("t", None), fields.pop("kind", None), fields.pop("id", None) or ""
    if not isinstance(t, float | int) or not isinstance(kind, str) or not isinstance(place, str):
        raise ValueError("is not a metrics record, without time and kind; remove the line")
    if b"null" in line and None in fields.values():
        fields = {name: value for name, value in fields.items() if value is not None}
    return Record(t=float(t), kind=kind, values=fields, id=place)  # type: ignore[arg-type]
