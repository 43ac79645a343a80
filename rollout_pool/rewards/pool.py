"""Scores reward parts in separate processes as episodes end.

A request whose process hangs gets no reward; one whose process dies is retried once in another.
Either way the process is replaced; other requests only have one process less for a moment.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import os
import socket
import sys
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO, cast

from configs.rollout_schema import TaskConfig
from processes.child import Child, kill_group
from rollout_pool.cancelling import BackgroundTasks
from rollout_pool.rewards.types import PartScore, Setup, encode, part_of

log = logging.getLogger(__name__)

START_TIMEOUT_S = 600.0
"""Imports alone took more than 120 s on two cores with a load of 30, and a timeout as a run starts
ends it."""
END_TIMEOUT_S = 30.0
"""A killed process that is still there after this long is stuck in the kernel."""
START_AGAIN_S = 1.0
"""The host may have no process to spare at once."""
MAX_STARTS = 3
"""How often a process may die during its start."""
MAX_ATTEMPTS = 2
"""How often a request may kill its process."""
TOGETHER_S = 0.05
"""Requests go to a process in one message as long as they should take no longer than this together,
each as long as any of its part did lately: sending a message costs as much as scoring a short
request, but none should sit behind a slow one while other processes are idle."""
TOGETHER_BYTES = 2**16
"""A socket and its writer take so much at once: the timer of a request does not run while others
are written."""
FADE = 0.99
"""The longest time of a part is multiplied by it at each of its requests."""
CLOSED = "the reward pool was closed"
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
        setup = encode(Setup(config=config, data=dict(data), timeout_s=timeout_s))
        self._processes = [_ScoringProcess(setup, log_path) for _ in range(num_processes)]
        self._idle: deque[_ScoringProcess] = deque()
        self._waiting: deque[_Asked] = deque()
        self._timeout_s = timeout_s
        self._tasks = BackgroundTasks()
        self._is_closed = False
        self._worked_s = 0.0
        """Seconds that the processes spent on requests, over their number."""
        self._longest_s: dict[bytes, float] = {}
        """By part: the longest that a request took lately."""
        self.num_restarts = 0
        """Number of processes replaced."""

    async def start(self) -> None:
        """Start all processes. Raises ValueError if the task refuses its config."""
        await asyncio.gather(*(process.start() for process in self._processes))
        self._idle.extend(self._processes)
        self._serve()

    async def score(self, request: bytes) -> PartScore:
        """Scores one request; waits for a free process, then at most `timeout_s` for each request
        before it, and for its own."""
        if self._is_closed:
            return PartScore(failure=CLOSED, is_unscored=True)
        loop = asyncio.get_running_loop()
        one = _Asked(request, loop.create_future(), time.monotonic(), self._worked_s)
        self._waiting.append(one)
        if len(self._waiting) == 1:
            loop.call_soon(self._serve)  # with all that end in this turn of the loop
        # If the caller is cancelled the process finishes its work; killing it would cost more.
        return await one.scored

    def _serve(self) -> None:
        """Shares what waits among the idle processes. One that is dead gets a single request, and
        only if no other is idle, as it may take long to start."""
        while self._waiting and self._idle and not self._is_closed:
            process = next((one for one in self._idle if one.is_alive), self._idle[0])
            share = math.ceil(len(self._waiting) / len(self._idle)) if process.is_alive else 1
            if asked := self._take(share):
                self._idle.remove(process)
                self._tasks.spawn(self._score(process, asked))

    def _take(self, most: int) -> list[_Asked]:
        """The next requests for one process, slow ones and those of unknown parts alone."""
        taken: list[_Asked] = []
        num_bytes, took_s = 0, 0.0
        while self._waiting and len(taken) < most:
            one = self._waiting[0]
            if not one.scored.done():  # else its caller was cancelled
                num_bytes += len(one.request) + 1
                took_s += self._longest_s.get(part_of(one.request), math.inf)
                if taken and (num_bytes > TOGETHER_BYTES or took_s > TOGETHER_S):
                    break
                taken.append(one)
            self._waiting.popleft()
        return taken

    async def close(self) -> None:
        """Open requests get no score."""
        self._is_closed = True
        await asyncio.sleep(0)  # tasks that have not begun would not give back what they have
        await self._tasks.end()
        await asyncio.gather(*(process.kill() for process in self._processes))
        for one in self._waiting:
            one.end(PartScore(failure=CLOSED, is_unscored=True))

    async def _score(self, process: _ScoringProcess, asked: list[_Asked]) -> None:
        """Returns the process to the pool or replaces it. If it fails, that is the doing of the
        first request without a reply; the others wait again."""
        left, is_up, is_well = deque(asked), False, False
        try:
            if not process.is_alive:  # killed while idle, or its start failed
                self.num_restarts += 1
                await process.start()
            is_up = True
            async with asyncio.timeout(self._timeout_s) as limit:
                await process.send(*(one.request for one in left))
                while left:
                    waited_s = left[0].waited_s(self._worked_s)
                    reply = await process.reply()
                    score = _part_score(reply, waited_s)
                    self._note_work(left[0], reply["took_s"])
                    left.popleft().end(score)
                    limit.reschedule(asyncio.get_running_loop().time() + self._timeout_s)
            is_well = True
        except ConnectionError:
            left[0].num_deaths += 1
            log.warning("a scoring process died during a request, attempt %d", left[0].num_deaths)
            if left[0].num_deaths >= MAX_ATTEMPTS:
                left.popleft().end(PartScore(failure="the scoring process died"))
        except (TimeoutError, RewardError, ValueError, TypeError, LookupError) as error:
            waited_s = left[0].waited_s(self._worked_s)
            if is_up and isinstance(error, TimeoutError):
                self._note_work(left[0], self._timeout_s)
            failure = str(error) or f"no reward within {self._timeout_s:g} s"
            # What cannot start, as a file that is being edited, says nothing about the completion.
            left[0].num_deaths += not is_up
            if is_up or left[0].num_deaths > MAX_ATTEMPTS:
                score = PartScore(failure=failure, waited_s=waited_s, is_unscored=not is_up)
                left.popleft().end(score)
        except Exception as error:
            if not any(one.is_alive for one in self._processes):
                while left:  # the host can start no process: to wait again would not help
                    left.popleft().end(error)
        finally:
            self._waiting.extendleft(reversed(left))
            if is_well:
                self._idle.append(process)
            elif not self._is_closed:
                self._tasks.spawn(self._replace(process))
            self._serve()

    def _note_work(self, one: _Asked, took_s: float) -> None:
        self._worked_s += took_s / len(self._processes)
        part = part_of(one.request)
        self._longest_s[part] = max(took_s, FADE * self._longest_s.get(part, 0.0))

    async def _replace(self, process: _ScoringProcess) -> None:
        """Restarts it; if that fails, the next request that gets it tries again."""
        self.num_restarts += 1
        try:
            await process.start()
        except Exception as error:
            log.error("a scoring process did not start again: %s", error)
            await asyncio.sleep(START_AGAIN_S)
        finally:
            self._idle.append(process)
            self._serve()


@dataclass(slots=True, eq=False)
class _Asked:
    """A request that has no score so far."""

    request: bytes
    scored: asyncio.Future[PartScore]
    came: float
    worked_before_s: float
    num_deaths: int = 0
    """Processes that died during it, or could not start for it."""

    def waited_s(self, worked_s: float) -> float:
        """How long others kept the processes from it.

        At a busy worker a reply may lie for longer than its request took: more processes would not
        help, so that time is no wait for one.
        """
        return min(time.monotonic() - self.came, worked_s - self.worked_before_s)

    def end(self, score: PartScore | Exception) -> None:
        if self.scored.done():  # its caller was cancelled
            return
        if isinstance(score, Exception):
            self.scored.set_exception(score)
        else:
            self.scored.set_result(score)


def _part_score(reply: Mapping[str, Any], waited_s: float) -> PartScore:
    if "error" in reply:
        return PartScore(failure=str(reply["error"]), waited_s=waited_s)
    if reply["reward"] is None:
        return PartScore(is_left_open=True, waited_s=waited_s)
    if isinstance(reply["reward"], list):
        return PartScore(of_group=tuple(reply["reward"]), waited_s=waited_s)
    return PartScore(value=float(reply["reward"]), waited_s=waited_s)


class _ScoringProcess:
    """One scoring process, which can be restarted. The processes of its scorers end with it, unless
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
                    await self.send(self._setup)
                    greeting = await self.reply()
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
        # In a thread, since it waits for a fork server. If this is cancelled, the pipe is closed
        # with its last reference, which ends the process.
        child, life, ours = await asyncio.to_thread(self._run)
        self._reader, self._writer = await asyncio.open_connection(sock=ours, limit=_REPLY_LIMIT)
        self._child, self._life = child, life
        # Once it has ended, what it started has too.
        self._ending = asyncio.create_task(child.exit())

    def _run(self) -> tuple[Child, BinaryIO, socket.socket]:
        """The process, the pipe that it lives by, and our end of its socket."""
        ours, theirs = socket.socketpair()
        its_end, our_end = os.pipe()
        life = os.fdopen(our_end, "wb")
        with theirs, os.fdopen(its_end, "rb"):
            socket.send_fds(ours, [b"\n"], [its_end])
            command = [sys.executable, "-m", "rollout_pool.rewards.process"]
            return Child(command, self._log_path, stdin=theirs.fileno()), life, ours

    async def send(self, *requests: bytes) -> None:
        """Raises ConnectionError if the process dies."""
        self._writer.write(b"".join(request + b"\n" for request in requests))
        await self._writer.drain()

    async def reply(self) -> dict[str, Any]:
        """The next one; they come in the order of the requests. Raises ConnectionError if the
        process dies."""
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
        self._life.close()
        # asyncio.wait does not cancel it, so a cancelled caller does not leave it half done.
        await asyncio.wait([self._ending], timeout=END_TIMEOUT_S)
