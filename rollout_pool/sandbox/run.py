"""Runs programs that a model wrote in a sandbox.

    run_program ──► keeper (own namespaces, own root) ──► program (no rights, no network, limits)
        │               └── dies with us, and the program with it
        └── reads the output up to a limit, and kills both when time is up

The layers are in `child` and the modules that it uses. The program sees the standard library, the
packages of the environment that the user chose, its standard input and an empty folder of its own
(none where the kernel allows no root of its own). It can start threads, but no process and no
connection. Only a compiler, which does not run the program, can start processes.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import os
import signal
import time
import weakref
from collections import OrderedDict
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from rollout_pool.cancelling import end_tasks
from rollout_pool.sandbox.environment import BARE, ProgramEnvironment
from rollout_pool.sandbox.program import NOT_STARTED
from rollout_pool.sandbox.request import Request
from rollout_pool.sandbox.view import FILE

log = logging.getLogger(__name__)

_PACKAGE = str(Path(__file__).parents[1])
# The package's own __init__ imports a library, and a program finds none: a bare one stands for it.
_START = (
    "import sys; package = type(sys)('rollout_pool'); package.__path__ = [sys.argv[1]]; "
    "sys.modules['rollout_pool'] = package; "
    "from rollout_pool.sandbox.child import main; main()"
)
_CHUNK = 65536
_NOTES_LIMIT = 65536
_KILL_AGAIN_S = 2.0
_END_TIMEOUT_S = 30.0
"""A killed process that has not ended after this time is stuck in the kernel."""
_MOST_MADE_BYTES = 64 * 2**20
_AT_ONCE = max(2, os.cpu_count() or 1)
"""More concurrent programs would only use up each other's time limits."""

REASONS = {
    "cpu_time": "it exceeded its CPU time",
    "wall_time": "it took too long",
    "memory": "it exceeded its memory",
    "output": "it printed too much",
    "network": "it tried to use the network",
    "processes": "it tried to start or signal a process, or started too many threads",
    "files": "it tried to use a forbidden or missing file, or wrote too much",
    "compile": "it does not compile",
    "ended": "it ended before its tests",
    "exit": "it ended with an error",
}
"""Reasons for a failed program, as text."""


class SandboxError(RuntimeError):
    """Programs cannot be run safely here; the message says what is missing."""


@dataclass(kw_only=True, slots=True, frozen=True)
class SandboxLimits:
    cpu_time_s: int = 10
    """All threads together."""
    wall_time_s: float = 20.0
    memory_bytes: int = 512 * 2**20
    """Address space, of which the interpreter takes about 20 MiB."""
    max_file_bytes: int = 16 * 2**20
    """Per file."""
    max_folder_bytes: int = 64 * 2**20
    """All files together; they are in memory."""
    max_output_bytes: int = 2**20
    """For standard output and standard error each."""
    max_open_files: int = 64
    max_threads: int = 32
    """For a compiler: processes and their threads, each with the limits on memory and CPU."""

    def of_the_kernel(self) -> dict[str, int]:
        """The limits that the kernel enforces; the parent enforces the others."""
        every = dataclasses.asdict(self)
        ours = ("wall_time_s", "max_output_bytes")
        return {name: value for name, value in every.items() if name not in ours}


@dataclass(kw_only=True, slots=True, frozen=True)
class SandboxResult:
    """How a program ended."""

    stdout: str
    stderr: str
    exit_code: int
    """If negative, the signal that ended it."""
    reason: str | None
    """A key of REASONS; None if it succeeded. Best effort: a program that catches the error of a
    limit may succeed or end for another reason."""
    seconds: float
    layers: tuple[str, ...]
    """Layers that protected the machine; empty if it was killed before it started."""
    tried: tuple[str, ...] = ()
    """Denied actions that it tried ("network", "processes"), even if it continued."""
    held: bool = False
    """It finished and the statements that test it passed; False without any."""
    made: bytes = b""
    """The file that a compiler made."""

    @property
    def explanation(self) -> str:
        """One line for logs; "" if it succeeded."""
        if self.reason is None:
            return ""
        last = self.stderr.strip().rpartition("\n")[2]
        if self.reason == "compile":  # what follows an error only points at its place
            last = next((line for line in self.stderr.splitlines() if "error" in line), last)
        words = f"{REASONS[self.reason]} (exit code {self.exit_code})"
        return f"{words}: {last[:300]}" if last else words


