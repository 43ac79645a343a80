"""Cuts a model's parameters into broadcast buckets; pure, and the same on every rank."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from weight_sync.types import Bucket, TensorSpec


def plan_buckets(tensors: Iterable[TensorSpec], bucket_bytes: int) -> tuple[Bucket, ...]:
    """Whole tensors in the given order, at most `bucket_bytes` a bucket unless one alone is larger.

    A bucket holds one dtype only: a receiver views slices of the flat bytes as that dtype, and a
    slice behind tensors of a narrower dtype might not be aligned for a wider one.
    """
    if bucket_bytes < 1:
        raise ValueError(f"weight_sync.bucket_bytes={bucket_bytes}: must be at least 1")
    runs = _runs(tensors, bucket_bytes)
    return tuple(Bucket(index=index, tensors=run) for index, run in enumerate(runs))


def _runs(tensors: Iterable[TensorSpec], bucket_bytes: int) -> Iterator[tuple[TensorSpec, ...]]:
    run: list[TensorSpec] = []
    num_bytes = 0
    for tensor in tensors:
        does_fit = num_bytes + tensor.num_bytes <= bucket_bytes
        if run and not (does_fit and tensor.dtype == run[0].dtype):
            yield tuple(run)
            run, num_bytes = [], 0
        run.append(tensor)
        num_bytes += tensor.num_bytes
    if run:
        yield tuple(run)
