"""How a setting that cannot be is refused: the field, its value, the fix."""

from __future__ import annotations


def require(ok: bool, field_name: str, value: object, fix: str) -> None:
    if not ok:
        raise ValueError(f"{field_name}={_without_secrets(value)!r}: {fix}")


def _without_secrets(value: object) -> object:
    """An address without user, password and query; any other value as it is."""
    if not isinstance(value, str) or "://" not in value:
        return value
    scheme, _, rest = value.partition("://")
    place, _, query = rest.partition("?")
    if "@" in query:  # a password may hold anything
        return f"{scheme}://***"
    return f"{scheme}://{place.rpartition('@')[2]}"