class Sandbox(Protocol):
    """Runs programs: on this machine, or by a service."""

    async def run(
        self, code: str, *, limits: SandboxLimits, stdin: str = "", statements: str | None = None
    ) -> SandboxResult:
        """See run_program. Raises an error if the program could not be run, and is not at fault."""
        ...


class LocalSandbox:
    """A `Sandbox`: this machine."""

    def __init__(
        self,
        environment: ProgramEnvironment = BARE,
        compiler: ProgramEnvironment | None = None,
        compiler_limits: SandboxLimits = SandboxLimits(),
    ) -> None:
        """`compiler` makes the file that `environment` runs."""
        self._environment = environment
        self._compiler = compiler
        self._compiler_limits = compiler_limits
        self._made: OrderedDict[str, bytes] = OrderedDict()
        """Files that the compiler made of the last programs: each has several tests."""

    async def run(
        self, code: str, *, limits: SandboxLimits, stdin: str = "", statements: str | None = None
    ) -> SandboxResult:
        seconds, file = 0.0, self._made.get(code)
        if self._compiler is not None and file is None:
            compiled = await self._compile(code, self._compiler)
            if compiled.reason is not None:
                return compiled
            seconds, file = compiled.seconds, compiled.made
        result = await run_program(
            code if file is None else file,
            stdin=stdin,
            limits=limits,
            statements=statements,
            environment=self._environment,
        )
        return dataclasses.replace(result, seconds=result.seconds + seconds)

    async def protections(self, limits: SandboxLimits) -> tuple[str, ...]:
        layers: tuple[str, ...] = ()
        if self._compiler is not None:
            layers = await protections(self._compiler, self._compiler_limits)
        if self._environment.command[:1] != (FILE,):  # without a program there is nothing to try
            layers = await protections(self._environment, limits)
        return layers

    async def _compile(self, code: str, compiler: ProgramEnvironment) -> SandboxResult:
        result = await run_program(code, limits=self._compiler_limits, environment=compiler)
        if result.reason is None and result.made:
            self._made[code] = result.made
            while sum(map(len, self._made.values())) > _MOST_MADE_BYTES:
                self._made.popitem(last=False)
            return result
        why = "" if result.reason == "exit" else REASONS.get(result.reason or "", "it made no file")
        return dataclasses.replace(result, reason="compile", stderr=f"{result.stderr}\n{why}")


async def run_program(
    code: str | bytes,
    *,
    stdin: str = "",
    limits: SandboxLimits = SandboxLimits(),
    statements: str | None = None,
    environment: ProgramEnvironment = BARE,
    without: Collection[str] = (),
) -> SandboxResult:
    """Run `code` as a program of `environment`, or let its compiler make a file of it. Only a few
    run at once; others wait.

        result = await run_program("print(2 * int(input()))", stdin="21")
        assert (result.stdout, result.reason) == ("42\n", None)

    `statements` run after a Python program, in a process of their own with the same limits: they
    can call what it has defined, and it sees nothing of them but these calls. `without`: layers not
    to use ("landlock", "namespaces", "seccomp"), for tests of the others. Raises SandboxError,
    without running anything, if the rest are too few.
    """
    async with _turn():
        return await _Run(limits, environment).run(code, stdin, without, statements)


