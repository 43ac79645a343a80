"""Refuses what cannot have room before any work is spent on it.

To count the tokens of some MiB of text takes seconds, in which the event loop that the engines are
driven from must not stand still.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from rollout_pool.endpoint.errors import ApiError
from rollout_pool.endpoint.sessions import Session

CHARACTERS_PER_TOKEN = 16
"""Of a text as a whole no tokenizer has so many, however long its longest tokens are."""
LARGE_BODY_BYTES = 100_000
"""A larger request is read and tokenized in a thread."""

T = TypeVar("T")


def check_characters(session: Session, number: int, param: str) -> None:
    """Raises ApiError for a conversation of so many characters that it can't have room."""
    most = session.serving.max_tokens
    if number <= CHARACTERS_PER_TOKEN * most:
        return
    session.is_full = True
    raise ApiError(
        400,
        f"This model's maximum context length is {most} tokens (rollout.max_prompt_tokens + "
        f"rollout.max_response_tokens). The conversation has {number} characters, more than "
        f"{CHARACTERS_PER_TOKEN} for each of them",
        param=param,
        code="context_length_exceeded",
    )


async def in_thread_if_large(num_bytes: int, work: Callable[[], T]) -> T:
    """The result of `work` on a request of so many bytes."""
    return await asyncio.to_thread(work) if num_bytes > LARGE_BODY_BYTES else work()
