"""Starts Python programs by forking a process that has already imported what they need.

    python -m processes.fork_server <folder> <listeners> <imports> <eager or lazy>
    what all need ─┬─ fork ─► kind 1: import sglang ... ────┐
                   └────────► kind 2: import deepspeed ... ─┤
                                                               ▼
    start(command)  ── arguments, environment, streams ──►  fork ─► the program runs
                    ◄── process id, later its exit code ──

Imports are most of what a program costs to start on a CPU: those of an SGLang server take ten
seconds of a core. The server of a kind pays them once. The folder holds a socket for each program
that can be forked; a program without one is started in the usual way. CUDA does not survive a fork,
so a machine with a GPU has no servers.

A forked program has what an executed one would have: arguments, environment, streams, folder,
umask, limits, niceness, cores, a session of its own, other random numbers. The server is its
parent, and reports its exit code. At its end it calls what is registered and flushes open files;
it destroys no objects, so a temporary file that is still open stays.

Servers live as long as a process keeps them (`keep`). What they have forked goes on without them.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import io
import json
import os
import resource
import runpy
import select
import selectors
import shutil
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import NoReturn

from configs.environment import FORK_SERVERS_VARIABLE, RUN_VARIABLE

UNKNOWN_EXIT_CODE = 255
"""Reported for a program whose server died before it."""
IMPORTS_S = 120.0
"""Longest wait for a server that is still importing."""

_LIMITS = (resource.RLIMIT_NOFILE, resource.RLIMIT_CORE, resource.RLIMIT_AS, resource.RLIMIT_CPU)
_OOM_SCORE = Path("/proc/self/oom_score_adj")
_NUMBER = struct.Struct("!i")
_FAULTS = {signal.SIGSEGV, signal.SIGFPE, signal.SIGBUS, signal.SIGILL, signal.SIGABRT}
_REQUEST_S = 10.0
"""Time for a request to arrive."""
_ROOM = 4096
"""Bytes that /proc has for the command and the environment of a forked program."""
_ROOM_VARIABLE = "LEASH_ROOM"
_KEPT = "kept"
"""A named pipe in the folder: who has it open for writing keeps the servers."""
_ENV_START, _ENV_END = 50 - 3, 51 - 3
"""Places in /proc/PID/stat (proc(5)), counted from the third field, after the name."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Kind:
    """One server: what it can run, and what it imports first."""

    programs: Sequence[str]
    """Modules (`a.b`) and scripts (`c.py`)."""
    imports: Sequence[str]


def start(
    folder: Path, kinds: Sequence[Kind], log: Path, *, is_eager: bool = True
) -> tuple[subprocess.Popen[bytes], int]:
    """Start the servers of these kinds, with their sockets in `folder`.

    They import at once if `is_eager`, else when they are first asked. They end when the descriptor
    that this returns is closed, and those of `keep`.
    """
    os.mkfifo(folder / _KEPT, 0o600)
    kept = keep(folder)
    input_end = os.open(folder / _KEPT, os.O_RDONLY | os.O_NONBLOCK)
    # They listen before the imports: an early request waits, and does not import by itself.
    listeners = [_listen(folder, kind.programs) for kind in kinds]
    descriptors = [listener.fileno() for listener in listeners]
    arguments = json.dumps([[*kind.imports] for kind in kinds])
    command = [sys.executable, "-m", "processes.fork_server", str(folder), json.dumps(descriptors)]
    with log.open("ab") as output:
        servers = subprocess.Popen(
            [*command, arguments, "eager" if is_eager else "lazy", "." * _ROOM],
            stdin=input_end,
            stdout=output,
            stderr=output,
            env={**os.environ, **_ENVIRONMENT},
            pass_fds=descriptors,
            start_new_session=True,
        )
    os.close(input_end)
    for listener in listeners:
        listener.close()
    return servers, kept


def _listen(folder: Path, programs: Sequence[str]) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    first, *others = programs
    listener.bind(f"{folder}/{first}")
    listener.listen(64)
    for name in others:
        (folder / name).symlink_to(first)
    return listener


