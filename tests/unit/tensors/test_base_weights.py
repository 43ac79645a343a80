"""Weights from the files of a model, whole or in parts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tensors.base_weights import BaseWeights

WEIGHTS = {"a.weight": torch.arange(6.0).view(2, 3), "b.weight": torch.ones(4)}


@pytest.fixture(params=["safetensors", "bin"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=["whole", "in parts"])
def folder(tmp_path: Path, kind: str, request: pytest.FixtureRequest) -> Path:
    save: Any = save_file if kind == "safetensors" else torch.save
    whole = "model.safetensors" if kind == "safetensors" else "pytorch_model.bin"
    if request.param == "whole":
        save(WEIGHTS, tmp_path / whole)
        return tmp_path
    of = {"a.weight": f"part-1.{kind}", "b.weight": f"part-2.{kind}"}
    for name, file in of.items():
        save({name: WEIGHTS[name]}, tmp_path / file)
    (tmp_path / f"{whole}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": of}))
    return tmp_path


def test_weights_and_their_shapes_are_those_of_the_files(folder: Path) -> None:
    with BaseWeights(str(folder)) as base:
        assert base.names == WEIGHTS.keys()
        for name, weight in WEIGHTS.items():
            assert torch.equal(base.tensor(name), weight)
            assert base.shape(name) == tuple(weight.shape)
        for read in (base.tensor, base.shape):
            with pytest.raises(ValueError, match=r"model\.path='.*' has no weight c\.weight"):
                read("c.weight")


def test_folder_without_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no weights: neither model\.safetensors .*save_pretrain"):
        BaseWeights(str(tmp_path))


def test_missing_or_damaged_file_is_named(folder: Path, kind: str) -> None:
    files = sorted(folder.glob(f"*.{kind}"))
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
