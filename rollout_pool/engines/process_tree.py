"""Ends a server and everything that it started, and leaves none of its shared memory behind."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import psutil

_SHARED_MEMORY = Path("/dev/shm")


def descendants(pid: int) -> list[psutil.Process]:
    """The processes below `pid`, without itself; none if it is gone."""
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def family(pid: int) -> list[psutil.Process]:
    """`pid` and the processes below it; none if it is gone."""
    try:
        return [psutil.Process(pid), *descendants(pid)]
    except psutil.NoSuchProcess:
        return []


def shared_memory_files(processes: Iterable[psutil.Process]) -> frozenset[Path]:
    """Files in shared memory that these processes map now: a killed one cannot remove them.

    Python's own semaphores (sem.*) are not among them: its resource tracker removes those. Nor are
    files in folders, such as staged weights: those are others', who share them.
    """
    found: set[Path] = set()
    for process in processes:
        try:
            paths = {Path(mapping.path) for mapping in process.memory_maps()}
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue  # ended meanwhile
        found |= {path for path in paths if path.parent == _SHARED_MEMORY}
    return frozenset(path for path in found if path.exists())


def kill(processes: Iterable[psutil.Process], timeout_s: float) -> None:
    """SIGKILL, then wait until they are gone. Python's resource trackers end by themselves.

    A tracker removes the semaphores of its family once the last member is gone, so it must outlive
    them, and must not be stopped when the others were.
    """
    doomed = []
    for process in processes:
        try:
            if _is_tracker(process):
                process.resume()
            else:
                doomed.append(process)
                process.kill()
        except psutil.NoSuchProcess:
            continue
    psutil.wait_procs(doomed, timeout=timeout_s)


def _is_tracker(process: psutil.Process) -> bool:
    try:
        return any("multiprocessing.resource_tracker" in word for word in process.cmdline())
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return False
