"""Which versions survive a rollback, and the number each has afterwards (pure).

A trainer that restores a checkpoint of version `last` publishes it under a higher number `resume`,
for a number is never used again for other weights. What was sampled at or below `last` survives and
keeps its distance; what lies between was made by weights that no longer exist:

    0 .. last          -> moved up by resume - last
    last+1 .. resume-1 -> gone
    resume ..          -> as it is

The scripts apply the same rule at the server (scripts/lineage.lua).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class Gap(NamedTuple):
    """One rollback: version `last` became `resume`, and nothing between them is valid."""

    last: int
    resume: int


def renumber_version(version: int, gaps: Iterable[Gap]) -> int | None:
    """The number of `version` after these rollbacks, in their order; None if it is gone."""
    for gap in gaps:
        if version <= gap.last:
            version += gap.resume - gap.last
        elif version < gap.resume:
            return None
    return version


def parse_gaps(text: str) -> tuple[Gap, ...]:
    """Reads 'last:resume last:resume', as the settings hold it."""
    return tuple(Gap(*map(int, pair.split(":"))) for pair in text.split())
