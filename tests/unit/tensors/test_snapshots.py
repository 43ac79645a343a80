from __future__ import annotations

import mmap
import threading

import pytest
import torch

from tensors.layout import Layout, TensorSpec
from tensors.snapshots import Shard, SnapshotError, Snapshots
from tests.support.weights.known_weights import cast_weights, scene_layout, scene_shards


def assembled(layout: Layout, streams: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Reassembles the ranks' streams into whole tensors, as receivers do."""
    data = torch.empty(layout.num_bytes, dtype=torch.uint8)
    for pieces, stream in zip(layout.pieces, streams, strict=True):
        for piece in pieces:
            part = stream[piece.stream_start : piece.stream_stop]
            data[piece.file_start :][: piece.num_bytes] = part
    return {
        spec.name: data[start:][: spec.num_bytes]
        .clone()
        .view(getattr(torch, spec.dtype))
        .view(spec.shape)
        for spec, start in zip(layout.tensors, layout.offsets, strict=False)
    }


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_ranks_streams_together_are_the_cast_weights(num_ranks: int) -> None:
    layout = scene_layout(num_ranks, num_rows=3)
    ranks = [Snapshots(layout, rank) for rank in range(num_ranks)]
    for version, slot in ((0, 0), (1, 1), (2, 0)):
        for rank, snapshots in enumerate(ranks):
            snapshots.capture(slot, version, scene_shards(layout, rank, version))
        found = assembled(layout, [snapshots.stream(slot, version, 1.0) for snapshots in ranks])
        for name, tensor in cast_weights(layout, version).items():
            assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name


def test_capture_does_not_follow_later_changes_and_spares_the_other_buffer() -> None:
    layout = scene_layout(1, num_rows=3)
    snapshots = Snapshots(layout, 0)
    shards = scene_shards(layout, 0, 0)
    snapshots.capture(0, 0, shards)
    before = snapshots.stream(0, 0, 1.0).clone()
    for shard in shards:
        shard.tensor.zero_()
    snapshots.capture(1, 1, shards)
    assert torch.equal(snapshots.stream(0, 0, 1.0), before) and before.any()
    assert not snapshots.stream(1, 1, 1.0).any()


def test_buffer_is_used_again_where_it_lies() -> None:
    layout = scene_layout(1, num_rows=3)
    snapshots = Snapshots(layout, 0)
    snapshots.capture(0, 0, scene_shards(layout, 0, 0))
    place = snapshots.stream(0, 0, 1.0).data_ptr()
    snapshots.capture(0, 1, scene_shards(layout, 0, 1))
    assert snapshots.stream(0, 1, 1.0).data_ptr() == place


def test_reader_waits_for_this_ranks_capture() -> None:
    layout = scene_layout(1, num_rows=3)
    snapshots = Snapshots(layout, 0)
    with pytest.raises(SnapshotError, match=r"rank 0 did not capture version 0 within 0\.01 s"):
        snapshots.stream(0, 0, 0.01)
    found: list[torch.Tensor] = []
    reader = threading.Thread(target=lambda: found.append(snapshots.stream(0, 0, 10.0)))
    reader.start()
    snapshots.capture(0, 0, scene_shards(layout, 0, 0))
    reader.join(60.0)
    assert len(found) == 1


def test_buffer_is_whole_pages_and_no_more() -> None:
    """Pinned as it lies: an allocator that rounds up to a power of two would nearly double it."""
    layout = Layout.of([TensorSpec(name="a", dtype="float32", shape=(5000,))], 1)
    snapshots = Snapshots(layout, 0)
    stream = snapshots._buffers[0].stream
    assert stream.data_ptr() % mmap.PAGESIZE == 0
    assert stream.untyped_storage().nbytes() == 20_000


def test_seconds_of_a_copy_are_kept_by_buffer() -> None:
    layout = scene_layout(1, num_rows=3)
    snapshots = Snapshots(layout, 0)
    snapshots.capture(1, 0, scene_shards(layout, 0, 0))
    snapshots.stream(1, 0, 1.0)
    assert snapshots.copy_s(1) > 0 == snapshots.copy_s(0)


def two_tensors() -> Layout:
    specs = [TensorSpec(name=name, dtype="float32", shape=(5,)) for name in ("a", "b")]
    return Layout.of(specs, 2)


def shard(name: str, num_elements: int) -> Shard:
    return Shard(name=name, tensor=torch.zeros(num_elements))


@pytest.mark.parametrize(
    ("shards", "message"),
    [
        ([shard("a", 2)], "rank 1 gave no shard of b"),
        ([shard("a", 2), shard("a", 2)], "shard of 'a': not in the layout, or given twice"),
        ([shard("c", 2)], "shard of 'c': not in the layout"),
        ([shard("a", 3)], r"shard of 'a' has shape \[3\]; rank 1 owns 2 of its elements"),
        ([shard("a", 1)], r"shard of 'a' has shape \[1\]; rank 1 owns 2 of its elements"),
    ],
)
def test_shards_must_be_exactly_what_the_rank_owns(shards: list[Shard], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Snapshots(two_tensors(), 1).capture(0, 0, shards)


def test_empty_shard_of_a_parameter_that_other_ranks_own_is_fine() -> None:
    layout = Layout.of([TensorSpec(name="a", dtype="float32", shape=(1,))], 2)
    snapshots = Snapshots(layout, 1)
    snapshots.capture(0, 0, [shard("a", 0)])
    assert snapshots.stream(0, 0, 1.0).numel() == 0
