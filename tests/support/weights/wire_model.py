"""A small model whose every version is known at both ends of the wire, bit by bit."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from tensors.checksums import staged_checksums
from tensors.layout import Layout, TensorSpec
from weight_sync import delta
from weight_sync.types import Manifest, Transfer

BUCKET_BYTES = 16384


def model_layout(num_ranks: int) -> Layout:
    """1.1 MB in both widths: a tensor of many buckets, buckets of many tensors, odd shapes."""
    tensors = [TensorSpec(name="embed", dtype="bfloat16", shape=(331, 1024))]
    for index in range(20):
        tensors.append(TensorSpec(name=f"norm.{index}", dtype="float32", shape=(7 + index,)))
        tensors.append(TensorSpec(name=f"mlp.{index}", dtype="bfloat16", shape=(33, 301)))
    return Layout.of(tensors, num_ranks)


def file_data(layout: Layout, version: int) -> Tensor:
    """uint8: the data of the version's file. Every version changes about 1% of the one before."""
    data = np.random.default_rng(0).integers(0, 256, layout.num_bytes, dtype=np.uint8)
    for number in range(1, version + 1):
        random = np.random.default_rng(number)
        places = random.integers(0, layout.num_bytes, layout.num_bytes // 100)
        data[places] = random.integers(0, 256, len(places), dtype=np.uint8)
    return torch.from_numpy(data)


def rank_stream(layout: Layout, rank: int, version: int) -> Tensor:
    """uint8: the whole stream of one rank."""
    data = file_data(layout, version)
    pieces = [data[p.file_start : p.file_start + p.num_bytes] for p in layout.pieces[rank]]
    return torch.cat(pieces) if pieces else torch.empty(0, dtype=torch.uint8)


def wire_stream(layout: Layout, rank: int, version: int, base_version: int | None) -> Tensor:
    """uint8: what the rank sends, its stream or its delta."""
    stream = rank_stream(layout, rank, version)
    if base_version is None:
        return stream
    encoded = delta.encode(layout, rank, rank_stream(layout, rank, base_version), stream)
    assert encoded is not None
    return encoded.payload


def make_transfer(layout: Layout, version: int, base_version: int | None = None) -> Transfer:
    streams = [wire_stream(layout, rank, version, base_version) for rank in range(layout.num_ranks)]
    return Transfer(
        version=version,
        base_version=base_version,
        layout_digest=layout.digest,
        wire_bytes=tuple(stream.numel() for stream in streams),
        bucket_bytes=BUCKET_BYTES,
    )


def make_manifest(layout: Layout, version: int) -> Manifest:
    checksums = staged_checksums(layout, file_data(layout, version))
    return Manifest(version=version, layout=layout, checksums=checksums)
