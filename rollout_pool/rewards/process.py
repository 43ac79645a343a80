"""One scoring process: `python -m rollout_pool.rewards.process <factory> <task config as JSON>`.

It builds the task once, says so, and then answers one line of JSON with one line of JSON until its
standard input ends:

    {"index": 7, "is_held_out": false, "text": "3 + 4 =", "completion": "7"}  ->  {"reward": 1.0}
                                                                       or  {"error": "why not"}

A process of its own because a scorer runs what a model wrote: it may hang or crash.
"""

from __future__ import annotations

import ctypes
import dataclasses
import importlib
import importlib.util
import json
import math
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO, cast

from configs.choices import RewardKind, TaskKind, ToolParser
from configs.rollout_schema import RewardConfig, TaskConfig
from rollout_pool.tasks.task import Prompt, Task

TaskFactory = Callable[[TaskConfig], Task]


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


def load_factory(name: str) -> TaskFactory:
    """The function `module:function` or `file.py:function` that makes a task from its config.

    Raises ValueError naming what is missing.
    """
    place, _, function = name.rpartition(":")
    try:
        if place.endswith(".py"):
            spec = importlib.util.spec_from_file_location(Path(place).stem, place)
            if spec is None or spec.loader is None:
                raise ImportError(f"{place} is no Python file")
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
        else:
            module = importlib.import_module(place)
        return cast(TaskFactory, getattr(module, function))
    except (ImportError, OSError, AttributeError, ValueError) as error:
        raise ValueError(f"task factory {name!r}: {error}") from error


def answer(task: Task, request: dict[str, Any]) -> dict[str, object]:
    """The reply to one request; whatever the scorer raises costs this sample alone."""
    prompt = Prompt(
        index=request["index"], is_held_out=request["is_held_out"], text=request["text"]
    )
    try:
        reward = float(task.score(prompt, request["completion"]))
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"[:500]}
    if not math.isfinite(reward):
        return {"error": f"the reward is {reward}"}
    return {"reward": reward}


def main(argv: list[str]) -> None:
    _die_with_parent()
    replies = _own_stdout()
    try:
        task = load_factory(argv[0])(decode_config(argv[1]))
    except ValueError as error:
        _write(replies, {"error": str(error)})
        return
    _write(replies, {"ready": task.name})
    for line in sys.stdin:
        _write(replies, answer(task, json.loads(line)))


def _die_with_parent() -> None:
    # A scorer that hangs never reads its input's end.
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # 1: PR_SET_PDEATHSIG


def _own_stdout() -> TextIO:
    """Standard output for replies alone: what a scorer prints goes to standard error."""
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return replies


def _write(replies: TextIO, reply: dict[str, object]) -> None:
    replies.write(json.dumps(reply) + "\n")
    replies.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