async def protections(
    environment: ProgramEnvironment = BARE,
    limits: SandboxLimits = SandboxLimits(),
    without: Collection[str] = (),
) -> tuple[str, ...]:
    """The layers in force on this machine. Raises SandboxError if they are too few, or if programs
    cannot run in `environment` with the memory of `limits`."""
    # Not with their times: a program that is killed before it has started shows no layers.
    within = dataclasses.replace(SandboxLimits(), memory_bytes=limits.memory_bytes)
    result = await _Run(within, environment).run("", "", without)
    # An empty program may be an error in a language, but not one that ends it by a signal.
    if environment.command and (result.exit_code < 0 or result.exit_code == NOT_STARTED):
        raise SandboxError(
            f"{environment.command[0]} does not run in the sandbox with "
            f"memory_bytes={limits.memory_bytes}: {result.explanation}"
        )
    return result.layers


def cost_of_missing(layers: Collection[str]) -> str | None:
    """A warning for the user if the kernel allows no namespaces."""
    if "namespaces" in layers and "own root" in layers:
        return None
    return (
        "programs of the model run WITHOUT NAMESPACES of their own, since this kernel or container "
        "allows none: only a system call filter and Landlock protect the machine's files, "
        "processes and network, so a single hole in either exposes the machine. They have no "
        "folder to write to, and no threads if this is root. Allow unprivileged user namespaces "
        "(kernel.unprivileged_userns_clone=1, user.max_user_namespaces above 0; in a container a "
        "seccomp profile that allows unshare and mount), or run on a machine without valuable "
        "data"
    )


class _Run:
    """One run of a program, until all its processes have ended."""

    def __init__(self, limits: SandboxLimits, environment: ProgramEnvironment) -> None:
        self._limits = limits
        self._environment = environment
        self._killed_for: str | None = None
        self._process: asyncio.subprocess.Process

    async def run(
        self, code: str | bytes, stdin: str, without: Collection[str], statements: str | None = None
    ) -> SandboxResult:
        with contextlib.ExitStack() as stack:
            request = Request(
                # Code from a model may contain lone surrogates, which Python refuses anyway.
                code=code.encode("utf-8", "replace") if isinstance(code, str) else code,
                command=list(self._environment.command),
                compiles=self._environment.compiles,
                limits=self._limits.of_the_kernel(),
                packages=list(self._environment.packages),
                parent_pid=os.getpid(),
                without=list(without),
            )
            request_fd = _file_in_memory(request.encode(), stack)
            notes_read, notes_write = _pipe(stack)
            ending_read, ending_write = _pipe(stack)
            descriptors = [request_fd, notes_write, ending_write]
            if statements is not None or self._environment.compiles:
                text = (statements or "").encode("utf-8", "replace")
                descriptors.append(_file_in_memory(text, stack))
            started = time.perf_counter()
            await self._start(*descriptors)
            try:
                stdout, stderr = await self._talk(stdin)
            finally:
                await self._end()
            seconds = time.perf_counter() - started
            notes, ending = _notes(_read_pipe(notes_read)), _read_pipe(ending_read)
            made = _read_from_start(descriptors[-1]) if self._environment.compiles else b""
        exit_code, cpu_s, held = ending.split() if ending else (-signal.SIGKILL, 0.0, 0)
        reason = self._killed_for or self._reason(int(exit_code), float(cpu_s), notes)
        if reason is None and statements is not None and not int(held):
            reason = "ended"
        return SandboxResult(
            stdout=stdout,
            stderr=stderr,
            exit_code=int(exit_code),
            reason=reason,
            seconds=seconds,
            layers=_layers(notes, self._killed_for, stderr),
            tried=tuple(value for kind, value in notes if kind == "tried"),
            held=bool(int(held)),
            made=made,
        )

    async def _start(self, *descriptors: int) -> None:
        self._process = await asyncio.create_subprocess_exec(
            self._environment.interpreter,
            *("-I", "-S", "-X", "utf8", "-c", _START, _PACKAGE),
            *(str(descriptor) for descriptor in descriptors),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            pass_fds=descriptors,
            # Libraries as OpenBLAS would start a thread for each core of the machine.
            env={"OMP_NUM_THREADS": "1"} if self._environment.packages else {},
            cwd="/",
            start_new_session=True,
        )

    async def _talk(self, stdin: str) -> tuple[str, str]:
        """Returns what it printed until it ended or was killed."""
        assert self._process.stdout is not None and self._process.stderr is not None
        printed = bytearray(), bytearray()
        writing = asyncio.create_task(self._write(stdin))
        # It may close its outputs long before its end.
        ending: list[asyncio.Task[Any]] = [
            asyncio.create_task(self._read(self._process.stdout, printed[0])),
            asyncio.create_task(self._read(self._process.stderr, printed[1])),
            asyncio.create_task(self._process.wait()),
        ]
        try:
            if not await _all_end(ending, self._limits.wall_time_s):
                await self._force_end(ending)
        finally:
            await end_tasks([writing, *ending])
        return printed[0].decode("utf-8", "replace"), printed[1].decode("utf-8", "replace")

    async def _write(self, stdin: str) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(ConnectionError):  # it may not read its input
            self._process.stdin.write(stdin.encode("utf-8", "replace"))
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
        """Kills it through the keeper, which also reaps the program's processes."""
        if self._killed_for is None:
            self._killed_for = reason
            if self._process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    self._process.send_signal(signal.SIGTERM)

    async def _force_end(self, ending: Collection[asyncio.Task[Any]]) -> None:
        self._kill("wall_time")
        if await _all_end(ending, _KILL_AGAIN_S):
            return
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        if not await _all_end(ending, _END_TIMEOUT_S):
            log.error("a killed program is stuck in the kernel: %d", self._process.pid)

    async def _end(self) -> None:
        """Ends all processes in any case."""
        if self._process.returncode is not None:
            return
        ending = [asyncio.create_task(self._process.wait())]
        try:
            await self._force_end(ending)
        finally:
            await end_tasks(ending)

    def _reason(self, exit_code: int, cpu_s: float, notes: _Notes) -> str | None:
        if exit_code == 0:
            return None
        if exit_code < 0 and cpu_s >= self._limits.cpu_time_s:
            return "cpu_time"
        told = [value for kind, value in notes if kind == "reason" and value in REASONS]
        return told[-1] if told else "exit"


