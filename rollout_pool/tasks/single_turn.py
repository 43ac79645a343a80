"""Tasks that ask once and want one answer: most are."""

from __future__ import annotations

from abc import ABC, abstractmethod

from configs.rollout_schema import TaskConfig
from rollout_pool.episodes.env import Env, Message, SingleTurn, system_message
from rollout_pool.tasks.task import Prompt


class SingleTurnTask(ABC):
    """The part of a `Task` that follows from its prompts and its solutions."""

    def __init__(self, config: TaskConfig) -> None:
        self._system_prompt = config.system_prompt

    @abstractmethod
    def solution(self, prompt: Prompt) -> str: ...

    def environment(self, prompt: Prompt) -> Env:
        return SingleTurn(prompt.text, self._system_prompt)

    def demonstration(self, prompt: Prompt) -> tuple[Message, ...]:
        system = [] if self._system_prompt is None else [system_message(self._system_prompt)]
        question = Message(role="user", content=prompt.text)
        answer = Message(role="assistant", content=self.solution(prompt))
        return (*system, question, answer)
