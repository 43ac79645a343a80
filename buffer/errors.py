"""Errors of the buffer besides ValueError and TimeoutError."""

from __future__ import annotations


class BufferFullError(RuntimeError):
    """A push found the buffer full, and `buffer.on_full=error` forbids waiting."""


class RunPausedError(RuntimeError):
    """No group begins and no batch is formed until the run goes on (`buffer.paused`)."""


class NotOwnerError(RuntimeError):
    """Another trainer took over the buffer from the caller's lineage.

    Nothing was changed. The caller is a zombie and should exit.
    """


def taken_over(what: str) -> NotOwnerError:
    """`what` says which trainer wanted to do what."""
    return NotOwnerError(f"{what}, but another trainer took this buffer over; end this one")
