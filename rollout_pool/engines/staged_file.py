"""A staged version as this process reads it: one safetensors file, mapped and cut into batches.

header | embed | q 0 | k 0 | q 1 | ...        no copy is made: a batch is a range of the file
         └─ batch 0 ─┘└ batch 1 ┘
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from weight_sync.types import TensorSpec

FILE_NAME = "model.safetensors"
_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
_LENGTH_BYTES = 8


@dataclass(kw_only=True, slots=True, frozen=True)
class Batch:
    """Tensors that lie next to each other in the file, whole."""

    tensors: tuple[TensorSpec, ...]
    data: npt.NDArray[np.uint8]
    """[bytes of all of them], in this order."""


@dataclass(kw_only=True, slots=True, frozen=True)
class StagedFile:
    tensors: tuple[TensorSpec, ...]
    """In the order in which they lie in the file."""
    data: npt.NDArray[np.uint8]
    """Everything behind the header; a write to it would not reach the file."""

    @classmethod
    def open(cls, folder: Path) -> StagedFile:
        """Raises OSError, and ValueError for a file that is not what a receiver stages."""
        path = folder / FILE_NAME
        with path.open("rb") as file:
            length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
            header: dict[str, Any] = json.loads(file.read(length))
        header.pop("__metadata__", None)
        entries = sorted(header.items(), key=lambda entry: entry[1]["data_offsets"])
        try:
            tensors = tuple(
                TensorSpec(name=name, dtype=_DTYPES[e["dtype"]], shape=tuple(e["shape"]))
                for name, e in entries
            )
        except KeyError as error:
            raise ValueError(
                f"{path}: a tensor is of a dtype that is not served: {error}"
            ) from None
        data = np.memmap(path, np.uint8, mode="c", offset=_LENGTH_BYTES + length)
        if sum(tensor.num_bytes for tensor in tensors) != data.size:
            raise ValueError(f"{path}: its tensors do not fill it")
        return cls(tensors=tensors, data=data)

    def batches(self, max_bytes: int) -> Iterator[Batch]:
        """All tensors, as many at a time as fit into `max_bytes`, and one at least."""
        start, size, tensors = 0, 0, list[TensorSpec]()
        for tensor in self.tensors:
            if tensors and size + tensor.num_bytes > max_bytes:
                yield Batch(tensors=tuple(tensors), data=self.data[start : start + size])
                start, size, tensors = start + size, 0, []
            tensors.append(tensor)
            size += tensor.num_bytes
        yield Batch(tensors=tuple(tensors), data=self.data[start : start + size])
