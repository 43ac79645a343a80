"""Turns tokens into text as they arrive, and holds back what may yet turn out not to be text."""

from __future__ import annotations

from configs.choices import ToolParser
from rollout_pool.episodes.tokenizer import Tokenizer
from rollout_pool.episodes.tool_calls import OPEN, PYTHON_TAG

_BROKEN = "\ufffd"
_MARKERS = {ToolParser.hermes: OPEN, ToolParser.llama3_json: PYTHON_TAG}
MAX_BROKEN_TOKENS = 8
"""A character has at most four bytes, so what is broken for longer stays broken."""


class TextStream:
    """Text of a growing list of tokens, in pieces that put together give the text of all of them.

    A token can hold a part of a character, and how it is written can depend on the one before. So a
    piece is the difference between two decoded stretches that begin at the same earlier token, and
    waits while it ends within a character.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._start = 0
        """The stretch begins here; its text up to `_told` is out."""
        self._told = 0

    def feed(self, tokens: list[int], *, is_end: bool) -> str:
        """What `tokens`, all that there are so far, add to the text."""
        if len(tokens) <= self._told:
            return ""
        before = self._decode(tokens[self._start : self._told])
        text = self._decode(tokens[self._start :])
        waits = text.endswith(_BROKEN) and len(tokens) - self._told < MAX_BROKEN_TOKENS
        if waits and not is_end:
            return ""
        self._start, self._told = self._told, len(tokens)
        return text[len(before) :]

    def _decode(self, tokens: list[int]) -> str:
        return self._tokenizer.decode(tokens, skip_special_tokens=True)


class ContentStream:
    """The same without tool calls: lets text through up to the first one.

    White space waits for what follows it: around calls it is no content.
    """

    def __init__(self, tokenizer: Tokenizer, parser: ToolParser) -> None:
        self.told = ""
        """All that was let through."""
        self._tokenizer = tokenizer
        self._texts = TextStream(tokenizer)
        self._parser = parser
        self._marker = _MARKERS[parser]
        self._text = ""
        self._num_seen = 0
        self._is_over = False

    def feed(self, tokens: list[int], *, is_end: bool) -> str:
        """What `tokens`, all that there are so far, add to the content."""
        if self._is_over:
            return ""
        end = self._marker_token(tokens)
        self._text += self._texts.feed(tokens[:end], is_end=is_end or self._is_over)
        text = self._text.lstrip()
        out = text[: self._safe_length(text)].rstrip()[len(self.told) :]
        self.told += out
        return out

    def rest(self, content: str) -> str:
        """What is missing of `content`, the whole of it as it was found at the end."""
        if not content.startswith(self.told):
            content = content.lstrip()
        return content[len(self.told) :] if content.startswith(self.told) else ""

    def _marker_token(self, tokens: list[int]) -> int:
        """Where a call begins with a token of its own, which the text leaves out if it is special;
        else the number of tokens."""
        for place in range(self._num_seen, len(tokens)):
            if self._tokenizer.decode([tokens[place]]) == self._marker:
                self._is_over = True
                return place
        self._num_seen = len(tokens)
        return len(tokens)

    def _safe_length(self, text: str) -> int:
        if self._parser is ToolParser.llama3_json and text.startswith("{"):
            return 0
        if (place := text.find(self._marker)) >= 0:
            return place
        begun = (n for n in range(len(self._marker) - 1, 0, -1) if text.endswith(self._marker[:n]))
        return len(text) - next(begun, 0)
