"""The model's tokenizer, as far as it is used here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, cast


class AddedToken(Protocol):
    """A text that is one token wherever it stands."""

    content: str
    special: bool


class Tokenizer(Protocol):
    """The part of a Hugging Face tokenizer that is used here."""

    eos_token_id: int | None

    @property
    def added_tokens_decoder(self) -> Mapping[int, AddedToken]: ...
    def __len__(self) -> int: ...
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


def vocab_size(model_path: str, tokenizer: Tokenizer, *, trust_remote_code: bool) -> int:
    """How many tokens the model has embeddings for; ids are below it.

    Of the model's config, and of the tokenizer if that does not say: a model may have embeddings
    for more tokens than its tokenizer ever writes.
    """
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(model_path, trust_remote_code=trust_remote_code)
        size = config.get_text_config().to_dict().get("vocab_size")
    except (OSError, ValueError, KeyError):
        size = None
    return size if isinstance(size, int) and size > 0 else len(tokenizer)
