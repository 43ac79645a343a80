"""Texts that end a completion, besides the model's own end.

    tokens          [ Let | 's | see | .\n | Obs | erv | ation | : x | y ]    stop "Observation:"
    the completion  [ Let | 's | see | .\n | Obs | erv | ation | : x ]

Engines get no texts (they run without a tokenizer), so the worker looks at what arrives. A
completion keeps the token that completes the text, since the model sampled it; nothing changes in
how any token was drawn, so all stay exact to train on. Tokens behind it count as wasted.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence

Decode = Callable[[Sequence[int]], str]
"""With special tokens, so that a completion may also end at one by its text."""

STOP_STREAM_INTERVAL = 8
"""Tokens between two parts of a response with such texts: those behind its end are wasted."""
CONTEXT = 4
"""Tokens before those that can hold the text: what a token says may depend on the one before."""


def find_stop(
    tokens: Sequence[int], num_seen: int, stop: Sequence[str], decode: Decode
) -> int | None:
    """The number of `tokens` up to the end of the first text of `stop`; None if there is none. The
    first `num_seen` tokens are known to have none."""
    # A token that adds to the text adds at least a byte; and a text, once there, stays.
    reach = max(len(text.encode()) for text in stop) + CONTEXT
    start = max(0, num_seen - reach)
    if first_stop(decode(tokens[start:]), stop) is None:
        return None
    places = range(num_seen + 1, len(tokens) + 1)
    return places[
        bisect_left(
            places, True, key=lambda end: first_stop(decode(tokens[start:end]), stop) is not None
        )
    ]


def first_stop(text: str, stop: Sequence[str]) -> int | None:
    """Where the first of the texts begins in `text`."""
    return min((place for one in stop if (place := text.find(one)) >= 0), default=None)


def before_stop(text: str, stop: Sequence[str]) -> str:
    """`text` up to the first of the texts."""
    return text[: first_stop(text, stop)]


def safe_length(text: str, stop: Sequence[str]) -> int:
    """How much of a growing `text` certainly comes before any of the texts."""
    if (place := first_stop(text, stop)) is not None:
        return place
    begun = (
        size
        for one in stop
        for size in range(min(len(one) - 1, len(text)), 0, -1)
        if text.endswith(one[:size])
    )
    return len(text) - max(begun, default=0)
