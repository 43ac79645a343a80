"""Other ways to move weights: tensor by tensor, in buckets one after another, or as Ray objects.

All of them end where ours does, with every tensor in its place in warm memory of every receiver,
and none of them checks what came. What they would allocate is given to them warm.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import ray
import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.team import Round, Worker
from benchmarks.weights.bounds import Stage, join_gloo, prepare
from benchmarks.weights.model import views_of
from weight_sync.buckets import plan_buckets
from weight_sync.types import Transfer

_ROUND_S = 300.0


def per_tensor_member(stage: Stage, name: str, rank: int, num_trainers: int) -> Worker:
    """PipelineRL's way: a full parameter is gathered, broadcast from rank 0, and loaded; the next.

    The first `num_trainers` members are ZeRO-3 ranks; the gather of one rank alone is a copy.
    """
    world_size = num_trainers + stage.num_receivers
    join_gloo(stage, name, rank, world_size)
    gather_group = dist.new_group(list(range(num_trainers)))
    weight_group = dist.new_group([0, *range(num_trainers, world_size)])
    if rank < num_trainers:
        return _GatheringTrainer(stage, rank, num_trainers, gather_group, weight_group)
    return _TensorReceiver(stage, rank - num_trainers, weight_group)


class _GatheringTrainer:
    def __init__(
        self, stage: Stage, rank: int, num_trainers: int, gather_group: Any, weight_group: Any
    ) -> None:
        self._gather_group, self._weight_group = gather_group, weight_group
        self._num_trainers, self._is_sender = num_trainers, rank == 0
        layout = stage.weights.layout
        largest = max(tensor.num_elements for tensor in layout.tensors)
        dtype = getattr(torch, layout.tensors[0].dtype)
        # ZeRO-3 pads every parameter, so that all ranks own slices of one length.
        self._full = torch.zeros(largest + num_trainers, dtype=dtype)
        self._slices = []
        shards = stage.weights.shards(rank, num_trainers)
        for tensor, shard in zip(layout.tensors, shards, strict=True):
            share = -(-tensor.num_elements // num_trainers)
            padding = torch.zeros(share - len(shard.tensor), dtype=dtype)
            padded = torch.cat([shard.tensor, padding]) if len(padding) else shard.tensor
            self._slices.append((tensor.num_elements, padded))

    def work(self, num_rounds: int) -> None:
        for _ in range(num_rounds):
            for num_elements, owned in self._slices:
                gathered = self._full[: len(owned) * self._num_trainers]
                if self._num_trainers == 1:
                    gathered.copy_(owned)
                else:
                    dist.all_gather_single(gathered, owned, group=self._gather_group)
                if self._is_sender:
                    dist.broadcast(gathered[:num_elements], 0, group=self._weight_group)


class _TensorReceiver:
    def __init__(self, stage: Stage, receiver: int, group: Any) -> None:
        self._group = group
        self._places = [
            view.flatten() for view in views_of(stage.places(receiver), stage.weights.layout)
        ]
        self._scratch = torch.zeros(max(map(len, self._places)), dtype=self._places[0].dtype)

    def work(self, num_rounds: int) -> None:
        for _ in range(num_rounds):
            for place in self._places:
                arrived = self._scratch[: len(place)]
                dist.broadcast(arrived, 0, group=self._group)
                place.copy_(arrived)


class BucketMember:
    """Flattened buckets (slime, verl): concatenated, broadcast, taken apart; then the next one."""

    def __init__(self, stage: Stage, name: str, rank: int) -> None:
        join_gloo(stage, name, rank, 1 + stage.num_receivers)
        data = stage.weights.open() if rank == 0 else stage.places(rank - 1)
        layout = stage.weights.layout
        transfer = Transfer(
            version=0,
            base_version=None,
            layout_digest=layout.digest,
            wire_bytes=(layout.num_bytes,),
            bucket_bytes=stage.bucket_bytes,
        )
        self._is_sender = rank == 0
        self._flat = torch.zeros(stage.bucket_bytes, dtype=torch.uint8)
        tensors = [view.flatten().view(torch.uint8) for view in views_of(data, layout)]
        self._buckets = [
            _parts_of(bucket.start, bucket.stop, layout.offsets, tensors)
            for bucket in plan_buckets(layout, transfer)
        ]

    def work(self, num_rounds: int) -> None:
        for _ in range(num_rounds):
            for parts in self._buckets:
                length = sum(map(len, parts))
                flat = self._flat[:length]
                places = torch.split(flat, [len(part) for part in parts])
                if self._is_sender:
                    for place, part in zip(places, parts, strict=True):
                        place.copy_(part)
                dist.broadcast(flat, 0)
                if not self._is_sender:
                    for place, part in zip(places, parts, strict=True):
                        part.copy_(place)


def _parts_of(start: int, stop: int, offsets: tuple[int, ...], tensors: list[Tensor]) -> list[Any]:
    """The bytes of each tensor that lie between `start` and `stop` of the file's data."""
    parts = []
    for tensor, offset in zip(tensors, offsets, strict=False):
        begin, end = max(start, offset), min(stop, offset + len(tensor))
        if begin < end:
            parts.append(tensor[begin - offset : end - offset])
    return parts


class _Holder:
    """A Ray actor: the trainer, or a receiver."""

    def __init__(self, data: Callable[[], Tensor]) -> None:
        prepare()
        self._data = data().numpy()

    def put(self) -> list[Any]:
        return [ray.put(self._data)]

    def take(self, references: list[Any]) -> None:
        self._data[:] = ray.get(references[0])


class RayTeam:
    """Through the object store: put once by the trainer, got by every receiver, copied in place.

    Plays as `Team` does. Wants a Ray that is started and whose store has room for two copies.
    """

    def __init__(self, stage: Stage) -> None:
        holder = ray.remote(_Holder).options(num_cpus=0)
        self._putter = holder.remote(stage.weights.open)
        self._takers = [holder.remote(partial(stage.places, n)) for n in range(stage.num_receivers)]

    def play(self, num_groups: int) -> Round:
        began = time.perf_counter()
        for _ in range(num_groups // 2):
            references = ray.get(self._putter.put.remote(), timeout=_ROUND_S)
            ray.get([each.take.remote(references) for each in self._takers], timeout=_ROUND_S)
            del references
        return Round(num_groups=num_groups, seconds=time.perf_counter() - began)

    def close(self) -> None:
        for actor in [self._putter, *self._takers]:
            ray.kill(actor)
