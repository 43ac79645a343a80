"""How others move weights: tensor by tensor, in buckets one after another, or as Ray objects.

All of them end where ours does, with every tensor in its place in warm memory of every receiver,
and none of them checks what came. What they would allocate is given to them warm.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import ray
import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.team import Round, Worker
from benchmarks.weights_model import views_of
from benchmarks.weights_wires import Stage, join_gloo, prepare
from weight_sync.buckets import plan_buckets
from weight_sync.layout import Transfer

_ROUND_S = 300.0


@dataclass(kw_only=True, slots=True)
class MakePerTensorMember:
    """PipelineRL's way: a full parameter is gathered, broadcast from rank 0, and loaded; the next.

    The first `num_trainers` members are ZeRO-3 ranks; the gather of one rank alone is a copy.
    """

    stage: Stage
    name: str
    rank: int
    num_trainers: int

    def __call__(self) -> Worker:
        stage, trainers = self.stage, list(range(self.num_trainers))
        join_gloo(stage, self.name, self.rank, self.num_trainers + stage.num_receivers)
        gather_group = dist.new_group(trainers)
        receivers = range(self.num_trainers, self.num_trainers + stage.num_receivers)
        weight_group = dist.new_group([0, *receivers])
        if self.rank < self.num_trainers:
            return _GatheringTrainer(self, gather_group, weight_group)
        return _TensorReceiver(stage, self.rank - self.num_trainers, weight_group)


class _GatheringTrainer:
    def __init__(self, spec: MakePerTensorMember, gather: Any, weights: Any) -> None:
        self._gather_group, self._weight_group = gather, weights
        self._num_trainers, self._is_sender = spec.num_trainers, spec.rank == 0
        layout = spec.stage.weights.layout
        largest = max(tensor.num_elements for tensor in layout.tensors)
        dtype = getattr(torch, layout.tensors[0].dtype)
        # ZeRO-3 pads every parameter, so that all ranks own slices of one length.
        self._full = torch.zeros(largest + spec.num_trainers, dtype=dtype)
        self._slices = []
        for tensor, owned in spec.stage.weights.shards(spec.rank, spec.num_trainers):
            share = -(-tensor.num_elements // spec.num_trainers)
            padding = torch.zeros(share - len(owned), dtype=dtype)
            padded = torch.cat([owned, padding]) if len(padding) else owned
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


@dataclass(kw_only=True, slots=True)
class MakeBucketMember:
    """Flattened buckets (slime, verl): concatenated, broadcast, taken apart; then the next one."""

    stage: Stage
    name: str
    rank: int

    def __call__(self) -> Worker:
        join_gloo(self.stage, self.name, self.rank, 1 + self.stage.num_receivers)
        data = self.stage.weights.open() if self.rank == 0 else self.stage.places(self.rank - 1)
        return _BucketMember(self.stage, data, is_sender=self.rank == 0)


class _BucketMember:
    def __init__(self, stage: Stage, data: Tensor, *, is_sender: bool) -> None:
        layout = stage.weights.layout
        transfer = Transfer(
            version=0,
            base_version=None,
            layout_digest=layout.digest,
            wire_bytes=(layout.num_bytes,),
            bucket_bytes=stage.bucket_bytes,
        )
        self._is_sender = is_sender
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


class _Putter:
    def __init__(self, stage: Stage) -> None:
        prepare()
        self._source = stage.weights.open().numpy()

    def ready(self) -> None:
        return None

    def put(self) -> list[Any]:
        return [ray.put(self._source)]


class _Taker:
    def __init__(self, stage: Stage, receiver: int) -> None:
        prepare()
        self._places = stage.places(receiver)

    def ready(self) -> None:
        return None

    def take(self, references: list[Any]) -> None:
        array = ray.get(references[0])
        self._places.numpy()[:] = array  # a read-only view of the object store: torch would warn


class RayTeam:
    """Through the object store: put once by the trainer, got by every receiver, copied in place.

    Plays as `Team` does. Wants a Ray that is started and whose store has room for two copies.
    """

    def __init__(self, stage: Stage) -> None:
        self._putter = ray.remote(_Putter).options(num_cpus=0).remote(stage)
        taker = ray.remote(_Taker).options(num_cpus=0)
        self._takers = [taker.remote(stage, number) for number in range(stage.num_receivers)]
        ray.get([each.ready.remote() for each in [self._putter, *self._takers]], timeout=_ROUND_S)

    def play(self, num_groups: int) -> Round:
        began = time.perf_counter()
        for _ in range(num_groups // 2):
            references = ray.get(self._putter.put.remote(), timeout=_ROUND_S)
            ray.get([each.take.remote(references) for each in self._takers], timeout=_ROUND_S)
            del references
        seconds = time.perf_counter() - began
        return Round(
            num_groups=num_groups,
            seconds=seconds,
            producer_cpu_s=0.0,
            consumer_cpu_s=0.0,
            middle_cpu_s=0.0,
        )

    def close(self) -> None:
        for actor in [self._putter, *self._takers]:
            ray.kill(actor)
