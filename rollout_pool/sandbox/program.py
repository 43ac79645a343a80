"""Runs a program's code in this process as Python itself would, and notes which limits it hit."""

from __future__ import annotations

import builtins
import errno
import os
import sys

from rollout_pool.sandbox import statements, view

TYPE_CHECKING = False  # avoids the import of typing
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType
    from typing import NoReturn

NOT_STARTED = 127
"""Exit code of a command that could not be started, as in a shell."""
NAME = "program.py"
"""File name of the program's code in tracebacks."""
_NETWORK_EVENTS = (
    "socket.connect",
    "socket.bind",
    "socket.sendto",
    "socket.sendmsg",
    "socket.getaddrinfo",
    "socket.gethostbyname",
    "socket.gethostbyaddr",
    "socket.getnameinfo",
)
_PROCESS_EVENTS = (
    "os.fork",
    "os.forkpty",
    "os.posix_spawn",
    "os.system",
    "os.exec",
    "os.kill",
    "subprocess.Popen",
)
_AF_UNIX = 1
_FILE_ERRORS = (errno.EFBIG, errno.ENOSPC, errno.EMFILE, errno.EROFS, errno.EDQUOT)


class Notes:
    """Notes to the parent, one line with kind and value each. For logs only: a program could forge
    all but the first, which is written before it runs."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self.tried: list[str] = []
        """Denied actions that were tried, without repeats, the latest last."""

    def write(self, kind: str, value: str) -> None:
        os.write(self._descriptor, f"{kind} {value}\n".encode())

    def end(self) -> None:
        """A program that replaces this process writes none."""
        os.close(self._descriptor)

    def note_try(self, what: str) -> None:
        if what not in self.tried:
            self.tried.append(what)
            self.write("tried", what)


def run(code: str, notes: Notes, channel: statements.Channel | None = None) -> None:
    """Run it as `__main__`, then serve its tests through `channel`. Raises its SystemExit."""

    def note(error: BaseException) -> None:
        if (reason := _reason(error, notes.tried)) is not None:
            notes.write("reason", reason)
        _print(error, {NAME: code})

    module = type(sys)("__main__")
    _clear_up(module)
    server = channel and statements.Server(channel, module.__dict__, note)
    sys.addaudithook(_listener(notes))
    try:
        exec(compile(code, NAME, "exec"), module.__dict__)  # safe: inside the sandbox
        if server:
            server.serve()
    except SystemExit:
        raise
    except BaseException as error:
        note(error)
        raise SystemExit(1) from None


def put_file(code: bytes) -> None:
    """Write the program where its command finds it."""
    with open(os.open(view.FILE, os.O_CREAT | os.O_WRONLY | os.O_EXCL, 0o755), "wb") as file:
        file.write(code)


def become(command: list[str], environment: dict[str, str], notes: Notes) -> NoReturn:
    """Replace this process by `command`, which runs the file with the code."""
    import signal

    notes.end()
    for ignored in (signal.SIGPIPE, signal.SIGXFSZ):  # by Python, and the command would inherit it
        signal.signal(ignored, signal.SIG_DFL)
    try:
        os.execve(command[0], command[1:], environment)
    except OSError as error:
        os.write(2, f"{command[0]} cannot be started: {error.strerror}\n".encode())
    os._exit(NOT_STARTED)


def run_tests(text: str, channel: statements.Channel) -> None:
    """Run statements that test the program at the other end. Raises SystemExit if they fail."""
    module = type(sys)("__main__")
    _clear_up(module)
    try:
        statements.run_statements(text, module.__dict__, statements.Asker(channel))
    except SystemExit:
        raise
    except BaseException as error:
        _print(error, {statements.NAME: text})
        raise SystemExit(1) from None


def _clear_up(module: ModuleType) -> None:
    """Restore the state of an interpreter that was started with the program."""
    for name in [name for name in sys.modules if name.split(".")[0] == "rollout_pool"]:
        del sys.modules[name]
    del sys.path[0]
    sys.argv = [NAME]
    sys.modules["__main__"] = module
    module.__dict__["__builtins__"] = builtins
    for name in ("exit", "quit"):  # normally added by the site module
        setattr(builtins, name, sys.exit)


def _listener(notes: Notes) -> Callable[[str, tuple[object, ...]], None]:
    def listen(event: str, arguments: tuple[object, ...]) -> None:
        if event in _NETWORK_EVENTS or (
            event == "socket.__new__" and arguments[1] not in (_AF_UNIX, -1)
        ):
            notes.note_try("network")
        elif event in _PROCESS_EVENTS:
            notes.note_try("processes")

    return listen


def _reason(error: BaseException, tried: list[str]) -> str | None:
    """The limit that caused an error, if known."""
    if isinstance(error, MemoryError):
        return "memory"
    if isinstance(error, RuntimeError) and "start new thread" in str(error):
        return "processes"
    if not isinstance(error, OSError):
        return None
    if error.errno in _FILE_ERRORS:
        return "files"
    if tried:
        return tried[-1]
    return "files" if error.filename is not None else None


def _print(error: BaseException, texts: dict[str, str]) -> None:
    # Imported here: a program that succeeds does not need them.
    import linecache
    import traceback

    for name, text in texts.items():
        linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    trace = error.__traceback__
    while trace and trace.tb_frame.f_code.co_filename not in texts:  # ours
        trace = trace.tb_next
    traceback.print_exception(type(error), error, trace)
    sys.stderr.flush()  # its tests' process may write after it
