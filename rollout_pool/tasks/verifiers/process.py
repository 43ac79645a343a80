"""The process of an environment of the verifiers library, with an interpreter that has the library.

`child.py` describes its program and its messages.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import os
import socket
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from configs.environment import LOG_DIR_VARIABLE, PROCESS_VARIABLE
from processes.child import Child
from processes.logs import last_lines
from rollout_pool.cancelling import BackgroundTasks, end_tasks
from rollout_pool.episodes.episode import EpisodeFailed

log = logging.getLogger(__name__)

PROGRAM = Path(__file__).with_name("child.py")
START_TIMEOUT_S = 600.0
"""Environments may download their data."""
CANCEL_TIMEOUT_S = 30.0
"""A process that does not confirm a cancellation within this time hangs, and is replaced."""
END_TIMEOUT_S = 10.0
LINE_LIMIT = 2**28
INSTALL = "`make install-verifiers` makes .venv-verifiers, which has it"


class EnvironmentDied(EpisodeFailed):
    """The process ended in its start or an episode; the message has its last lines.

    The episodes beside the one that ended it are not at fault: none of them may be scored.
    """


@dataclass(kw_only=True, slots=True, frozen=True)
class Program:
    """How the process of one environment is started."""

    python: str | None
    """Path of the interpreter; None: that of .venv-verifiers beside this one's environment."""
    folder: str | None
    """Put before the installed packages."""
    name: str
    """The environment's."""
    settings: str
    """The library's settings of the environment, as JSON."""

    @property
    def interpreter(self) -> Path:
        if self.python is not None:
            return Path(self.python)
        return Path(sys.prefix).parent / ".venv-verifiers" / "bin" / "python"

    def start(self, log_path: Path) -> tuple[Child, socket.socket]:
        """The process, and the socket for its messages. Raises ValueError naming the setting."""
        if not os.access(self.interpreter, os.X_OK):
            raise ValueError(
                f"task.python={str(self.interpreter)!r}: there is no such interpreter; give that "
                f"of an environment with the verifiers library, as env/bin/python; {INSTALL}"
            )
        if self.folder is not None and not Path(self.folder).is_dir():
            raise ValueError(
                f"task.path={self.folder!r}: there is no such folder; give the one with the "
                "environment's module, or install its package and leave task.path out"
            )
        ours, theirs = socket.socketpair()
        with theirs:
            number = theirs.fileno()
            command = [str(self.interpreter), "-P", str(PROGRAM), str(number)]
            # Whatever this process's PYTHONPATH has is for another interpreter.
            path = {"PYTHONPATH": self.folder or ""}
            return Child(command, log_path, environment=path, pass_fds=[number]), ours

    def setup(self, *, rows: bool) -> bytes:
        return _line({"environment": json.loads(self.settings), "rows": rows})

    def check(self, greeting: Mapping[str, Any]) -> None:
        """Raises ValueError for a process that could not load the environment."""
        reason = greeting.get("error")
        if greeting.get("is_missing"):
            raise ValueError(
                f"task.python={str(self.interpreter)!r}: has no verifiers library of version 0.4 "
                f"({reason}); {INSTALL}"
            )
        if reason is not None:
            raise ValueError(
                f"task.name={self.name!r}: the verifiers library could not load it: {reason}; "
                "install its package for task.python, or name its folder in task.path, and see "
                "task.params"
            )

    def not_loaded(self, why: str, log_path: Path) -> ValueError:
        return ValueError(
            f"task.name={self.name!r}: {why} while it loaded:\n{last_lines(log_path)}"
        )


