"""Pages of host memory for tensors, which GPUs can be allowed to copy from and to directly."""

from __future__ import annotations

import contextlib
import logging
import mmap
from functools import cache
from typing import Any

import torch
from torch import Tensor

_PORTABLE = 1
"""cudaHostRegisterPortable: pinned for every GPU of the process."""
_log = logging.getLogger(__name__)


class HostMemory(mmap.mmap):
    """Anonymous pages, or those of a file, that live as long as a tensor uses them."""

    # torch's own allocator of pinned memory rounds up to a power of two: up to twice as much.

    _pinned_at: int | None = None

    def __new__(cls, num_bytes: int, file: int | None = None) -> HostMemory:
        """`file`: a descriptor that is open for reading and writing; writes reach the file."""
        if file is not None:
            return super().__new__(cls, file, num_bytes)
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        return super().__new__(cls, -1, max(1, num_bytes), flags=flags)

    def tensor(self) -> Tensor:
        """All of it as flat uint8."""
        return torch.frombuffer(self, dtype=torch.uint8)

    def pin(self) -> None:
        """Lock the pages for copies by GPUs. Where the system refuses, it is logged once, and
        copies take a way that is several times slower."""
        address = self.tensor().data_ptr()
        try:
            torch.cuda.check_error(_cudart().cudaHostRegister(address, len(self), _PORTABLE))
        except RuntimeError as error:
            _forget_error()
            _say_refused(str(error))
        else:
            self._pinned_at = address

    def __del__(self) -> None:
        if self._pinned_at is not None:
            # At exit the process may have left the GPU already.
            with contextlib.suppress(Exception):
                _cudart().cudaHostUnregister(self._pinned_at)


def _cudart() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


def _forget_error() -> None:
    """CUDA keeps the error of a thread, and torch would blame the thread's next kernel for it."""
    with contextlib.suppress(RuntimeError):
        torch.ones(1, device="cuda")


@cache
def _say_refused(why: str) -> None:
    _log.warning(
        "host memory cannot be pinned for the GPU (%s): copies of weights and training states are "
        "slower; raise the limit of locked memory (ulimit -l, in a container --ulimit memlock=-1)",
        why,
    )
