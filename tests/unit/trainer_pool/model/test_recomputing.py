"""Layers that are computed again in the backward pass, in a model by itself."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers as hf
from torch.autograd import graph
from transformers import AutoModelForCausalLM, LlamaConfig

from trainer_pool.model import recomputing

LAYERS = 3
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2}


def gradients(
    *, recompute: bool, offload: bool = False, tile: int | None = None, sizes_seen: Any = None
) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    config = LlamaConfig(**SIZES, num_hidden_layers=LAYERS, vocab_size=64, pad_token_id=0)
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
    # A layer is computed again, and then each tile before its own backward pass.
    assert sizes_seen == once * 3 * LAYERS


def test_rows_of_one_tile_are_not_computed_again_for_it() -> None:
    sizes_seen: list[int] = []
    gradients(recompute=True, tile=40, sizes_seen=sizes_seen)
    assert sizes_seen == [40] * 2 * LAYERS


def test_gradients_of_many_tiles_are_not_summed_in_bfloat16() -> None:
    """Each of a thousand roundings of the sum would add to the error."""
    torch.manual_seed(0)
    config = LlamaConfig(**SIZES, num_hidden_layers=1, vocab_size=64)
    model: Any = AutoModelForCausalLM.from_config(config)
    mlp, hidden = model.model.layers[0].mlp.bfloat16(), torch.randn(1, 4096, 32).bfloat16()

    def error(exact: torch.Tensor) -> float:
        mlp.zero_grad()
        mlp(hidden).square().sum().backward()
        return float((mlp.gate_proj.weight.grad.double() - exact).norm() / exact.norm())

    twin = copy.deepcopy(mlp).double()
    twin(hidden.double()).square().sum().backward()
    exact = twin.gate_proj.weight.grad
    whole = error(exact)
    recomputing.tile_mlps(model, 4)
    assert 0 < error(exact) < 1.2 * whole


def test_gpt2_is_tiled_and_what_cannot_be_is_refused() -> None:
    small = hf.GPT2Config(n_embd=32, n_layer=1, n_head=2, vocab_size=64)
    recomputing.tile_mlps(AutoModelForCausalLM.from_config(small), 8)
    heads = {"num_hidden_layers": 1, "num_key_value_heads": 2, "vocab_size": 64}
    opt = hf.OPTConfig(hidden_size=32, ffn_dim=48, num_attention_heads=2, num_hidden_layers=1)
    for config, why in (
        (hf.MixtralConfig(**SIZES, **heads), "its MixtralDecoderLayer has a mixture of experts"),
        (opt, "its OPTDecoderLayer has no module `mlp`"),
    ):
        model = AutoModelForCausalLM.from_config(config)
        with pytest.raises(ValueError, match=rf"^trainer\.mlp_tile_tokens=8: .*{why}; do not set"):
            recomputing.tile_mlps(model, 8)
    plain = AutoModelForCausalLM.from_config(LlamaConfig(**SIZES, num_hidden_layers=1))
    plain._no_split_modules = None
    with pytest.raises(ValueError, match="_no_split_modules do not name LlamaDecoderLayer"):
        recomputing.tile_mlps(plain, 8)
