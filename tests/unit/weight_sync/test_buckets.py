from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tensors.layout import Layout
from tests.support.weights.layouts import full_transfer, layouts, make_streams, random_bytes, spec
from weight_sync.buckets import Bucket, plan_buckets

sizes = st.one_of(st.integers(1, 40), st.integers(41, 3000))


def plan(layout: Layout, bucket_bytes: int) -> tuple[Bucket, ...]:
    return plan_buckets(layout, full_transfer(layout, bucket_bytes=bucket_bytes))


@settings(max_examples=40)
@given(layouts(), sizes)
def test_buckets_cover_every_byte_of_every_stream_once(layout: Layout, size: int) -> None:
    buckets = plan(layout, size)
    for rank in range(layout.num_ranks):
        position = 0
        for bucket in buckets:
            if bucket.rank == rank:
                assert bucket.start == position
                assert 0 < bucket.num_bytes <= size
                position = bucket.stop
        assert position == layout.stream_bytes(rank)


@settings(max_examples=40)
@given(layouts(), sizes)
def test_extents_of_a_bucket_are_its_bytes_in_order(layout: Layout, size: int) -> None:
    for bucket in plan(layout, size):
        position = bucket.start
        for extent in bucket.extents:
            assert extent.stream_start == position
            position += extent.num_bytes
        assert position == bucket.stop


@settings(max_examples=40)
@given(layouts(), sizes, st.integers(0, 2**32))
def test_streams_that_are_scattered_bucket_by_bucket_are_the_file(
    layout: Layout, size: int, seed: int
) -> None:
    sent = random_bytes(layout.num_bytes, seed)
    streams = make_streams(layout, sent)
    received = torch.zeros(layout.num_bytes, dtype=torch.uint8)
    for bucket in plan(layout, size):
        stream = streams[bucket.rank]
        for extent in bucket.extents:
            place = received[extent.file_start : extent.file_start + extent.num_bytes]
            place += stream[extent.stream_start : extent.stream_start + extent.num_bytes]
    assert torch.equal(received, sent)


def test_ranks_take_turns_and_buckets_are_numbered_in_that_order() -> None:
    layout = Layout.of([spec("a", 24)], num_ranks=3)  # 16 bytes a rank
    buckets = plan(layout, 12)
    assert [(b.index, b.rank, b.start, b.stop) for b in buckets] == [
        (0, 0, 0, 12),
        (1, 1, 0, 12),
        (2, 2, 0, 12),
        (3, 0, 12, 16),
        (4, 1, 12, 16),
        (5, 2, 12, 16),
    ]


def test_long_stretch_travels_straight_to_its_place_and_short_ones_together() -> None:
    tensors = [spec("s0", 4), spec("s1", 4), spec("long", 100), spec("s2", 4), spec("s3", 4)]
    buckets = [b for b in plan(Layout.of(tensors, num_ranks=2), 64) if b.rank == 1]
    # Of each tensor rank 1 has the second half: nothing of it is a neighbour in the file.
    assert [[e.file_start for e in b.extents] for b in buckets] == [
        [4, 12],
        [116],
        [180],
        [220, 228],
    ]
    assert [b.direct is not None for b in buckets] == [False, True, True, False]
    assert [b.num_bytes for b in buckets] == [8, 64, 36, 8]


def test_short_stretches_fill_a_bucket_and_no_more() -> None:
    layout = Layout.of([spec(f"t{i}", 12) for i in range(8)], num_ranks=2)  # 12 bytes a piece
    assert [b.num_bytes for b in plan(layout, 64) if b.rank == 0] == [60, 36]


def test_neighbours_in_stream_and_file_are_one_stretch() -> None:
    layout = Layout.of([spec(f"t{i}", 3) for i in range(10)], num_ranks=1)
    (bucket,) = plan(layout, 1000)
    assert bucket.direct is not None
    assert (bucket.direct.file_start, bucket.direct.num_bytes) == (0, 60)


@settings(max_examples=40)
@given(st.lists(st.integers(0, 200), min_size=2, max_size=2), sizes)
def test_delta_is_cut_by_its_length_alone(wire_bytes: list[int], size: int) -> None:
    layout = Layout.of([spec("a", 40), spec("b", 3)], num_ranks=2)
    transfer = replace(
        full_transfer(layout, bucket_bytes=size), base_version=0, wire_bytes=tuple(wire_bytes)
    )
    buckets = plan_buckets(layout, transfer)
    assert [bucket.index for bucket in buckets] == list(range(len(buckets)))
    for rank, num_bytes in enumerate(wire_bytes):
        ours = [bucket for bucket in buckets if bucket.rank == rank]
        assert [b.start for b in ours] == list(range(0, num_bytes, size))
        assert sum(b.num_bytes for b in ours) == num_bytes
        assert not any(b.extents or b.direct for b in ours)


@pytest.mark.parametrize("wire_bytes", [(), (8,), (8, 7), (8, 8, 8)])
def test_transfer_of_another_layout_is_refused(wire_bytes: tuple[int, ...]) -> None:
    layout = Layout.of([spec("a", 8)], 2)
    with pytest.raises(ValueError, match="version 1"):
        plan_buckets(layout, replace(full_transfer(layout), wire_bytes=wire_bytes))
