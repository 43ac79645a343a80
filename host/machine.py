"""The machine: memory that its processes may use, folders, its disk, NVIDIA's driver."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import psutil

DRIVER_FILE = Path("/proc/driver/nvidia/version")
OWN_CGROUPS, CGROUPS = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")


def driver_version() -> str | None:
    """As "580.65.06"; None without a driver of NVIDIA."""
    text = DRIVER_FILE.read_text() if DRIVER_FILE.is_file() else ""
    found = re.search(r"\b\d{3,}(\.\d+)+", text)
    return None if found is None else found[0]


def host_memory() -> int:
    """Bytes that the processes of this machine, or of its container or job, may use."""
    return min([int(psutil.virtual_memory().total), *_cgroup_limits()])


def existing(path: str | Path) -> Path:
    """The folder, or the nearest above it that exists."""
    return next(p for p in (Path(path), *Path(path).parents) if p.exists())


def sync(path: Path) -> None:
    """Sync a file's bytes, or a folder's entries, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _cgroup_limits() -> Iterator[int]:
    """Limits of this process's control groups, of version 1 or 2, and of the groups above them."""
    for line in OWN_CGROUPS.read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            root, name = CGROUPS, "memory.max"
        elif "memory" in controllers.split(","):
            root, name = CGROUPS / "memory", "memory.limit_in_bytes"
        else:
            continue
        # A container may be told the path on its host, and sees its own group as the root.
        parts = Path(path.lstrip("/")).parts
        for depth in range(len(parts) + 1):
            file = root.joinpath(*parts[:depth], name)
            if file.is_file() and (limit := file.read_text().strip()).isdecimal():
                yield int(limit)
