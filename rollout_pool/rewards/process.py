"""One scoring process: `python -m rollout_pool.rewards.process`, whose input is a socket.

It gets a pipe that is open as long as its worker lives, and reads one line of JSON with the task's
config and the time limit for a part, builds the task, loads the parts that are scored here and
reports that it is ready. Then it replies to each line of JSON (see `types`) with one line of JSON:

    {"part": "brevity", "prompt": {...}, "episodes": [...]} ->  {"reward": 1.0}
                               a whole group                ->  {"reward": [1.0, null]}
                               cannot be judged             ->  {"reward": null}
                               cannot be scored             ->  {"error": "reason"}

It is a process because a scorer may run what a model wrote, and hang or crash. Scorers run in its
main thread, as libraries that limit their own time with signals require.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import time
from typing import TextIO

from configs.rollout_schema import TaskConfig
from processes.die_with_parent import die_with_writer
from rollout_pool.rewards.function import BadReward
from rollout_pool.rewards.reward import PartScorer, class_of, parts_of
from rollout_pool.rewards.types import PartRequest, Setup, decode
from rollout_pool.tasks.mixture import for_each_member
from rollout_pool.tasks.registry import build_task, check_data
from rollout_pool.tasks.task import Task


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


def reply_to(line: str, parts: dict[str, PartScorer]) -> dict[str, object]:
    """Scores one request; an error of a scorer fails only this part."""
    try:
        request = decode(line, PartRequest)
        return {"reward": parts[request.part](request)}
    except BadReward as error:
        return {"error": str(error)}
    except (Exception, SystemExit) as error:
        return {"error": f"{type(error).__name__}: {error}"[:500]}


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    requests, replies = _open_socket()
    try:
        setup = decode(requests.readline(), Setup)
        task = build_task(setup.config)
        check_data(setup.config, task, setup.data)
        parts = load_parts(setup.config, task, setup.timeout_s)
    except (ValueError, RuntimeError) as error:
        _write(replies, {"error": str(error)})
        return
    _write(replies, {"ready": task.name})
    for line in requests:
        began = time.perf_counter()
        reply = reply_to(line, parts)
        _write(replies, {**reply, "took_s": time.perf_counter() - began})


def _open_socket() -> tuple[TextIO, TextIO]:
    """Streams for requests and replies, not inherited by processes that a scorer starts. From here
    on this process dies with its worker, which need not be its parent."""
    number, nothing = os.dup(0), os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    connection = socket.socket(fileno=number)
    _, (pipe,), _, _ = socket.recv_fds(connection, 1, 1)
    os.set_inheritable(pipe, False)
    die_with_writer(pipe)
    connection.detach()
    os.register_at_fork(after_in_child=lambda: os.dup2(nothing, number, inheritable=False))
    return os.fdopen(number, encoding="utf-8"), os.fdopen(
        number, "w", encoding="utf-8", closefd=False
    )


def _write(replies: TextIO, reply: dict[str, object]) -> None:
    replies.write(json.dumps(reply) + "\n")
    replies.flush()


if __name__ == "__main__":
    main()
