"""Text to tokens and back: the one place where a prompt is tokenized."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, cast

from configs.choices import OnLongPrompt
from configs.rollout_schema import RolloutConfig, TaskConfig
from rollout_pool.tasks.task import Prompt, TaskStream


class Tokenizer(Protocol):
    """What is used of a Hugging Face tokenizer."""

    eos_token_id: int | None

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...
    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str: ...
    def apply_chat_template(
        self,
        conversation: Sequence[dict[str, str]],
        *,
        add_generation_prompt: bool,
        tokenize: bool,
    ) -> str: ...


def load_tokenizer(model_path: str, *, trust_remote_code: bool) -> Tokenizer:
    """The model's own tokenizer. Raises ValueError naming model.path if there is none."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(model_path, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(
            f"model.path={model_path!r}: there is no tokenizer to load; give a folder with a "
            f"Hugging Face model, or a model's name there ({error})"
        ) from error
    return cast(Tokenizer, tokenizer)


def tokenize_prompt(tokenizer: Tokenizer, text: str, *, chat_template: bool) -> list[int]:
    """The prompt's tokens, with the special tokens that the model expects in front."""
    if not chat_template:
        return list(tokenizer.encode(text))
    turn = [{"role": "user", "content": text}]
    rendered = tokenizer.apply_chat_template(turn, add_generation_prompt=True, tokenize=False)
    return list(tokenizer.encode(rendered, add_special_tokens=False))  # the template wrote them


def tokenize_solution(tokenizer: Tokenizer, text: str) -> list[int]:
    """A reference answer as the policy should write it, with the token that ends it."""
    tokens = list(tokenizer.encode(text, add_special_tokens=False))
    return tokens if tokenizer.eos_token_id is None else [*tokens, tokenizer.eos_token_id]


@dataclass(kw_only=True, slots=True, frozen=True)
class TokenizedPrompt:
    prompt: Prompt
    tokens: list[int]


class PromptReader:
    """Tokenizes prompts and holds them to `max_prompt_tokens`; no prompt is ever cut."""

    def __init__(self, tokenizer: Tokenizer, task: TaskConfig, rollout: RolloutConfig) -> None:
        self._tokenizer = tokenizer
        self._chat_template = task.chat_template
        self._max_tokens = rollout.max_prompt_tokens
        self._on_long = rollout.on_long_prompt
        self.num_skipped = 0

    def read(self, prompt: Prompt) -> TokenizedPrompt | None:
        """None for a prompt that is too long and may be skipped; it is counted.

        Raises ValueError for one that is too long if `on_long_prompt` is refuse, or empty.
        """
        tokens = tokenize_prompt(self._tokenizer, prompt.text, chat_template=self._chat_template)
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
