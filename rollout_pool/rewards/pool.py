"""Scores samples as they end, in processes of their own, so that generation never waits for it.

A sample whose scorer hangs or crashes gets no reward; its process is killed and started again, and
no other sample notices more than one process fewer for a moment.
"""

from __future__ import annotations

import asyncio
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from configs.rollout_schema import TaskConfig
from rollout_pool.rewards.process import encode_config
from rollout_pool.tasks.task import Prompt

START_TIMEOUT_S = 120.0
DEFAULT_FACTORY = "rollout_pool.tasks.task:build_task"
_REPLY_LIMIT = 2**20  # characters; a longer line is a broken process


class RewardError(RuntimeError):
    """The reward pool cannot work at all; the message says why."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Score:
    """Of one sample. `failure` says why there is no honest reward; `reward` is then 0."""

    reward: float
    failure: str | None = None


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
        command += [factory, encode_config(config)]
        self._scorers = [_Scorer(command, log_path) for _ in range(num_processes)]
        self._idle: asyncio.Queue[_Scorer] = asyncio.Queue()
        self._timeout_s = timeout_s
        self._asking: set[asyncio.Task[Score]] = set()
        self.num_restarts = 0
        """Processes that had to be replaced."""

    async def start(self) -> None:
        """Start all processes. Raises ValueError if the task refuses its config."""
        await asyncio.gather(*(scorer.start() for scorer in self._scorers))
        for scorer in self._scorers:
            self._idle.put_nowait(scorer)

    async def score(self, prompt: Prompt, completion: str) -> Score:
        """The sample's score; waits for a free process, then at most `timeout_s`."""
        request = {
            "index": prompt.index,
            "is_held_out": prompt.is_held_out,
            "text": prompt.text,
            "completion": completion,
        }
        scorer = await self._idle.get()
        asking = asyncio.create_task(self._ask(scorer, request))
        self._asking.add(asking)
        asking.add_done_callback(self._asking.discard)
        # A caller that gives up leaves the process to end its answer; killing it would cost more.
        return await asyncio.shield(asking)

    async def _ask(self, scorer: _Scorer, request: dict[str, object]) -> Score:
        is_well = False
        try:
            if not scorer.is_alive:
                await scorer.start()
            reply = await asyncio.wait_for(scorer.ask(request), self._timeout_s)
            is_well = True
        except TimeoutError:
            return Score(reward=0.0, failure=f"no reward within {self._timeout_s:g} s")
        except ConnectionError:
            return Score(reward=0.0, failure="the scoring process died")
        finally:
            if not is_well:
                self.num_restarts += 1
                await scorer.kill()
            self._idle.put_nowait(scorer)
        if "error" in reply:
            return Score(reward=0.0, failure=str(reply["error"]))
        return Score(reward=float(reply["reward"]))

    async def close(self) -> None:
        for asking in self._asking:
            asking.cancel()
        await asyncio.gather(*self._asking, return_exceptions=True)
        await asyncio.gather(*(scorer.kill() for scorer in self._scorers))


class _Scorer:
    """One child process; a killed one can be started again."""

    def __init__(self, command: list[str], log_path: Path) -> None:
        self._command = command
        self._log_path = log_path
        self._process: asyncio.subprocess.Process | None = None

    @property
    def is_alive(self) -> bool:
        return self._process is not None and self._process.returncode is None

    async def start(self) -> None:
        with self._log_path.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *self._command,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                limit=_REPLY_LIMIT,
            )
        try:
            greeting = await asyncio.wait_for(self._read(), START_TIMEOUT_S)
        except (TimeoutError, ConnectionError) as error:
            await self.kill()
            raise RewardError(
                f"a scoring process did not start within {START_TIMEOUT_S:g} s or died; "
                f"see {self._log_path}"
            ) from error
        if "error" in greeting:
            await self.kill()
            raise ValueError(str(greeting["error"]))

    async def ask(self, request: dict[str, object]) -> dict[str, Any]:
        """Raises ConnectionError if the process dies over it."""
        assert self._process is not None and self._process.stdin is not None
        self._process.stdin.write(json.dumps(request).encode() + b"\n")
        await self._process.stdin.drain()
        return await self._read()

    async def _read(self) -> dict[str, Any]:
        assert self._process is not None and self._process.stdout is not None
        line = await self._process.stdout.readline()
        if not line.endswith(b"\n"):
            raise ConnectionError("the scoring process closed its output")
        return cast(dict[str, Any], json.loads(line))

    async def kill(self) -> None:
        if self._process is not None and self._process.returncode is None:
            self._process.kill()
            await self._process.wait()
