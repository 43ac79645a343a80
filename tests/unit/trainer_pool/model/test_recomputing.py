"""Layers that are computed again in the backward pass, in a model by itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.autograd import graph
from transformers import AutoModelForCausalLM, LlamaConfig

from trainer_pool.model import recomputing

LAYERS = 3


def gradients(*, recompute: bool, offload: bool = False) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2}
    config = LlamaConfig(**sizes, num_hidden_layers=LAYERS, vocab_size=64, pad_token_id=0)
    model: Any = AutoModelForCausalLM.from_config(config).train()
    if recompute:
        recomputing.recompute_layers(model, offload=offload)
    model(torch.arange(40)[None]).logits.log_softmax(-1)[..., 7].sum().backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def test_gradients_are_the_same_wherever_the_inputs_of_layers_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Copies are made of these inputs alone."""
    copied: list[torch.Size] = []

    class Noting(graph.saved_tensors_hooks):
        def __init__(self, *, pin_memory: bool) -> None:
            on_cpu = graph.save_on_cpu(pin_memory=pin_memory)

            def pack(tensor: torch.Tensor) -> Any:
                copied.append(tensor.shape)
                packed = on_cpu.pack_hook(tensor)
                assert packed[1].data_ptr() != tensor.data_ptr()
                return packed

            super().__init__(pack, on_cpu.unpack_hook)

    monkeypatch.setattr(recomputing, "save_on_cpu", Noting)
    plain = gradients(recompute=False)
    for offload in (False, True):
        found = gradients(recompute=True, offload=offload)
        assert found.keys() == plain.keys()
        for name, gradient in found.items():
            assert torch.equal(gradient, plain[name]), name
        assert copied == [torch.Size([1, 40, 32])] * LAYERS * offload
