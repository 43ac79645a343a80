"""Staleness arithmetic: how old a token is, and whether it may still be trained.

    staleness(token) = version being trained - version that sampled the token

A group is as old as its oldest trainable token. The scripts apply the same rules at the server;
these functions are the model that they are tested against, and what a worker asks about its groups
in flight.
"""

from __future__ import annotations

from dataclasses import replace

from buffer.types import PromptRef


def staleness(version: int, min_version: int) -> int:
    """Versions by which a group lags whose oldest trainable token was sampled by `min_version`."""
    return version - min_version


def oldest_fresh_version(version: int, max_staleness: int) -> int:
    """The oldest version whose tokens may be trained when `version` is being trained."""
    return version - max_staleness


def is_fresh(version: int, min_version: int, max_staleness: int) -> bool:
    """Whether a group may be trained; also, with the trainer's version now, whether it ever may."""
    return min_version >= oldest_fresh_version(version, max_staleness)


def next_attempt(prompt: PromptRef, max_retries: int) -> PromptRef | None:
    """The prompt to run again after its group went stale; None if it has used up its retries."""
    if prompt.attempt >= max_retries:
        return None
    return replace(prompt, attempt=prompt.attempt + 1)
