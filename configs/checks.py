"""What a setting may be: a bound beside its field, the rules of its section, and their one checker.

    class TrainerConfig(Section):
        SECTION = "trainer"
        num_steps: int = field(default=100, metadata=at_least(1))

        def rules(self) -> Iterator[Rule]:
            yield Rule(self.groups_per_step >= self.ranks, "groups_per_step", "every rank ...")

`docs/configuration.md` shows the bound in the setting's type.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from enum import Enum
from operator import attrgetter
from typing import Any, ClassVar, NamedTuple

_KEY, _OWN = "bound", object()
LARGEST_COUNT = 10**9
"""Nothing here is counted so far; larger numbers overflow somewhere below."""
LARGEST_SIZE = 2**50
"""In bytes."""
LONGEST_S = 1e6
"""11 days: in milliseconds it still fits 32 bits, which some waits are kept in."""


class Bound(NamedTuple):
    """The values that a field admits, besides null where its type has that."""

    admits: Callable[[Any], bool]
    words: str
    """As the end of "must be ..."."""
    short: str
    """The same for the documentation, without the limits that hold for every count."""


class Rule(NamedTuple):
    """Something that must hold between the settings of a section, or of several."""

    holds: bool
    setting: str
    """Its name within the section; several with a slash between them."""
    fix: str
    value: object = _OWN
    """To be shown; by default what the setting is."""


class Section:
    """Base of each section: raises ValueError naming the first setting that may not be so."""

    SECTION: ClassVar[str] = ""
    """Its name, as on the command line."""

    def __post_init__(self) -> None:
        self.hold(self._bounds())
        self.hold(self.rules())

    def rules(self) -> Iterator[Rule]:
        """Those that join its settings; each may rely on the bounds and on the rules before it."""
        return iter(())

    def hold(self, rules: Iterable[Rule]) -> None:
        """Raises ValueError for the first that is broken: the setting, its value, the fix."""
        prefix = f"{self.SECTION}." if self.SECTION else ""
        for rule in rules:
            if not rule.holds:
                value = rule.value
                if value is _OWN:
                    value = attrgetter(*rule.setting.split("/"))(self)
                raise ValueError(f"{prefix}{rule.setting}={_shown(value)!r}: {rule.fix}")

    def _bounds(self) -> Iterator[Rule]:
        for field in dataclasses.fields(self):  # type: ignore[arg-type]  # its classes are such
            bound, value = bound_of(field), getattr(self, field.name)
            if bound is not None and value is not None:
                yield Rule(bound.admits(value), field.name, f"must be {bound.words}")


def _shown(value: object) -> object:
    """A choice by its name; an address without user, password and query."""
    if isinstance(value, Enum):
        return value.name
    if not isinstance(value, str) or "://" not in value:
        return value
    scheme, _, rest = value.partition("://")
    place, _, query = rest.partition("?")
    if "@" in query:  # a password may hold anything
        return f"{scheme}://***"
    return f"{scheme}://{place.rpartition('@')[2]}"


def bound_of(field: dataclasses.Field[Any]) -> Bound | None:
    bound: Bound | None = field.metadata.get(_KEY)
    return bound


def within(
    least: float = -math.inf,
    most: float = math.inf,
    *,
    above: float = -math.inf,
    below: float = math.inf,
    also: float | None = None,
) -> Mapping[str, Bound]:
    """Metadata of a finite number from `least` to `most`, or beyond `above` and below `below`;
    `also` is one value outside of it that has a meaning of its own."""

    def admits(value: float) -> bool:
        is_inside = least <= value <= most and above < value < below
        return value == also or (math.isfinite(value) and is_inside)

    def words(most: float) -> str:
        if math.isfinite(least) and math.isfinite(most):
            text = f"{least:.15g} to {most:.15g}"
        else:
            limits = {"at least": least, "above": above, "at most": most, "below": below}
            given = [f"{word} {limit:g}" for word, limit in limits.items() if math.isfinite(limit)]
            text = " and ".join(given) or "finite"
        return text if also is None else f"{text}, or {also:g}"

    is_usual = most in (LARGEST_COUNT, LARGEST_SIZE)
    return {_KEY: Bound(admits, words(most), words(math.inf if is_usual else most))}


def at_least(least: int) -> Mapping[str, Bound]:
    """Metadata of a field that counts something."""
    return within(least, LARGEST_COUNT)


def matching(pattern: str, words: str) -> Mapping[str, Bound]:
    """Metadata of a text that `pattern` matches as a whole, or of a list of such."""

    def admits(value: str | list[str]) -> bool:
        texts = value if isinstance(value, list) else [value]
        return all(re.fullmatch(pattern, text) for text in texts)

    return {_KEY: Bound(admits, words, words)}


FINITE = within()
POSITIVE = within(above=0)
NOT_NEGATIVE = within(0)
SHARE = within(0, 1)
NUM_BYTES = within(1, LARGEST_SIZE)
SECONDS = within(0.001, LONGEST_S)
MAX_PORT = 65535
PORT = within(0, MAX_PORT)
SEED = within(0, 2**31 - 1)
NOT_EMPTY = matching(r"(?s).*\S.*", "not empty")
CODE_PATTERN = r"(?s:.+):[^\W\d][\w.]*"
CODE = matching(CODE_PATTERN, "module:name or file.py:name")
