"""Reads the fields of a request's JSON body; whatever is wrong is told by the field's name."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from rollout_pool.endpoint.errors import refuse

T = TypeVar("T")


class Fields:
    """One JSON object. Null is the same as a field left out, as in OpenAI's API."""

    def __init__(self, values: object, path: str = "") -> None:
        self.path = path
        if not isinstance(values, Mapping):
            raise refuse(path or "body", f"must be an object, not {_kind(values)}")
        self._values: Mapping[str, Any] = values

    def name(self, key: str) -> str:
        return f"{self.path}.{key}" if self.path else key

    def has(self, key: str) -> bool:
        return self._values.get(key) is not None

    def only(self, *allowed: str) -> None:
        """Refuses fields that nobody here knows: ignoring one could change what it promises."""
        for key in self._values:
            if key not in allowed and self.has(key):
                raise refuse(self.name(key), "is not supported here; leave it out")

    def text(self, key: str, default: str | None = None) -> str:
        return self._typed(key, str, "a string", default)

    def flag(self, key: str, default: bool) -> bool:
        return self._typed(key, bool, "true or false", default)

    def number(self, key: str, default: float) -> float:
        value = self._values.get(key)
        if value is None:
            return default
        number = math.nan
        if isinstance(value, int | float) and not isinstance(value, bool):
            with contextlib.suppress(OverflowError):  # a whole number that no float holds
                number = float(value)
        if not math.isfinite(number):
            raise refuse(self.name(key), f"must be a number, not {_kind(value)}")
        return number

    def count(self, key: str, default: int, *, at_least: int = 0) -> int:
        value = self._values.get(key)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or value < at_least:
            problem = f"must be a whole number, at least {at_least}, not {shown(value)}"
            raise refuse(self.name(key), problem)
        return value

    def optional_count(self, key: str, *, at_least: int = 0) -> int | None:
        return self.count(key, 0, at_least=at_least) if self.has(key) else None

    def raw(self, key: str) -> Any:
        """The value as it came; None if there is none."""
        return self._values.get(key)

    def inner(self, key: str) -> Fields | None:
        return Fields(self._values[key], self.name(key)) if self.has(key) else None

    def objects(self, key: str) -> list[Fields]:
        """The elements of a list of objects; none if there is no list."""
        values = self._values.get(key)
        if values is None:
            return []
        if not isinstance(values, Sequence) or isinstance(values, str):
            raise refuse(self.name(key), f"must be a list, not {_kind(values)}")
        return [Fields(value, f"{self.name(key)}[{i}]") for i, value in enumerate(values)]

    def must_be(self, key: str, accepted: Sequence[object], why: str) -> None:
        """Refuses a value that is none of `accepted`, for `why`."""
        value = self._values.get(key)
        if value is not None and not any(
            type(value) is type(one) and value == one for one in accepted
        ):
            raise refuse(self.name(key), f"{shown(value)} is not supported: {why}")

    def _typed(self, key: str, kind: type[T], words: str, default: T | None) -> T:
        value = self._values.get(key)
        if value is None:
            if default is None:
                raise refuse(self.name(key), f"is missing: it must be {words}")
            return default
        if not isinstance(value, kind):
            raise refuse(self.name(key), f"must be {words}, not {_kind(value)}")
        return value


def check_whole(name: str, value: object) -> None:
    """Refuses halves of characters, which JSON can spell and nothing can write out again."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise refuse(name, "holds half a character (a lone surrogate)") from error


def _kind(value: object) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "a boolean"
        case int() | float():
            return f"the number {shown(value)}"
        case str():
            return "a string"
        case list():
            return "a list"
        case _:
            return "an object"


def shown(value: object) -> str:
    """For a message: however long it is, not all of it."""
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
