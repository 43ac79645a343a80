"""A private folder for Unix sockets, whose paths the kernel limits to 107 bytes."""

from __future__ import annotations

import tempfile
from pathlib import Path

_ROOM = 48
"""Longest TMPDIR that is used: folder and socket have up to 57 bytes more."""
_SHORT = "/tmp"


def make_socket_folder(prefix: str) -> Path:
    """A new folder that only its owner can enter: in TMPDIR, or in /tmp if that is too long.

    Schedulers set TMPDIR to long paths, and the libraries that make sockets do not say that it was
    the cause.
    """
    chosen = tempfile.gettempdir()
    return Path(tempfile.mkdtemp(prefix=prefix, dir=chosen if len(chosen) <= _ROOM else _SHORT))
