"""Files of bounded size, a line of JSON for each group that is recorded.

rollouts/worker-0.jsonl      when full it becomes worker-0.jsonl.1,
rollouts/worker-0.jsonl.1    that one .2, ... and the oldest is removed
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from hashlib import sha256
from itertools import pairwise
from pathlib import Path

log = logging.getLogger(__name__)

MAX_FILE_BYTES = 64 * 2**20
NUM_FILES = 4


def is_chosen(group_id: str, rate: float, seed: int) -> bool:
    """Whether a share `rate` of all groups has this one: by its id alone, so all agree."""
    digest = sha256(f"{seed}:{group_id}".encode()).digest()
    return int.from_bytes(digest[:6], "big") < rate * 2**48


def parts_of(path: Path, number: int = NUM_FILES) -> list[Path]:
    """The names of its files, newest first."""
    return [path, *(path.with_name(f"{path.name}.{i}") for i in range(1, number))]


class LineLog:
    """Appends whole lines, from any thread. A failing disk only loses lines."""

    def __init__(
        self, path: Path, max_file_bytes: int = MAX_FILE_BYTES, num_files: int = NUM_FILES
    ) -> None:
        self.path = path
        self._max_file_bytes = max_file_bytes
        self._num_files = num_files
        self._lock = threading.Lock()
        self.num_lost = 0
        """Lines that could not be written."""

    def append(self, make: Callable[[], bytes]) -> None:
        """Appends the line that `make` returns; if it cannot be made or written it is lost."""
        try:
            line = make()
            with self._lock:
                self._append(line)
        except (OSError, ValueError, TypeError) as error:
            self.lose(f"{self.path}: {error}")

    def _append(self, line: bytes) -> None:
        if len(line) > self._max_file_bytes:
            self.lose(f"a group of {len(line)} bytes exceeds the size limit of {self.path}")
            return
        self.path.parent.mkdir(exist_ok=True)
        with open(self.path, "ab+", buffering=0) as file:
            size = file.seek(0, os.SEEK_END)
            if size + 1 + len(line) > self._max_file_bytes:
                self._rotate()
            elif size:
                file.seek(-1, os.SEEK_END)
                if file.read() != b"\n":  # a line was truncated, by a full disk or a kill
                    line = b"\n" + line
        with open(self.path, "ab") as file:
            file.write(line)

    def _rotate(self) -> None:
        for newer, older in reversed([*pairwise(parts_of(self.path, self._num_files))]):
            if newer.exists():
                newer.replace(older)
        self.path.unlink(missing_ok=True)  # if there is only one file

    def lose(self, why: str) -> None:
        self.num_lost += 1
        if self.num_lost == 1:
            log.warning("a group is not recorded, and perhaps others: %s", why)