def keep(folder: Path) -> int:
    """A descriptor that keeps the servers of this folder alive until it is closed."""
    return os.open(folder / _KEPT, os.O_RDWR | os.O_NONBLOCK)


_ENVIRONMENT = {
    _ROOM_VARIABLE: "." * _ROOM,
    "SPT_NOENV": "1",  # a title must not overwrite the environment
    "OMP_NUM_THREADS": "1",  # none starts threads, which a fork would lose
    "DS_ACCELERATOR": "cpu",  # DeepSpeed reads it when it is imported
}
"""Added to the environment of the servers themselves."""


class Forked:
    """The part of subprocess.Popen that a Child uses, for a program that a server has forked."""

    def __init__(self, connection: socket.socket, pid: int, handle: int) -> None:
        self.pid = pid
        self.stdin: io.FileIO | None = None
        self.stdout: io.FileIO | None = None
        self._connection = connection
        self._handle = handle
        """A descriptor of the process: its number may be another's once it has ended."""

    def wait(self) -> int:
        """Its exit code; minus the number of the signal that killed it."""
        with self._connection:
            code = self._connection.recv(_NUMBER.size, socket.MSG_WAITALL)
        if len(code) == _NUMBER.size:
            return int(_NUMBER.unpack(code)[0])
        select.select([self._handle], [], [])
        return UNKNOWN_EXIT_CODE

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def send_signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._handle, number)

    def __del__(self) -> None:
        os.close(self._handle)


def fork(
    command: Sequence[str], environment: Mapping[str, str], streams: Sequence[int]
) -> Forked | None:
    """Start `command`, `[python, "-m", module, ...]` or `[python, script, ...]`, with these three
    descriptors as its standard streams. None if no server answers for this program."""
    folder = environment.get(FORK_SERVERS_VARIABLE)
    if folder is None or command[0] != sys.executable:
        return None
    words = command[2:] if command[1] == "-m" else command[1:]
    program = words[0] if command[1] == "-m" else os.path.basename(words[0])
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(IMPORTS_S)
    try:
        connection.connect(f"{folder}/{program}")
        request = _Request(
            words=list(words),
            is_module=command[1] == "-m",
            environment=dict(environment),
            folder=os.getcwd(),
            umask=_umask(),
            niceness=os.getpriority(os.PRIO_PROCESS, 0),
            cores=sorted(os.sched_getaffinity(0)),
            limits={number: resource.getrlimit(number) for number in _LIMITS},
            oom_score=_OOM_SCORE.read_text(),
        )
        data = json.dumps(asdict(request)).encode()
        socket.send_fds(connection, [_NUMBER.pack(len(data))], list(streams))
        connection.sendall(data)
        answer, handles, _, _ = socket.recv_fds(connection, _NUMBER.size, 1)
        if not handles:  # the server has died, or the process at once
            raise ConnectionResetError(f"the server of {program} did not fork it")
        os.set_inheritable(handles[0], False)
        connection.settimeout(None)
    except BaseException as error:
        connection.close()  # also if a signal raised: the forked process sees by it that it is late
        if not isinstance(error, OSError):
            raise
        return None
    return Forked(connection, _NUMBER.unpack(answer)[0], handles[0])


