"""Holds prompts to their length before anything is spent on them."""

from __future__ import annotations

from collections.abc import Iterator

from configs.choices import OnLongPrompt
from configs.rollout_schema import RolloutConfig, TaskConfig
from rollout_pool.episodes.chat import ChatFormat
from rollout_pool.episodes.env import Message, system_message
from rollout_pool.tasks.task import Prompt, TaskStream


class PromptReader:
    """Holds prompts to `max_prompt_tokens`; no prompt is ever cut.

    Measures a prompt as a question with one answer would open. With the `chat` of the episodes,
    whose ChatFormat keeps the last texts, such a prompt is tokenized once.
    """

    def __init__(self, chat: ChatFormat, task: TaskConfig, rollout: RolloutConfig) -> None:
        self._chat = chat
        self._system = [] if task.system_prompt is None else [system_message(task.system_prompt)]
        self._max_tokens = rollout.max_prompt_tokens
        self._on_long = rollout.on_long_prompt
        self.num_skipped = 0

    def accepts(self, prompt: Prompt) -> bool:
        """False for a prompt that is too long and may be skipped; it is counted.

        Raises ValueError for one that is too long if `on_long_prompt` is refuse, or empty.
        """
        num_tokens = len(self.opening(prompt))
        if not num_tokens:
            raise ValueError(f"prompt {prompt.index} has no tokens: {prompt.text!r}")
        if num_tokens <= self._max_tokens:
            return True
        if self._on_long is OnLongPrompt.refuse:
            which = "held-out prompt" if prompt.is_held_out else "prompt"
            raise ValueError(
                f"rollout.max_prompt_tokens={self._max_tokens}: {which} {prompt.index} has "
                f"{num_tokens} tokens; raise the limit, or set rollout.on_long_prompt=skip"
            )
        self.num_skipped += 1
        return False

    def opening(self, prompt: Prompt) -> list[int]:
        """The tokens before the first answer."""
        return self._chat.first([*self._system, Message(role="user", content=prompt.text)])

    def stream(self, prompts: TaskStream) -> Iterator[Prompt]:
        """The prompts of a stream that are short enough."""
        return filter(self.accepts, prompts)
