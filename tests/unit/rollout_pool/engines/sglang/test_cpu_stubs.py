"""Functions that replace SGLang's kernels without a GPU."""

from __future__ import annotations

import pytest
import torch

from rollout_pool.engines.sglang.cpu_stubs import gate_shared_expert


@pytest.mark.parametrize("do_add", [False, True])
def test_shared_expert_is_gated_by_each_tokens_own_scalar(do_add: bool) -> None:
    hidden_LH = torch.tensor([[1.0, 1.0], [0.0, 2.0]])
    output_LH = torch.tensor([[10.0, 20.0], [30.0, 40.0]])
    before_LH = output_LH.clone() * do_add
    shared_LH = torch.tensor([[2.0, 4.0], [1.0, 1.0]])
    gate_shared_expert(hidden_LH, torch.tensor([1.0, -1.0]), shared_LH, output_LH, do_add=do_add)
    # sigmoid(0) and sigmoid(-2)
    expected = torch.tensor([[1.0, 2.0], [0.1192029, 0.1192029]])
    torch.testing.assert_close(output_LH, before_LH + expected)