@lru_cache(maxsize=16)  # a launch wants them for its checks and for the warm start
def load_rows(program: Program) -> list[dict[str, Any]]:
    """The tasks of the environment, from a process that ends with them. Raises ValueError."""
    with tempfile.TemporaryDirectory(prefix="leash-verifiers-") as folder:
        log_path = Path(folder) / "log"
        child, connection = program.start(log_path)
        try:
            with connection:
                connection.settimeout(START_TIMEOUT_S)
                connection.sendall(program.setup(rows=True))
                found: list[dict[str, Any]] = []
                with connection.makefile("rb") as replies:
                    for line in replies:
                        if not line.endswith(b"\n"):
                            break  # it ended in the middle of a row
                        reply = _message(line)
                        program.check(reply)
                        if "is_ready" in reply:
                            return found
                        found.append(_row(reply))
            why = "its process ended"
        except TimeoutError:
            why = f"nothing came from it for {START_TIMEOUT_S:g} s"
        except ConnectionError as error:
            why = f"its process ended ({error})"
        except NoMessageError as error:
            why = str(error)
        finally:
            child.stop(END_TIMEOUT_S)
        raise program.not_loaded(why, log_path)


class EnvironmentProcess:
    """Runs episodes in a process, all of them side by side. Used in one event loop.

    If the process ends, the running episodes fail, and the next one starts another.
    """

    def __init__(self, program: Program) -> None:
        self._program = program
        self._connection: _Connection | None = None
        self._starting: asyncio.Task[_Connection] | None = None
        """The last start, whether it has ended or not."""
        self._temporary: tempfile.TemporaryDirectory[str] | None = None
        """For the log of a process that belongs to no run."""

    @property
    def pid(self) -> int | None:
        """Pid of the process that runs now."""
        return None if self._connection is None else self._connection.child.pid

    async def start(self) -> None:
        """Raises ValueError or EnvironmentDied like `run`."""
        await self._connected()

    async def run(self, row: Mapping[str, Any], base_url: str, model: str) -> dict[str, Any]:
        """Runs the episode of `row`: its reward and its metrics.

        Raises RuntimeError if the environment could not finish it, EnvironmentDied if its process
        ended, and ValueError if it could not be started.
        """
        connection = await self._connected()
        reply = await connection.ask({"row": row, "base_url": base_url, "model": model})
        if "error" in reply:
            raise RuntimeError(reply["error"])
        return reply

    async def close(self) -> None:
        """Ends the process, or its start; running episodes fail."""
        if self._starting is not None:
            await end_tasks([self._starting], again_s=2 * END_TIMEOUT_S)
        await self._leave()
        if self._temporary is not None:
            self._temporary.cleanup()

    async def _connected(self) -> _Connection:
        if self._connection is not None and self._connection.is_alive:
            return self._connection
        if self._starting is None or self._starting.done():
            self._starting = asyncio.create_task(self._start())
        starting = self._starting
        await asyncio.wait([starting])  # others wait for it too: no cancelled episode ends it
        if starting.cancelled():
            raise EnvironmentDied("the process of the environment was ended in its start")
        return starting.result()

    async def _start(self) -> _Connection:
        await self._leave()
        # Not in a thread: that would go on if this were cancelled, and leave its process behind.
        log_path = self._log_path()
        child, ours = self._program.start(log_path)
        try:
            reader, writer = await asyncio.open_connection(sock=ours, limit=LINE_LIMIT)
            connection = self._connection = _Connection(child, reader, writer, log_path)
            await connection.begin(self._program)
        except BaseException:
            await self._leave()
            await asyncio.to_thread(child.stop, END_TIMEOUT_S)
            raise
        return connection

    def _log_path(self) -> Path:
        folder = os.environ.get(LOG_DIR_VARIABLE)
        if folder is None:
            self._temporary = self._temporary or tempfile.TemporaryDirectory(prefix="leash-")
            folder = self._temporary.name
        process = os.environ.get(PROCESS_VARIABLE, "environment")
        return Path(folder) / f"{process}-{self._program.name.replace('/', '-')}.log"

    async def _leave(self) -> None:
        if self._connection is not None:
            await self._connection.close()
            self._connection = None


