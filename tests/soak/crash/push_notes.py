"""A producer's log of its pushes and their replies, which survives SIGKILL."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(kw_only=True, slots=True, frozen=True)
class Attempt:
    """Enough to create the same group again."""

    group_id: str
    index: int
    attempt: int
    versions: tuple[int, ...]


class PushNotes:
    """Append-only: one call writes a line, so that a kill truncates at most the last one."""

    def __init__(self, path: Path) -> None:
        self.acknowledged: dict[str, str] = {}
        """Reply to each push, by group id."""
        self.unacknowledged: dict[str, Attempt] = {}
        if path.exists():
            for line in path.read_text().splitlines():
                self._read(line)
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        os.write(self._file, b"\n")  # ends a line that a kill cut

    def trying(self, attempt: Attempt) -> None:
        self.unacknowledged[attempt.group_id] = attempt
        fields = [attempt.group_id, attempt.index, attempt.attempt, *attempt.versions]
        self._append(fields)

    def acknowledge(self, group_id: str, answer: str) -> None:
        """Call it only after the server has replied."""
        self._append([group_id, answer])
        del self.unacknowledged[group_id]
        self.acknowledged[group_id] = answer

    def close(self) -> None:
        os.close(self._file)

    def _append(self, fields: list[str | int]) -> None:
        os.write(self._file, json.dumps(fields).encode() + b"\n")

    def _read(self, line: str) -> None:
        try:
            fields = json.loads(line)
        except ValueError:
            return
        if len(fields) == 2:
            self.acknowledged[fields[0]] = fields[1]
            self.unacknowledged.pop(fields[0], None)
        else:
            group_id, index, attempt, *versions = fields
            self.unacknowledged[group_id] = Attempt(
                group_id=group_id, index=index, attempt=attempt, versions=tuple(versions)
            )
