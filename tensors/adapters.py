"""Low-rank adapters on their way: their names, and the weights that they make of a base's.

    weight [out, in] = base + scale B A        A [rank, in], B [out, rank], scale = alpha / rank

An adapter's tensors are named as peft writes them (`base_model.model.NAME.lora_A.weight`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from tensors.layout import Layout, TensorSpec

_PREFIX = "base_model.model."
_A, _B = ".lora_A.weight", ".lora_B.weight"


def factor_names(weight: str) -> tuple[str, str]:
    """The names of A and B of the base's weight `NAME.weight`."""
    module = _PREFIX + weight.removesuffix(".weight")
    return module + _A, module + _B


def merged_layout(adapter: Layout) -> Layout | None:
    """The weights that an adapter changes, whole on one rank; None if these are no adapter's
    tensors."""
    known, specs = {tensor.name: tensor for tensor in adapter.tensors}, []
    for tensor in adapter.tensors:
        weight = tensor.name.removeprefix(_PREFIX).removesuffix(_A) + ".weight"
        a, b = factor_names(weight)
        if tensor.name == a and b in known:
            shape = (known[b].shape[0], tensor.shape[1])
            specs.append(TensorSpec(name=weight, dtype=tensor.dtype, shape=shape))
    return Layout.of(specs, 1) if 2 * len(specs) == len(known) else None


def merged(base: Tensor, a: Tensor, b: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    """[out, in] of `dtype`: base + scale B A, computed in float32 and rounded once."""
    product = b.to(torch.float32) @ a.to(torch.float32)
    return torch.add(base.to(torch.float32), product, alpha=scale).to(dtype)
