"""One scoring process: `python -m rollout_pool.rewards.process <descriptor of its socket>`.

It reads one line of JSON with the task's factory, its config and the time limit for a part, builds
the task, loads the reward functions and reports that it is ready. Then it answers each line of JSON
(see `types`) with one line of JSON:

    {"part": "brevity", "prompt": {...}, "answer": "7", ...}  ->  {"reward": 1.0}
                            of an answer that cannot be judged ->  {"reward": null}
                                                          or  {"error": "reason"}

It is a process because a scorer may run what a model wrote, and hang or crash. Scorers run in its
main thread, as libraries that limit their own time with signals require.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import logging
import math
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from typing import SupportsFloat, TextIO

from configs.choices import RewardKind
from configs.dotted import load_callable
from configs.rollout_schema import RewardConfig, TaskConfig
from processes.die_with_parent import die_with_parent
from rollout_pool.rewards.types import PartRequest, Setup, decode_request
from rollout_pool.tasks.mixture import Mixture
from rollout_pool.tasks.registry import check_data
from rollout_pool.tasks.task import Task, load_with_solution

PartScorer = Callable[[PartRequest], float | None]
"""None if the answer cannot be judged. Raises BadReward if a user's function returned anything but
that or a number."""

_RUNNER = asyncio.Runner()
"""Runs async functions in one loop for all calls: the clients that they keep belong to it."""


class BadReward(ValueError):
    """What a user's function returned is no reward; the message names the setting and the fix."""


def load_parts(task: Task, config: TaskConfig, timeout_s: float) -> dict[str, PartScorer]:
    """The scorer of each part that is scored in a process; "" is the task itself. The process is
    killed when one takes `timeout_s`. Those of a mixture have the name of their task and a slash
    before them. Raises ValueError naming the setting at fault."""
    if isinstance(task, Mixture):
        return {
            f"{member.name}/{name}": part
            for member in task.members.values()
            for name, part in load_parts(member.task, member.config, timeout_s).items()
        }
    parts: dict[str, PartScorer] = {"": _by_task(task, config)}
    for name, reward in config.rewards.items():
        setting = f"task.rewards.{name}"
        if reward.kind is RewardKind.task:
            parts[name] = parts[""]
        elif reward.kind is RewardKind.function:
            assert reward.function is not None, name
            parts[name] = load_function(name, reward.function, task)
        elif reward.kind is RewardKind.code_tests and reward.url is None:
            parts[name] = _by_tests(task, reward, setting, timeout_s)
    return parts


def _by_task(task: Task, config: TaskConfig) -> PartScorer:
    what = f"task.factory={config.factory!r} (score)"
    return lambda request: as_reward(task.score(request.prompt, request.episode.answer), what)


def load_function(part: str, name: str, task: Task) -> PartScorer:
    """The user's function of `task.rewards`. Raises ValueError naming the setting at fault."""
    setting = f"task.rewards.{part}.function"
    what = f"{setting}={name!r}"
    function = load_with_solution(name, setting, "(prompt, episode)", task)
    _check_returns(load_callable(name, setting), what)
    return lambda request: as_reward(
        function(request.prompt, request.episode, request.prompt), what
    )


def _check_returns(function: Callable[..., object], what: str) -> None:
    """Raises ValueError for what can return no reward when it is called."""
    called = function if inspect.isroutine(function) else type(function).__call__
    if inspect.isclass(function):
        is_what, fix = "a class, and a call makes an object of it", "name such an object"
    elif inspect.isgeneratorfunction(called) or inspect.isasyncgenfunction(called):
        is_what, fix = "a generator, which yields", "return the reward instead"
    else:
        return
    raise ValueError(f"{what}: is {is_what}, but a reward is the number that a call returns; {fix}")


def as_reward(given: object, what: str) -> float | None:
    """`given`, which `what` returned, as a reward; of an async function what it returns in the end.
    None if that is None. Raises BadReward if it is no finite number."""
    if inspect.isawaitable(given):
        given = _RUNNER.run(_awaited(given))
    if given is None:
        return None
    # Text that spells a number is not one: `float` would take it.
    try:
        reward = float(given) if isinstance(given, SupportsFloat) else math.nan
    except (TypeError, ValueError, OverflowError):  # an array of several numbers, or a huge one
        reward = math.nan
    if not math.isfinite(reward):
        raise BadReward(
            f"{what}: returned {given!r:.200}, which is not a finite number; let it return an int, "
            "a float or a bool, or None for an answer that cannot be judged"
        )
    return reward


async def _awaited(given: Awaitable[object]) -> object:
    return await given


def _by_tests(task: Task, config: RewardConfig, setting: str, timeout_s: float) -> PartScorer:
    from rollout_pool.rewards.code_tests import CodeTests

    tests = CodeTests(task, config, setting, timeout_s)
    return lambda request: tests.score(request.prompt, request.episode.answer)


def answer(parts: dict[str, PartScorer], line: str) -> dict[str, object]:
    """The reply to one request; an error of a scorer fails only this part."""
    try:
        request = decode_request(line)
        return {"reward": parts[request.part](request)}
    except BadReward as error:
        return {"error": str(error)}
    except (Exception, SystemExit) as error:
        return {"error": f"{type(error).__name__}: {error}"[:500]}


def main(number: int) -> None:
    die_with_parent(signal.SIGKILL)  # SIGKILL, since a scorer may ignore SIGTERM
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    requests, replies = _open_socket(number)
    try:
        setup = Setup.decode(requests.readline())
        task: Task = load_callable(setup.factory, "task.factory")(setup.config)
        check_data(setup.config, task, setup.data)
        parts = load_parts(task, setup.config, setup.timeout_s)
    except (ValueError, RuntimeError) as error:
        _write(replies, {"error": str(error)})
        return
    _write(replies, {"ready": task.name})
    for line in requests:
        _write(replies, answer(parts, line))


def _open_socket(number: int) -> tuple[TextIO, TextIO]:
    """Streams for requests and replies, not inherited by processes that a scorer starts."""
    os.set_inheritable(number, False)

    def give_up() -> None:
        nothing = os.open(os.devnull, os.O_RDWR)
        os.dup2(nothing, number, inheritable=False)

    os.register_at_fork(after_in_child=give_up)
    return os.fdopen(number, encoding="utf-8"), os.fdopen(
        number, "w", encoding="utf-8", closefd=False
    )


def _write(replies: TextIO, reply: dict[str, object]) -> None:
    replies.write(json.dumps(reply) + "\n")
    replies.flush()


if __name__ == "__main__":
    main(int(sys.argv[1]))
