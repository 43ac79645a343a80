"""Compiled grammars and their processes, within limits of time and memory.

open(constraint) ──► the process of its grammar ──► Following: one completion's way through it
                       compiled once, kept while there is room
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import socket
import sys
from abc import ABC, abstractmethod
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterator, Sequence
from copy import copy
from pathlib import Path
from typing import Any

import msgspec

from processes.child import Child
from rollout_pool.cancelling import BackgroundTasks
from rollout_pool.sampling.grammar_process import (
    Call,
    NotAllowed,
    Reply,
    Rules,
    Setup,
    Verdict,
    Vocabulary,
)
from rollout_pool.sampling.sample import Constraint, SampleFailed

MAX_GRAMMAR = 2**18
"""In characters."""
COMPILE_S = 5.0
"""Processor time in which a grammar must be compiled."""
STEP_S = 2.0
"""Processor time in which a few tokens must be looked at."""
MAX_GRAMMAR_BYTES = 2**28
"""Memory of one grammar, with all completions that follow it."""
KEPT_BYTES = 2**29
"""Memory of all grammars of a worker. Those that no completion follows are forgotten, the longest
unused first."""
PROCESS_BYTES = 2**23
"""A process takes at least this."""
MAX_COMPILED_AT_ONCE = 2
REPLY_TIMEOUT_S = 120.0
"""Ends the wait for a process that the limits above do not end, as one that was stopped."""
START_TIMEOUT_S = 600.0
CLOSE_S = 5.0
STEP_TOKENS = 1024
"""Forced or known tokens of one request."""
_LINE_BYTES = 2**24
_MIB = 2**20


class ConstraintFailed(SampleFailed):
    """A completion can't go on within its constraint; the message says why."""


class Following(ABC):
    """The rules of one completion, here or in a process. Each method raises ConstraintFailed."""

    async def accept(self, tokens: Sequence[int]) -> None:
        """See Rules."""
        for start in range(0, len(tokens), STEP_TOKENS):
            await self._call("accept", tokens[start : start + STEP_TOKENS])

    async def follow(
        self, tokens: Sequence[int], alternatives: Sequence[Sequence[int]], *, last_stays: bool
    ) -> Verdict:
        """See Rules."""
        verdict = await self._call("follow", tokens, alternatives, last_stays)
        return msgspec.convert(verdict, Verdict)

    async def force(self, after: Sequence[int], most: int) -> list[int]:
        """See Rules. `most` is at most STEP_TOKENS."""
        forced: list[int] = await self._call("force", after, most)
        return forced

    def close(self) -> None:
        """The completion has ended."""
        return

    @abstractmethod
    async def _call(self, verb: str, *arguments: Any) -> Any: ...


