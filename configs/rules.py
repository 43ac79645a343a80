"""How a setting that cannot be is refused: the field, its value, the fix."""

from __future__ import annotations


def require(ok: bool, field_name: str, value: object, fix: str) -> None:
    if not ok:
        raise ValueError(f"{field_name}={value!r}: {fix}")
