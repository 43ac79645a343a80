"""A copy of one policy version in host memory, laid out as the flat buckets that will travel.

The buffers are made at the first publish and written again at each later one, so their pages stay
warm (a first write to fresh memory is many times slower) and nothing is allocated while ranks wait.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from weight_sync.buckets import plan_buckets
from weight_sync.types import Bucket, TensorSpec


def spec_of(name: str, tensor: Tensor) -> TensorSpec:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return TensorSpec(name=name, dtype=dtype, shape=tuple(tensor.shape))


@dataclass(kw_only=True, slots=True)
class _Slot:
    """Where one tensor lies: the view has the tensor's own shape and dtype."""

    spec: TensorSpec
    view: Tensor


class Snapshot:
    """Owns the host buffers of one model; `capture` fills them, `buckets` hands them out."""

    def __init__(self, bucket_bytes: int, *, should_pin: bool) -> None:
        self._bucket_bytes = bucket_bytes
        self._should_pin = should_pin
        self._buckets: list[tuple[Bucket, Tensor]] = []
        self._slots: list[_Slot] = []

    def capture(self, named_tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Copy every tensor into its place; the first call also plans the places.

        Raises ValueError if a later call brings other names, shapes or dtypes than the first.
        """
        if not self._slots:
            self._lay_out((name, tensor.detach().cpu()) for name, tensor in named_tensors)
            return
        index = -1
        for index, (name, tensor) in enumerate(named_tensors):
            slot = self._slots[index] if index < len(self._slots) else None
            if slot is None or slot.spec != spec_of(name, tensor):
                raise ValueError(
                    f"tensor {index} of the model is now {spec_of(name, tensor)}, "
                    f"was {slot.spec if slot else 'absent'}: a policy may not change its shape"
                )
            slot.view.copy_(tensor.detach(), non_blocking=self._should_pin)
        if index + 1 != len(self._slots):
            raise ValueError(f"{index + 1} tensors given, {len(self._slots)} expected")
        if self._should_pin:
            torch.cuda.current_stream().synchronize()

    def _lay_out(self, named_tensors: Iterator[tuple[str, Tensor]]) -> None:
        # Gathered parameters are only valid while the iterator stands on them, so they are kept as
        # copies until all sizes are known.
        kept = [(spec_of(name, tensor), tensor.clone()) for name, tensor in named_tensors]
        tensors = iter(kept)
        for bucket in plan_buckets((spec for spec, _ in kept), self._bucket_bytes):
            flat = torch.empty(bucket.num_bytes, dtype=torch.uint8, pin_memory=self._should_pin)
            self._buckets.append((bucket, flat))
            start = 0
            for spec in bucket.tensors:
                part = flat[start : start + spec.num_bytes]
                view = part.view(getattr(torch, spec.dtype)).view(spec.shape)
                view.copy_(next(tensors)[1])
                self._slots.append(_Slot(spec=spec, view=view))
                start += spec.num_bytes

    def buckets(self) -> Iterator[tuple[Bucket, Tensor]]:
        """The buckets in order, each with its flat uint8 bytes."""
        return iter(self._buckets)

    @property
    def num_bytes(self) -> int:
        return sum(bucket.num_bytes for bucket, _ in self._buckets)
