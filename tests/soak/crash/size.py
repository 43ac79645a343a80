"""Size of the soak: short as in CI, or as set by LEASH_SOAK_*."""

from __future__ import annotations

import os


def size(name: str, short: int) -> int:
    """The integer in LEASH_SOAK_<name>, or CI's default."""
    return int(os.environ.get(f"LEASH_SOAK_{name}", short))


def minutes(short: float) -> float:
    return float(os.environ.get("LEASH_SOAK_MINUTES", short))
