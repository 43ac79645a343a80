"""How a setting that cannot be is refused: the field, its value, the fix."""

from __future__ import annotations

import re


def require(ok: bool, field_name: str, value: object, fix: str) -> None:
    if not ok:
        raise ValueError(f"{field_name}={_without_secrets(value)!r}: {fix}")


def _without_secrets(value: object) -> object:
    """An address without user, password and query; any other value as it is."""
    if isinstance(value, str) and "://" in value:
        return re.sub(r"//[^/]*@", "//", value).partition("?")[0]
    return value
