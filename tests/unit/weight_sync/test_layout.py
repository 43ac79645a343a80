from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import convert
from safetensors import safe_open

from tests.support.weights.layouts import (
    as_sent,
    full_transfer,
    layouts,
    make_streams,
    random_bytes,
    spec,
)
from weight_sync.layout import Layout, Manifest, Transfer, mismatches


@settings(deadline=None, max_examples=40)
@given(layouts())
def test_pieces_of_all_ranks_cover_the_file_once_and_each_stream_in_order(
    layout: Layout,
) -> None:
    covered = []
    for rank, pieces in enumerate(layout.pieces):
        position = 0
        for piece in pieces:
            assert piece.num_bytes > 0
            assert piece.stream_start == position
            position = piece.stream_stop
            covered.append((piece.file_start, piece.file_start + piece.num_bytes))
        assert position == layout.stream_bytes(rank)
    covered.sort()
    assert [start for start, _ in covered] == [0, *(stop for _, stop in covered)][: len(covered)]
    assert sum(stop - start for start, stop in covered) == layout.num_bytes


@settings(deadline=None, max_examples=40)
@given(layouts())
def test_pieces_are_aligned_to_their_dtype_in_stream_and_file(layout: Layout) -> None:
    assert len(layout.file_header) % 64 == 0
    for pieces in layout.pieces:
        for piece in pieces:
            item = getattr(torch, layout.tensors[piece.tensor].dtype).itemsize
            assert piece.stream_start % item == piece.file_start % item == 0


@settings(deadline=None, max_examples=40)
@given(layouts())
def test_pieces_are_what_zero3_keeps_on_each_rank(layout: Layout) -> None:
    data = random_bytes(layout.num_bytes, seed=1)
    for rank, stream in enumerate(make_streams(layout, data)):
        assert len(stream) == layout.stream_bytes(rank)
        for piece in layout.pieces[rank]:
            sent = stream[piece.stream_start : piece.stream_stop]
            assert torch.equal(sent, data[piece.file_start : piece.file_start + piece.num_bytes])


def test_header_and_data_are_a_safetensors_file(tmp_path: Path) -> None:
    layout = Layout.of(
        [
            spec("model.embed", 7, 5),
            spec("scale"),
            spec("none", 0, 4),
            spec("norm", 3, dtype="float32"),
            spec("ä.bias", 1, dtype="float16"),
        ],
        num_ranks=3,
    )
    data = random_bytes(layout.num_bytes, seed=2)
    path = tmp_path / "model.safetensors"
    path.write_bytes(layout.file_header + data.numpy().tobytes())
    with safe_open(path, framework="pt") as file:
        assert set(file.keys()) == {tensor.name for tensor in layout.tensors}
        for tensor, start in zip(layout.tensors, layout.offsets, strict=False):
            found = file.get_tensor(tensor.name)
            assert (str(found.dtype), found.shape) == (f"torch.{tensor.dtype}", tensor.shape)
            raw = found.reshape(-1).view(torch.uint8)
            assert torch.equal(raw, data[start : start + tensor.num_bytes])


@settings(deadline=None, max_examples=40)
@given(layouts())
def test_layout_survives_the_wire_with_its_digest(layout: Layout) -> None:
    again = Layout.from_json(as_sent(layout.to_json()))
    assert again == layout
    assert again.digest == layout.digest


def test_layouts_that_differ_have_other_digests() -> None:
    tensors = [spec("a", 4), spec("b", 2, 2)]
    variants = [
        Layout.of(tensors, 2),
        Layout.of(tensors, 1),
        Layout.of([spec("a", 4), spec("b", 4)], 2),
        Layout.of([spec("a", 4), spec("c", 2, 2)], 2),
        Layout.of([spec("a", 4), spec("b", 2, 2, dtype="float16")], 2),
        Layout.of(tensors[::-1], 2),
    ]
    assert len({layout.digest for layout in variants}) == len(variants)


@pytest.mark.parametrize(
    ("tensors", "num_ranks", "message"),
    [
        ([], 1, "no tensor"),
        ([spec("twin", 2), spec("b", 1), spec("twin", 3)], 1, "share a name: twin"),
        ([spec("codes", 2, dtype="int8")], 1, "'codes' is of dtype 'int8'"),
        ([spec("a", 2, -1)], 1, r"'a' has the shape \[2, -1\]"),
        ([spec("__metadata__", 2)], 1, "__metadata__"),
        ([spec("a", 2)], 0, "num_ranks=0"),
    ],
)
def test_model_that_cannot_be_published_is_refused_by_name(
    tensors: list[object], num_ranks: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        Layout.of(tensors, num_ranks)


@pytest.mark.parametrize(
    "fields", [None, [], {}, {"num_ranks": 1, "tensors": [["a", "bfloat16"]]}, {"tensors": 3}]
)
def test_nonsense_is_no_layout(fields: object) -> None:
    with pytest.raises(ValueError):
        Layout.from_json(fields)


@pytest.mark.parametrize("base_version", [None, 6])
def test_transfer_survives_the_wire(base_version: int | None) -> None:
    transfer = Transfer(
        version=7,
        base_version=base_version,
        layout_digest="abc",
        wire_bytes=(3, 0),
        bucket_bytes=1,
    )
    assert convert(as_sent(asdict(transfer)), Transfer) == transfer


@pytest.mark.parametrize(
    "change", [{"version": None}, {"wire_bytes": 3}, {"wire_bytes": [4, -1]}, {"bucket_bytes": 0}]
)
def test_nonsense_is_no_transfer(change: dict[str, object]) -> None:
    fields = asdict(full_transfer(Layout.of([spec("a", 4)], 2)))
    with pytest.raises(ValueError):
        convert(fields | change, Transfer)


@settings(deadline=None, max_examples=40)
@given(layouts(), st.integers(0, 99))
def test_manifest_survives_the_wire(layout: Layout, version: int) -> None:
    checksums = tuple(tuple(range(len(pieces))) for pieces in layout.pieces)
    manifest = Manifest(version=version, layout=layout, checksums=checksums)
    assert Manifest.from_json(as_sent(manifest.to_json())) == manifest
    assert "layout" not in manifest.to_wire()


def test_manifest_with_a_checksum_too_few_is_refused() -> None:
    layout = Layout.of([spec("a", 4), spec("b", 4)], 2)
    fields = Manifest(version=3, layout=layout, checksums=((1, 2), (3,))).to_json()
    with pytest.raises(ValueError, match="version 3"):
        Manifest.from_json(fields)


def test_mismatches_name_each_tensor_once() -> None:
    layout = Layout.of([spec("a", 4), spec("b", 4), spec("c", 1)], 2)
    expected = ((1, 2, 3), (4, 5))
    assert mismatches(layout, expected, expected) == []
    assert mismatches(layout, expected, ((0, 2, 3), (0, 5))) == ["a"]
    assert mismatches(layout, expected, ((1, 2, 0), (4, 0))) == ["b", "c"]
