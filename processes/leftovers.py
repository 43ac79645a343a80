"""What the processes of a run would leave on each machine if they were killed.

    runs/<name>/leftovers/<host>/<process>      a path on that host in each line

Whoever makes such files lists them first, and takes them off the list when they are removed. Where
it is killed instead, they are removed on that host, since nobody else can: by the run's end or by
`make stop` there, or by the next launch with the same `run.dir` that starts an engine there.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import socket
from collections.abc import Iterable
from pathlib import Path

from processes.runs import living_runs

log = logging.getLogger(__name__)

_FOLDER = "leftovers"


def list_path(run_dir: Path, process: str) -> Path:
    """Where `process`, which runs on this host, lists what it would leave."""
    return run_dir / _FOLDER / socket.gethostname() / process


def write_list(list_file: Path, paths: Iterable[str | Path]) -> None:
    """Replaced at once: a list that was cut off in the middle could name a folder above."""
    list_file.parent.mkdir(parents=True, exist_ok=True)
    part = list_file.with_name(f".{list_file.name}.part")
    part.write_text("".join(f"{path}\n" for path in paths))
    part.replace(list_file)


def remove_leftovers(run_dir: Path) -> None:
    """Remove what this host's lists name; the processes of the run on it have ended.

    A list stays as long as something of it is there. Lists of other hosts stay, and so does one of
    another user, who could have written any path into it.
    """
    for list_file in sorted((run_dir / _FOLDER / socket.gethostname()).glob("*")):
        try:
            _remove_listed(list_file)
        except OSError as error:
            log.warning("cannot clear up after %s: %s", list_file, error)
    for folder in (run_dir / _FOLDER / socket.gethostname(), run_dir / _FOLDER):
        with contextlib.suppress(OSError):  # not empty, or not there
            folder.rmdir()


def remove_leftovers_of_dead_runs(root: Path) -> None:
    """The same for every run below `root` of which no process lives on this host."""
    lists = {folder.parent.parent for folder in root.glob(f"*/{_FOLDER}/{socket.gethostname()}")}
    if not lists:
        return
    living = living_runs()
    for run_dir in lists:
        if os.path.realpath(run_dir) not in living:
            remove_leftovers(run_dir)


def hosts_with_leftovers(run_dir: Path) -> list[str]:
    """Names of the hosts on which something is still listed."""
    return sorted({path.parent.name for path in (run_dir / _FOLDER).glob("*/*")})


def _remove_listed(list_file: Path) -> None:
    if list_file.stat().st_uid != os.geteuid():
        raise PermissionError("it belongs to another user")
    if not list_file.name.startswith("."):  # one that was never finished may be cut off
        for path in map(Path, list_file.read_text().splitlines()):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
    list_file.unlink()
