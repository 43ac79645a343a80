"""Ends a server with all its descendants, and finds the shared memory that it would leave."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path

import psutil

SHARED_MEMORY = Path("/dev/shm")


def descendants(pid: int) -> list[psutil.Process]:
    """All descendants of `pid`; none if it is gone."""
    return family(pid)[1:]


def family(pid: int) -> list[psutil.Process]:
    """`pid` and all its descendants; none if it is gone."""
    try:
        process = psutil.Process(pid)
        return [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def shared_memory_files(processes: Iterable[psutil.Process]) -> frozenset[Path]:
    """Shared-memory files that these processes map: a killed process cannot remove them.

    Files in folders, such as staged weights, are left out: other processes share them.
    """
    inodes: set[int] = set()
    for process in processes:
        try:
            lines = Path(f"/proc/{process.pid}/maps").read_text().splitlines()
        except OSError:
            continue  # it has ended
        for line in lines:
            _, _, _, _, inode, *path = line.split(maxsplit=5)
            # A semaphore is mapped under a name other than its file's, so compare inodes.
            if path and Path(path[0]).parent == SHARED_MEMORY:
                inodes.add(int(inode))
    return frozenset(
        Path(file.path)
        for file in os.scandir(SHARED_MEMORY)
        if file.inode() in inodes and file.is_file(follow_symlinks=False)
    )


def is_semaphore(path: Path) -> bool:
    """A semaphore of Python, which its resource tracker removes unless that is killed too."""
    return path.name.startswith("sem.")


def kill(processes: Iterable[psutil.Process], timeout_s: float) -> None:
    """SIGKILL, then wait until they are gone. Python's resource trackers are spared.

    A tracker removes the semaphores of its process family once the last member is gone, then ends
    by itself. So it must outlive them, and is resumed if it was stopped.
    """
    killed = []
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            if _is_tracker(process):
                process.resume()
            else:
                killed.append(process)
                process.kill()
    psutil.wait_procs(killed, timeout=timeout_s)


def _is_tracker(process: psutil.Process) -> bool:
    try:
        return any("multiprocessing.resource_tracker" in word for word in process.cmdline())
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return False
