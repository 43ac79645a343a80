"""What a setting may be, said beside its field, and the one checker of it.

    num_steps: int = field(default=100, metadata=at_least(1))

`docs/configuration.md` shows the bound in the setting's type.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping
from dataclasses import Field, dataclass, fields
from typing import Any, Protocol

from configs.rules import require

_KEY = "bound"
LARGEST_COUNT = 10**9
"""Nothing here is counted so far; larger numbers overflow somewhere below."""
LARGEST_SIZE = 2**50
"""In bytes."""
LONGEST_S = 1e6
"""11 days: in milliseconds it still fits 32 bits, which some waits are kept in."""


class Bound(Protocol):
    """What values a field admits, besides null where its type has that."""

    @property
    def words(self) -> str:
        """As the end of "must be ..."."""
        ...

    @property
    def short(self) -> str:
        """The same for the documentation, without the limits that hold for every count."""
        ...

    def admits(self, value: Any) -> bool: ...


@dataclass(kw_only=True, slots=True, frozen=True)
class Range:
    """Finite numbers from `least` to `most`, or beyond `above` and below `below`."""

    least: float = -math.inf
    above: float = -math.inf
    most: float = math.inf
    below: float = math.inf
    also: float | None = None
    """One value outside of it that has a meaning of its own."""

    def admits(self, value: Any) -> bool:
        if value == self.also:
            return True
        return (
            math.isfinite(value)
            and self.least <= value <= self.most
            and self.above < value < self.below
        )

    @property
    def words(self) -> str:
        if math.isfinite(self.least) and math.isfinite(self.most):
            text = f"{self.least:.15g} to {self.most:.15g}"
        else:
            limits = {
                "at least": self.least,
                "above": self.above,
                "at most": self.most,
                "below": self.below,
            }
            given = [f"{word} {limit:g}" for word, limit in limits.items() if math.isfinite(limit)]
            text = " and ".join(given) or "finite"
        return text if self.also is None else f"{text}, or {self.also:g}"

    @property
    def short(self) -> str:
        if self.most in (LARGEST_COUNT, LARGEST_SIZE):
            return dataclasses.replace(self, most=math.inf).words
        return self.words


@dataclass(kw_only=True, slots=True, frozen=True)
class Pattern:
    """Texts that `pattern` matches as a whole; each of them, for a list."""

    pattern: str
    words: str

    @property
    def short(self) -> str:
        return self.words

    def admits(self, value: Any) -> bool:
        texts = value if isinstance(value, list) else [value]
        return all(re.fullmatch(self.pattern, text) for text in texts)


def bound_of(field: Field[Any]) -> Bound | None:
    bound: Bound | None = field.metadata.get(_KEY)
    return bound


def check_bounds(section: Any, name: str) -> None:
    """Raises ValueError naming the first setting of `section`, called `name`, out of its bound."""
    for field in fields(section):
        bound, value = bound_of(field), getattr(section, field.name)
        if bound is not None and value is not None:
            require(bound.admits(value), f"{name}.{field.name}", value, f"must be {bound.words}")


def within(
    least: float = -math.inf,
    most: float = math.inf,
    *,
    above: float = -math.inf,
    below: float = math.inf,
    also: float | None = None,
) -> Mapping[str, Bound]:
    """Metadata of a numeric field."""
    return {_KEY: Range(least=least, most=most, above=above, below=below, also=also)}


def at_least(least: int) -> Mapping[str, Bound]:
    """Metadata of a field that counts something."""
    return within(least, LARGEST_COUNT)


def matching(pattern: str, words: str) -> Mapping[str, Bound]:
    """Metadata of a field that holds text."""
    return {_KEY: Pattern(pattern=pattern, words=words)}


FINITE = within()
POSITIVE = within(above=0)
NOT_NEGATIVE = within(0)
SHARE = within(0, 1)
NUM_BYTES = within(1, LARGEST_SIZE)
SECONDS = within(0.001, LONGEST_S)
PORT = within(0, 65535)
SEED = within(0, 2**31 - 1)
NOT_EMPTY = matching(r"(?s).*\S.*", "not empty")
CODE_PATTERN = r"(?s:.+):[^\W\d][\w.]*"
CODE = matching(CODE_PATTERN, "module:name or file.py:name")
