"""Weights from the files of a model, whole or in parts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tensors.base_weights import BaseWeights

WEIGHTS = {"a.weight": torch.arange(6.0).view(2, 3), "b.weight": torch.ones(4)}


@pytest.fixture(params=["whole", "in parts"])
def folder(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    if request.param == "whole":
        save_file(WEIGHTS, tmp_path / "model.safetensors")
        return tmp_path
    of = {"a.weight": "part-1.safetensors", "b.weight": "part-2.safetensors"}
    for name, file in of.items():
        save_file({name: WEIGHTS[name]}, tmp_path / file)
    index = {"metadata": {}, "weight_map": of}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    return tmp_path


def test_weights_and_their_shapes_are_those_of_the_files(folder: Path) -> None:
    with BaseWeights(str(folder)) as base:
        for name, weight in WEIGHTS.items():
            assert torch.equal(base.tensor(name), weight)
            assert base.shape(name) == tuple(weight.shape)
        for read in (base.tensor, base.shape):
            with pytest.raises(ValueError, match=r"model\.path='.*' has no weight c\.weight"):
                read("c.weight")


def test_model_without_safetensors_is_refused(tmp_path: Path) -> None:
    torch.save(WEIGHTS, tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"model\.path=.*; save the model again with save_pretra"):
        BaseWeights(str(tmp_path))


def test_missing_or_damaged_file_is_named(folder: Path) -> None:
    files = sorted(folder.glob("*.safetensors"))
    files[0].write_bytes(b"no weights")
    with (
        pytest.raises(ValueError, match=rf"{files[0].name} cannot be read"),
        BaseWeights(str(folder)) as base,
    ):
        base.tensor("a.weight")
    if len(files) > 1:
        files[0].unlink()
        with pytest.raises(ValueError, match=rf"{files[0].name} is missing"):
            BaseWeights(str(folder)).tensor("a.weight")
