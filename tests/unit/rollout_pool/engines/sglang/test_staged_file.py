"""How a staged file is read, against safetensors itself."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from rollout_pool.engines.sglang.strategies import StagedFile


@pytest.fixture
def tensors():
    torch.manual_seed(0)
    return {
        "embed": torch.randn(40, 8),
        "norm": torch.randn(3),
        "q": torch.randn(5, 7).bfloat16(),
        "bias": torch.randn(1).bfloat16(),
    }


@pytest.fixture
def folder(tmp_path, tensors):
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    return tmp_path


@pytest.mark.parametrize("max_bytes", [1, 60, 10**6])
def test_batches_hold_every_tensor_whole_and_in_its_place(folder, tensors, max_bytes):
    found = {}
    for batch in StagedFile.open(folder).batches(max_bytes):
        assert len(batch.tensors) == 1 or batch.data.size <= max_bytes
        start = 0
        for spec in batch.tensors:
            data = torch.from_numpy(np.array(batch.data[start : start + spec.num_bytes]))
            found[spec.name] = data.view(getattr(torch, spec.dtype)).view(spec.shape)
            start += spec.num_bytes
        assert start == batch.data.size
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())


def test_unsupported_dtype_is_an_error(tmp_path):
    save_file({"a": torch.zeros(2, dtype=torch.int64)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"model\.safetensors.*unsupported dtype.*I64"):
        StagedFile.open(tmp_path)


def test_truncated_file_is_an_error(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ValueError, match="do not cover the file"):
        StagedFile.open(folder)
