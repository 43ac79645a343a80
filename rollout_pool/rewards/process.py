"""One scoring process: `python -m rollout_pool.rewards.process <descriptor of its socket>`.

It reads one line of JSON with the task's config and the time limit for a part, builds the task,
loads the parts that are scored here and reports that it is ready. Then it replies to each line, a
number and JSON (see `types`), with one line of JSON, which also has that number as `id`, and the
seconds that it took as `took_s`:

    {"part": "brevity", "prompt": {...}, "episodes": [...]} ->  {"reward": 1.0}
                               a whole group                ->  {"reward": [1.0, null]}
                               cannot be judged             ->  {"reward": null}
                               cannot be scored             ->  {"error": "reason"}

The reply of an async function comes later, in any order; {"later": true} comes at once. Its loop,
with all of them, runs between two lines:

    ──► line ─► scorer ─► reply        ──► line ─► async function begins ─► later
          loop: async functions go on            loop: ─► reply

It is a process because a scorer may run what a model wrote, and hang or crash. Scorers run in its
main thread, as libraries that limit their own time with signals require, and outside of the loop,
as those that run a loop of their own do.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import logging
import os
import signal
import sys
import time
from collections.abc import Awaitable, Coroutine
from typing import Any

from configs.rollout_schema import TaskConfig
from processes.die_with_parent import die_with_parent
from rollout_pool.rewards.function import BadReward
from rollout_pool.rewards.reward import PartScorer, class_of, parts_of
from rollout_pool.rewards.types import Scored, Setup, decode_request
from rollout_pool.tasks.mixture import for_each_member
from rollout_pool.tasks.registry import build_task, check_data
from rollout_pool.tasks.task import Task

_CHUNK = 2**20


def load_parts(config: TaskConfig, task: Task, timeout_s: float) -> dict[str, PartScorer]:
    """The scorer of each part that is scored in a process, which is killed when one takes
    `timeout_s`. Parts of a mixture have the name of their task and a slash before them. Raises
    ValueError naming the setting at fault."""

    def load(member: str, config: TaskConfig, task: Task) -> dict[str, PartScorer]:
        prefix = f"{member}/" if member else ""
        return {
            prefix + name: kind(name, reward, task).load(timeout_s)
            for name, reward in parts_of(config).items()
            if (kind := class_of(reward)).is_in_process(reward)
        }

    found = for_each_member(config, task, load)
    return {name: scorer for parts in found.values() for name, scorer in parts.items()}


Reply = dict[str, object]


def reply_to(line: str, parts: dict[str, PartScorer]) -> Reply | Coroutine[Any, Any, Reply]:
    """Scores one request; an error of a scorer fails only this part."""
    try:
        request = decode_request(line)
        reward = parts[request.part](request)
    except (Exception, SystemExit) as error:
        return _failure(error)
    return _reply_of(reward) if inspect.isawaitable(reward) else {"reward": reward}


async def _reply_of(reward: Awaitable[Scored]) -> Reply:
    try:
        return {"reward": await reward}
    except (Exception, SystemExit, asyncio.CancelledError) as error:
        return _failure(error)


def _failure(error: BaseException) -> Reply:
    if isinstance(error, BadReward):
        return {"error": str(error)}
    return {"error": f"{type(error).__name__}: {error}"[:500]}


def main(number: int) -> None:
    die_with_parent(signal.SIGKILL)  # SIGKILL, since a scorer may ignore SIGTERM
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    wire = _Wire(number)
    try:
        setup = Setup.decode(wire.read_line().decode())
        task = build_task(setup.config)
        check_data(setup.config, task, setup.data)
        parts = load_parts(setup.config, task, setup.timeout_s)
    except (ValueError, RuntimeError) as error:
        wire.write({"error": str(error)})
        return

    async def reply_later(number: int, work: Coroutine[Any, Any, Reply]) -> None:
        scoring = asyncio.create_task(work)
        done, _ = await asyncio.wait([scoring], timeout=setup.timeout_s)
        late: Reply = {"error": f"no reward within {setup.timeout_s:g} s"}
        wire.write({"id": number, **(scoring.result() if done else late)})
        scoring.cancel()  # may be ignored, but the request has its reply

    wire.write({"ready": task.name})
    loop, working = asyncio.new_event_loop(), set[asyncio.Task[None]]()
    while True:
        if working and not wire.has_line:
            loop.run_until_complete(wire.wait_readable())
        if not (line := wire.read_line()):
            return
        began = time.perf_counter()
        name, _, request = line.decode().partition(" ")
        reply = reply_to(request, parts)
        if isinstance(reply, dict):
            wire.write({"id": int(name), "took_s": time.perf_counter() - began, **reply})
            continue
        wire.write({"id": int(name), "later": True})
        working.add(task_of := loop.create_task(reply_later(int(name), reply)))
        task_of.add_done_callback(working.discard)


class _Wire:
    """Lines of requests and replies over a socket that processes which a scorer starts do not have.
    Reads without a loop: a turn of one takes longer than most rewards."""

    def __init__(self, number: int) -> None:
        self._number = number
        self._received = bytearray()
        self._num_seen = 0
        """Bytes in which no line ends."""
        os.set_inheritable(number, False)
        os.register_at_fork(after_in_child=self._give_up)

    def _give_up(self) -> None:
        os.dup2(os.open(os.devnull, os.O_RDWR), self._number, inheritable=False)

    @property
    def has_line(self) -> bool:
        return b"\n" in self._received[self._num_seen :]

    def read_line(self) -> bytes:
        """Empty at the end."""
        while (end := self._received.find(b"\n", self._num_seen)) < 0:
            self._num_seen = len(self._received)
            if not (data := os.read(self._number, _CHUNK)):
                return b""
            self._received += data
        line = bytes(self._received[:end])
        del self._received[: end + 1]
        self._num_seen = 0
        return line

    async def wait_readable(self) -> None:
        loop, ready = asyncio.get_running_loop(), asyncio.Event()
        loop.add_reader(self._number, ready.set)
        try:
            await ready.wait()
        finally:
            loop.remove_reader(self._number)

    def write(self, reply: Reply) -> None:
        data = memoryview(json.dumps(reply).encode() + b"\n")
        while data:
            data = data[os.write(self._number, data) :]


if __name__ == "__main__":
    main(int(sys.argv[1]))
