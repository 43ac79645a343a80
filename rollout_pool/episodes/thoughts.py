"""A model's thoughts, `<think>...</think>` at the beginning of its text. Pure.

Where a template's prompt ends with `<think>`, the text begins within the thoughts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from rollout_pool.episodes.conversation import Message
from rollout_pool.sampling.stop import safe_length

THINK, END_OF_THINK = "<think>", "</think>"


def split_thoughts(text: str) -> tuple[str, str]:
    """Thoughts with their marks, and content."""
    end = text.rfind(END_OF_THINK)
    if end >= 0:
        end += len(END_OF_THINK)
        return text[:end], text[end:]
    return (text, "") if text.lstrip().startswith(THINK) else ("", text)


def join_thoughts(thoughts: str, content: str) -> str:
    """One text of both."""
    return f"{THINK}\n{thoughts}\n{END_OF_THINK}\n\n{content}" if thoughts else content


def without_thoughts(messages: Sequence[Message]) -> list[Message]:
    """The conversation as reasoning models are shown it: without thoughts before its last question.

    Those behind it stay: between the calls of tools a model goes on with its thoughts.
    """
    asked = max((place for place, one in enumerate(messages) if one.role == "user"), default=0)
    return [
        replace(one, content=divide(one.content)[1])
        if one.role == "assistant" and place < asked
        else one
        for place, one in enumerate(messages)
    ]


def divide(text: str, *, are_open: bool = False) -> tuple[str, str]:
    """Thoughts without their marks, and content. See ThoughtStream."""
    return ThoughtStream(are_open=are_open).feed(text, is_end=True)


class ThoughtStream:
    """Divides a growing text into thoughts and content. White space around thoughts is neither.

    Unlike in `split_thoughts` the first `</think>` ends them: what has been sent as content stays.
    """

    def __init__(self, *, are_open: bool) -> None:
        """`are_open`: the prompt opened the thoughts."""
        self._thinks: bool | None = None
        """Unknown until the text has begun."""
        self._are_open = are_open
        self._is_start = True
        """White space is left out until something else follows."""
        self._held = ""

    def feed(self, text: str, *, is_end: bool) -> tuple[str, str]:
        """The new thoughts and the new content."""
        text, self._held = self._held + text, ""
        if self._thinks is None:
            begun = text.lstrip()
            if not is_end and THINK.startswith(begun):
                self._held = text
                return "", ""
            self._thinks = self._are_open or begun.startswith(THINK)
            self._is_start = self._thinks
            if self._thinks:
                text = begun.removeprefix(THINK)
        thoughts = ""
        if self._thinks:
            thoughts, mark, rest = text.partition(END_OF_THINK)
            if not mark and not is_end:
                thoughts = text[: safe_length(text, (END_OF_THINK,))]
            thoughts = thoughts.rstrip()
            self._held = "" if mark else text[len(thoughts) :]
            thoughts, text = self._begun(thoughts), rest
            if mark:
                self._thinks, self._is_start = False, True
        return thoughts, self._begun(text)

    def _begun(self, text: str) -> str:
        if self._is_start:
            text = text.lstrip()
            self._is_start = not text
        return text
