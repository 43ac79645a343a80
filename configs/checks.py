"""Validation of settings: a bound beside each field, the rules of its section, and one checker.

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
from functools import cache
from itertools import chain
from operator import attrgetter
from typing import Any, ClassVar, NamedTuple, TypeVar, get_args, get_type_hints

_KEY, _LIVE, _OWN = "bound", "live", object()
_NULL = "null"
LARGEST_COUNT = 10**9
"""No setting needs more, and larger numbers overflow in libraries."""
LARGEST_SIZE = 2**50
"""In bytes."""
LONGEST_S = 1e6
"""11 days: in milliseconds it still fits the 32 bits of some waits."""


class Bound(NamedTuple):
    """The valid values of a field, besides null if its type allows that."""

    admits: Callable[[Any], bool]
    words: str
    """The end of "must be ..."."""
    short: str
    """The same for the documentation, without limits that hold for every count."""


class Rule(NamedTuple):
    """A constraint between settings of one or several sections."""

    holds: bool
    setting: str
    """Its name within the section; several are joined by slashes."""
    fix: str
    value: object = _OWN
    """The value to show; by default the setting's."""


class Section:
    """Base of each section: raises ValueError naming the first invalid setting."""

    SECTION: ClassVar[str] = ""
    """Its name, as on the command line."""

    def __post_init__(self) -> None:
        self.enforce(self._bounds())
        self.enforce(self.rules())

    def rules(self) -> Iterator[Rule]:
        """Constraints between its settings; each may rely on the bounds and on earlier rules."""
        return iter(())

    def enforce(self, rules: Iterable[Rule]) -> None:
        """Raises ValueError for the first broken rule: the setting, its value, the fix."""
        prefix = f"{self.SECTION}." if self.SECTION else ""
        for rule in rules:
            if not rule.holds:
                value = rule.value
                if value is _OWN:
                    value = attrgetter(*rule.setting.split("/"))(self)
                raise ValueError(f"{prefix}{rule.setting}={_shown(value)!r}: {rule.fix}")

    def _bounds(self) -> Iterator[Rule]:
        for field in dataclasses.fields(self):  # type: ignore[arg-type]  # every subclass is one
            bound, value = bound_of(field), getattr(self, field.name)
            if bound is not None and value is not None:
                yield Rule(bound.admits(value), field.name, f"must be {bound.words}")


@dataclasses.dataclass(kw_only=True, slots=True)
class FunctionConfig(Section):
    """Base of the settings of a function that the user chooses by its kind, such as a loss.

    A kind's class has the settings that its function reads. A table in the family's file, such as
    `LOSSES`, has the class of each kind; kinds that read the same settings share one. A user's own
    function has its family's class with `params`, as `OwnLoss`.
    """

    kind: str
    """Its name, or a user's as `file.py:name`."""

    @property
    def is_own(self) -> bool:
        """It is a user's function; ours have no colon."""
        return ":" in self.kind


S = TypeVar("S", bound=Section)


def _shown(value: object) -> object:
    """An Enum member as its name; an address without user, password and query."""
    if isinstance(value, Enum):
        return value.name
    if not isinstance(value, str) or "://" not in value:
        return value
    scheme, _, rest = value.partition("://")
    place, _, query = rest.partition("?")
    if "@" in query:  # a password may contain anything
        return f"{scheme}://***"
    return f"{scheme}://{place.rpartition('@')[2]}"


def bound_of(field: dataclasses.Field[Any]) -> Bound | None:
    bound: Bound | None = field.metadata.get(_KEY)
    return bound


def live(bound: Mapping[str, Any] | None = None) -> Mapping[str, Any]:
    """Metadata of a field with this bound that may change while the run is going on."""
    return {**(bound or {}), _LIVE: True}


def is_live(field: dataclasses.Field[Any]) -> bool:
    return _LIVE in field.metadata


def default_of(field: dataclasses.Field[Any]) -> object:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


_types: Callable[[type], dict[str, Any]] = cache(get_type_hints)


def live_names(section: type[Section]) -> tuple[str, ...]:
    """Its fields that may change while the run is going on, and those of the sections in it."""
    fields = dataclasses.fields(section)  # type: ignore[arg-type]  # every subclass is one
    kinds = [kind for kind in _types(section).values() if isinstance(kind, type)]
    inner = [live_names(kind) for kind in kinds if issubclass(kind, Section)]
    return (*(field.name for field in fields if is_live(field)), *chain.from_iterable(inner))


def live_text(value: object) -> str:
    """A live setting as text, for `with_live`."""
    if value is None:
        return _NULL
    return value.name if isinstance(value, Enum) else str(value)


def with_live(section: S, texts: Mapping[str, str]) -> S:
    """The section with these live settings, its own and those of the sections in it. Raises
    ValueError naming one that cannot be read."""
    values: dict[str, object] = {}
    hints, own = _types(type(section)), dict(texts)
    for place in hints:
        if isinstance(inner := getattr(section, place, None), Section):
            of_inner = {n: own.pop(n) for n in live_names(type(inner)) if n in own}
            values[place] = with_live(inner, of_inner)
    for name, text in own.items():
        try:
            values[name] = _read_live(hints[name], text)
        except (KeyError, ValueError):
            what = f"{section.SECTION}.{name}={text!r}"
            raise ValueError(f"{what}: the run's Redis holds a value that cannot be read") from None
    return dataclasses.replace(section, **values)  # type: ignore[type-var]


def _read_live(annotation: Any, text: str) -> object:
    kind, *others = get_args(annotation) or (annotation,)
    if others and text == _NULL:
        return None
    if kind is bool:
        return {"True": True, "False": False}[text]
    return kind[text] if issubclass(kind, Enum) else kind(text)


def within(
    least: float = -math.inf,
    most: float = math.inf,
    *,
    above: float = -math.inf,
    below: float = math.inf,
    also: float | None = None,
) -> Mapping[str, Bound]:
    """Metadata of a finite number from `least` to `most`, or above `above` and below `below`;
    `also` is one valid value outside that range, with a special meaning."""

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
    """Metadata of a count."""
    return within(least, LARGEST_COUNT)


def matching(pattern: str, words: str) -> Mapping[str, Bound]:
    """Metadata of a text that `pattern` matches fully, or of a list of such texts."""

    def admits(value: str | list[str]) -> bool:
        texts = value if isinstance(value, list) else [value]
        return all(re.fullmatch(pattern, text) for text in texts)

    return {_KEY: Bound(admits, words, words)}


FINITE = within()
POSITIVE = within(above=0)
NOT_NEGATIVE = within(0)
FRACTION = within(0, 1)
NUM_BYTES = within(1, LARGEST_SIZE)
SECONDS = within(0.001, LONGEST_S)
MAX_PORT = 65535
PORT = within(0, MAX_PORT)
SEED = within(0, 2**31 - 1)
NOT_EMPTY = matching(r"(?s).*\S.*", "not empty")
CODE_PATTERN = r"(?s:.+):[^\W\d][\w.]*"
CODE = matching(CODE_PATTERN, "module:name or file.py:name")
VARIABLE = matching("[A-Za-z_][A-Za-z0-9_]*", "the name of an environment variable, not its value")
