"""Runs a prompt's episodes in an environment, the task's or a user's, with or without tools.

Settings: task.env, task.tools. The other sources of episodes are in `endpoint`: users' agents and
external programs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from configs.rollout_schema import TaskConfig
from host.user_code import load_callable
from rollout_pool.cancelling import contained
from rollout_pool.episodes.conversation import Tool, ToolSpec
from rollout_pool.episodes.environment import Env
from rollout_pool.episodes.episode import Episode, EpisodeFailed, EpisodeRequest
from rollout_pool.episodes.mcp_tools import PREFIX, mcp_tools
from rollout_pool.episodes.runner import EpisodeRunner
from rollout_pool.episodes.tools import ToolEnv, function_tool, python_tool
from rollout_pool.tasks.mixture import for_each_member, member_of
from rollout_pool.tasks.source import EpisodeSource
from rollout_pool.tasks.task import Prompt, Task, load_user_function

PYTHON = "python"
CALL_FRACTION = 0.9
"""Time limit of a call as a fraction of task.turn_timeout_s: the model sees a call's timeout before
the step's own ends the episode."""

METHODS = ("reset", "step", "close")
"""An environment must have them."""

EnvironmentFactory = Callable[[Prompt], Env]


class EnvEpisodes(EpisodeSource):
    """Runs each episode in a new environment."""

    is_repeatable: bool = True

    def __init__(self, runner: EpisodeRunner, make_env: EnvironmentFactory) -> None:
        self._runner = runner
        self._make_env = make_env

    async def run(self, prompt: Prompt, request: EpisodeRequest) -> Episode:
        try:
            with contained("it"):
                env = self._make_env(prompt)
        except Exception as error:  # a user's code: fails the prompt, not the run
            raise EpisodeFailed(
                f"its environment could not be created: {type(error).__name__}: {error}"
            ) from error
        return await self._runner.run(env, request)


def environment_factory(config: TaskConfig, task: Task) -> EnvironmentFactory:
    """The function that creates the environment of each episode of `task`.

    Raises ValueError for an environment or a tool that cannot be loaded.
    """
    factories = for_each_member(config, task, _factory_of_member)

    def make(prompt: Prompt) -> Env:
        name, own = member_of(task, prompt)
        return factories[name](own)

    return make


def _factory_of_member(name: str, config: TaskConfig, task: Task) -> EnvironmentFactory:
    make = task.environment if config.env is None else _own(config, config.env, task)
    if not config.tools:
        return make
    if config.max_turns < 2:
        raise ValueError(
            f"task.max_turns={config.max_turns}: with task.tools a call and the answer to its "
            "result are separate turns; set at least 2"
        )
    tools = load_tools(config.tools)
    timeout_s = config.turn_timeout_s * CALL_FRACTION
    return lambda prompt: ToolEnv(make(prompt), tools, call_timeout_s=timeout_s)


def _own(config: TaskConfig, name: str, task: Task) -> EnvironmentFactory:
    factory = load_user_function(name, "task.env", "(config, prompt)", task)

    def make(prompt: Prompt) -> Env:
        env: Env = factory(config, prompt, prompt)
        missing = [method for method in METHODS if not hasattr(env, method)]
        if missing:
            raise TypeError(
                f"it is a {type(env).__name__} without {', '.join(missing)}; return an object of a "
                "class derived from rollout_pool.Env that has a reset and a step"
            )
        return env

    return make


def tools_shown(config: TaskConfig, task: Task) -> list[ToolSpec]:
    """The tools in task.tools, or those that the task brings (`tool_specs`)."""
    return [*getattr(task, "tool_specs", ()), *(tool.spec for tool in load_tools(config.tools))]


def load_tools(names: Sequence[str]) -> list[Tool]:
    """`python`, functions as `module:name`, and the tools of MCP servers. Raises ValueError naming
    task.tools."""
    tools: list[Tool] = []
    taken: dict[str, str] = {}
    for name in names:
        for tool in _load_tools(name):
            if tool.spec.name in taken:
                raise ValueError(
                    f"task.tools={name!r}: there is a tool named {tool.spec.name!r} already, "
                    f"{taken[tool.spec.name]!r}; rename one"
                )
            taken[tool.spec.name] = name
            tools.append(tool)
    return tools


def _load_tools(name: str) -> list[Tool]:
    if name == PYTHON:
        return [python_tool()]
    if name.startswith(PREFIX):
        return mcp_tools(name, f"task.tools={name!r}")
    if ":" not in name:
        raise ValueError(
            f"task.tools={name!r}: the built-in tool is {PYTHON}; give your own as module:name"
        )
    return [function_tool(load_callable(name, "task.tools"), f"task.tools={name!r}")]
