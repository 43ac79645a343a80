"""Runs Python that a model wrote, so that whatever it does costs nobody but itself.

    run_python ──► keeper (own namespaces, own root) ──► program (no rights, no network, limits)
        │              └── dies with us, and the program with it
        └── reads what is printed up to a limit, and kills both when time is up

What keeps the program in is in `rollout_pool.jail`. It sees the standard library, its standard
input and an empty folder of its own (none where the kernel lets it have no root of its own); it
can start threads, but no process and no connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import os
import signal
import sys
import time
import weakref
from collections.abc import AsyncIterator, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollout_pool.cancelling import end_tasks
from rollout_pool.sandbox.request import Request

log = logging.getLogger(__name__)

_ROOT = str(Path(__file__).parents[2])
_START = (
    "import sys; sys.path.insert(0, sys.argv[1]); "
    "from rollout_pool.sandbox.child import main; main()"
)
_CHUNK = 65536
_NOTES_LIMIT = 65536
_KILL_AGAIN_S = 2.0
_END_TIMEOUT_S = 30.0
"""A killed process that is still there after this long is stuck in the kernel."""
_AT_ONCE = max(2, os.cpu_count() or 1)
"""More programs at the same time would only take each other's time, which is limited."""

REASONS = {
    "cpu_time": "it used more processor time than it may",
    "wall_time": "it took longer than it may",
    "memory": "it wanted more memory than it may have",
    "output": "it printed more than it may",
    "network": "it wanted to use the network",
    "processes": "it wanted to start a process or to signal one, or made too many threads",
    "files": "it wanted a file that is not for it or does not exist, or wrote too much",
    "exit": "it ended with an error",
}
"""Why a program did not end well, in words."""


class SandboxError(RuntimeError):
    """Nothing can be run safely here; the message says what is missing."""


@dataclass(kw_only=True, slots=True, frozen=True)
class SandboxLimits:
    cpu_time_s: int = 10
    """Of all its threads together."""
    wall_time_s: float = 20.0
    memory_bytes: int = 512 * 2**20
    """Of its address space; the interpreter itself takes some 20 MiB of it."""
    max_file_bytes: int = 16 * 2**20
    """Of one file."""
    max_folder_bytes: int = 64 * 2**20
    """Of all its files, which are kept in memory."""
    max_output_bytes: int = 2**20
    """Of standard output and of standard error, each."""
    max_open_files: int = 64
    max_threads: int = 32

    def of_the_kernel(self) -> dict[str, int]:
        """Those that the kernel holds; the others are ours."""
        every = dataclasses.asdict(self)
        ours = ("wall_time_s", "max_output_bytes")
        return {name: value for name, value in every.items() if name not in ours}


@dataclass(kw_only=True, slots=True, frozen=True)
class SandboxResult:
    """How a program ended."""

    stdout: str
    stderr: str
    exit_code: int
    """Negative: the signal that ended it."""
    reason: str | None
    """A key of REASONS; None if it ended well. Best effort where the program itself failed: one
    that swallows what it ran into ends well, or for another reason."""
    seconds: float
    tried: tuple[str, ...] = ()
    """What it tried that is not allowed ("network", "processes"), even if it went on."""
    held: bool = False
    """Whether it came to its end and the statements that test it then held; False without any."""

    @property
    def explanation(self) -> str:
        """One line for logs; "" if it ended well."""
        if self.reason is None:
            return ""
        last = self.stderr.strip().rpartition("\n")[2]
        words = f"{REASONS[self.reason]} (exit code {self.exit_code})"
        return f"{words}: {last[:300]}" if last else words


async def run_python(
    code: str,
    *,
    stdin: str = "",
    limits: SandboxLimits = SandboxLimits(),
    statements: str | None = None,
    without: Collection[str] = (),
) -> SandboxResult:
    """Run `code` as a program. A few run at a time; the rest wait for their turn.

    `statements` are run when it has come to its end, in a process of their own with the same
    limits: they can call what it has defined, and it can see nothing of them but their calls.
    `without`: layers to do without ("landlock", "namespaces", "seccomp"), to see that the others
    hold. Raises SandboxError if the rest are too few; then nothing was run.
    """
    async with _turn():
        result, _ = await _Run(limits).run(code, stdin, without, statements)
    return result


