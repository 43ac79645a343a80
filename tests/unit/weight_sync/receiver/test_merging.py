"""A receiver of adapters: what its engines load, and when."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tensors.adapters import factor_names, merged
from tensors.checksums import staged_checksums
from tensors.layout import Layout, TensorSpec
from tests.support.weights.layouts import full_transfer
from tests.support.weights.receiver_specs import receiver_spec
from weight_sync.receiver.client import StagedVersion
from weight_sync.receiver.receiver import Receiver
from weight_sync.types import Manifest, MergeSpec, ReceiverSpec, UnknownVersion

WEIGHTS = ("model.q_proj.weight", "model.down_proj.weight")
SHAPES = {WEIGHTS[0]: (24, 16), WEIGHTS[1]: (16, 40)}
RANK, SCALE, TIMEOUT_S = 4, 2.0, 60.0


def adapter_layout(dtype: str = "float32") -> Layout:
    specs = []
    for name, (rows, columns) in SHAPES.items():
        a, b = factor_names(name)
        specs += [
            TensorSpec(name=a, dtype=dtype, shape=(RANK, columns)),
            TensorSpec(name=b, dtype=dtype, shape=(rows, RANK)),
        ]
    return Layout.of(specs, num_ranks=2)


LAYOUT = adapter_layout()


@pytest.fixture
def base(tmp_path: Path) -> Path:
    generator = torch.Generator().manual_seed(1)
    weights = {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
    folder = tmp_path / "base"
    folder.mkdir()
    save_file({**weights, "model.norm.weight": torch.ones(16)}, folder / "model.safetensors")
    return folder


@pytest.fixture
def spec(tmp_path: Path, base: Path) -> ReceiverSpec:
    merge = MergeSpec(model_path=str(base), scale=SCALE, dtype="float32")
    return replace(receiver_spec("node-0", tmp_path), merge=merge)


class Merged:
    """A receiver, and the wait for the versions that it has merged."""

    def __init__(self, spec: ReceiverSpec) -> None:
        self.receiver = Receiver(spec)
        self._changed = threading.Condition()
        self.receiver.on_merged = self._note

    def _note(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def wait(self, version: int) -> StagedVersion:
        with self._changed:
            assert self._changed.wait_for(lambda: self.newest_version() == version, TIMEOUT_S)
        staged = self.receiver.newest()
        assert staged is not None
        return staged

    def newest_version(self) -> int | None:
        newest = self.receiver.newest()
        return None if newest is None else newest.version

    def stage(self, version: int) -> dict[str, torch.Tensor]:
        """An adapter arrives and is released; returns its tensors."""
        slot = self.receiver.store.begin(full_transfer(LAYOUT, version=version))
        values = torch.randn(
            LAYOUT.num_bytes // 4, generator=torch.Generator().manual_seed(version)
        )
        slot.data.view(torch.float32).copy_(values)
        checksums = staged_checksums(LAYOUT, slot.data)
        self.receiver.store.complete(slot, Manifest.of(version, LAYOUT, checksums))
        parts = values.split([tensor.num_elements for tensor in LAYOUT.tensors])
        tensors = zip(LAYOUT.tensors, parts, strict=True)
        self.receiver.release(version)
        return {tensor.name: part.view(tensor.shape) for tensor, part in tensors}


@pytest.fixture
def start(spec: ReceiverSpec) -> Iterator[Callable[[], Merged]]:
    started: list[Merged] = []

    def make() -> Merged:
        started.append(Merged(spec))
        return started[-1]

    yield make
    for merged_receiver in started:
        merged_receiver.receiver.close(should_remove=True)


def assert_merged(staged: StagedVersion, adapter: dict[str, torch.Tensor], base: Path) -> None:
    found, of_base = load_file(Path(staged.path) / "model.safetensors"), base / "model.safetensors"
    weights = load_file(of_base)
    assert found.keys() == SHAPES.keys()
    for name in WEIGHTS:
        a, b = factor_names(name)
        expected = merged(weights[name], adapter[a], adapter[b], SCALE, torch.float32)
        assert torch.equal(found[name], expected), name
    manifest = Manifest.read(Path(staged.path))
    assert manifest.version == staged.version
    assert manifest.tensor_checksums.keys() == SHAPES.keys()


def test_engines_load_the_base_with_the_newest_adapter(
    start: Callable[[], Merged], base: Path
) -> None:
    node = start()
    node.receiver.set_layout(LAYOUT)
    assert node.receiver.newest() is None
    for version in (0, 1, 2):
        adapter = node.stage(version)
        assert_merged(node.wait(version), adapter, base)


def test_version_that_an_engine_loads_is_not_overwritten_and_the_next_follows_its_end(
    start: Callable[[], Merged], base: Path
) -> None:
    node = start()
    node.receiver.set_layout(LAYOUT)
    first = node.stage(0)
    held = node.wait(0)
    node.receiver.hold(0, "engine-0", 600.0, as_sent=False)
    node.stage(1)
    node.wait(1)
    node.receiver.hold(1, "engine-1", 600.0, as_sent=False)
    third = node.stage(2)  # arrives, but both merged slots are held
    assert node.receiver.store.newest == 2
    assert_merged(held, first, base)
    node.receiver.let_go(0, "engine-0")
    assert_merged(node.wait(2), third, base)
    with pytest.raises(UnknownVersion):
        node.receiver.hold(0, "engine-0", 600.0, as_sent=False)


def test_peers_hold_the_adapter_itself(start: Callable[[], Merged]) -> None:
    node = start()
    node.receiver.set_layout(LAYOUT)
    node.stage(0)
    node.wait(0)
    node.receiver.hold(0, "receiver east", 600.0, as_sent=True)
    node.stage(1)
    node.wait(1)
    assert "version 0 is held by receiver east" in node.receiver.store.obstacle
    assert node.receiver.served.obstacle == ""


def test_receiver_that_died_goes_on_with_what_it_had_merged(
    start: Callable[[], Merged], base: Path
) -> None:
    node = start()
    node.receiver.set_layout(LAYOUT)
    adapter = node.stage(3)
    node.wait(3)
    node.receiver.close(should_remove=False)
    again = start()
    assert again.receiver.store.newest == 3
    assert_merged(again.wait(3), adapter, base)
    adapter = again.stage(4)
    assert_merged(again.wait(4), adapter, base)


def test_receiver_that_died_before_it_merged_merges_then(
    start: Callable[[], Merged], spec: ReceiverSpec, base: Path
) -> None:
    node = start()
    node.receiver.set_layout(LAYOUT)
    node.stage(3)
    node.wait(3)
    node.receiver.hold(3, "engine-0", 600.0, as_sent=False)
    node.stage(4)
    node.wait(4)
    node.receiver.hold(4, "engine-1", 600.0, as_sent=False)
    adapter = node.stage(5)
    assert node.newest_version() == 4
    node.receiver.close(should_remove=False)
    again = start()
    for version, engine in ((3, "engine-0"), (4, "engine-1")):
        again.receiver.let_go(version, engine)
    assert_merged(again.wait(5), adapter, base)


def test_receiver_that_died_before_its_first_merging_merges_then(
    start: Callable[[], Merged], spec: ReceiverSpec, base: Path
) -> None:
    plain = Merged(replace(spec, merge=None))  # has the adapter alone
    plain.receiver.set_layout(LAYOUT)
    adapter = plain.stage(0)
    plain.receiver.close(should_remove=False)
    assert_merged(start().wait(0), adapter, base)


def test_version_that_was_merged_but_not_released_is_released_by_the_next_process(
    start: Callable[[], Merged], spec: ReceiverSpec, base: Path
) -> None:
    node = start()
    node.receiver.set_layout(LAYOUT)
    adapter = node.stage(3)
    staged = node.wait(3)
    node.receiver.close(should_remove=False)
    (Path(staged.path) / "released").unlink()
    assert_merged(start().wait(3), adapter, base)


def test_versions_that_came_while_no_slot_was_free_are_skipped_but_the_newest(
    start: Callable[[], Merged], base: Path
) -> None:
    node = start()
    node.receiver.set_layout(LAYOUT)
    for version in (0, 1):
        node.stage(version)
        node.wait(version)
        node.receiver.hold(version, f"engine-{version}", 600.0, as_sent=False)
    for version in (2, 3, 4):  # their slots are free all the same
        adapter = node.stage(version)
    assert node.newest_version() == 1
    node.receiver.let_go(0, "engine-0")
    assert_merged(node.wait(4), adapter, base)
    assert node.receiver.served.complete_versions == [1, 4]


def test_receiver_without_room_for_merged_weights_asks_for_the_layout_again(
    start: Callable[[], Merged], base: Path
) -> None:
    node = start()
    whole = (base / "model.safetensors").read_bytes()
    save_file({WEIGHTS[0]: torch.ones(24, 16)}, base / "model.safetensors")
    for _ in range(2):
        with pytest.raises(ValueError, match="has no weight"):
            node.receiver.set_layout(LAYOUT)
        assert node.receiver.status().layout_digest is None
    (base / "model.safetensors").unlink()
    (base / "model.safetensors").write_bytes(whole)
    other = start_again(node, start)
    other.receiver.set_layout(LAYOUT)
    assert other.receiver.status().layout_digest == LAYOUT.digest
    adapter = other.stage(0)
    assert_merged(other.wait(0), adapter, base)


def start_again(node: Merged, start: Callable[[], Merged]) -> Merged:
    node.receiver.close(should_remove=False)
    return start()


def test_adapter_of_another_base_is_refused_before_anything_arrives(
    start: Callable[[], Merged], base: Path
) -> None:
    save_file({WEIGHTS[0]: torch.ones(24, 16)}, base / "model.safetensors")
    with pytest.raises(ValueError, match=r"has no weight model\.down_proj\.weight"):
        start().receiver.set_layout(LAYOUT)


def test_shape_of_another_base_is_named(start: Callable[[], Merged], base: Path) -> None:
    save_file({name: torch.ones(24, 16) for name in WEIGHTS}, base / "model.safetensors")
    with pytest.raises(
        ValueError,
        match=r"model\.down_proj\.weight of the adapter has the shape \[16, 40\], that of "
        r"model\.path='.*' \[24, 16\]",
    ):
        start().receiver.set_layout(LAYOUT)


def test_whole_weights_are_refused_by_a_receiver_of_adapters(start: Callable[[], Merged]) -> None:
    whole = Layout.of([TensorSpec(name=WEIGHTS[0], dtype="float32", shape=(24, 16))], 1)
    with pytest.raises(ValueError, match="whole weights were sent"):
        start().receiver.set_layout(whole)
