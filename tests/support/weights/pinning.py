"""A stand-in for the CUDA runtime, which knows what memory is pinned."""

from __future__ import annotations

import pytest

from tensors import host_memory


class CudaStandIn:
    """`check_error`, `cudaHostRegister` and `cudaHostUnregister` of one process."""

    def __init__(self, refusal: str | None = None) -> None:
        """If `refusal` is given, nothing is pinned, and that is the error."""
        self.pinned: dict[int, int] = {}
        """Sizes by address."""
        self.last_error: str | None = None
        self._refusal = refusal

    def install(self, patch: pytest.MonkeyPatch) -> CudaStandIn:
        patch.setattr(host_memory, "_cudart", lambda: self)
        patch.setattr(host_memory, "_forget_error", self._forget_error)
        patch.setattr("torch.cuda.check_error", self._check_error)
        return self

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:
        assert flags == 1
        self.last_error = self._refusal
        if self._refusal is None:
            self.pinned[address] = num_bytes
        return int(self._refusal is not None)

    def cudaHostUnregister(self, address: int) -> int:
        del self.pinned[address]
        return 0

    def _check_error(self, error: int) -> None:
        if error:
            raise RuntimeError(f"{self.last_error} ({error})")

    def _forget_error(self) -> None:
        self.last_error = None
