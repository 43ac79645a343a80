"""Scores reward parts in separate processes as episodes end.

A process scores one request at a time; async functions, of which it has accepted many, run side by
side in it. A request whose process hangs gets no reward; one whose process dies is retried once in
another, alone. Either way the process is replaced; other requests only have one process less for a
moment.
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
CONCURRENT = 64
"""Async requests that one process runs at a time."""
GRACE_S = 5.0
"""A process itself ends an async request in time; if it is this late, the process is stuck."""
Replies = asyncio.Queue[dict[str, Any]]
"""Replies to one request."""
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
                return await self._ask(process, request, waited_s, alone=attempt > 0)
            except ConnectionError:
                log.warning("a scoring process died during a request, attempt %d", attempt + 1)
        return PartScore(failure="the scoring process died", waited_s=waited_s)

    async def _ask(
        self, process: _ScoringProcess, request: bytes, waited_s: float, *, alone: bool
    ) -> PartScore:
        """Returns the process to the pool or replaces it: for an async request as soon as that is
        accepted, unless it is to be `alone`. Raises ConnectionError if the process died, or hung
        while it had other requests, any of which may be at fault."""
        has_replied, is_ours = False, True
        try:
            if alone:
                await process.is_quiet.wait()
            if not process.is_alive:  # killed while idle, or its start failed
                self.num_restarts += 1
                await process.start()
            async with asyncio.timeout(self._timeout_s) as limit:
                replies = process.send(request)
                if "later" in (reply := await replies.get()):
                    late_s = self._timeout_s + GRACE_S
                    limit.reschedule(asyncio.get_running_loop().time() + late_s)
                    if not alone and process.num_open < CONCURRENT:
                        is_ours = False
                        self._idle.put_nowait(process)
                    reply = await replies.get()
            if "died" in reply:
                raise ConnectionError(reply["died"])
            self._worked_s += reply.get("took_s", 0.0) / len(self._processes)
            has_replied = True
        except TimeoutError:
            has_others = process.num_open > 1
            self._worked_s += self._timeout_s / len(self._processes)
            process.stop()
            if has_others:
                raise ConnectionError("it hung with several requests") from None
            failure = f"no reward within {self._timeout_s:g} s"
            return PartScore(failure=failure, waited_s=waited_s)
        except (RewardError, ValueError) as error:
            return PartScore(failure=str(error), waited_s=waited_s)
        finally:
            if has_replied and is_ours:
                self._idle.put_nowait(process)
            elif is_ours and not self._is_closed:
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
        self._calls: dict[int, Replies] = {}
        self._num_calls = 0
        self._following: asyncio.Task[None] | None = None
        """Reads its replies."""
        self.is_quiet = asyncio.Event()
        """It has no open request."""
        self.is_quiet.set()

    @property
    def is_alive(self) -> bool:
        is_read = self._following is not None and not self._following.done()
        return is_read and self._child is not None and not self._ending.done()

    @property
    def num_open(self) -> int:
        return len(self._calls)

    async def start(self) -> None:
        """Kills the old process and starts a new one. Raises RewardError if it does not start,
        ValueError if it refuses its settings."""
        for _ in range(MAX_STARTS):
            await self.kill()
            try:
                async with asyncio.timeout(START_TIMEOUT_S):
                    await self._begin()
                    greeting = await self._greeting()
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
        self._following = asyncio.create_task(self._follow())

    async def _begin(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            number = theirs.fileno()
            command = [sys.executable, "-m", "rollout_pool.rewards.process", str(number)]
            self._child = Child(command, self._log_path, pass_fds=[number])
        # Once it has ended, what it started has too.
        self._ending = asyncio.create_task(self._child.exit())
        self._reader, self._writer = await asyncio.open_connection(sock=ours, limit=_REPLY_LIMIT)

    async def _greeting(self) -> dict[str, Any]:
        """Raises ConnectionError if the process dies."""
        self._writer.write(self._setup + b"\n")
        await self._writer.drain()
        return await self._read()

    async def _read(self) -> dict[str, Any]:
        try:
            line = await self._reader.readline()
            if not line.endswith(b"\n"):
                raise ConnectionError("the scoring process closed its output")
            return cast(dict[str, Any], json.loads(line))
        except ValueError as error:  # too long, or not JSON
            raise ConnectionError(f"the scoring process gave an invalid reply: {error}") from error

    def send(self, request: bytes) -> Replies:
        """The last one is {"died": why} if the process dies."""
        replies = self._calls[self._num_calls] = asyncio.Queue()
        self.is_quiet.clear()
        self._writer.write(b"%d %b\n" % (self._num_calls, request))
        self._num_calls += 1
        if not self.is_alive:  # nobody would read a reply
            self._give_up("it has ended")
        return replies

    async def _follow(self) -> None:
        """Hands each reply to its call until the process ends."""
        why = "it was replaced"
        try:
            while True:
                reply = await self._read()
                self._calls[reply["id"]].put_nowait(reply)
                if "later" not in reply:
                    del self._calls[reply["id"]]
                if not self._calls:
                    self.is_quiet.set()
        except (OSError, KeyError) as error:
            why = str(error)
        finally:
            self._give_up(why)

    def _give_up(self, why: str) -> None:
        for replies in self._calls.values():
            replies.put_nowait({"died": why})
        self._calls.clear()
        self.is_quiet.set()

    def stop(self) -> None:
        """Kills the process and what it started."""
        if self._child is not None and not self._ending.done():  # else its pid may be reused
            kill_group(self._child.pid)

    async def kill(self) -> None:
        """The same, and waits for its end."""
        if self._child is None:
            return
        self.stop()
        self._writer.close()
        if self._following is not None:
            self._following.cancel()
            await asyncio.wait([self._following])  # it gives up the calls of this process only
        # asyncio.wait does not cancel it, so a cancelled caller does not leave it half done.
        await asyncio.wait([self._ending], timeout=END_TIMEOUT_S)