def _umask() -> int:
    """Read where it stands: os.umask would change it for a moment, for all threads."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("Umask:"):
            return int(line.split()[1], 8)
    raise AssertionError("Linux shows it since 4.7")


@dataclass(kw_only=True, slots=True, frozen=True)
class _Request:
    words: list[str]
    """Module or script, and its arguments."""
    is_module: bool
    environment: dict[str, str]
    folder: str
    umask: int
    niceness: int
    cores: list[int]
    limits: dict[int, tuple[int, int]]
    oom_score: str


class _Server:
    def __init__(self, listener: int, imports: Sequence[str]) -> None:
        self._imports = imports
        self._listener = socket.socket(fileno=listener)
        self._running: dict[int, tuple[int, socket.socket]] = {}
        """By descriptor of a forked process: its number, and who wants its exit code."""

    def close(self) -> None:
        self._listener.close()

    def serve(self, title: str) -> _Request | None:
        """Returns in each forked process, with what that runs; None when the server is to end."""
        _set_title(title)
        if "torch" not in sys.modules:  # lazy
            asked, _, _ = select.select([self._listener, sys.stdin], [], [])
            if self._listener not in asked:
                return None
        import torch

        if torch.cuda.is_available():
            return None
        for name in self._imports:
            import_module(name)
        # A collection would write to each object, and so copy it into every forked process.
        gc.freeze()
        gc.enable()
        with selectors.DefaultSelector() as selector:
            selector.register(self._listener, selectors.EVENT_READ)
            selector.register(sys.stdin.fileno(), selectors.EVENT_READ)
            while True:
                for key, _ in selector.select():
                    if key.fileobj is self._listener:
                        connection, _ = self._listener.accept()
                        if (request := self._fork(connection, selector)) is not None:
                            return request
                    elif key.fd == sys.stdin.fileno():
                        return None
                    else:
                        selector.unregister(key.fd)
                        self._report_end(key.fd)

    def _fork(self, connection: socket.socket, selector: selectors.BaseSelector) -> _Request | None:
        streams: list[int] = []
        try:
            connection.settimeout(_REQUEST_S)
            size, streams, _, _ = socket.recv_fds(connection, _NUMBER.size, 3)
            (length,) = _NUMBER.unpack(size)
            data = connection.recv(length, socket.MSG_WAITALL)
            request = _Request(**json.loads(data))
            pid = os.fork()
        except (OSError, TypeError, ValueError, struct.error) as error:
            # Who asked has died, or the host has no process to spare.
            print(f"a request was not served: {error}", file=sys.stderr, flush=True)
            connection.close()
            for stream in streams:
                os.close(stream)
            return None
        if pid == 0:
            self._leave(selector)
            _take_over(request, streams)
            _introduce_itself(connection)
            return request
        for stream in streams:
            os.close(stream)
        with contextlib.suppress(OSError):  # a full disk
            print(pid, *request.words[:2], flush=True)
        handle = os.pidfd_open(pid)
        self._running[handle] = pid, connection
        selector.register(handle, selectors.EVENT_READ)
        return None

    def _leave(self, selector: selectors.BaseSelector) -> None:
        """Close what is the server's: this is a forked process."""
        selector.close()
        self._listener.close()
        for handle, (_, other) in self._running.items():
            os.close(handle)
            other.close()

    def _report_end(self, handle: int) -> None:
        pid, connection = self._running.pop(handle)
        os.close(handle)
        _, status = os.waitpid(pid, 0)
        with connection, contextlib.suppress(OSError):
            connection.sendall(_NUMBER.pack(os.waitstatus_to_exitcode(status)))


def _introduce_itself(connection: socket.socket) -> None:
    """Ends this forked process if who asked has not waited: it runs the program by itself then."""
    handle = os.pidfd_open(os.getpid())
    try:
        socket.send_fds(connection, [_NUMBER.pack(os.getpid())], [handle])
    except OSError:
        os._exit(1)
    os.close(handle)
    connection.close()


def _set_title(title: str) -> None:
    from setproctitle import setproctitle  # SGLang needs it as well

    setproctitle(title)


