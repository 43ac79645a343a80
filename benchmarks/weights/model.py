"""The weights that travel: real tensor shapes with random numbers, one copy of them for everyone.

They lie in one file on tmpfs that every process maps, in the order of the staged file's data, so a
run needs no more memory than its receivers write.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from tensors.layout import Layout, TensorSpec
from tensors.snapshots import Shard

_CHUNK = 1 << 24
SHARED_MEMORY = Path("/dev/shm")
_PREFIX = "leash-benchmark-"


@contextmanager
def folder_in_memory() -> Iterator[Path]:
    """An empty folder on tmpfs that is removed at the end; after a kill, by the next call."""
    for left in SHARED_MEMORY.glob(f"{_PREFIX}*"):
        with suppress(OSError), _locked(left):
            shutil.rmtree(left)
    made = tempfile.TemporaryDirectory(prefix=_PREFIX, dir=SHARED_MEMORY)
    with made as name, _locked(Path(name)):
        yield Path(name)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Held until the process ends, however it does. Raises OSError if another one holds it."""
    opened = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(opened)


@dataclass(kw_only=True, slots=True, frozen=True)
class ModelShape:
    """A Qwen2.5: its parameters by their Hugging Face names."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    is_tied: bool = True
    """The embedding is the output layer, too."""

    def tensors(self, dtype: str) -> list[TensorSpec]:
        shapes: dict[str, tuple[int, ...]] = {
            "model.embed_tokens.weight": (self.vocab, self.hidden)
        }
        for layer in range(self.layers):
            for name, shape in self._layer().items():
                shapes[f"model.layers.{layer}.{name}"] = shape
        shapes["model.norm.weight"] = (self.hidden,)
        if not self.is_tied:
            shapes["lm_head.weight"] = (self.vocab, self.hidden)
        return [TensorSpec(name=name, dtype=dtype, shape=shape) for name, shape in shapes.items()]

    def _layer(self) -> dict[str, tuple[int, ...]]:
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return {
            "self_attn.q_proj.weight": (queries, self.hidden),
            "self_attn.q_proj.bias": (queries,),
            "self_attn.k_proj.weight": (keys, self.hidden),
            "self_attn.k_proj.bias": (keys,),
            "self_attn.v_proj.weight": (keys, self.hidden),
            "self_attn.v_proj.bias": (keys,),
            "self_attn.o_proj.weight": (self.hidden, queries),
            "mlp.gate_proj.weight": (self.intermediate, self.hidden),
            "mlp.up_proj.weight": (self.intermediate, self.hidden),
            "mlp.down_proj.weight": (self.hidden, self.intermediate),
            "input_layernorm.weight": (self.hidden,),
            "post_attention_layernorm.weight": (self.hidden,),
        }


QWEN_HALF_B = ModelShape(
    hidden=896, layers=24, heads=14, kv_heads=2, head_dim=64, intermediate=4864, vocab=151_936
)
"""Qwen2.5-0.5B: 494M parameters."""

_QWEN_1_5B = ModelShape(
    hidden=1536, layers=28, heads=12, kv_heads=2, head_dim=128, intermediate=8960, vocab=151_936
)
_QWEN_7B = ModelShape(
    hidden=3584,
    layers=28,
    heads=28,
    kv_heads=4,
    head_dim=128,
    intermediate=18_944,
    vocab=152_064,
    is_tied=False,
)

SHAPES = {"0.5B": QWEN_HALF_B, "1.5B": _QWEN_1_5B, "7B": _QWEN_7B}
"""Shapes of Qwen2.5, by size."""

SMALL = ModelShape(
    hidden=512, layers=6, heads=8, kv_heads=2, head_dim=64, intermediate=2048, vocab=24_576
)
"""34M parameters, 67 MB of bfloat16."""


@dataclass(kw_only=True, slots=True, frozen=True)
class SharedWeights:
    """`path` holds the data of all tensors, as `layout` places them."""

    path: Path
    layout: Layout

    @classmethod
    def write(cls, path: Path, shape: ModelShape, dtype: str) -> SharedWeights:
        layout = Layout.of(shape.tensors(dtype), 1)
        values = map_file(path, layout.num_bytes).view(getattr(torch, dtype))
        dice = torch.Generator().manual_seed(0)
        for start in range(0, len(values), _CHUNK):
            part = values[start : start + _CHUNK]
            part.copy_(torch.randn(len(part), generator=dice) * 0.02)
        return cls(path=path, layout=layout)

    @property
    def num_bytes(self) -> int:
        return self.layout.num_bytes

    def open(self) -> Tensor:
        """All bytes, flat."""
        return map_file(self.path, self.num_bytes)

    def spread_over(self, num_ranks: int) -> Layout:
        return Layout.of(self.layout.tensors, num_ranks)

    def shards(self, rank: int, num_ranks: int) -> list[Shard]:
        """The slice of every tensor that a ZeRO-3 rank owns, flat; an empty one too."""
        data, layout = self.open(), self.spread_over(num_ranks)
        owned = {piece.tensor: piece for piece in layout.pieces[rank]}
        shards = []
        for index, spec in enumerate(layout.tensors):
            piece = owned.get(index)
            start, length = (piece.file_start, piece.num_bytes) if piece else (0, 0)
            tensor = data[start : start + length].view(getattr(torch, spec.dtype))
            shards.append(Shard(name=spec.name, tensor=tensor))
        return shards


def map_file(path: Path, num_bytes: int) -> Tensor:
    """The file's bytes, writable, shared by all processes; makes the file if it is not there."""
    mapped: Tensor = torch.from_file(str(path), shared=True, size=num_bytes, dtype=torch.uint8)
    return mapped


def views_of(data: Tensor, layout: Layout) -> list[Tensor]:
    """Every tensor of the model, in place in `data`, in its own dtype and shape."""
    return [
        data[start : start + spec.num_bytes].view(getattr(torch, spec.dtype)).view(spec.shape)
        for spec, start in zip(layout.tensors, layout.offsets, strict=False)
    ]
