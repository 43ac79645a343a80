"""Ends a server and everything that it started, and leaves none of its shared memory behind."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import psutil

SHARED_MEMORY = Path("/dev/shm")


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

    Files in folders, such as staged weights, are not among them: those are others', who share them.
    """
    inodes: set[int] = set()
    for process in processes:
        try:
            lines = Path(f"/proc/{process.pid}/maps").read_text().splitlines()
        except OSError:
            continue  # ended meanwhile
        for line in lines:
            _, _, _, _, inode, *path = line.split(maxsplit=5)
            # A semaphore is mapped under another name than it has, so the inode says which it is.
            if path and Path(path[0]).parent == SHARED_MEMORY:
                inodes.add(int(inode))
    return frozenset(
        Path(file.path)
        for file in os.scandir(SHARED_MEMORY)
        if file.inode() in inodes and file.is_file(follow_symlinks=False)
    )


def is_semaphore(path: Path) -> bool:
    """One of Python's, which its resource tracker removes unless it is killed, too."""
    return path.name.startswith("sem.")


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
