"""Memory for payloads that are received, used for a step, and forgotten.

What malloc hands out for a payload of a megabyte was given back to the kernel after the last one,
and a fault for each of its pages costs many times what it takes to fill it. So payloads lie in
blocks, and a block is used again once nothing refers to any payload in it.
"""

from __future__ import annotations

from collections import deque
from typing import Any
from weakref import finalize

import numpy as np
from numpy.typing import NDArray

from buffer.arena import ALIGNMENT, fresh

BLOCK_BYTES = 8 << 20
BLOCKS_KEPT = 16
"""Free blocks that are kept for the next batch."""


class Blocks:
    """Hands out pieces of blocks. Used in one event loop; pieces may be dropped in any thread."""

    def __init__(self) -> None:
        self._free: deque[NDArray[Any]] = deque(maxlen=BLOCKS_KEPT)
        self._block = memoryview(b"")
        self._used = 0

    def take(self, num_bytes: int) -> memoryview:
        """Writable memory that stays as it is for as long as this object, or a view of it, lives.

        What would fill half a block gets memory of its own.
        """
        if 2 * num_bytes > BLOCK_BYTES:
            return fresh(num_bytes)
        if self._used + num_bytes > len(self._block):
            self._begin_block()
        piece = self._block[self._used : self._used + num_bytes]
        self._used += num_bytes + -num_bytes % ALIGNMENT
        return piece

    def _begin_block(self) -> None:
        memory = self._free.pop() if self._free else np.empty(BLOCK_BYTES, np.uint8)
        lent = memory[:]  # every piece refers to this one, which goes with the last of them
        finalize(lent, self._free.append, memory).atexit = False
        self._block, self._used = lent.data, 0