def _take_over(request: _Request, streams: Sequence[int]) -> None:
    """Make this forked process what an executed one would be."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.setsid()
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    _reopen_streams()
    os.chdir(request.folder)
    os.umask(request.umask)
    os.sched_setaffinity(0, request.cores)
    with contextlib.suppress(PermissionError):  # where the server may not go back
        os.setpriority(os.PRIO_PROCESS, 0, request.niceness)
    with contextlib.suppress(PermissionError):
        _OOM_SCORE.write_text(request.oom_score)
    for kind, limit in request.limits.items():
        with contextlib.suppress(PermissionError, ValueError):
            resource.setrlimit(int(kind), limit)
    os.environ.clear()
    os.environ.update(request.environment)
    _show_environment(request.environment)
    _set_title(" ".join([sys.executable, *(["-m"] if request.is_module else []), *request.words]))
    if (torch := sys.modules.get("torch")) is not None:
        # Its threads would take the signals that the guard of a launch blocks, to wait for them. A
        # fault that its own thread blocks would end the process without faulthandler's stack.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals() - _FAULTS)
        # OpenMP has read the variable when it was loaded.
        torch.set_num_threads(int(request.environment.get("OMP_NUM_THREADS", os.cpu_count() or 1)))
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed()  # Python's own generator does so by itself
    sys.argv = list(request.words)


def _reopen_streams() -> None:
    """The server's own streams remember its log: that it can seek, and is no terminal."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        old = getattr(sys, name)
        stream = open(  # noqa: SIM115  (it lives as long as this process)
            number,
            "w" if number else "r",
            buffering=1 if name == "stderr" else -1,
            encoding=old.encoding,
            errors=old.errors,
            closefd=False,
        )
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _show_environment(environment: Mapping[str, str]) -> None:
    """Overwrite what /proc shows, which is the environment that the server was executed with: by it
    the processes of a run are found."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = int(fields[_ENV_START]), int(fields[_ENV_END])
    data = b""
    shown = [name for name in environment if name.startswith("LEASH_")]
    for name in sorted(shown, key=lambda name: name != RUN_VARIABLE):
        entry = f"{name}={environment[name]}\0".encode()
        if len(data) + len(entry) < end - start:
            data += entry
    # Nothing points there any more: os.environ has put copies of its own in their place.
    ctypes.memmove(start, data.ljust(end - start, b"\0"), end - start)


def main(folder: str, listeners: str, imports: str, when: str) -> _Request | None:
    """Become the servers of all kinds; returns what a forked process is to run."""
    servers = [_Server(*of) for of in zip(json.loads(listeners), json.loads(imports), strict=True)]
    gc.disable()  # a fifth of the time of imports, which leave hardly any garbage
    if when == "eager":
        import torch  # noqa: F401

        first, *others = json.loads(imports)
        for name in first:
            if all(name in other for other in others):  # once for all kinds
                import_module(name)
    for number, server in enumerate(servers):
        if number + 1 == len(servers) or os.fork() == 0:
            for other in servers:
                if other is not server:
                    other.close()
            return server.serve(f"leash fork server {number} {folder}")
    raise AssertionError("no kinds")


def _run(request: _Request) -> None:
    program = request.words[0]
    if request.is_module:
        sys.modules.pop(program, None)  # imported by the server; runpy warns of it
        runpy.run_module(program, run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = os.path.dirname(program)
        runpy.run_path(program, run_name="__main__")


_exit_code: int | None = None
"""Set once the program of this forked process has ended."""


def _leave() -> None:
    """Skip the interpreter's own end: it would free all that the server has imported, and so copy
    each page of it, which takes seconds of a core."""
    with contextlib.suppress(OSError, ValueError):  # of a flush; the interpreter reports it
        if _exit_code is not None:
            for each in gc.get_objects():  # those of this program: the server's are frozen
                if issubclass(type(each), io.IOBase) and not each.closed:
                    with contextlib.suppress(OSError, ValueError):
                        each.flush()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(_exit_code)
    gc.unfreeze()  # or libraries would report what is not collected as their leak


def _end(*_: object) -> NoReturn:
    shutil.rmtree(sys.argv[1], ignore_errors=True)
    os._exit(0)  # without what the imported libraries do at their end, which takes seconds


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _end)
    atexit.register(_leave)  # the first one: it is called last
    if (wanted := main(*sys.argv[1:5])) is None:
        _end()
    try:
        _run(wanted)
    except Exception:
        _exit_code = 1
        raise
    except SystemExit as end:
        is_said = end.code is None or isinstance(end.code, int)
        _exit_code = int(end.code or 0) & 0xFF if is_said else 1
        raise
    _exit_code = 0
