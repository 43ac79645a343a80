"""Layers that are computed again in the backward pass, in a model by itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.autograd import graph
from transformers import AutoModelForCausalLM, LlamaConfig, MixtralConfig

from trainer_pool.model import recomputing

LAYERS = 3


def gradients(
    *, recompute: bool, offload: bool = False, tile: int | None = None, sizes_seen: Any = None
) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2}
    config = LlamaConfig(**sizes, num_hidden_layers=LAYERS, vocab_size=64, pad_token_id=0)
    model: Any = AutoModelForCausalLM.from_config(config).train()
    if recompute:
        recomputing.recompute_layers(model, offload=offload)
    if tile is not None:
        recomputing.tile_mlps(model, tile)
        for layer in model.model.layers:
            layer.mlp.act_fn.register_forward_hook(lambda *seen: sizes_seen.append(len(seen[2][0])))
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


def test_mlps_in_tiles_have_the_same_gradients_and_the_values_of_one_tile() -> None:
    plain, sizes_seen = gradients(recompute=True), []
    tiled = gradients(recompute=True, tile=7, sizes_seen=sizes_seen)
    assert tiled.keys() == plain.keys()
    for name, gradient in tiled.items():
        torch.testing.assert_close(gradient, plain[name], rtol=1e-5, atol=1e-6)
    once = [7, 7, 7, 7, 7, 5]
    assert sizes_seen[: 6 * LAYERS] == once * LAYERS, "forward"
    # A layer is computed again, up to what its last tile needs, and then each tile before its own
    # backward pass.
    assert len(sizes_seen) == (6 + 5 + 6) * LAYERS and max(sizes_seen) == 7


def test_rows_of_one_tile_are_not_computed_again_for_it() -> None:
    sizes_seen: list[int] = []
    gradients(recompute=True, tile=40, sizes_seen=sizes_seen)
    assert sizes_seen == [40] * 2 * LAYERS


def test_experts_are_not_tiled() -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2}
    config = MixtralConfig(**sizes, num_hidden_layers=1, num_key_value_heads=2, vocab_size=64)
    model = AutoModelForCausalLM.from_config(config)
    with pytest.raises(ValueError, match=r"mlp_tile_tokens=8: .*MixtralDecoderLayer.*of experts"):
        recomputing.tile_mlps(model, 8)
