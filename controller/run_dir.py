"""The folder of a run: its layout, its record, and how commands find it.

runs/<name>/
    run.json        name, pid, start time, state (running, finished, failed, stopped), the error
    redis.url       address of its Redis with the password; readable only by the owner
    config.yaml     the resolved settings
    experiment.yaml the same as an experiment, with which another run repeats it
    data.json       number and digest of the problems of each task that has a file or a data set
    metrics.jsonl   one line per step, evaluation and buffer sample
    logs/           one file per process
    model/          the initial policy, if it was built from scratch
    checkpoints/    the trainer's
    stacks/         stacks of processes in a stall
    rollouts/       some of the groups as they were sampled, for `make show`
    trained/        their advantages, and their log-probabilities by the trainer
    ray/            a link to Ray's private folder, while Ray runs
    leftovers/      one folder per host, one file per engine: what a killed server would leave
    redis/          the data of a server started for this run
    final_model/    the final weights
    summary.md, *.png, result.json      the outcome, however the run ended

Only its owner can read it, or also the group of `run.group`. All processes of the run take their
umask from the folder's mode.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import secrets
import shutil
import socket
import stat
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import psutil
from msgspec import Meta

from configs.run_files import read_json, read_text
from processes.child import has_ended, started_at
from processes.leftovers import hosts_with_leftovers, remove_leftovers

if TYPE_CHECKING:
    from configs.schema import Config

T = TypeVar("T")

EXPERIMENT_FILE = "experiment.yaml"
EVALUATED = "evaluated"
_PRIVATE = "/tmp/leash-ray-"


class RunDirError(ValueError):
    """The run's folder cannot be used or does not exist; the message contains the fix."""


@dataclass(kw_only=True, slots=True, frozen=True)
class RunRecord:
    """The content of `run.json`."""

    name: str
    pid: Annotated[int, Meta(ge=1, le=2**31 - 1)]
    process_started: float
    """`started_at` of `pid`: another process may get the same number later."""
    started: float
    state: Annotated[str, Meta(pattern="^(running|finished|failed|stopped)$")]
    ended: float | None = None
    resumed: float | None = None
    """When it last went on."""
    host: str = ""
    error: str | None = None
    """Why the run failed, or is being ended."""

    @property
    def is_here(self) -> bool:
        """True if the controller runs, or ran, on this machine."""
        return self.host in ("", socket.gethostname())

    @property
    def is_alive(self) -> bool:
        """True if the controller lives; for one on another machine, its record decides."""
        if not self.is_here:
            return self.state == "running"
        try:
            # One that has ended and that nobody has waited for still has a start.
            return started_at(self.pid) == self.process_started and not has_ended(self.pid, 0)
        except psutil.NoSuchProcess:
            return False

    @property
    def stands_still(self) -> bool:
        """True if a signal has stopped the controller, on this machine."""
        with contextlib.suppress(psutil.NoSuchProcess):
            status = psutil.STATUS_STOPPED
            return self.is_here and self.is_alive and psutil.Process(self.pid).status() == status
        return False

    @property
    def is_of_parent(self) -> bool:
        """True if this process's guard has adopted the run."""
        return self.is_alive and self.is_here and self.pid == os.getppid()

    @property
    def is_running(self) -> bool:
        """True if the run continues; false if its controller was killed, despite the record."""
        return self.state == "running" and self.is_alive