async def protections(without: Collection[str] = ()) -> tuple[str, ...]:
    """The layers that are in force on this machine. Raises SandboxError if they are too few."""
    _, layers = await _Run(SandboxLimits()).run("", "", without)
    return layers


def cost_of_missing(layers: Collection[str]) -> str | None:
    """What it costs that the kernel allows no namespaces, if it does not; for the user to read."""
    if "namespaces" in layers and "own root" in layers:
        return None
    return (
        "programs of the model run WITHOUT NAMESPACES of their own, since this kernel or container "
        "allows none: a filter of system calls and Landlock alone keep them from the machine's "
        "files, processes and network, so one hole in either leads to the machine. They have no "
        "folder to write to, and no threads if this is root. Allow unprivileged user namespaces "
        "(kernel.unprivileged_userns_clone=1, user.max_user_namespaces above 0; in a container a "
        "seccomp profile that allows unshare and mount), or run on a machine that holds nothing "
        "of worth"
    )


class _Run:
    """One program, from its start to the end of its processes."""

    def __init__(self, limits: SandboxLimits) -> None:
        self._limits = limits
        self._killed_for: str | None = None
        self._process: asyncio.subprocess.Process | None = None

    async def run(
        self, code: str, stdin: str, without: Collection[str], statements: str | None = None
    ) -> tuple[SandboxResult, tuple[str, ...]]:
        with contextlib.ExitStack() as stack:
            request = Request(
                code=code,
                limits=self._limits.of_the_kernel(),
                parent_pid=os.getpid(),
                without=list(without),
            )
            request_fd = _file_in_memory(request.encode(), stack)
            notes_read, notes_write = _pipe(stack)
            ending_read, ending_write = _pipe(stack)
            descriptors = [request_fd, notes_write, ending_write]
            if statements is not None:
                descriptors.append(_file_in_memory(statements.encode("utf-8", "replace"), stack))
            started = time.perf_counter()
            try:
                await self._start(*descriptors)
                stdout, stderr = await self._talk(stdin)
            finally:
                await self._end()
            seconds = time.perf_counter() - started
            notes, ending = _notes(_read_pipe(notes_read)), _read_pipe(ending_read)
        layers = _layers(notes, self._killed_for, stderr)
        return self._result(stdout, stderr, seconds, notes, ending), layers

    async def _start(self, *descriptors: int) -> None:
        self._process = await asyncio.create_subprocess_exec(
            # Not the virtual environment's: what is installed there is none of its business.
            sys._base_executable,  # type: ignore[attr-defined]
            *("-I", "-S", "-X", "utf8", "-c", _START, _ROOT),
            *(str(descriptor) for descriptor in descriptors),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            pass_fds=descriptors,
            env={},
            cwd="/",
            start_new_session=True,
        )

    async def _talk(self, stdin: str) -> tuple[str, str]:
        """What it printed, by the time it ended or was killed."""
        assert self._process is not None
        assert self._process.stdout is not None and self._process.stderr is not None
        printed = bytearray(), bytearray()
        writing = asyncio.create_task(self._write(stdin))
        # It may close its outputs long before it ends.
        ending: list[asyncio.Task[Any]] = [
            asyncio.create_task(self._read(self._process.stdout, printed[0])),
            asyncio.create_task(self._read(self._process.stderr, printed[1])),
            asyncio.create_task(self._process.wait()),
        ]
        try:
            if not await _all_end(ending, self._limits.wall_time_s):
                self._kill("wall_time")
                if not await _all_end(ending, _KILL_AGAIN_S):
                    self._kill_group()
                    await _all_end(ending, _END_TIMEOUT_S)
        finally:
            await end_tasks([writing, *ending])
        return printed[0].decode("utf-8", "replace"), printed[1].decode("utf-8", "replace")

    async def _write(self, stdin: str) -> None:
        assert self._process is not None and self._process.stdin is not None
        with contextlib.suppress(ConnectionError):  # it need not read it
            self._process.stdin.write(stdin.encode())
            await self._process.stdin.drain()
            self._process.stdin.close()
            await self._process.stdin.wait_closed()

    async def _read(self, stream: asyncio.StreamReader, printed: bytearray) -> None:
        limit = self._limits.max_output_bytes
        while chunk := await stream.read(_CHUNK):
            room = limit - len(printed)
            printed += chunk[:room]
            if len(chunk) > room:
                self._kill("output")

    def _kill(self, reason: str) -> None:
        """Through the keeper, which also collects what is left of the program."""
        assert self._process is not None
        if self._killed_for is None:
            self._killed_for = reason
            if self._process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    self._process.send_signal(signal.SIGTERM)

    def _kill_group(self) -> None:
        assert self._process is not None
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    async def _end(self) -> None:
        """Whatever happened, leave nothing behind."""
        if self._process is None or self._process.returncode is not None:
            return
        self._kill("wall_time")
        ending = [asyncio.create_task(self._process.wait())]
        try:
            if not await _all_end(ending, _KILL_AGAIN_S):
                self._kill_group()
                if not await _all_end(ending, _END_TIMEOUT_S):
                    log.error("a killed program is stuck in the kernel: %d", self._process.pid)
        finally:
            await end_tasks(ending)

    def _result(
        self,
        stdout: str,
        stderr: str,
        seconds: float,
        notes: _Notes,
        ending: str,
    ) -> SandboxResult:
        code, cpu_s, held = ending.split() if ending else (-signal.SIGKILL, 0.0, 0)
        return SandboxResult(
            stdout=stdout,
            stderr=stderr,
            exit_code=int(code),
            reason=self._killed_for or self._reason(int(code), float(cpu_s), notes),
            seconds=seconds,
            tried=tuple(value for kind, value in notes if kind == "tried"),
            held=bool(int(held)),
        )

    def _reason(self, exit_code: int, cpu_s: float, notes: _Notes) -> str | None:
        if exit_code == 0:
            return None
        if exit_code < 0 and cpu_s >= self._limits.cpu_time_s * 0.8:  # the kernel counts in ticks
            return "cpu_time"
        told = [value for kind, value in notes if kind == "reason" and value in REASONS]
        return told[-1] if told else "exit"


