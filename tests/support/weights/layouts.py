"""Models of odd shapes, as layouts, and what belongs to them: streams, files, transfers."""

from __future__ import annotations

import json

import torch
from hypothesis import strategies as st
from torch import Tensor

from tensors.layout import Layout, TensorSpec
from weight_sync.types import Transfer


def spec(name: str, *shape: int, dtype: str = "bfloat16") -> TensorSpec:
    return TensorSpec(name=name, dtype=dtype, shape=shape)


shapes = st.one_of(
    st.just(()),
    st.tuples(st.integers(0, 9)),
    st.tuples(st.integers(1, 7), st.integers(1, 40)),
    st.tuples(st.integers(1, 3), st.integers(1, 5), st.integers(1, 11)),
)
dtypes = st.sampled_from(["float32", "bfloat16", "float16"])


@st.composite
def layouts(draw: st.DrawFn, max_ranks: int = 5) -> Layout:
    """Scalars, empty tensors and tensors of fewer elements than ranks among them."""
    parts = draw(st.lists(st.tuples(dtypes, shapes), min_size=1, max_size=8))
    tensors = [spec(f"t{i}", *shape, dtype=dtype) for i, (dtype, shape) in enumerate(parts)]
    return Layout.of(tensors, draw(st.integers(1, max_ranks)))


def random_bytes(num_bytes: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, generator=generator)


def full_transfer(layout: Layout, version: int = 1, bucket_bytes: int = 64) -> Transfer:
    return Transfer.full(version, layout, bucket_bytes)


def make_streams(layout: Layout, data: Tensor) -> list[Tensor]:
    """Every rank's stream of these weights, cut as DeepSpeed's ZeRO-3 does: by torch alone.

    It pads the flat tensor to a multiple of the ranks and gives each an equal chunk.
    """
    streams: list[list[Tensor]] = [[] for _ in range(layout.num_ranks)]
    start = 0
    for tensor in layout.tensors:
        flat = data[start : start + tensor.num_bytes].view(getattr(torch, tensor.dtype))
        start += tensor.num_bytes
        missing = -len(flat) % layout.num_ranks
        padded = torch.cat([flat, flat.new_zeros(missing)])
        share = len(padded) // layout.num_ranks
        for rank in range(layout.num_ranks):
            stop = min((rank + 1) * share, len(flat))
            streams[rank].append(padded[rank * share : max(stop, rank * share)].view(torch.uint8))
    return [torch.cat(parts) for parts in streams]


def as_sent(fields: dict[str, object]) -> object:
    """The fields after a round trip through JSON."""
    return json.loads(json.dumps(fields))