@dataclass(kw_only=True, slots=True, frozen=True)
class RunDir:
    """The folder of one run.

    run_dir = RunDir.create("runs", "night", "quickstart")   # runs/night, with a run.json
    run_dir.write_config(config)
    run_dir.read_record().is_running                         # True while this process lives
    run_dir.end("finished")
    RunDir.find("runs", None) == run_dir                     # the newest
    """

    path: Path

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def run_id(self) -> str:
        """In the environment of all processes of the run; unique on a machine."""
        return str(self.path)

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def model(self) -> Path:
        return self.path / "model"

    def log_of(self, process: str) -> Path:
        return self.logs / f"{process}.log"

    @classmethod
    def create(
        cls,
        root: str,
        name: str | None,
        experiment: str,
        group: str | None = None,
        fill: Callable[[RunDir], None] = lambda run_dir: None,
    ) -> RunDir:
        """A new folder below `root`, readable by its owner and `group`, with what `fill` writes.

        Raises RunDirError if the folder exists, or if it cannot be made or filled; a half-made one
        is removed.
        """
        name = name or f"{experiment}-{datetime.now():%Y%m%d-%H%M%S}"
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", name):
            raise RunDirError(
                f"run.name={name!r}: use letters, digits, '.', '_', '-' (it names Redis keys too)"
            )
        path = (Path(root) / name).absolute()
        is_ours = False
        try:
            path.mkdir(mode=0o700, parents=True)
            is_ours = True
            _open_to_group(path, group)
            (path / "logs").mkdir()
            (path / "logs").chmod(stat.S_IMODE(path.stat().st_mode))
            run_dir = cls(path=path)
            fill(run_dir)
            record = RunRecord(name=name, started=time.time(), state="running", **_this_process())
            run_dir.write_record(record)
            return run_dir
        except OSError as error:
            if is_ours:
                shutil.rmtree(path, ignore_errors=True)
            elif isinstance(error, FileExistsError):
                raise RunDirError(
                    f"run.name={name!r}: {path} is in use; choose another run.name or remove the "
                    "folder"
                ) from error
            raise RunDirError(
                f"run.dir={root!r}: cannot make {path} ({error.strerror}); free space there, or "
                "choose a folder that can be written with run.dir=..."
            ) from error

    def reopen(self, look: Callable[[], T]) -> T:
        """Make this process the controller of a run that has ended, or that its guard has adopted.
        Returns what `look` finds then: until the run's end its ranks may complete a checkpoint.

        Raises RunDirError if it has another controller. An error of `look` leaves the run as it is.
        """
        with self.ending():  # two of them might try
            record = self.read_record()
            if record.state == "running" and not record.is_of_parent:
                raise self._is_controlled(record)
            found = look()
            self.remove_temporary()  # nobody has, if its machine was lost
            again = replace(record, state="running", ended=None, error=None, **_this_process())
            self.write_record(replace(again, resumed=time.time()))
            return found

    def check_ended(self) -> None:
        """Raises RunDirError if a controller of the run lives that is not this process's guard."""
        record = self.read_record()
        if record.is_running and not record.is_of_parent:
            raise self._is_controlled(record)

    def _is_controlled(self, record: RunRecord) -> RunDirError:
        stop, what = f"`{self.command('stop')}`", f"its controller is process {record.pid} on"
        if record.is_here:
            words = f"{what} this machine; {stop} ends it, or what it left"
        else:
            words = (
                f"{what} {record.host}; {stop} there ends it. Is that machine gone? Then write "
                f'"failed" for "running" in {self.path}/run.json'
            )
        return RunDirError(f"RUN={self.name!r}: {words}")

    def take_over(self) -> None:
        """Make this process the controller of a run that goes on without one. Raises RunDirError as
        `check_alone` does."""
        with self.ending():
            self.check_alone()
            self.write_record(replace(self.read_record(), **_this_process()))

    def check_alone(self) -> None:
        """Raises RunDirError unless the run goes on without a controller, or its guard has adopted
        it."""
        record = self.read_record()
        if record.state != "running":
            fix = f"`{self.resume_command}`" if self.has_checkpoint else "launch it again"
            raise RunDirError(f"RUN={self.name!r}: it has ended; {fix} if it is to go on")
        if record.is_alive and not record.is_of_parent:
            raise RunDirError(
                f"RUN={self.name!r}: its controller, process {record.pid}"
                f"{'' if record.is_here else ' on ' + record.host}, is not gone: end it first, by "
                f"Ctrl-C where it runs or by `{self.command('stop')}`, which ends the run too. "
                f"Does it hang? `kill -9 {record.pid}`, and its guard starts another"
            )

    def adopt(self) -> None:
        """Make this process, a guard whose controller died, the run's controller until the next one
        reopens it: who wants to stop the run finds somebody to ask."""
        with self.ending():
            self.write_record(replace(self.read_record(), **_this_process()))

    @classmethod
    def below(cls, root: str) -> list[RunDir]:
        """All runs of a folder, by name."""
        folders = sorted(file.parent.absolute() for file in Path(root).glob("*/run.json"))
        return [cls(path=folder) for folder in folders]

    @classmethod
    def find(cls, root: str, name: str | None) -> RunDir:
        """The run called `name`, or the newest one."""
        runs = cls.below(root)
        if name is not None:
            found = cls(path=(Path(root) / name).absolute())
            if not (found.path / "run.json").is_file():
                known = ", ".join(run.name for run in runs) or "none"
                raise RunDirError(f"RUN={name!r}: no such run below {root}/ (there are: {known})")
            return found
        if not runs:
            raise RunDirError(f"no run below {root}/ yet: start one with `make launch`")
        try:
            records = [(run.read_record(), run) for run in runs]
        except RunDirError as error:
            raise RunDirError(f"{error}; or name another run by RUN=...") from error
        return max(records, key=lambda found: found[0].resumed or found[0].started)[1]

    def write_record(self, record: RunRecord) -> None:
        self._write("run.json", json.dumps(asdict(record), indent=1) + "\n")

    def read_record(self) -> RunRecord:
        """Raises RunDirError if it is damaged."""
        path = self.path / "run.json"
        try:
            return read_json(path, RunRecord)
        except ValueError as error:
            raise RunDirError(f"{error}; restore it, or remove the folder") from error

    def write_data(self, data: Mapping[str, str]) -> None:
        self._write("data.json", json.dumps(data, indent=1) + "\n")

    def read_data(self) -> dict[str, str]:
        """The data of `write_data`; {} if there are none."""
        path = self.path / "data.json"
        try:
            return read_json(path, dict[str, str])
        except FileNotFoundError:
            return {}
        except ValueError as error:
            raise RunDirError(
                f"{error}; remove it if the run's task has the data that it began with"
            ) from error

    def end(self, state: str, error: str | None = None) -> None:
        self.note_error(error)
        self.write_record(replace(self.read_record(), state=state, ended=time.time()))

    def note_error(self, error: str | None) -> None:
        """Why the run is being ended, for another controller, should this one be killed."""
        if error is not None:  # it may quote half of a surrogate pair, which is not JSON
            error = error.encode(errors="replace").decode()
        self.write_record(replace(self.read_record(), error=error))

    @contextlib.contextmanager
    def ending(self) -> Iterator[None]:
        """A lock, so that the guard and `make stop` do not clean up at once."""
        folder = os.open(self.path, os.O_RDONLY)
        try:
            fcntl.flock(folder, fcntl.LOCK_EX)
            yield
        finally:
            os.close(folder)

    def write_config(self, config: Config) -> None:
        from configs.load import to_yaml

        self._write("config.yaml", to_yaml(config))

    def read_config(self, overrides: Sequence[str] = ()) -> Config:
        """Its settings with `overrides`. Raises ConfigError."""
        # Not at the top: each of Ray's workers imports this module, and the loader is slow.
        from configs.load import read_config

        return read_config(self.path / "config.yaml", overrides)

    def write_experiment(self, config: Config) -> None:
        """The same as an experiment, which repeats the run."""
        from configs.load import experiment_yaml

        self._write(EXPERIMENT_FILE, experiment_yaml(config))

    def write_redis_url(self, url: str) -> None:
        self._write("redis.url", url + "\n", mode=0o600)

    def read_redis_url(self) -> str | None:
        try:
            return read_text(self.path / "redis.url").strip() or None
        except FileNotFoundError:
            return None

    def forget_redis_url(self) -> None:
        """The server is gone, and its password with it."""
        (self.path / "redis.url").unlink(missing_ok=True)

    @property
    def resume_command(self) -> str | None:
        """The command that continues it when it has ended; None before its first checkpoint."""
        return self.command("resume") if self.has_checkpoint else None

    @property
    def has_checkpoint(self) -> bool:
        return (self.path / "checkpoints" / "latest").exists()

    def command(self, verb: str) -> str:
        """`make VERB` for this run, to be typed in the current folder."""
        return f"make {verb}{self.named}"

    @property
    def named(self) -> str:
        """The end of a command on this run."""
        root = self.path.parent
        folder = "" if root == Path("runs").absolute() else f" DIR={root}"
        return f" RUN={self.name}{folder}"

    @property
    def gone_words(self) -> str:
        """Says that the controller is gone, and what can be done."""
        attach = f"`{self.command('attach')}` gives it another one, if its processes go on"
        stop = f"`{self.command('stop')}` ends what is left"
        end = f"{stop}: it has no checkpoint yet, so launch it again"
        if self.has_checkpoint:
            end = f"`{self.resume_command}` goes on from its last checkpoint; {stop}"
        return f"its controller is gone; {attach}; {end}"

    def make_temporary(self) -> Path:
        """A private folder for files that must not outlive the run.

        The link to it is made first, so that `remove_temporary` finds it even after a crash.
        """
        # Ray puts unix sockets below it, whose paths are limited to 107 bytes: the run's own folder
        # could be too deep.
        folder = Path(f"{_PRIVATE}{secrets.token_hex(4)}")
        (self.path / "ray").symlink_to(folder)
        folder.mkdir(mode=0o700)
        return folder

    @property
    def temporary(self) -> Path | None:
        """None also if another user made the link: it could point anywhere."""
        link = self.path / "ray"
        if not link.is_symlink() or link.lstat().st_uid != os.geteuid():
            return None
        return link.readlink()

    def remove_temporary(self) -> None:
        """Remove what killed processes left; call it when the run's processes are gone."""
        shutil.rmtree(self.path / EVALUATED, ignore_errors=True)
        if self.temporary is not None:
            shutil.rmtree(self.temporary, ignore_errors=True)
            (self.path / "ray").unlink()
        remove_leftovers(self.path)

    def left_elsewhere(self) -> list[str]:
        """A line for each other host that may hold files of the run, and how to remove them.

        The files are in that host's memory and /tmp, so only that host can remove them.
        """
        return [
            f"{host} may still hold files of the run: `{self.command('stop')}` there removes them, "
            "and so does the next launch with this run.dir that starts an engine there"
            for host in hosts_with_leftovers(self.path)
        ]

    @property
    def umask(self) -> int:
        return umask_like(self.path)

    def _write(self, name: str, text: str, mode: int | None = None) -> None:
        """Replace the file atomically; without `mode` it is as private as the folder."""
        part = self.path / f".{name}.part"
        try:
            with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
                os.fchmod(file.fileno(), 0o666 & ~self.umask if mode is None else mode)
                file.write(text)
            part.replace(self.path / name)
        except OSError as error:  # that of a full disk does not say where
            raise OSError(error.errno, error.strerror, str(self.path / name)) from error


