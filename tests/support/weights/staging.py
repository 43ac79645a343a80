"""Versions to stage: a layout, the bytes of each version, and the way into a store."""

import torch

from tensors.checksums import staged_checksums
from tensors.layout import Layout
from tests.support.weights.layouts import full_transfer, random_bytes, spec
from weight_sync.receiver.store import Slot, StagedStore
from weight_sync.types import Manifest, Transfer

LAYOUT = Layout.of([spec("a", 50, 30), spec("norm", 7, dtype="float32"), spec("s")], num_ranks=2)
OTHER_LAYOUT = Layout.of([spec("a", 9000)], num_ranks=2)


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def content(version: int, layout: Layout = LAYOUT) -> torch.Tensor:
    return random_bytes(layout.num_bytes, seed=version)


def full(version: int, layout: Layout = LAYOUT) -> Transfer:
    return full_transfer(layout, version=version)


def delta(version: int, base_version: int) -> Transfer:
    return Transfer(
        version=version,
        base_version=base_version,
        layout_digest=LAYOUT.digest,
        wire_bytes=(16, 16),
        bucket_bytes=64,
    )


def manifest_of(version: int, data: torch.Tensor, layout: Layout = LAYOUT) -> Manifest:
    return Manifest(version=version, layout=layout, checksums=staged_checksums(layout, data))


def stage(store: StagedStore, version: int, should_release: bool = True) -> Slot:
    slot = store.begin(full(version))
    slot.data.copy_(content(version))
    store.complete(slot, manifest_of(version, slot.data))
    if should_release:
        store.release(version)
    return slot
