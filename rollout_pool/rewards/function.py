"""A reward from a user's own function, called as function(prompt, episode) -> number, or for a
whole group as function(prompt, episodes) -> [number, ...]."""

from __future__ import annotations

import asyncio
import inspect
import math
import re
from collections.abc import Awaitable, Callable
from typing import Any, SupportsFloat

from configs.choices import RewardScope
from configs.rollout_schema import RewardConfig, TaskConfig
from host.user_code import load_callable
from rollout_pool.episodes.episode import MAX_REWARD
from rollout_pool.rewards.reward import PartScorer, Reward
from rollout_pool.tasks.task import Task, load_user_function, signature_of

_NOT_FIRST = re.compile(
    "args|samples?|data_sources?|solution_strs?|predict(_str)?|reward_inputs|completions?|prompts"
    "|queries|episodes?"
)
_NOT_SECOND = re.compile("prompts?|solution_strs?|ground_truths?|extra_info|completion")
"""Names that other systems give to what stands there. Any other names are the user's own."""
_RUNNER = asyncio.Runner()
"""Runs async functions in one loop for all calls: the clients that they keep belong to it."""


class BadReward(ValueError):
    """A user's function returned no reward; the message names the setting and the fix."""


class FunctionReward(Reward):
    reads_messages = True

    @classmethod
    def is_in_process(cls, config: RewardConfig) -> bool:
        return True

    @classmethod
    def check(cls, part: str, config: TaskConfig, task: Task) -> None:
        cls(part, config.rewards[part], task).load(0)

    def load(self, timeout_s: float) -> PartScorer:
        """Raises ValueError for a function that is missing, takes other arguments, or is a class or
        a generator. A call raises BadReward if it returned anything but a number or None."""
        name = self.config.function
        assert name is not None and self.task is not None, self.part  # checked by the schema
        setting = f"task.rewards.{self.part}.function"
        what = f"{setting}={name!r}"
        is_of_group = self.config.of is RewardScope.group
        arguments = "(prompt, episodes)" if is_of_group else "(prompt, episode)"
        function = load_user_function(name, setting, arguments, self.task)
        _check_names(load_callable(name, setting), what, arguments)
        _check_returns(load_callable(name, setting), what)
        if is_of_group:
            return lambda request: as_rewards(
                function(request.prompt, list(request.episodes), request.prompt),
                len(request.episodes),
                what,
            )
        return lambda request: as_reward(
            function(request.prompt, request.episode, request.prompt), what
        )


KIND = FunctionReward


def _check_names(function: Callable[..., object], what: str, arguments: str) -> None:
    """Raises ValueError for a function made for other arguments: each call would fail, and score
    0."""
    parameters = signature_of(function).parameters.values()
    names = [one.name for one in parameters if one.kind <= one.POSITIONAL_OR_KEYWORD][:2]
    if names[1:] in (["episode"], ["episodes"]):
        return
    both = zip(names, (_NOT_FIRST, _NOT_SECOND), strict=False)
    if wrong := [name for name, others in both if others.fullmatch(name)]:
        raise ValueError(
            f"{what}: is called with {arguments}, in this order, but takes ({', '.join(names)}), "
            f"and would get something else as {' and '.join(wrong)}; change its parameters to "
            f"{arguments}: the first has text, an episode has answer and messages, and further "
            "ones named solution or row get the prompt's"
        )


def _check_returns(function: Callable[..., object], what: str) -> None:
    """Raises ValueError for a function whose call can return no reward."""
    called = function if inspect.isroutine(function) else type(function).__call__
    if inspect.isclass(function):
        is_what, fix = "a class, and a call makes an object of it", "name such an object"
    elif inspect.isgeneratorfunction(called) or inspect.isasyncgenfunction(called):
        is_what, fix = "a generator, which yields", "return the reward instead"
    else:
        return
    raise ValueError(f"{what}: is {is_what}, but a reward is the number that a call returns; {fix}")


def as_reward(given: object, what: str) -> float | None:
    """Reads `given`, which `what` returned, as a reward; awaits it first if it is awaitable. None
    stays None. Raises BadReward if it is no finite number."""
    if inspect.isawaitable(given):
        given = _RUNNER.run(_awaited(given))
    if given is None:
        return None
    # Text that spells a number is not one: `float` would take it.
    try:
        reward = float(given) if isinstance(given, SupportsFloat) else math.nan
    except (TypeError, ValueError, OverflowError):  # an array of several numbers, or a huge one
        reward = math.nan
    if not abs(reward) < MAX_REWARD:
        raise BadReward(
            f"{what}: returned {given!r:.200}, which is not a finite number below 1e30; let it "
            "return an int, a float or a bool, or None for an answer that cannot be judged"
        )
    return reward


def as_rewards(given: Any, num_episodes: int, what: str) -> list[float | None]:
    """The same for the rewards of a group: a list, tuple or array with one for each episode."""
    if inspect.isawaitable(given):
        given = _RUNNER.run(_awaited(given))
    is_list = hasattr(given, "__getitem__") and hasattr(given, "__len__")
    if not is_list or isinstance(given, str | bytes | dict) or len(given) != num_episodes:
        raise BadReward(
            f"{what}: returned {given!r:.200}, which is no list of {num_episodes} rewards; let it "
            "return one for each episode, in their order"
        )
    return [as_reward(one, f"{what}, episode {place}") for place, one in enumerate(given)]


async def _awaited(given: Awaitable[object]) -> object:
    return await given
