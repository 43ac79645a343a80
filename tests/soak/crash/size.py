"""How long the soak runs: short as CI runs it, or as large as LEASH_SOAK_* ask for."""

from __future__ import annotations

import os


def size(name: str, short: int) -> int:
    """The whole number in LEASH_SOAK_<name>, else the one that CI uses."""
    return int(os.environ.get(f"LEASH_SOAK_{name}", short))


def minutes(short: float) -> float:
    return float(os.environ.get("LEASH_SOAK_MINUTES", short))