def _this_process() -> dict[str, Any]:
    """Its part of a record."""
    pid = os.getpid()
    return {"pid": pid, "process_started": started_at(pid), "host": socket.gethostname()}


def umask_like(folder: Path) -> int:
    """The umask that makes new files as private as `folder`; private if that does not exist."""
    try:
        return 0o777 & ~stat.S_IMODE(folder.stat().st_mode)
    except FileNotFoundError:
        return 0o077


def _open_to_group(folder: Path, group: str | None) -> None:
    if group is None:
        folder.chmod(0o700)  # clears a setgid bit inherited from the parent
        return
    try:
        shutil.chown(folder, group=group)
        folder.chmod(0o2750)  # files below belong to the group, too
    except (LookupError, OSError) as error:
        folder.rmdir()
        raise RunDirError(
            f"run.group={group!r}: cannot open {folder} to it ({error}); name a Unix group that "
            "you belong to (`id -Gn` lists them), or null"
        ) from error


def settings_of(folder: Path) -> dict[str, Any]:
    """The settings of a run by their dotted names, as they were written: another version of this
    program may have others. {} if there are none."""
    import yaml  # as the loader: each of Ray's workers imports this module

    path = folder / "config.yaml"
    try:
        found = yaml.safe_load(read_text(path))
    except FileNotFoundError:
        return {}
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is damaged: {error}; restore it") from None
    return dict(flat(found))


def flat(found: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """The leaves of mappings in mappings, by their dotted names."""
    if not isinstance(found, dict) or not found:
        yield name, found
        return
    for key, value in found.items():
        yield from flat(value, f"{name}.{key}" if name else str(key))