class _Connection:
    """One process and the episodes that it runs."""

    def __init__(
        self,
        child: Child,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        log_path: Path,
    ) -> None:
        self.child = child
        self._reader = reader
        self._writer = writer
        self._log_path = log_path
        self._numbers = itertools.count()
        self._replies: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._cancelled: dict[int, asyncio.Event] = {}
        self._tasks = BackgroundTasks()
        self._death: EnvironmentDied | None = None
        self.is_alive = False
        """False once it takes no more episodes."""

    async def begin(self, program: Program) -> None:
        """Returns when it has loaded its environment. Raises ValueError or EnvironmentDied."""
        line = b""
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                self._writer.write(program.setup(rows=False))
                line = await self._reader.readline()
        except TimeoutError:
            why = f"nothing came from it for {START_TIMEOUT_S:g} s"
            raise program.not_loaded(why, self._log_path) from None
        except ConnectionError:  # it ended without reading its settings
            pass
        if not line.endswith(b"\n"):
            raise await self._died()
        try:
            program.check(_message(line))
        except NoMessageError as error:
            raise program.not_loaded(str(error), self._log_path) from None
        self.is_alive = True
        self._tasks.spawn(self._read())

    async def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """The reply. A cancelled request is cancelled in the process too."""
        if not self.is_alive:
            raise await self._died()
        number = next(self._numbers)
        reply: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._replies[number] = reply
        try:
            self._writer.write(_line({"id": number, **request}))
            return await reply
        except asyncio.CancelledError:
            self._tasks.spawn(self._cancel(number))
            raise
        finally:
            del self._replies[number]

    async def _died(self) -> EnvironmentDied:
        """Ends the process if it has not ended. It is one error for all of its episodes."""
        code = await asyncio.to_thread(self.child.stop, END_TIMEOUT_S)
        if self._death is None:
            self._death = EnvironmentDied(
                f"the process of the environment ended with exit code {code}; the last lines of "
                f"{self._log_path}:\n{last_lines(self._log_path)}"
            )
        return self._death

    async def close(self) -> None:
        self.is_alive = False
        self._writer.close()
        await self._tasks.end()
        await self._fail()

    async def _read(self) -> None:
        try:
            while line := await self._reader.readline():
                message = _message(line)
                if "cancelled" in message:
                    if event := self._cancelled.get(_number(message["cancelled"])):
                        event.set()
                elif (reply := self._replies.get(_number(message.get("id")))) and not reply.done():
                    reply.set_result(message)
        except (ConnectionError, ValueError) as error:  # a line that is too long, or no message
            log.warning("the process of the environment (log: %s): %s", self._log_path, error)
        self.is_alive = False
        await self._fail()

    async def _fail(self) -> None:
        """Ends the process and its episodes."""
        error = await self._died()
        for reply in self._replies.values():
            if not reply.done():
                reply.set_exception(error)

    async def _cancel(self, number: int) -> None:
        confirmed = self._cancelled[number] = asyncio.Event()
        try:
            self._writer.write(_line({"cancel": number}))
            async with asyncio.timeout(CANCEL_TIMEOUT_S):
                await confirmed.wait()
        except TimeoutError:
            self.is_alive = False  # the next episode is not for this one
            log.warning(
                "the process of the environment (log: %s) hangs: it did not confirm within %g s "
                "that it has cancelled an episode; it is killed, and its other episodes fail",
                self._log_path,
                CANCEL_TIMEOUT_S,
            )
            await asyncio.to_thread(self.child.stop, 0.0)
        finally:
            del self._cancelled[number]


class NoMessageError(ValueError):
    """The process, or a library in it, wrote something else where its messages go."""

    def __init__(self, found: bytes) -> None:
        super().__init__(f"its process wrote {found[:100]!r} where its messages go")


def _message(line: bytes) -> dict[str, Any]:
    try:
        message = json.loads(line)
    except (ValueError, RecursionError):
        raise NoMessageError(line) from None
    if not isinstance(message, dict):
        raise NoMessageError(line)
    return message


def _number(found: object) -> int:
    if not isinstance(found, int):
        raise NoMessageError(repr(found).encode())
    return found


def _row(message: Mapping[str, Any]) -> dict[str, Any]:
    row = message.get("row")
    if not isinstance(row, dict):
        raise NoMessageError(_line(message))
    return row


def _line(message: Mapping[str, Any]) -> bytes:
    return json.dumps(message).encode() + b"\n"