class Grammars:
    """Follows constraints for one tokenizer. Used in one event loop, which it never holds."""

    def __init__(
        self,
        tokenizer: Any,
        num_embeddings: int,
        end_tokens: Collection[int],
        log: Path = Path(os.devnull),
    ) -> None:
        """`tokenizer`: of Hugging Face, a fast one. `end_tokens`: each ends a sample. `log`: of the
        processes."""
        self.end_tokens = sorted(end_tokens)
        self._vocabulary = Vocabulary(num_embeddings, self.end_tokens)
        # Now, not at the first grammar: it holds the GIL, with a large vocabulary for 0.1 s.
        self._tokenizer = _as_text(tokenizer)
        self._log = log
        self._processes: OrderedDict[str, _Process] = OrderedDict()
        """By grammar, the longest unused first."""
        self._starter: tuple[Child, socket.socket] | None = None
        self._starting = asyncio.Lock()
        self._compiling = asyncio.Semaphore(MAX_COMPILED_AT_ONCE)
        self._numbers = itertools.count()
        self._tasks = BackgroundTasks()

    @property
    def num_bytes(self) -> int:
        """Memory of all grammars that are kept."""
        return sum(process.num_bytes for process in self._processes.values())

    async def check(self, constraint: Constraint) -> None:
        """Raises ConstraintFailed if its grammar can't be compiled within the limits, or no
        completion can begin. May take some seconds."""
        (await self.open(constraint)).close()

    async def open(self, constraint: Constraint) -> Following:
        """The rules of a new completion. Raises ConstraintFailed. May take as long."""
        limits = (constraint.min_tokens, constraint.banned)
        if not constraint.grammar:
            return _Here(self._vocabulary, *limits)
        process = self._processes.get(constraint.grammar) or self._begin(constraint.grammar)
        self._processes.move_to_end(constraint.grammar)
        following = _There(process, next(self._numbers))
        try:
            self._make_room(process)
            await asyncio.shield(process.compiling)  # others may wait for it, too
            await process.ask(Call("open", following.number, limits))
        except BaseException:
            following.close()
            raise
        return following

    def _begin(self, grammar: str) -> _Process:
        if self._tokenizer is None:
            raise ConstraintFailed("only fast tokenizers of Hugging Face are supported")
        if not self.end_tokens:
            raise ConstraintFailed("the model has no token that ends an answer")
        if len(grammar) > MAX_GRAMMAR:
            raise ConstraintFailed(f"it has {len(grammar)} characters, and may have {MAX_GRAMMAR}")
        process = self._processes[grammar] = _Process(grammar, self._make_room, self._ended)
        process.compiling = self._tasks.spawn(self._compile(process))
        # All that wait for it may have been cancelled.
        process.compiling.add_done_callback(lambda task: task.cancelled() or task.exception())
        return process

    async def _compile(self, process: _Process) -> None:
        try:
            async with self._compiling:
                connection = await self._fork()
                streams = await asyncio.open_connection(sock=connection, limit=_LINE_BYTES)
                self._tasks.spawn(process.read(process.connect(*streams)))
                await process.ask(Call("compile", arguments=[process.grammar]))
                process.is_compiled = True
        except (ConstraintFailed, OSError) as error:
            process.end(str(error))
            raise ConstraintFailed(str(error)) from error

    def _make_room(self, growing: _Process) -> None:
        """Forgets grammars until the others have room; if that does not help, `growing` ends."""
        for process in list(self._processes.values()):
            if self.num_bytes <= KEPT_BYTES:
                return
            if not process.num_completions:
                process.end("it was forgotten")
        if self.num_bytes > KEPT_BYTES:
            growing.end(
                f"the forms of all answers in progress take more than {KEPT_BYTES // _MIB} MiB of "
                "memory together; ask again when some have ended, or for a simpler form"
            )

    def _ended(self, process: _Process) -> None:
        if self._processes.get(process.grammar) is process:
            del self._processes[process.grammar]

    async def _fork(self) -> socket.socket:
        """The connection to a new process. Raises ConstraintFailed if none can be started."""
        async with self._starting:
            if self._starter is None or self._starter[0].wait(0) is not None:
                await self._start()
            assert self._starter is not None
            ours, theirs = socket.socketpair()
            with theirs, contextlib.suppress(ConnectionError):  # then `ours` is at its end
                socket.send_fds(self._starter[1], [b"f"], [theirs.fileno()])
            return ours

    async def _start(self) -> None:
        assert self._tokenizer is not None
        self._stop()
        setup = Setup(
            tokenizer=self._tokenizer,
            num_embeddings=self._vocabulary.num_embeddings,
            end_tokens=self.end_tokens,
            compile_s=COMPILE_S,
            step_s=STEP_S,
            max_bytes=MAX_GRAMMAR_BYTES,
        )
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        with theirs:
            number = theirs.fileno()
            command = [sys.executable, "-m", "rollout_pool.sampling.grammar_process", str(number)]
            # Without further threads, whose stacks and heaps would count as the grammar's.
            alone = {"OPENBLAS_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1"}
            child = await asyncio.to_thread(
                Child, command, self._log, environment=alone, pass_fds=[number]
            )
        self._starter = child, ours
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                await loop.sock_sendall(ours, msgspec.json.encode(setup) + b"\n")
                is_ready = await loop.sock_recv(ours, 16)
        except (ConnectionError, TimeoutError):
            is_ready = b""
        if not is_ready:
            self._stop()
            raise ConstraintFailed(f"no process can compile grammars; see {self._log}")

    def _stop(self) -> None:
        if self._starter is not None:
            self._starter[1].close()  # it ends, and its processes with it
            self._starter = None

    async def close(self) -> None:
        """Ends all processes. Completions in progress fail."""
        for process in list(self._processes.values()):
            process.end("the run has ended")
        await self._tasks.end()
        child = None if self._starter is None else self._starter[0]
        self._stop()
        if child is not None:
            await asyncio.to_thread(child.stop, CLOSE_S)


