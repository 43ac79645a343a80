import mmap
import os

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tensors.layout import Layout
from tests.support.weights.layouts import layouts, make_streams, random_bytes, spec
from weight_sync import delta

BLOCK = 65536
HEADER_BYTES = 16
"""Two sizes."""


def change(data: Tensor, density: float, seed: int) -> Tensor:
    """Flips the lowest bit of so many bytes."""
    generator = torch.Generator().manual_seed(seed)
    is_changed = torch.rand(len(data), generator=generator) < density
    return data ^ is_changed.to(torch.uint8)


def send(layout: Layout, old: Tensor, new: Tensor) -> Tensor:
    """A receiver's data after every rank's delta is applied to `old`; all as data of a file."""
    received = old.clone()
    streams = zip(make_streams(layout, old), make_streams(layout, new), strict=True)
    for rank, (base, stream) in enumerate(streams):
        found = delta.encode(layout, rank, base, stream)
        assert found is not None
        delta.apply(layout, rank, found.payload, received)
    return received


@settings(max_examples=40)
@given(layouts(), st.sampled_from([0.0, 0.02, 0.5, 1.0]), st.integers(0, 2**32))
def test_base_and_delta_are_the_new_version_bit_by_bit(
    layout: Layout, density: float, seed: int
) -> None:
    old = random_bytes(layout.num_bytes, seed)
    new = change(old, density, seed)
    assert torch.equal(send(layout, old, new), new)


