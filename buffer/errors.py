"""What the buffer raises besides ValueError and TimeoutError."""

from __future__ import annotations


class BufferFullError(RuntimeError):
    """A push found the buffer full, and `buffer.on_full=error` says not to wait."""


class NotOwnerError(RuntimeError):
    """The caller's lineage is no longer the buffer's: another trainer took over.

    Nothing was changed. The caller is a zombie and should end.
    """
