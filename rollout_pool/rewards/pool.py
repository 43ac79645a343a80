"""Scores parts of rewards as episodes end, in processes of their own, aside from generation.

A request whose process hangs gets no reward; one whose process dies is asked again once, elsewhere.
Either way the process is replaced, and no other request notices more than one process fewer for a
moment.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sys
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, cast

from configs.rollout_schema import TaskConfig
from processes.child import kill_group
from rollout_pool.cancelling import end_tasks
from rollout_pool.rewards.part import PartScore
from rollout_pool.rewards.process import encode_config

log = logging.getLogger(__name__)

START_TIMEOUT_S = 120.0
END_TIMEOUT_S = 30.0
"""A killed process that is still there after this long is stuck in the kernel."""
DEFAULT_FACTORY = "rollout_pool.tasks.registry:build_task"
MAX_STARTS = 3
"""Times that a process may die while it starts."""
MAX_ASKED = 2
"""Times that a request may cost a process its life."""
_REPLY_LIMIT = 2**20  # bytes; a longer line is a broken process


class RewardError(RuntimeError):
    """The reward pool cannot work at all; the message says why."""


class RewardPool:
    """`num_processes` scoring processes behind one queue. Used in one event loop."""

    def __init__(
        self,
        config: TaskConfig,
        *,
        num_processes: int,
        timeout_s: float,
        log_path: Path,
        factory: str = DEFAULT_FACTORY,
    ) -> None:
        """`factory` ("module:function" or "file.py:function") makes the task from `config`."""
        command = [sys.executable, "-m", "rollout_pool.rewards.process"]
        command += [factory, encode_config(config), str(timeout_s)]
        self._scorers = [_Scorer(command, log_path) for _ in range(num_processes)]
        self._idle: asyncio.Queue[_Scorer] = asyncio.Queue()
        self._timeout_s = timeout_s
        self._tasks: set[asyncio.Task[Any]] = set()
        self._is_closed = False
        self.num_restarts = 0
        """Processes that had to be replaced."""

    async def start(self) -> None:
        """Start all processes. Raises ValueError if the task refuses its config."""
        await asyncio.gather(*(scorer.start() for scorer in self._scorers))
        for scorer in self._scorers:
            self._idle.put_nowait(scorer)

    async def score(self, request: bytes) -> PartScore:
        """The answer to one line of JSON; waits for a free process, then at most `timeout_s`."""
        came = time.monotonic()
        scorer = await self._idle.get()
        if self._is_closed:
            self._idle.put_nowait(scorer)  # for the next who waits in vain
            return PartScore(value=0.0, failure="the reward pool was closed")
        # A caller that gives up leaves the process to end its answer; killing it would cost more.
        return await asyncio.shield(self._spawn(self._answer(scorer, request, came)))

    async def close(self) -> None:
        """Whoever still asks gets no answer."""
        self._is_closed = True
        await end_tasks(self._tasks)
        await asyncio.gather(*(scorer.kill() for scorer in self._scorers))
        if self._idle.empty():
            self._idle.put_nowait(self._scorers[0])

    async def _answer(self, scorer: _Scorer, request: bytes, came: float) -> PartScore:
        waited_s = time.monotonic() - came
        for asked in range(MAX_ASKED):
            if asked:
                waiting = time.monotonic()
                scorer = await self._idle.get()
                waited_s += time.monotonic() - waiting
            try:
                return await self._ask(scorer, request, waited_s)
            except ConnectionError:
                log.warning(
                    "a scoring process died over a request, which was asked %d times", asked
                )
        return PartScore(value=0.0, failure="the scoring process died", waited_s=waited_s)

    async def _ask(self, scorer: _Scorer, request: bytes, waited_s: float) -> PartScore:
        """Gives the process back, or has it replaced. Raises ConnectionError if it died."""
        is_well = False
        try:
            if not scorer.is_alive:  # killed while it was idle, or could not be started before
                self.num_restarts += 1
                await scorer.start()
            async with asyncio.timeout(self._timeout_s):
                reply = await scorer.ask(request)
            is_well = True
        except TimeoutError:
            failure = f"no reward within {self._timeout_s:g} s"
            return PartScore(value=0.0, failure=failure, waited_s=waited_s)
        except (RewardError, ValueError) as error:
            return PartScore(value=0.0, failure=str(error), waited_s=waited_s)
        finally:
            if is_well:
                self._idle.put_nowait(scorer)
            elif not self._is_closed:
                self._spawn(self._replace(scorer))
        if "error" in reply:
            return PartScore(value=0.0, failure=str(reply["error"]), waited_s=waited_s)
        return PartScore(value=float(reply["reward"]), waited_s=waited_s)

    async def _replace(self, scorer: _Scorer) -> None:
        """Others go on meanwhile; one that does not start is tried again by who needs it."""
        self.num_restarts += 1
        try:
            await scorer.kill()
            await scorer.start()
        except (RewardError, ValueError) as error:
            log.error("%s", error)
        finally:
            self._idle.put_nowait(scorer)

    def _spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


class _Scorer:
    """One child process; a killed one can be started again.

    Whatever ends it, what its scorers started ends with it, unless that left its process group.
    """

    def __init__(self, command: list[str], log_path: Path) -> None:
        self._command = command
        self._log_path = log_path
        self._process: asyncio.subprocess.Process | None = None
        self._clearing: asyncio.Task[None] | None = None

    @property
    def is_alive(self) -> bool:
        return self._process is not None and self._process.returncode is None

    async def start(self) -> None:
        """Raises RewardError if it does not start, ValueError if it refuses its settings."""
        for _ in range(MAX_STARTS):
            await self._begin()
            try:
                async with asyncio.timeout(START_TIMEOUT_S):
                    greeting = await self._read()
                break
            except ConnectionError:  # it died; whoever killed it may not mean the next
                await self.kill()
            except TimeoutError as error:
                await self.kill()
                raise RewardError(
                    f"a scoring process did not start within {START_TIMEOUT_S:g} s; "
                    f"see {self._log_path}"
                ) from error
        else:
            raise RewardError(
                f"a scoring process died {MAX_STARTS} times while it started; see {self._log_path}"
            )
        if "error" in greeting:
            await self.kill()
            raise ValueError(str(greeting["error"]))

    async def _begin(self) -> None:
        with self._log_path.open("ab") as log_file:
            self._process = await asyncio.create_subprocess_exec(
                *self._command,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=log_file,
                limit=_REPLY_LIMIT,
                start_new_session=True,
            )
        self._clearing = asyncio.create_task(_clear_up(self._process))

    async def ask(self, request: bytes) -> dict[str, Any]:
        """Raises ConnectionError if the process dies over it."""
        assert self._process is not None and self._process.stdin is not None
        self._process.stdin.write(request + b"\n")
        await self._process.stdin.drain()
        return await self._read()

    async def _read(self) -> dict[str, Any]:
        assert self._process is not None and self._process.stdout is not None
        try:
            line = await self._process.stdout.readline()
            if not line.endswith(b"\n"):
                raise ConnectionError("the scoring process closed its output")
            return cast(dict[str, Any], json.loads(line))
        except ValueError as error:  # longer than any reply, or none
            raise ConnectionError(f"the scoring process talks nonsense: {error}") from error

    async def kill(self) -> None:
        if self._process is None:
            return
        assert self._clearing is not None
        if not self._clearing.done():  # else its number may be another's
            kill_group(self._process.pid)
        # Not awaited itself: whoever is cancelled here must not leave it undone.
        await asyncio.wait([self._clearing], timeout=END_TIMEOUT_S)


async def _clear_up(process: asyncio.subprocess.Process) -> None:
    """What is left when a process has ended."""
    await process.wait()
    kill_group(process.pid)