@pytest.mark.parametrize("num_ranks", [1, 3])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("edge", [BLOCK - 1, BLOCK, BLOCK + 1, 16 * BLOCK, 16 * BLOCK + 1])
def test_changes_at_the_edges_of_blocks_and_chunks(edge: int, dtype: str, num_ranks: int) -> None:
    layout = Layout.of(
        [spec("a", num_ranks * edge, dtype=dtype), spec("odd", 5, dtype="float32")], num_ranks
    )
    item = getattr(torch, dtype).itemsize
    old = random_bytes(layout.num_bytes, seed=1)
    new = old.clone()
    for tensor, start in zip(layout.tensors, layout.offsets, strict=False):
        elements = new[start : start + tensor.num_bytes].view(torch.int16)
        elements[0] ^= 1
        elements[-1] ^= 1
        if tensor.name == "a":
            for place in range(0, tensor.num_elements, BLOCK):
                elements[place * item // 2] ^= 1
                elements[(place - 1) * item // 2] ^= 1
    assert not torch.equal(old, new)
    assert torch.equal(send(layout, old, new), new)


def test_payload_holds_only_changed_elements() -> None:
    layout = Layout.of([spec("wide", 5, dtype="float32"), spec("narrow", 100_000)], num_ranks=1)
    old = random_bytes(layout.num_bytes, seed=2)
    new = old.clone()
    new[4] ^= 1  # wide[1]
    new[20 + 2 * 70_000] ^= 1
    new[20 + 2 * 70_001 + 1] ^= 128
    found = delta.encode(layout, 0, old, new)
    assert found is not None
    assert found.num_changed == 3
    expected = torch.cat(
        [
            torch.tensor([1, 2]).view(torch.uint8),
            torch.tensor([1, 0, 2], dtype=torch.int32).view(torch.uint8),
            new[4:8],
            new[20 + 140_000 : 20 + 140_004],
            torch.tensor([1, 70_000 - BLOCK, 70_001 - BLOCK], dtype=torch.int16).view(torch.uint8),
        ]
    )
    assert torch.equal(found.payload, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_bits_count_not_values(dtype: torch.dtype) -> None:
    bits = {4: torch.int32, 2: torch.int16}[dtype.itemsize]
    nan = torch.tensor([float("nan")], dtype=dtype)
    other_nan = (nan.view(bits) | 1).view(dtype)
    old = torch.cat([torch.tensor([0.0, 1.0], dtype=dtype), nan, nan])
    new = torch.cat([torch.tensor([-0.0, 1.0], dtype=dtype), nan, other_nan])
    layout = Layout.of([spec("a", 4, dtype=str(dtype).removeprefix("torch."))], 1)
    found = delta.encode(layout, 0, old.view(torch.uint8), new.view(torch.uint8))
    assert found is not None
    assert found.num_changed == 2  # 0.0 became -0.0, one NaN another NaN
    received = old.clone()
    delta.apply(layout, 0, found.payload, received.view(torch.uint8))
    assert torch.equal(received.view(bits), new.view(bits))


@settings(max_examples=40)
@given(layouts(), st.integers(0, 2**32))
def test_retry_after_a_broken_or_a_whole_apply_ends_at_the_same_bytes(
    layout: Layout, seed: int
) -> None:
    old = random_bytes(layout.num_bytes, seed)
    new = change(old, 0.3, seed)
    half_done = torch.where(random_bytes(len(old), seed + 1) < 128, old, new)
    twice = send(layout, old, new)
    for rank, (base, stream) in enumerate(
        zip(make_streams(layout, old), make_streams(layout, new), strict=True)
    ):
        found = delta.encode(layout, rank, base, stream)
        assert found is not None
        delta.apply(layout, rank, found.payload, twice)
        delta.apply(layout, rank, found.payload, half_done)
    assert torch.equal(twice, new)
    # An element that was torn between old and new is whole again, one that never changed stays.
    assert torch.equal(half_done, new)


def test_rank_that_owns_nothing_has_an_empty_delta() -> None:
    layout = Layout.of([spec("a", 2)], num_ranks=4)
    nothing = torch.empty(0, dtype=torch.uint8)
    found = delta.encode(layout, 3, nothing, nothing, max_density=0.0)
    assert found is not None
    assert (found.num_changed, len(found.payload)) == (0, HEADER_BYTES)
    data = random_bytes(4, seed=0)
    before = data.clone()
    delta.apply(layout, 3, found.payload, data)
    assert torch.equal(data, before)


@pytest.mark.parametrize(("num_changed", "is_sent"), [(0, True), (29, True), (30, False)])
def test_density_above_the_limit_gives_no_delta(num_changed: int, is_sent: bool) -> None:
    layout = Layout.of([spec("a", 100)], num_ranks=1)
    old = torch.zeros(200, dtype=torch.uint8)
    new = old.clone()
    new[: 2 * num_changed : 2] = 1
    found = delta.encode(layout, 0, old, new, max_density=0.29)
    assert (found is not None) == is_sent


def map_zeros(num_bytes: int) -> tuple[int, Tensor]:
    """Memory that exists only where it was looked at, and the file that tells how much of it."""
    descriptor = os.memfd_create("zeros")
    os.truncate(descriptor, num_bytes)
    return descriptor, torch.frombuffer(mmap.mmap(descriptor, num_bytes), dtype=torch.uint8)


def test_density_above_the_limit_is_noticed_long_before_the_end_of_the_stream() -> None:
    num_bytes = 32 * 2**20
    layout = Layout.of([spec("a", num_bytes // 2)], num_ranks=1)
    descriptor, base = map_zeros(num_bytes)
    try:
        new = torch.zeros(num_bytes, dtype=torch.uint8)
        new[: 2**20] = 1
        assert delta.encode(layout, 0, base, new, max_density=0.01) is None
        assert os.stat(descriptor).st_blocks * 512 <= num_bytes // 8
        assert delta.encode(layout, 0, base, new, max_density=0.5) is not None
        assert os.stat(descriptor).st_blocks * 512 == num_bytes
    finally:
        os.close(descriptor)


@settings(max_examples=40)
@given(layouts(max_ranks=3), st.data())
def test_damaged_payload_is_refused_or_stays_within_its_rank(
    layout: Layout, data: st.DataObject
) -> None:
    old = random_bytes(layout.num_bytes, seed=5)
    new = change(old, 0.5, seed=6)
    rank = data.draw(st.integers(0, layout.num_ranks - 1))
    found = delta.encode(
        layout, rank, make_streams(layout, old)[rank], make_streams(layout, new)[rank]
    )
    assert found is not None
    payload = found.payload.clone()
    for _ in range(data.draw(st.integers(1, 3))):
        payload[data.draw(st.integers(0, len(payload) - 1))] = data.draw(st.integers(0, 255))
    # The data of a file between two others: what is written outside shows there.
    fenced = torch.cat([old, old, old])
    is_own = torch.zeros(len(fenced), dtype=torch.bool)
    try:
        delta.apply(layout, rank, payload, fenced[len(old) : 2 * len(old)])
        for piece in layout.pieces[rank]:
            is_own[len(old) + piece.file_start :][: piece.num_bytes] = True
    except ValueError:
        pass
    assert torch.equal(fenced[~is_own], torch.cat([old, old, old])[~is_own])


def make_payload() -> tuple[Layout, Tensor, Tensor]:
    layout = Layout.of([spec("a", BLOCK + 10)], num_ranks=1)
    old = torch.zeros(layout.num_bytes, dtype=torch.uint8)
    new = old.clone()
    new[[0, 2, 2 * BLOCK + 18]] = 1  # elements 0, 1 and the very last
    found = delta.encode(layout, 0, old, new)
    assert found is not None
    return layout, old, found.payload  # sizes 16 | counts 8 | values 6 | indices 6


@pytest.mark.parametrize("num_bytes", [0, 1, 15, 16, 23, 24, 30, 35])
def test_payload_that_is_cut_off_is_refused(num_bytes: int) -> None:
    layout, data, payload = make_payload()
    assert len(payload) == 36
    with pytest.raises(ValueError, match="rank 0"):
        delta.apply(layout, 0, payload[:num_bytes], data)
    with pytest.raises(ValueError, match="rank 0"):
        delta.apply(layout, 0, torch.cat([payload, payload[:1]]), data)
    assert not data.any()


@pytest.mark.parametrize(
    ("place", "value", "what"),
    [
        (8, 4, "truncated or damaged"),  # one element more than there are bytes for
        (15, 255, "truncated or damaged"),  # 2**64 elements
        (16, 3, "truncated or damaged"),  # a count that does not add up
        (32, 0, "out of order"),  # the same element twice
        (30, 2, "out of order"),  # 2 before 1
        (34, 10, "outside"),  # one past the last element
        (35, 255, "outside"),
    ],
)
def test_payload_of_nonsense_is_refused_before_anything_is_written(
    place: int, value: int, what: str
) -> None:
    layout, data, payload = make_payload()
    payload[place] = value
    with pytest.raises(ValueError, match=what):
        delta.apply(layout, 0, payload, data)
    assert not data.any()
