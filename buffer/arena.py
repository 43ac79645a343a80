"""Memory for what is made, sent and forgotten, again and again.

What malloc hands out for a payload of a megabyte was given back to the kernel after the last one.
Each of its pages then costs a fault, which takes twenty times as long as to fill it.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

Allocate = Callable[[int], memoryview]
"""Writable memory of so many bytes; what is in it is left from before."""

ALIGNMENT = 64


def fresh(num_bytes: int) -> memoryview:
    """Memory of its own."""
    return np.empty(num_bytes, np.uint8).data


class Arena:
    """One block that is given out piece by piece, until `clear` makes all of it free again."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        """What is larger is not kept for the next time."""
        self._block = fresh(0)
        self._used = 0
        self._wanted = 0

    def take(self, num_bytes: int) -> memoryview:
        """A piece that is good until the next `clear`; beyond the block it is memory of its own."""
        start = self._used + -self._used % ALIGNMENT
        end = start + num_bytes
        self._wanted += num_bytes + ALIGNMENT
        if end > len(self._block):
            return fresh(num_bytes)
        self._used = end
        return self._block[start:end]

    def clear(self) -> None:
        """Nobody uses the pieces any more. The block grows to what was wanted this time."""
        if len(self._block) < self._wanted <= self._max_bytes:
            self._block = fresh(self._wanted)
        self._used = self._wanted = 0
