"""Environments of the verifiers library as tasks.

    worker                                  process of the environment
    task of its taskset ──► session ──►     the environment's own rollout and rewards
                            endpoint   ◄──  calls of the model
    reward, metrics                    ◄──

Such an environment calls an OpenAI-compatible server by itself, so it runs as an agent; in a
process of its own, because the library needs other versions of packages than a run.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from configs.rollout_schema import TaskConfig
from rollout_pool.episodes.conversation import Message
from rollout_pool.episodes.environment import Env
from rollout_pool.tasks.agent import SessionHandle
from rollout_pool.tasks.datasets import Problem, ProblemTask
from rollout_pool.tasks.task import Prompt
from rollout_pool.tasks.verifiers.process import EnvironmentProcess, Program, load_rows

_IGNORED = ("prompt_pattern", "instruction", "system_prompt", "eval_path", "tools", "env", "agent")


@dataclass(kw_only=True, slots=True, frozen=True)
class Row(Problem):
    """`question` is the initial conversation as text, `row` the library's task."""

    opening: tuple[Message, ...]

    @property
    def right(self) -> str:
        """All of the task but its number: what is right only its environment knows."""
        content = {name: value for name, value in self.row.items() if name != "idx"}
        return json.dumps(content, sort_keys=True)

    @property
    def solution(self) -> str:
        return str(self.row.get("answer", ""))


class VerifiersTask(ProblemTask[Row]):
    """The environment of the package `task.name`, with the settings `task.params`."""

    def __init__(self, config: TaskConfig) -> None:
        """Loads the rows. Raises ValueError naming the setting at fault."""
        _refuse_what_is_ignored(config)
        self.name = config.name
        program = Program(
            python=config.python, folder=config.path, name=config.name, settings=_settings(config)
        )
        super().__init__(config, *_split(load_rows(program), config))
        self._process = EnvironmentProcess(program)

    def demonstration(self, prompt: Prompt) -> tuple[Message, ...]:
        solution = self.solution(prompt)
        if not solution:
            raise ValueError(
                f"task.name={self.name!r}: its tasks have no answer to learn from; set "
                "trainer.warm_start.num_steps=0"
            )
        return (*self.problem(prompt).opening, Message(role="assistant", content=solution))

    def score(self, prompt: Prompt, completion: str) -> float:
        raise ValueError(
            "task.rewards: a verifiers environment scores whole episodes itself; leave "
            "task.rewards out, or use kind: env"
        )

    def environment(self, prompt: Prompt) -> Env:
        raise ValueError(
            f"task.name={self.name!r}: a verifiers environment runs through the endpoint; "
            "leave task.env and task.tools out"
        )

    async def run_agent(
        self, session: SessionHandle, prompt: Prompt
    ) -> tuple[float, dict[str, float]]:
        """Runs one episode. Returns its reward and metrics.

        Raises RuntimeError if the environment could not finish it, and EpisodeFailed if its process
        ended.
        """
        row = self.problem(prompt).row
        outcome = await self._process.run(row, session.keyed_url, session.model)
        return float(outcome["reward"]), outcome["metrics"]

    async def start(self) -> None:
        """Else the first episode would start the process. Raises ValueError or RuntimeError."""
        await self._process.start()

    async def close(self) -> None:
        await self._process.close()


def _refuse_what_is_ignored(config: TaskConfig) -> None:
    for name in _IGNORED:
        if value := getattr(config, name):
            raise ValueError(
                f"task.{name}={value!r}: an environment of the verifiers library brings its own; "
                "leave it out, and see which settings it has (task.params)"
            )


def _settings(config: TaskConfig) -> str:
    taskset = config.params.get("taskset", {})
    if not isinstance(taskset, dict) or "id" in taskset:
        raise ValueError(
            f"task.params.taskset={taskset!r}: must be the settings of the taskset by name, without"
            " its id, which is task.name"
        )
    return json.dumps({**config.params, "taskset": {**taskset, "id": config.name}})


def _split(found: list[dict[str, Any]], config: TaskConfig) -> tuple[list[Row], list[Row]]:
    """Training and held-out rows: the last ones."""
    if config.eval_size >= len(found):
        raise ValueError(
            f"task.eval_size={config.eval_size}: {config.name} has only {len(found)} tasks; hold "
            "fewer back, or let it load more (task.params)"
        )
    rows = [_row(one) for one in found]
    return rows[: -config.eval_size], rows[-config.eval_size :]


def _row(found: Mapping[str, Any]) -> Row:
    opening = tuple(
        Message(role=message["role"], content=_text(message.get("content")))
        for message in found["opening"]
    )
    # Where a simulated user opens the conversation, there is no text yet.
    question = "\n".join(message.content for message in opening) or json.dumps(found["task"])
    return Row(question=question, opening=opening, row=found["task"])


def _text(content: object) -> str:
    return content if isinstance(content, str) else json.dumps(content)
