"""Files that the processes of a run would leave on each machine if they were killed.

    runs/<name>/leftovers/<host>/<process>      one path on that host per line

A process lists such files before it creates them, and unlists them once they are removed. If it is
killed, they are removed on that host: at the run's end, by `make stop`, or by the next launch with
the same `run.dir` that starts an engine there.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import shutil
import socket
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from configs.run_files import read_text
from processes.runs import living_runs

log = logging.getLogger(__name__)

_FOLDER = "leftovers"
_LOCK = "lock"


def list_path(run_dir: Path, process: str) -> Path:
    """The list of files of `process` on this host."""
    return run_dir / _FOLDER / socket.gethostname() / process


def write_list(list_file: Path, paths: Iterable[str | Path]) -> None:
    """Replaces the list atomically: a truncated path could name a parent folder."""
    list_file.parent.mkdir(parents=True, exist_ok=True)
    part = list_file.with_name(f".{list_file.name}.part")
    part.write_text("".join(f"{path}\n" for path in paths))
    part.replace(list_file)


def remove_leftovers(run_dir: Path) -> None:
    """Remove the files in this host's lists. The run's processes on this host must have ended.

    A list stays until all its files are removed. Lists of other hosts stay, and so do lists of
    other users, which could name any path.
    """
    for list_file in sorted((run_dir / _FOLDER / socket.gethostname()).glob("*")):
        try:
            remove_listed(list_file)
        except (OSError, ValueError) as error:
            log.warning("cannot remove the files listed in %s: %s", list_file, error)
    for folder in (run_dir / _FOLDER / socket.gethostname(), run_dir / _FOLDER):
        with contextlib.suppress(OSError):  # not empty, or missing
            folder.rmdir()


def remove_leftovers_of_dead_runs(root: Path) -> None:
    """The same for every run below `root` that has no live process on this host."""
    lists = {folder.parent.parent for folder in root.glob(f"*/{_FOLDER}/{socket.gethostname()}")}
    if not lists:
        return
    living = living_runs()
    for run_dir in lists:
        if os.path.realpath(run_dir) not in living:
            remove_leftovers(run_dir)


def hosts_with_leftovers(run_dir: Path) -> list[str]:
    """Names of the hosts that still have a list."""
    return sorted({path.parent.name for path in (run_dir / _FOLDER).glob("*/*")})


@contextlib.contextmanager
def temporary_folder(prefix: str) -> Iterator[Path]:
    """A folder for one command, after those of killed processes are removed with what they list."""
    for old in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
        with contextlib.suppress(OSError), (old / _LOCK).open() as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # fails while its process lives
            remove_leftovers(old)
            shutil.rmtree(old)
    with tempfile.TemporaryDirectory(prefix=prefix) as name:
        folder = Path(name)
        with (folder / f".{_LOCK}").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            (folder / f".{_LOCK}").rename(folder / _LOCK)  # others find it locked
            yield folder


def remove_listed(list_file: Path) -> None:
    """Remove the files in one list, and the list. Raises OSError, and ValueError if the list is
    damaged: then nothing is removed."""
    if list_file.stat().st_uid != os.geteuid():
        raise PermissionError("it belongs to another user")
    if not list_file.name.startswith("."):  # an unfinished list may be truncated
        text = read_text(list_file)
        paths = [Path(line) for line in text.split("\n")[:-1]]
        if (text and not text.endswith("\n")) or not all(map(Path.is_absolute, paths)):
            raise ValueError(f"{list_file} is damaged: its lines are not all absolute paths")
        for path in paths:
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
    list_file.unlink()