def _as_text(tokenizer: Any) -> str | None:
    """The text that the tokenizers library writes; None for a tokenizer of another library."""
    if (inner := getattr(tokenizer, "backend_tokenizer", None)) is None:
        return None
    inner = copy(inner)
    inner.no_padding()
    inner.no_truncation()
    text: str = inner.to_str()
    return text


class _Process:
    """One grammar in its process."""

    compiling: asyncio.Task[None]

    def __init__(
        self,
        grammar: str,
        on_growth: Callable[[_Process], None],
        on_end: Callable[[_Process], None],
    ) -> None:
        self.grammar = grammar
        self.is_compiled = False
        self.num_completions = 0
        self.num_bytes = PROCESS_BYTES
        self._on_growth, self._on_end = on_growth, on_end
        self._why = ""
        """Why it has ended."""
        self._writer: asyncio.StreamWriter | None = None
        self._asked: deque[asyncio.Future[Reply] | None] = deque()
        """Calls without a reply so far; None if nobody waits for it."""

    async def ask(self, call: Call) -> Any:
        """The call's result. Raises ConstraintFailed."""
        if not self.tell(call, reply := asyncio.get_running_loop().create_future()):
            raise ConstraintFailed(self._why)
        try:
            async with asyncio.timeout(REPLY_TIMEOUT_S):
                found: Reply = await reply
        except TimeoutError:
            self.end(why := f"its process gave no reply in {REPLY_TIMEOUT_S:g} s")
            raise ConstraintFailed(why) from None
        if found.failed:
            raise ConstraintFailed(found.failed)
        return found.value

    def tell(self, call: Call, reply: asyncio.Future[Reply] | None = None) -> bool:
        """Sends a call, whose reply comes to `reply`; False if the process has ended."""
        if self._why or self._writer is None:
            return False
        self._asked.append(reply)
        self._writer.write(msgspec.json.encode(call) + b"\n")
        return True

    def connect(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> asyncio.StreamReader:
        self._writer = writer
        if self._why:
            writer.close()
        return reader

    async def read(self, reader: asyncio.StreamReader) -> None:
        """Takes replies until the process ends."""
        with contextlib.suppress(ConnectionError, ValueError):  # it was killed while it wrote
            while line := await reader.readline():
                reply = msgspec.json.decode(line, type=Reply)
                self.num_bytes = max(PROCESS_BYTES, reply.num_bytes)
                waiting = self._asked.popleft()
                if waiting is not None and not waiting.done():
                    waiting.set_result(reply)
                self._on_growth(self)
        what = "following an answer in it" if self.is_compiled else "compiling it"
        self.end(
            f"{what} takes more than {STEP_S if self.is_compiled else COMPILE_S:g} s of processor "
            f"time, or {MAX_GRAMMAR_BYTES // _MIB} MiB of memory; ask for a simpler form"
        )

    def end(self, why: str) -> None:
        """Calls fail from now on. Does nothing if it has ended."""
        if self._why:
            return
        self._why = why
        self._on_end(self)
        if self._writer is not None:
            self._writer.close()  # the process ends when it next reads or writes
        for reply in self._asked:
            if reply is not None and not reply.done():
                reply.set_exception(ConstraintFailed(why))
        self._asked.clear()


class _There(Following):
    """One completion in the process of its grammar."""

    def __init__(self, process: _Process, number: int) -> None:
        self.number = number
        self._process = process
        self._is_open = True
        process.num_completions += 1

    def close(self) -> None:
        if self._is_open:
            self._is_open = False
            self._process.num_completions -= 1
            self._process.tell(Call("close", self.number))

    async def _call(self, verb: str, *arguments: Any) -> Any:
        return await self._process.ask(Call(verb, self.number, arguments))


class _Here(Following):
    """Rules without a grammar, which take microseconds."""

    def __init__(self, vocabulary: Vocabulary, *limits: Any) -> None:
        with _failing():
            self._rules = Rules(vocabulary, None, *limits)

    async def _call(self, verb: str, *arguments: Any) -> Any:
        with _failing():
            return getattr(self._rules, verb)(*arguments)


@contextlib.contextmanager
def _failing() -> Iterator[None]:
    try:
        yield
    except NotAllowed as error:
        raise ConstraintFailed(str(error)) from error