_Notes = list[tuple[str, str]]
"""Kind and value."""


def _layers(notes: _Notes, killed_for: str | None, stderr: str) -> tuple[str, ...]:
    """The layers in the first note, which was written before the program ran."""
    kind, value = notes[0] if notes else ("", "")
    if kind == "layers":
        return tuple(value.split(","))
    if killed_for is not None:
        return ()  # killed before it started
    missing = value or f"the sandbox process ended before the program started: {stderr[-500:]}"
    raise SandboxError(f"programs of the model cannot be run safely here: {missing}")


async def _all_end(tasks: Collection[asyncio.Task[Any]], timeout_s: float) -> bool:
    """Returns whether all have ended within `timeout_s`; raises the error of one."""
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


def _read_from_start(descriptor: int) -> bytes:
    os.lseek(descriptor, 0, os.SEEK_SET)
    with open(descriptor, "rb", closefd=False) as file:
        return file.read()


def _pipe(stack: contextlib.ExitStack) -> tuple[int, int]:
    ends = os.pipe()
    for end in ends:
        os.set_blocking(end, False)
        stack.callback(os.close, end)
    return ends


def _read_pipe(descriptor: int) -> str:
    """The content of a pipe without writers."""
    try:
        return os.read(descriptor, _NOTES_LIMIT).decode("utf-8", "replace")
    except BlockingIOError:
        return ""


def _notes(text: str) -> _Notes:
    split = (line.partition(" ") for line in text.splitlines())
    return [(kind, value) for kind, _, value in split]


_turns: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = (
    weakref.WeakKeyDictionary()
)


def _turn() -> asyncio.Semaphore:
    """The few slots of this event loop; each frees within its program's limits."""
    return _turns.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(_AT_ONCE))
