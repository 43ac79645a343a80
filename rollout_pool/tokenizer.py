"""The model's tokenizer, as far as it is used here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, cast


class Tokenizer(Protocol):
    """What is used of a Hugging Face tokenizer."""

    eos_token_id: int | None

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...
    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str: ...
    def apply_chat_template(
        self,
        conversation: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
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
