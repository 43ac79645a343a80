"""Reads what the scripts and the server reply, of which any text may be anything."""

from __future__ import annotations

import math
from collections.abc import Sequence

from buffer.redis.client import DamagedRunError


def readable(raw: bytes) -> str:
    """Text that the server holds. What is no UTF-8 was not written by us, and is shown as such."""
    return raw.decode(errors="replace")


def is_number(text: str | bytes) -> bool:
    """Whether it is a whole number of a size that we write."""
    digits = text.lstrip(b"-") if isinstance(text, bytes) else text.lstrip("-")
    return len(text) <= 20 and digits.isdigit() and digits.isascii()


def number(text: str | bytes | None, otherwise: int = 0) -> int:
    """The whole number that the server holds, or another one where it holds none."""
    return int(text) if text is not None and is_number(text) else otherwise


def setting_number(name: str, text: str) -> float:
    """A setting of the run as a number. Raises DamagedRunError if it is none."""
    try:
        found = float(text)
    except ValueError:
        found = math.nan
    if not abs(found) <= 2**53:
        raise DamagedRunError(
            f"the run's setting {name} in Redis is {text[:40]!r}, which is no number: something "
            "else than Leash wrote it. Launch the run anew under another run.name"
        )
    return found


def texts(items: Sequence[bytes]) -> tuple[str, ...]:
    return tuple(map(readable, items))


def optional_int(text: bytes | None) -> int | None:
    """A number, or None for the empty text by which the scripts say so."""
    return int(text) if text else None


def parse_renumbered(flat: Sequence[bytes]) -> dict[str, tuple[int, ...]]:
    """Reads [id, 'version:tokens version:tokens', id, ...].

    Of versions that cannot be read nothing is left, which fits no payload.
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
