"""Weights whose every version is known at both ends: as the trainer has them and as it casts them.

Parameters are float32 at the trainer; of the served ones some are float32, most are bfloat16.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tensors.layout import Layout, TensorSpec
from tensors.snapshots import Shard

BUCKET_BYTES = 65536


def scene_layout(num_ranks: int, num_rows: int = 700) -> Layout:
    """About `num_rows` KiB: a tensor of many buckets, small odd ones, one that some ranks lack."""
    tensors = [TensorSpec(name="embed", dtype="bfloat16", shape=(num_rows, 512))]
    for index in range(6):
        tensors.append(TensorSpec(name=f"norm.{index}", dtype="float32", shape=(31 + index,)))
        tensors.append(TensorSpec(name=f"mlp.{index}", dtype="bfloat16", shape=(33, 301)))
    tensors.append(TensorSpec(name="scale", dtype="float32", shape=(1,)))
    return Layout.of(tensors, num_ranks)


def scene_weights(layout: Layout, version: int, share: float = 0.01) -> dict[str, Tensor]:
    """float32, by name, in its own shape. Each version changes `share` of the one before it."""
    weights = {}
    for index, spec in enumerate(layout.tensors):
        generator = torch.Generator().manual_seed(index)
        flat = torch.randn(spec.num_elements, generator=generator)
        for number in range(1, version + 1):
            generator.manual_seed(1000 * number + index)
            is_changed = torch.rand(flat.shape, generator=generator) < share
            flat = torch.where(is_changed, torch.randn(flat.shape, generator=generator), flat)
        weights[spec.name] = flat.view(spec.shape)
    return weights


def cast_weights(layout: Layout, version: int, share: float = 0.01) -> dict[str, Tensor]:
    """The weights that engines must be served."""
    weights = scene_weights(layout, version, share)
    return {spec.name: weights[spec.name].to(getattr(torch, spec.dtype)) for spec in layout.tensors}


def scene_shards(layout: Layout, rank: int, version: int, share: float = 0.01) -> list[Shard]:
    """A rank's pieces, as ZeRO-3 cuts them."""
    shards = []
    for name, weights in scene_weights(layout, version, share).items():
        size = -(-weights.numel() // layout.num_ranks)
        shards.append(Shard(name=name, tensor=weights.flatten()[rank * size :][:size].clone()))
    return shards