_Notes = list[tuple[str, str]]
"""Kind and value of each."""


def _layers(notes: _Notes, killed_for: str | None, stderr: str) -> tuple[str, ...]:
    """What the first note says, which was written before the program ran."""
    kind, value = notes[0] if notes else ("", "")
    if kind == "layers":
        return tuple(value.split(","))
    if killed_for is not None:
        return ()  # before it began
    missing = value or f"the sandbox's own process ended before the program began: {stderr[-500:]}"
    raise SandboxError(f"programs of the model cannot be run safely here: {missing}")


async def _all_end(tasks: Collection[asyncio.Task[Any]], timeout_s: float) -> bool:
    """Whether they have all ended by then; raises what one raised."""
    ended, late = await asyncio.wait(tasks, timeout=timeout_s)
    for task in ended:
        task.result()
    return not late


def _file_in_memory(content: bytes, stack: contextlib.ExitStack) -> int:
    descriptor = os.memfd_create("request")
    stack.callback(os.close, descriptor)
    with open(descriptor, "wb", closefd=False) as file:
        file.write(content)
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor


def _pipe(stack: contextlib.ExitStack) -> tuple[int, int]:
    ends = os.pipe()
    for end in ends:
        os.set_blocking(end, False)
        stack.callback(os.close, end)
    return ends


def _read_pipe(descriptor: int) -> str:
    """What is in a pipe that nobody writes to any more."""
    try:
        return os.read(descriptor, _NOTES_LIMIT).decode("utf-8", "replace")
    except BlockingIOError:
        return ""


def _notes(text: str) -> _Notes:
    found = []
    for line in text.splitlines():
        kind, _, value = line.partition(" ")
        found.append((kind, value))
    return found


_turns: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = (
    weakref.WeakKeyDictionary()
)


@contextlib.asynccontextmanager
async def _turn() -> AsyncIterator[None]:
    """One of the few places of this event loop; each is given back within its program's limits."""
    loop = asyncio.get_running_loop()
    if loop not in _turns:
        _turns[loop] = asyncio.Semaphore(_AT_ONCE)
    async with _turns[loop]:
        yield
