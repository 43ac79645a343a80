"""Scores reward parts in separate processes as episodes end.

A request whose process hangs gets no reward; one whose process dies is retried once in another.
Either way the process is replaced; other requests only have one process less for a moment.
"""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

from configs.rollout_schema import TaskConfig
from processes.child import Child, kill_group
from rollout_pool.cancelling import BackgroundTasks
from rollout_pool.rewards.types import PartScore, Setup

log = logging.getLogger(__name__)

START_TIMEOUT_S = 120.0
END_TIMEOUT_S = 30.0
"""A killed process that is still there after this long is stuck in the kernel."""
MAX_STARTS = 3
"""How often a process may die during its start."""
MAX_ATTEMPTS = 2
"""How often a request may kill its process."""
_REPLY_LIMIT = 2**20  # bytes; the process is broken if it writes a longer line


class RewardError(RuntimeError):
    """The reward pool cannot work at all; the message says why."""


class RewardPool:
    """`num_processes` scoring processes of this host behind one queue. Used in one event loop.

    Example:

        await pool.start()
        request = encode_request("short", prompt, episode, with_messages=True)
        score = await pool.score(request)  # PartScore(value=0.5, ...)
        await pool.close()
    """

    def __init__(
        self,
        config: TaskConfig,
        *,
        num_processes: int,
        timeout_s: float,
        log_path: Path,
        data: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """`data`: what the task must be made of (`registry.check_data`)."""
        setup = Setup(config=config, data=dict(data), timeout_s=timeout_s).encode()
        self._processes = [_ScoringProcess(setup, log_path) for _ in range(num_processes)]
        self._idle: asyncio.Queue[_ScoringProcess] = asyncio.Queue()
        self._timeout_s = timeout_s
        self._tasks = BackgroundTasks()
        self._is_closed = False
        self._worked_s = 0.0
        """Seconds that the processes spent on requests, over their number."""
        self.num_restarts = 0
        """Number of processes replaced."""

    async def start(self) -> None:
        """Start all processes. Raises ValueError if the task refuses its config."""
        await asyncio.gather(*(process.start() for process in self._processes))
        for process in self._processes:
            self._idle.put_nowait(process)

    async def score(self, request: bytes) -> PartScore:
        """Scores one request; waits for a free process, then at most `timeout_s`."""
        process, waited_s = await self._take_idle()
        if self._is_closed:
            self._idle.put_nowait(process)  # wakes the next waiting request
            return PartScore(failure="the reward pool was closed")
        # If the caller is cancelled the process finishes its work; killing it would cost more.
        return await asyncio.shield(self._tasks.spawn(self._score(process, request, waited_s)))

    async def _take_idle(self) -> tuple[_ScoringProcess, float]:
        """A process, and how long others kept it from this request.

        At a busy worker a reply may lie for longer than its request took: more processes would not
        help, so that time is no wait for one.
        """
        came, worked_s = time.monotonic(), self._worked_s
        process = await self._idle.get()
        return process, min(time.monotonic() - came, self._worked_s - worked_s)

    async def close(self) -> None:
        """Open requests get no score."""
        self._is_closed = True
        await self._tasks.end()
        await asyncio.gather(*(process.kill() for process in self._processes))
        if self._processes and self._idle.empty():
            self._idle.put_nowait(self._processes[0])

    async def _score(self, process: _ScoringProcess, request: bytes, waited_s: float) -> PartScore:
        for attempt in range(MAX_ATTEMPTS):
            if attempt:
                process, again_s = await self._take_idle()
                waited_s += again_s
            try:
                return await self._ask(process, request, waited_s)
            except ConnectionError:
                log.warning("a scoring process died during a request, attempt %d", attempt + 1)
        return PartScore(failure="the scoring process died", waited_s=waited_s)

    async def _ask(self, process: _ScoringProcess, request: bytes, waited_s: float) -> PartScore:
        """Returns the process to the pool or replaces it. Raises ConnectionError if it died."""
        has_replied = False
        try:
            if not process.is_alive:  # killed while idle, or its start failed
                self.num_restarts += 1
                await process.start()
            async with asyncio.timeout(self._timeout_s):
                reply = await process.ask(request)
            has_replied = True
            self._worked_s += reply["took_s"] / len(self._processes)
        except TimeoutError:
            self._worked_s += self._timeout_s / len(self._processes)
            failure = f"no reward within {self._timeout_s:g} s"
            return PartScore(failure=failure, waited_s=waited_s)
        except (RewardError, ValueError) as error:
            return PartScore(failure=str(error), waited_s=waited_s)
        finally:
            if has_replied:
                self._idle.put_nowait(process)
            elif not self._is_closed:
                self._tasks.spawn(self._replace(process))
        if "error" in reply:
            return PartScore(failure=str(reply["error"]), waited_s=waited_s)
        if reply["reward"] is None:
            return PartScore(is_left_open=True, waited_s=waited_s)
        if isinstance(reply["reward"], list):
            return PartScore(of_group=tuple(reply["reward"]), waited_s=waited_s)
        return PartScore(value=float(reply["reward"]), waited_s=waited_s)

    async def _replace(self, process: _ScoringProcess) -> None:
        """Restarts it; if that fails, the next request that gets it tries again."""
        self.num_restarts += 1
        try:
            await process.start()
        except Exception as error:
            log.error("a scoring process did not start again: %s", error)
        finally:
            self._idle.put_nowait(process)


class _ScoringProcess:
    """One child process, which can be restarted. The processes of its scorers end with it, unless
    they have left its process group."""

    def __init__(self, setup: bytes, log_path: Path) -> None:
        self._setup = setup
        self._log_path = log_path
        self._child: Child | None = None

    @property
    def is_alive(self) -> bool:
        return self._child is not None and not self._ending.done()

    async def start(self) -> None:
        """Kills the old process and starts a new one. Raises RewardError if it does not start,
        ValueError if it refuses its settings."""
        for _ in range(MAX_STARTS):
            await self.kill()
            try:
                async with asyncio.timeout(START_TIMEOUT_S):
                    await self._begin()
                    greeting = await self.ask(self._setup)
                break
            except ConnectionError:  # it died; the next one may not
                continue
            except TimeoutError as error:
                await self.kill()
                raise RewardError(
                    f"a scoring process did not start within {START_TIMEOUT_S:g} s; "
                    f"see {self._log_path}"
                ) from error
        else:
            await self.kill()
            raise RewardError(
                f"a scoring process died {MAX_STARTS} times while it started; see {self._log_path}"
            )
        if "error" in greeting:
            await self.kill()
            raise ValueError(str(greeting["error"]))

    async def _begin(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            number = theirs.fileno()
            command = [sys.executable, "-m", "rollout_pool.rewards.process", str(number)]
            self._child = Child(command, self._log_path, pass_fds=[number])
        # Once it has ended, what it started has too.
        self._ending = asyncio.create_task(self._child.exit())
        self._reader, self._writer = await asyncio.open_connection(sock=ours, limit=_REPLY_LIMIT)

    async def ask(self, request: bytes) -> dict[str, Any]:
        """Raises ConnectionError if the process dies."""
        self._writer.write(request + b"\n")
        await self._writer.drain()
        try:
            line = await self._reader.readline()
            if not line.endswith(b"\n"):
                raise ConnectionError("the scoring process closed its output")
            return cast(dict[str, Any], json.loads(line))
        except ValueError as error:  # too long, or not JSON
            raise ConnectionError(f"the scoring process gave an invalid reply: {error}") from error

    async def kill(self) -> None:
        """Kills the process and what it started, if there is one."""
        if self._child is None:
            return
        if not self._ending.done():  # else its pid may have been reused
            kill_group(self._child.pid)
        self._writer.close()
        # asyncio.wait does not cancel it, so a cancelled caller does not leave it half done.
        await asyncio.wait([self._ending], timeout=END_TIMEOUT_S)
