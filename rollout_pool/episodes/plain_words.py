"""Keeps words from being taken for the marks between turns.

A chat template writes the marks as text, so a user's or a tool's `<|im_end|>` would become the very
token that ends a turn, and could go on with a turn of somebody else's. Such words are spelled with
an invisible character in them; all other text stays byte for byte what it is.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from rollout_pool.episodes.tokenizer import Tokenizer

ZERO_WIDTH_SPACE = "\u200b"
_MARK = re.compile("<[|\uff5c].*[|\uff5c]>", re.DOTALL)
"""Some models' marks are not listed as special tokens. Others that are not (<think>, <tool_call>,
HTML, runs of spaces) are words that anybody may use."""


class PlainWords:
    """Of one tokenizer."""

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
        """`text` without a mark in it."""
        while self._pattern.search(text):  # what is left out can bring others together
            text = self._pattern.sub(lambda found: self._spell(found[0]), text)
        return text

    def within(self, value: Any) -> Any:
        """The same for all texts of a JSON value, names included."""
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
        """Nearly as it was, in whichever way the tokenizer sees no mark in it."""
        if mark not in self._spelled:
            ways = [
                f"{mark[0]}{ZERO_WIDTH_SPACE}{mark[1:]}",
                f"{mark[0]} {mark[1:]}",  # for a tokenizer that leaves invisible characters out
                " ".join(mark),
            ]
            self._spelled[mark] = next((way for way in ways if self._is_plain(way)), "")
        return self._spelled[mark]

    def _is_plain(self, text: str) -> bool:
        if self._pattern.search(text):
            return False
        return self._ids.isdisjoint(self._tokenizer.encode(text, add_special_tokens=False))
