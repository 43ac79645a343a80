"""Parses replies of scripts and server. Any text may have been overwritten by other clients."""

from __future__ import annotations

import math
from collections.abc import Sequence

from buffer.redis.client import DamagedRunError


def readable(raw: bytes) -> str:
    """Text from the server; bytes that are not UTF-8 (not written by us) become U+FFFD."""
    return raw.decode(errors="replace")


def is_number(text: str | bytes) -> bool:
    """Whether the text is an integer of at most 20 characters."""
    digits = text.lstrip(b"-") if isinstance(text, bytes) else text.lstrip("-")
    return len(text) <= 20 and digits.isdigit() and digits.isascii()


def number(text: str | bytes | None, otherwise: int = 0) -> int:
    """The text as an integer, or `otherwise` if it is none."""
    return int(text) if text is not None and is_number(text) else otherwise


def setting_number(name: str, text: str) -> float:
    """A setting of the run as a number. Raises DamagedRunError if it is not one."""
    try:
        found = float(text)
    except ValueError:
        found = math.nan
    if not abs(found) <= 2**53:
        raise DamagedRunError(
            f"the run's setting {name} in Redis is {text[:40]!r}, which is not a number: something "
            "other than Leash wrote it. Launch the run under another run.name"
        )
    return found


def texts(items: Sequence[bytes]) -> tuple[str, ...]:
    return tuple(map(readable, items))


def optional_int(text: bytes | None) -> int | None:
    """An integer, or None for the empty text."""
    return int(text) if text else None


def parse_renumbered(flat: Sequence[bytes]) -> dict[str, tuple[int, ...]]:
    """Reads [id, 'version:tokens version:tokens', id, ...].

    Versions that cannot be parsed become an empty tuple, which matches no payload.
    """
    return {
        readable(group_id): _renumbered(versions)
        for group_id, versions in zip(flat[::2], flat[1::2], strict=True)
    }


def _renumbered(versions: bytes) -> tuple[int, ...]:
    try:
        return tuple(int(part.split(b":")[0]) for part in versions.split())
    except ValueError:
        return ()
