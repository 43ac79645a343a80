"""One scoring process: `python -m rollout_pool.rewards.process`, and behind it the task's factory,
its config as JSON and the seconds in which a part must be scored.

It builds the task and loads the reward functions once, says so, and then answers one line of JSON
(see `part`) with one line of JSON until its standard input ends:

    {"part": "brevity", "prompt": {...}, "answer": "7", ...}  ->  {"reward": 1.0}
                                                          or  {"error": "why not"}

A process of its own because a scorer runs what a model wrote: it may hang or crash. Everything is
run in its main thread, where the libraries that limit their own time with signals need to be.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import os
import signal
import sys
from collections.abc import Callable
from typing import TextIO

from configs.choices import RewardKind, TaskKind, ToolParser
from configs.rollout_schema import RewardConfig, TaskConfig
from processes.die_with_parent import die_with_parent
from rollout_pool.rewards.part import PartRequest, decode_request
from rollout_pool.tasks.dotted import load_callable
from rollout_pool.tasks.task import Task

PartScorer = Callable[[PartRequest], object]
"""What it returns should be a number, but a user may have written it."""


def encode_config(config: TaskConfig) -> str:
    """`config` as one line of JSON."""
    return json.dumps(dataclasses.asdict(config), default=lambda choice: choice.name)


def decode_config(text: str) -> TaskConfig:
    fields = json.loads(text)
    rewards = {
        name: RewardConfig(**{**reward, "kind": RewardKind[reward["kind"]]})
        for name, reward in fields.pop("rewards").items()
    }
    kind, parser = TaskKind[fields.pop("kind")], ToolParser[fields.pop("tool_parser")]
    return TaskConfig(**fields, kind=kind, tool_parser=parser, rewards=rewards)


def load_parts(task: Task, config: TaskConfig, timeout_s: float) -> dict[str, PartScorer]:
    """Who scores each part that is scored in a process, which is killed if one takes `timeout_s`;
    "" is the task itself.

    Raises ValueError naming the setting that is at fault.
    """
    parts: dict[str, PartScorer] = {"": _by_task(task)}
    for name, reward in config.rewards.items():
        setting = f"task.rewards.{name}"
        if reward.kind is RewardKind.task:
            parts[name] = parts[""]
        elif reward.kind is RewardKind.function:
            assert reward.function is not None, name
            parts[name] = _by_function(load_callable(reward.function, f"{setting}.function"))
        elif reward.kind is RewardKind.code_tests:
            parts[name] = _by_tests(task, setting, timeout_s)
    return parts


def _by_task(task: Task) -> PartScorer:
    return lambda request: task.score(request.prompt, request.episode.answer)


def _by_function(function: Callable[..., object]) -> PartScorer:
    return lambda request: function(request.prompt, request.episode)


def _by_tests(task: Task, setting: str, timeout_s: float) -> PartScorer:
    from rollout_pool.rewards.code_tests import CodeTests

    tests = CodeTests(task, setting, timeout_s)
    return lambda request: tests.score(request.prompt, request.episode.answer)


def answer(parts: dict[str, PartScorer], line: str) -> dict[str, object]:
    """The reply to one request; whatever a scorer raises costs this part alone."""
    request = decode_request(line)
    try:
        given = parts[request.part](request)
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"[:500]}
    try:
        reward = float(given)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return {"error": f"the reward is no number but {given!r}"[:500]}
    if not math.isfinite(reward):
        return {"error": f"the reward is {reward}"}
    return {"reward": reward}


def main(argv: list[str]) -> None:
    die_with_parent(signal.SIGKILL)  # a scorer that hangs never reads its input's end
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    requests, replies = _own_ends()
    try:
        config = decode_config(argv[1])
        task: Task = load_callable(argv[0], "task.factory")(config)
        parts = load_parts(task, config, float(argv[2]))
    except (ValueError, RuntimeError) as error:
        _write(replies, {"error": str(error)})
        return
    _write(replies, {"ready": task.name})
    for line in requests:
        _write(replies, answer(parts, line))


def _own_ends() -> tuple[TextIO, TextIO]:
    """Where requests come from and replies go to, which no other process is to have.

    For a scorer, and for what it starts, standard input is empty, and what it prints goes to
    standard error.
    """
    requests, replies = os.dup(0), os.dup(1)
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    os.dup2(2, 1)

    def give_up() -> None:
        for descriptor in (requests, replies):
            os.dup2(nothing, descriptor, inheritable=False)

    os.register_at_fork(after_in_child=give_up)
    return os.fdopen(requests, encoding="utf-8"), os.fdopen(replies, "w", encoding="utf-8")


def _write(replies: TextIO, reply: dict[str, object]) -> None:
    replies.write(json.dumps(reply) + "\n")
    replies.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
