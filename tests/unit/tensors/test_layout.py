from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from safetensors import safe_open

from tensors.layout import Layout, Part, TensorSpec
from tests.support.weights.layouts import (
    as_sent,
    layouts,
    make_streams,
    random_bytes,
    spec,
)


@settings(max_examples=40)
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


@settings(max_examples=40)
@given(layouts())
def test_pieces_are_aligned_to_their_dtype_in_stream_and_file(layout: Layout) -> None:
    assert len(layout.file_header) % 64 == 0
    for pieces in layout.pieces:
        for piece in pieces:
            item = getattr(torch, layout.tensors[piece.tensor].dtype).itemsize
            assert piece.stream_start % item == piece.file_start % item == 0


@settings(max_examples=40)
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


@settings(max_examples=40)
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


def test_parts_of_a_parameter_are_tensors_of_the_file(tmp_path: Path) -> None:
    """A parameter of two experts is sent as one and read as two; the layout survives as JSON."""
    parts = (Part("experts.0.weight", (2, 3)), Part("experts.1.weight", (3, 2)))
    fused = TensorSpec(name="experts", dtype="bfloat16", shape=(2, 6), parts=parts)
    layout = Layout.of([spec("norm", 5, dtype="float32"), fused], num_ranks=2)
    assert Layout.from_json(layout.to_json()) == layout
    assert Layout.of([spec("norm", 5, dtype="float32")], 2).to_json().keys() == {
        "num_ranks",
        "tensors",
    }
    data = random_bytes(layout.num_bytes, seed=3)
    path = tmp_path / "model.safetensors"
    path.write_bytes(layout.file_header + data.numpy().tobytes())
    with safe_open(path, "pt") as file:
        assert {*file.keys()} == {"norm", *(part.name for part in parts)}
        flat = data[20:].view(torch.bfloat16)
        for part, values in zip(parts, flat.split(6), strict=True):
            read = file.get_tensor(part.name)
            assert tuple(read.shape) == part.shape
            assert torch.equal(read.flatten().view(torch.int16), values.view(torch.int16))


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ((Part("a", (2,)),), "the parts of tensor 'experts' are not all of it"),
        ((Part("a", (3,)), Part("a", (3,))), "share a name: a"),
        ((Part("a", (3,)), Part("norm", (3,))), "share a name: norm"),
    ],
)
def test_parts_must_be_all_of_their_parameter(parts: tuple[Part, ...], message: str) -> None:
    fused = TensorSpec(name="experts", dtype="float32", shape=(6,), parts=parts)
    with pytest.raises(ValueError, match=message):
        Layout.of([fused, spec("norm", 5)], 1)
