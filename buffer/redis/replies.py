"""Replies of scripts, and texts from the server; other clients may have overwritten any of them."""

from __future__ import annotations

import math

import msgspec

from buffer.redis.client import DamagedRunError


class Reply(msgspec.Struct, array_like=True):
    """The array that a script replies with, field by field."""


def readable(raw: bytes) -> str:
    """Text from the server; bytes that are not UTF-8 (not written by us) become U+FFFD."""
    return raw.decode(errors="replace")


def is_number(text: str | bytes) -> bool:
    """Returns whether the text is an integer of at most 20 characters."""
    digits = text.lstrip(b"-") if isinstance(text, bytes) else text.lstrip("-")
    return len(text) <= 20 and digits.isdigit() and digits.isascii()


def number(text: str | bytes | None) -> int:
    """The text as an integer, or 0 if it is none."""
    return int(text) if text is not None and is_number(text) else 0


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
