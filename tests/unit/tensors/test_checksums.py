import zlib
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from tensors.checksums import (
    StreamChecksums,
    mismatches,
    piece_checksums,
    staged_checksums,
)
from tensors.layout import Layout
from tests.support.weights.layouts import layouts, make_streams, random_bytes, spec


def test_checksum_is_the_crc32_of_a_piece() -> None:
    layout = Layout.of([spec("a", 3), spec("b", 2)], num_ranks=2)
    data = random_bytes(10, seed=0)
    raw = data.numpy().tobytes()
    expected = (
        (zlib.crc32(raw[0:4]), zlib.crc32(raw[6:8])),
        (zlib.crc32(raw[4:6]), zlib.crc32(raw[8:10])),
    )
    assert staged_checksums(layout, data) == expected


@settings(max_examples=40)
@given(layouts(), st.integers(0, 2**32))
def test_sender_and_receiver_find_the_same(layout: Layout, seed: int) -> None:
    data = random_bytes(layout.num_bytes, seed)
    streams = make_streams(layout, data)
    sent = tuple(piece_checksums(layout, rank, stream) for rank, stream in enumerate(streams))
    assert sent == staged_checksums(layout, data)


@settings(max_examples=40)
@given(layouts(), st.data())
def test_running_checksum_is_that_of_the_whole_wherever_the_stream_is_cut(
    layout: Layout, data: st.DataObject
) -> None:
    rank = data.draw(st.integers(0, layout.num_ranks - 1))
    length = layout.stream_bytes(rank)
    stream = random_bytes(length, seed=3)
    cuts = sorted({0, length, *data.draw(st.lists(st.integers(0, length)))})
    running = StreamChecksums(layout, rank)
    for start, stop in pairwise(cuts):
        running.feed(start, stream[start:stop])
    assert running.result() == piece_checksums(layout, rank, stream)


def test_mismatches_name_each_tensor_once() -> None:
    layout = Layout.of([spec("a", 4), spec("b", 4), spec("c", 1)], 2)
    expected = ((1, 2, 3), (4, 5))
    assert mismatches(layout, expected, expected) == []
    assert mismatches(layout, expected, ((0, 2, 3), (0, 5))) == ["a"]
    assert mismatches(layout, expected, ((1, 2, 0), (4, 0))) == ["b", "c"]
