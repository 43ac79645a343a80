"""Holds prompts to their length before anything is spent on them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from configs.choices import OnLongPrompt
from configs.rollout_schema import RolloutConfig, TaskConfig
from rollout_pool.episodes.chat import ChatFormat
from rollout_pool.episodes.env import Message, system_message
from rollout_pool.episodes.tokenizer import Tokenizer
from rollout_pool.tasks.task import Prompt, TaskStream


@dataclass(kw_only=True, slots=True, frozen=True)
class TokenizedPrompt:
    prompt: Prompt
    tokens: list[int]
    """As a question with one answer would open; what counts in an episode is the environment's
    own first observation."""


class PromptReader:
    """Tokenizes prompts and holds them to `max_prompt_tokens`; no prompt is ever cut."""

    def __init__(self, tokenizer: Tokenizer, task: TaskConfig, rollout: RolloutConfig) -> None:
        self._chat = ChatFormat(
            tokenizer, chat_template=task.chat_template, tool_parser=task.tool_parser
        )
        self._system = [] if task.system_prompt is None else [system_message(task.system_prompt)]
        self._max_tokens = rollout.max_prompt_tokens
        self._on_long = rollout.on_long_prompt
        self.num_skipped = 0

    def read(self, prompt: Prompt) -> TokenizedPrompt | None:
        """None for a prompt that is too long and may be skipped; it is counted.

        Raises ValueError for one that is too long if `on_long_prompt` is refuse, or empty.
        """
        tokens = self._chat.first([*self._system, Message(role="user", content=prompt.text)])
        if not tokens:
            raise ValueError(f"prompt {prompt.index} has no tokens: {prompt.text!r}")
        if len(tokens) <= self._max_tokens:
            return TokenizedPrompt(prompt=prompt, tokens=tokens)
        if self._on_long is OnLongPrompt.refuse:
            which = "held-out prompt" if prompt.is_held_out else "prompt"
            raise ValueError(
                f"rollout.max_prompt_tokens={self._max_tokens}: {which} {prompt.index} has "
                f"{len(tokens)} tokens; raise the limit, or set rollout.on_long_prompt=skip"
            )
        self.num_skipped += 1
        return None

    def stream(self, prompts: TaskStream) -> Iterator[TokenizedPrompt]:
        """The prompts of a stream that are short enough."""
        for prompt in prompts:
            if (tokenized := self.read(prompt)) is not None:
                yield tokenized
