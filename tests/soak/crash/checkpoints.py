"""Checkpoints of the soak's trainer: small atomic files, each naming its parent."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path

import msgspec


@dataclass(kw_only=True, slots=True, frozen=True)
class Checkpoint:
    step: int = 0
    version: int = 0
    lineage: str = ""
    consumed: tuple[str, ...] = ()
    """Groups trained since the parent checkpoint."""
    depths: dict[int, int] = field(default_factory=lambda: {0: 0})
    """Optimizer steps that made each version, for the newest ancestors of these weights."""
    parent: str | None = None
    """File of the parent checkpoint."""


class CheckpointChain:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._latest = folder / "latest"
        self._aliases = folder / "aliases"

    def save(self, checkpoint: Checkpoint) -> None:
        """Writes atomically; it becomes the latest with the last rename."""
        name = f"step-{checkpoint.step:06d}-{checkpoint.lineage}.json"
        write_whole(self._folder / name, msgspec.json.encode(checkpoint))
        write_whole(self._latest, name.encode())

    def latest_name(self) -> str | None:
        return self._latest.read_text() if self._latest.exists() else None

    def latest(self) -> Checkpoint:
        name = self.latest_name()
        return Checkpoint() if name is None else self._read(name)

    def note_alias(self, version: int) -> None:
        """Call before the latest checkpoint's weights are published as `version`."""
        with self._aliases.open("a") as file:  # one line, one write: whole or absent
            file.write(json.dumps([self.latest_name(), version]) + "\n")

    def aliases(self) -> list[int]:
        """Versions under which the latest checkpoint's weights ever were published again.

        A life that was killed before its first checkpoint leaves groups with such a number.
        """
        lines = self._aliases.read_text().splitlines() if self._aliases.exists() else []
        latest = self.latest_name()
        return [version for name, version in map(json.loads, lines) if name == latest]

    def trained(self) -> list[str]:
        """Every group that the surviving weights were trained on, in order."""
        chain, name = [], self.latest_name()
        while name is not None:
            checkpoint = self._read(name)
            chain.append(checkpoint.consumed)
            name = checkpoint.parent
        return [group_id for consumed in reversed(chain) for group_id in consumed]

    def _read(self, name: str) -> Checkpoint:
        return msgspec.json.decode((self._folder / name).read_bytes(), type=Checkpoint)


def write_whole(path: Path, data: bytes) -> None:
    """The file has its old content or the new one, whoever is killed meanwhile."""
    written = path.with_name(f".{path.name}.writing")
    written.write_bytes(data)
    os.replace(written, path)
