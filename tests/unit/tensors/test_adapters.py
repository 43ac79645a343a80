"""Names of an adapter's tensors, and the weights that it makes."""

from __future__ import annotations

import pytest
import torch

from tensors.adapters import factor_names, merged, merged_layout
from tensors.layout import Layout, TensorSpec

Q = "model.layers.0.self_attn.q_proj.weight"
A, B = factor_names(Q)


def layout(*tensors: tuple[str, tuple[int, ...]]) -> Layout:
    return Layout.of([TensorSpec(name=n, dtype="bfloat16", shape=s) for n, s in tensors], 2)


def test_factors_are_named_as_peft_writes_them() -> None:
    assert A == "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    assert B == "base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight"


def test_layout_of_merged_weights_has_their_shapes_on_one_rank() -> None:
    found = merged_layout(layout((A, (4, 32)), (B, (64, 4))))
    assert found == Layout.of([TensorSpec(name=Q, dtype="bfloat16", shape=(64, 32))], 1)


@pytest.mark.parametrize(
    "tensors",
    [
        [(Q, (64, 32))],
        [(A, (4, 32))],
        [(A, (4, 32)), (B, (64, 4)), ("base_model.model.lm_head.weight", (9, 9))],
    ],
    ids=["a weight", "half an adapter", "more than an adapter"],
)
def test_other_tensors_are_no_adapter(tensors: list[tuple[str, tuple[int, ...]]]) -> None:
    assert merged_layout(layout(*tensors)) is None


def test_product_is_added_in_float32_and_rounded_once() -> None:
    generator = torch.Generator().manual_seed(0)
    base = torch.randn(48, 32, generator=generator).bfloat16()
    a = torch.randn(8, 32, generator=generator).bfloat16()
    b = torch.randn(48, 8, generator=generator).bfloat16()
    exact = base.double() + 2.0 * (b.double() @ a.double())
    found = merged(base, a, b, 2.0, torch.bfloat16)
    assert found.dtype is torch.bfloat16
    # Half a unit in the last place of bfloat16, and what float32 adds to it.
    assert float(((found.double() - exact) / exact).abs().max()) <= 2**-8 * 1.001
    in_bfloat16 = base + 2.0 * (b @ a)
    assert float(((in_bfloat16.double() - exact) / exact).abs().max()) > 2**-8 * 1.001
