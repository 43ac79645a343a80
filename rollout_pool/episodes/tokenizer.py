"""The model's tokenizer."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cached_property, partial
from typing import Any, Protocol, cast


class AddedToken(Protocol):
    """A text that is always one token."""

    content: str
    special: bool


class Tokenizer(Protocol):
    """The parts of a Hugging Face tokenizer that are used here."""

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
        **template_args: Any,
    ) -> str: ...


def load_tokenizer(model_path: str, *, trust_remote_code: bool) -> Tokenizer:
    """The model's own tokenizer. Raises ValueError naming model.path if there is none."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(model_path, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(
            f"model.path={model_path!r}: there is no tokenizer to load; give a folder with a "
            f"Hugging Face model, or the name of one on the hub ({error})"
        ) from error
    return cast(Tokenizer, tokenizer)


def vocab_size(model_path: str, tokenizer: Tokenizer, *, trust_remote_code: bool) -> int:
    """Number of tokens that the model has embeddings for, which may be more than its tokenizer has.

    Read from the model's config, or else from the tokenizer.
    """
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(model_path, trust_remote_code=trust_remote_code)
        size = config.get_text_config().to_dict().get("vocab_size")
    except (OSError, ValueError, KeyError):
        size = None
    return size if isinstance(size, int) and size > 0 else len(tokenizer)


class TextTokens:
    """Tokens of a text where it opens a sequence, and where it goes on with one."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def opening(self, text: str) -> list[int]:
        """With the tokens that the tokenizer puts before a text, and without those that some put
        behind it: an end, after which the model would be asked to go on."""
        return [*self._before, *self._encode(text)]

    def continuation(self, text: str) -> list[int]:
        """Without the space that some tokenizers (SentencePiece) put before the first word."""
        if self._adds_space:
            for word in WORDS:
                before, both = self._encode(word), self._encode(word + text)
                if both[: len(before)] == before:  # else tokens reach across the border
                    return both[len(before) :]
        return self._encode(text)

    @cached_property
    def _before(self) -> list[int]:
        [word, *_] = WORDS
        plain, whole = self._encode(word), list(self._tokenizer.encode(word))
        places = range(len(whole) - len(plain) + 1)
        return whole[: next((at for at in places if whole[at : at + len(plain)] == plain), 0)]

    @cached_property
    def _adds_space(self) -> bool:
        one, other, *_ = WORDS
        tokens = [*self._encode(one), *self._encode(other)]
        return self._tokenizer.decode(tokens) != one + other

    def _encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False))


WORDS = ("0", "a", ".", "\n")
"""Words to put before a text; hardly any tokenizer joins all of them to the same one."""

_FURTHER_ENDS = ("<|eom_id|>", "<|content_model_end_sampling|>", "<|ifm|im_end|>")
"""Texts of tokens that end a sample in SGLang although no config says so."""


def end_tokens(model_path: str, tokenizer: Tokenizer, *, trust_remote_code: bool) -> frozenset[int]:
    """Tokens that end a sample in SGLang.

    Those of the model's config, its generation config and its tokenizer, and SGLang's own list.
    """
    from transformers import AutoConfig, GenerationConfig

    found = {tokenizer.eos_token_id}
    found |= {
        i for i, one in tokenizer.added_tokens_decoder.items() if one.content in _FURTHER_ENDS
    }
    for load in (
        partial(AutoConfig.from_pretrained, trust_remote_code=trust_remote_code),
        GenerationConfig.from_pretrained,
    ):
        try:
            named = getattr(load(model_path), "eos_token_id", None)
        except (OSError, ValueError, KeyError):
            continue
        found |= set(named) if isinstance(named, list | tuple | set) else {named}
    return frozenset(token for token in found if token is not None)


ZERO_WIDTH_SPACE = "\u200b"
_MARK = re.compile("<[|\uff5c].*[|\uff5c]>", re.DOTALL)
"""Marks between turns that some models do not list as special tokens. Other unlisted ones (<think>,
<tool_call>, HTML, runs of spaces) are ordinary text."""


class PlainWords:
    """Keeps text from being read as a tokenizer's marks between turns.

    A chat template writes the marks as text, so a user's or a tool's `<|im_end|>` would become the
    token that ends a turn. An invisible character is inserted into such text; all other text stays
    as it is, byte for byte.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        marks = {
            token_id: token.content
            for token_id, token in tokenizer.added_tokens_decoder.items()
            if token.content and (token.special or _MARK.fullmatch(token.content))
        }
        self._ids = frozenset(marks)
        longest_first = sorted(marks.values(), key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        self._spelled: dict[str, str] = {}

    def of(self, text: str) -> str:
        """`text` without marks."""
        while self._pattern.search(text):  # a removal can form a new mark
            text = self._pattern.sub(lambda found: self._spell(found[0]), text)
        return text

    def within(self, value: Any) -> Any:
        """The same for all strings of a JSON value, keys included."""
        match value:
            case str():
                return self.of(value)
            case Mapping():
                return {self.of(str(key)): self.within(one) for key, one in value.items()}
            case list() | tuple():
                return [self.within(one) for one in value]
            case _:
                return value

    def _spell(self, mark: str) -> str:
        """The closest spelling in which the tokenizer sees no mark."""
        if mark not in self._spelled:
            ways = [
                f"{mark[0]}{ZERO_WIDTH_SPACE}{mark[1:]}",
                f"{mark[0]} {mark[1:]}",  # for a tokenizer that drops invisible characters
                " ".join(mark),
            ]
            self._spelled[mark] = next((way for way in ways if self._is_plain(way)), "")
        return self._spelled[mark]

    def _is_plain(self, text: str) -> bool:
        if self._pattern.search(text):
            return False
        return self._ids.isdisjoint(self._tokenizer.encode(text, add_special_tokens=False))
