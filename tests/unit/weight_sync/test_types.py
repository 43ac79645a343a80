"""Transfers and manifests as they go over the wire."""

from dataclasses import asdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import convert

from tensors.layout import Layout
from tests.support.weights.layouts import as_sent, full_transfer, layouts, spec
from weight_sync.types import Manifest, Transfer


@pytest.mark.parametrize(
    "change", [{"version": None}, {"wire_bytes": 3}, {"wire_bytes": [4, -1]}, {"bucket_bytes": 0}]
)
def test_nonsense_is_no_transfer(change: dict[str, object]) -> None:
    fields = asdict(full_transfer(Layout.of([spec("a", 4)], 2)))
    with pytest.raises(ValueError):
        convert(fields | change, Transfer)


@settings(max_examples=40)
@given(layouts(), st.integers(0, 99))
def test_manifest_survives_the_wire(layout: Layout, version: int) -> None:
    checksums = tuple(tuple(range(len(pieces))) for pieces in layout.pieces)
    manifest = Manifest(version=version, layout=layout, checksums=checksums)
    assert Manifest.from_json(as_sent(manifest.to_json())) == manifest
    assert manifest.note.layout is None


def test_manifest_with_a_checksum_too_few_is_refused() -> None:
    layout = Layout.of([spec("a", 4), spec("b", 4)], 2)
    fields = Manifest(version=3, layout=layout, checksums=((1, 2), (3,))).to_json()
    with pytest.raises(ValueError, match="version 3"):
        Manifest.from_json(fields)
