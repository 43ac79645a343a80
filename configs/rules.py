"""How a setting that cannot be is refused: the field, its value, the fix."""

from __future__ import annotations


def require(ok: bool, field_name: str, value: object, fix: str) -> None:
    if not ok:
        raise ValueError(f"{field_name}={value!r}: {fix}")


def at_least(minimum: float, section: str, **fields: float) -> None:
    for name, value in fields.items():
        require(value >= minimum, f"{section}.{name}", value, f"must be at least {minimum:g}")
