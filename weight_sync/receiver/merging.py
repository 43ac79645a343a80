"""Adapters that a receiver got, merged into the base for the engines beside it.

    store        adapters, version after version: what travels, and what peers copy
      │ newest released
      ▼
    merged       base + scale B A of each adapted weight: what engines load

Only the weights that the adapter changes are merged and loaded; engines begin with the others.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from tensors.adapters import factor_names, merged, merged_layout
from tensors.base_weights import BaseWeights
from tensors.checksums import staged_checksums
from tensors.layout import Layout
from weight_sync.receiver.store import StagedStore
from weight_sync.types import Manifest, MergeSpec, StoreBusyError, Transfer, UnknownVersion

log = logging.getLogger(__name__)

_HELD_S = 600.0
"""How long an adapter is kept for its merging, at the longest."""
_LOOK_AGAIN_S = 1.0
"""Pause before another look for a free slot: a hold may expire, which nobody announces."""


class Merging:
    """Merges the newest adapter that is released, in a thread of its own; skips older ones.

    Example:

        merging = Merging(spec, folder / "merged", 2, adapters, torch.device("cpu"), notify)
        merging.set_layout(adapters.layout)       # creates the slots
        merging.wake()                            # an adapter was released: `notify` follows
        merging.store.newest
    """

    def __init__(
        self,
        spec: MergeSpec,
        folder: Path,
        num_slots: int,
        adapters: StagedStore,
        device: torch.device,
        on_merged: Callable[[], object],
    ) -> None:
        """`on_merged` is called in the thread, after each version. Raises ValueError if the base
        cannot be read."""
        self._spec = spec
        self._adapters = adapters
        self._device = device
        self._on_merged = on_merged
        self._base: BaseWeights | None = None
        """Opened once an adapter is expected: by then an engine has the model on this machine."""
        self.store = StagedStore(folder, num_slots, should_pin=device.type == "cuda")
        self.last_s = 0.0
        """Time that the last merging took; 0 after a restart."""
        self._woken, self._ends = threading.Event(), False
        self._thread = threading.Thread(target=self._run, name="merging", daemon=True)
        if (known := adapters.layout) is not None:  # an earlier process may not have merged its own
            self.set_layout(known)
        self._thread.start()

    def set_layout(self, adapter: Layout) -> None:
        """Make room for the merged weights of such an adapter.

        Raises ValueError if it does not fit this base, and StoreFullError.
        """
        if (layout := merged_layout(adapter)) is None:
            raise ValueError("whole weights were sent, and this receiver merges adapters")
        if self._base is None:
            self._base = BaseWeights(self._spec.model_path)
        for weight in layout.tensors:
            if weight.shape != (found := self._base.shape(weight.name)):
                raise ValueError(
                    f"{weight.name} of the adapter has the shape {list(weight.shape)}, that of "
                    f"model.path={self._spec.model_path!r} {list(found)}"
                )
        self.store.set_layout(layout)
        self.wake()

    def is_ready_for(self, adapter: Layout) -> bool:
        """Whether there is room for the merged weights of such an adapter."""
        return self.store.has_room and self.store.layout == merged_layout(adapter)

    def wake(self) -> None:
        """Call when an adapter was released, or when a merged version is held no longer."""
        self._woken.set()

    def close(self, should_remove: bool) -> None:
        self._ends = True
        self.wake()
        self.store.close(remove=should_remove)

    def _run(self) -> None:
        wait_s: float | None = None
        while not self._ends:
            self._woken.wait(wait_s)
            self._woken.clear()
            try:
                wait_s = self._merge_newest()
            except BaseException:
                if self._ends:
                    return
                # Engines would wait for ever; the process is started again.
                log.exception("an adapter could not be merged")
                os._exit(1)

    def _merge_newest(self) -> float | None:
        """Returns after how many seconds to try again, if so."""
        version, layout = self._adapters.newest, self.store.layout
        if version is None or layout is None or version == self.store.newest:
            return None
        start = time.perf_counter()
        if version not in self.store.complete_versions:  # else a process died before its release
            try:
                slot = self.store.begin(Transfer.full(version, layout, layout.num_bytes))
                factors = self._copy_of(version)
            except UnknownVersion:  # a newer one has just taken its slot
                return 0.0
            except StoreBusyError as error:
                log.warning("version %d is not merged yet: %s", version, error)
                return _LOOK_AGAIN_S
            for name, weight in _tensors(layout, slot.data).items():
                a, b = (factors[factor] for factor in factor_names(name))
                self._merge(weight, name, a, b)
            checksums = staged_checksums(layout, slot.data)
            self.store.complete(slot, Manifest.of(version, layout, checksums))
        self.last_s = time.perf_counter() - start
        self.store.release(version)
        self._on_merged()
        return 0.0  # a newer one may have come meanwhile

    def _copy_of(self, version: int) -> dict[str, Tensor]:
        """The adapter's tensors. A copy, so that its slot is free for the next one to arrive."""
        layout = self._adapters.layout
        assert layout is not None
        self._adapters.hold(version, "merging", _HELD_S)
        try:
            return _tensors(layout, self._adapters.get(version).data.clone())
        finally:
            self._adapters.let_go(version, "merging")

    def _merge(self, weight: Tensor, name: str, a: Tensor, b: Tensor) -> None:
        assert self._base is not None
        dtype, scale = getattr(torch, self._spec.dtype), self._spec.scale
        base = self._base.tensor(name)
        try:
            device = self._device
            own = base.to(device, dtype), a.to(device), b.to(device)
            weight.copy_(merged(*own, scale, weight.dtype))
        except torch.OutOfMemoryError as error:  # an engine has nearly all of the GPU
            log.warning("adapters are merged on the CPU from now on: %s", error)
            self._device = torch.device("cpu")
            weight.copy_(merged(base.to(dtype), a, b, scale, weight.dtype))


def _tensors(layout: Layout, data: Tensor) -> dict[str, Tensor]:
    """The tensors of a staged file's data, as views."""
    found = {}
    for tensor, start in zip(layout.tensors, layout.offsets, strict=False):
        part = data[start : start + tensor.num_bytes]
        found[tensor.name] = part.view(getattr(torch, tensor.dtype)).view(tensor.shape)
    return found
