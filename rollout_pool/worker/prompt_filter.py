"""Which prompts are short enough to be sampled."""

from __future__ import annotations

import logging

from configs.choices import OnLongPrompt
from configs.rollout_schema import RolloutConfig, TaskConfig
from host.pictures import UnreadablePicture
from rollout_pool.episodes.conversation import Chat
from rollout_pool.tasks.task import Prompt

log = logging.getLogger(__name__)


class PromptFilter:
    """Enforces `max_prompt_tokens`; no prompt is ever truncated.

    Measures a prompt as SingleTurn would open with it. Use the episodes' `chat`, which caches the
    last texts, so that such a prompt is tokenized only once.
    """

    def __init__(self, chat: Chat, task: TaskConfig, rollout: RolloutConfig) -> None:
        self._chat = chat
        self._system_prompt = task.system_prompt
        self._max_tokens = rollout.max_prompt_tokens
        self._on_long = rollout.on_long_prompt
        self.num_skipped = 0

    def accepts(self, prompt: Prompt) -> bool:
        """False for a prompt that is skipped, which is counted: one that is too long, or that holds
        half of a surrogate pair, which no tokenizer takes.

        Raises ValueError if it is empty, or too long and `on_long_prompt` is refuse.
        """
        try:
            prompt.text.encode()
        except UnicodeEncodeError:
            log.warning("prompt %d is skipped: its text is no Unicode", prompt.index)
            self.num_skipped += 1
            return False
        try:
            num_tokens = len(self.opening(prompt))
        except UnreadablePicture as error:  # it was there when the data were read
            log.warning("prompt %d: %s", prompt.index, error)
            return True  # its episodes fail, and as many groups in a row end the run
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
        return self._chat.first_prompt(prompt.opening(self._system_prompt))
