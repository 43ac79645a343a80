"""The gates of each type of model with experts, and the sums of what they choose."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from trainer_pool.algorithms.load_balancing import RouterSums, load_balancing_loss
from trainer_pool.data.packing import MicroBatch, PackedRow, Row, fill_up, pack, packed_row
from trainer_pool.model import attention
from trainer_pool.model.routers import gates, watching

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "max_position_embeddings": 64,
}
EXPERTS: dict[str, Any] = {**SIZES, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
FAMILIES: dict[str, hf.PreTrainedConfig] = {
    "qwen3_moe": hf.Qwen3MoeConfig(**EXPERTS, num_experts=6, norm_topk_prob=True),
    "qwen2_moe": hf.Qwen2MoeConfig(**EXPERTS, num_experts=6, shared_expert_intermediate_size=16),
    "mixtral": hf.MixtralConfig(**SIZES, num_local_experts=6, num_experts_per_tok=2),
    "olmoe": hf.OlmoeConfig(**SIZES, num_experts=6, num_experts_per_tok=2),
    "glm4_moe": hf.Glm4MoeConfig(
        **EXPERTS, n_routed_experts=6, first_k_dense_replace=1, n_group=2, topk_group=1
    ),
}


def build(kind: str) -> Any:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        FAMILIES[kind], dtype=torch.float32, attn_implementation=attention.PACKED
    )
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if ".gate." in name:  # large, so that experts differ, as do corrections of their scores
                tensor.copy_(torch.randn_like(tensor))
    return model


def hidden(model: Any, row: PackedRow, **options: bool) -> Any:
    return model.model(
        input_ids=row.tokens_L.unsqueeze(0),
        position_ids=row.position_ids_L.unsqueeze(0),
        use_cache=False,
        **attention.arguments(row),
        **options,
    )


@pytest.mark.parametrize("kind", FAMILIES)
def test_gates_of_each_type_are_found_with_what_they_choose(kind: str) -> None:
    """The chosen experts are those that the layer's experts are then called with."""
    model, chosen, used = build(kind), dict[str, torch.Tensor](), list[torch.Tensor]()
    found = gates(model)
    layers = [1, 2] if kind == "glm4_moe" else [0, 1, 2]
    assert [gate.name for gate in found] == [f"model.layers.{n}.mlp.gate" for n in layers]
    assert [gate.layer for gate in found] == layers
    assert {(gate.num_experts, gate.num_chosen) for gate in found} == {(6, 2)}
    for gate in found:

        def note(_: nn.Module, __: Any, output: Any, gate: Any = gate) -> None:
            chosen[gate.name] = gate.experts(output)
            sums_L = gate.probabilities(gate.logits(output)).sum(-1)
            assert torch.allclose(sums_L, torch.ones(7)) and gate.logits(output).shape == (7, 6)

        gate.module.register_forward_hook(note)
        gate.block.experts.register_forward_pre_hook(lambda _, args: used.append(args[1]))
    hidden(model, packed_row([torch.arange(7)]))
    assert len(used) == len(chosen) == len(found)
    for gate, experts in zip(found, used, strict=True):
        assert torch.equal(chosen[gate.name], experts)


def test_dense_model_has_no_gates() -> None:
    assert gates(AutoModelForCausalLM.from_config(hf.Qwen3Config(**SIZES))) == []


def rows() -> list[Row]:
    """Three sequences, the first two with 20 tokens in common and one of these trained, with a gap
    in what is trained; one token of the last is trained by a further stream alone."""
    dice = np.random.default_rng(0)
    common, found = dice.integers(0, 64, 20), []
    for number, length in enumerate((30, 25, 12)):
        tokens = dice.integers(0, 64, length).astype(np.int32)
        if number < 2:
            tokens[:20] = common
        mask = (np.arange(length) >= (19 if number < 2 else 5)).astype(np.uint8)
        mask[length - 3] = 0
        stream = np.zeros(length, np.float32)
        stream[3] = number == 2
        zeros = np.zeros(length, np.float32)
        found.append(
            Row(tokens=tokens, loss_mask=mask, rollout_logprobs=zeros, streams={"more": stream})
        )
    return found


SPLITS = {
    "one pass": pack(rows(), 100),
    "three passes and padding": fill_up(pack(rows(), 30), 4),
    "shared prefixes": pack(rows(), 100, should_share_prefixes=True),
}


def transformers_loss(model: Any, given: Sequence[Row]) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Its loss, the mean over layers, and [T, E] logits by layer; T positions that predict."""
    layers: list[list[torch.Tensor]] = []
    for row in given:
        output = hidden(
            model, packed_row([torch.from_numpy(row.tokens)]), output_router_logits=True
        )
        layers.append(
            [logits[np.flatnonzero(row.is_scored) - 1] for logits in output.router_logits]
        )
    logits = [torch.cat(of_layer) for of_layer in zip(*layers, strict=True)]
    losses = [load_balancing_loss_func((one,), num_experts=6, top_k=2) for one in logits]
    return torch.stack(losses).mean(), logits  # type: ignore[arg-type]


def sums_of(model: Any, batch: MicroBatch, *, has_gradient: bool) -> RouterSums:
    with watching(gates(model), batch, has_gradient=has_gradient) as layers:
        hidden(model, batch.row)
    return RouterSums.of_pass(layers)


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    found = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


@pytest.mark.parametrize("kind", sorted(FAMILIES.keys() - {"glm4_moe"}))
def test_gradient_of_the_balance_is_that_of_transformers_for_any_split(kind: str) -> None:
    """Into passes, some of padding, with shared prefixes, and with layers computed again."""
    model = build(kind)
    expected, logits = transformers_loss(model, rows())
    expected.backward()
    theirs = gradients(model)
    assert len(theirs) > 20
    for name, split in {**SPLITS, "layers computed again": SPLITS["one pass"]}.items():
        if name == "layers computed again":
            model.gradient_checkpointing_enable({"use_reentrant": False})
            model.train()
        whole = RouterSums.of_pass([])
        for batch in split:
            with torch.no_grad():
                whole = whole.plus(sums_of(model, batch, has_gradient=False))
        assert whole.tokens_G1.unique() == len(logits[0])
        of_update, losses = RouterSums(table_GC=whole.table_GC.float()), []
        for batch in split:
            loss = load_balancing_loss(sums_of(model, batch, has_gradient=True), of_update)
            loss.backward()  # type: ignore[no-untyped-call]
            losses.append(float(loss.detach()))
        assert sum(losses) == pytest.approx(float(expected.detach()), rel=1e-5)
        mine = gradients(model)
        assert mine.keys() == theirs.keys()
        for name, gradient in mine.items():
            assert (gradient - theirs[name]).norm() <= 1e-4 * theirs[name].norm(), name


@pytest.mark.parametrize("split", SPLITS)
def test_figures_of_routers_count_each_trained_token_once(split: str) -> None:
    model, whole = build("olmoe"), RouterSums.of_pass([])
    with torch.no_grad():
        loss, logits = transformers_loss(model, rows())
        for batch in SPLITS[split]:
            whole = whole.plus(sums_of(model, batch, has_gradient=False))
    p_GTE = torch.stack(logits).softmax(-1)
    load_GE = torch.stack([p.topk(2).indices.flatten().bincount(minlength=6) for p in p_GTE])
    found = whole.metrics()
    assert found.pop("router_dead_experts") == (load_GE == 0).sum()
    assert found == pytest.approx(
        {
            "router_entropy": float(-(p_GTE * p_GTE.log()).sum(-1).mean()),
            "router_max_load": float(load_GE.max() / (2 * len(logits[0]) / 6)),
            "load_balancing_loss": float(loss),
        },
        rel=1e-5,
    )


def test_scores_of_a_sigmoid_are_divided_by_their_sum() -> None:
    """And the experts are those that the corrections of its scores choose."""
    model = build("glm4_moe")
    (batch,) = SPLITS["one pass"]
    logits: list[torch.Tensor] = []
    with torch.no_grad():
        for gate in gates(model):
            gate.module.register_forward_hook(lambda _, __, output: logits.append(output))
        sums = sums_of(model, batch, has_gradient=False)
    for layer, gate in enumerate(gates(model)):
        scores_NE = logits[layer][batch.places_N].sigmoid()
        shares_E = (scores_NE / scores_NE.sum(-1, keepdim=True)).sum(0)
        torch.testing.assert_close(sums.probabilities_GE[layer], shares_E)
        chosen = gate.block.route_tokens_to_experts(logits[layer][batch.places_N])[0]
        assert sums.chosen_GE[layer].tolist() == chosen.flatten().bincount(minlength=6).tolist()


def test_choice_that_another_hook_replaces_is_the_one_that_counts() -> None:
    model = build("mixtral")
    (batch,) = SPLITS["one pass"]

    def replay(_: nn.Module, __: object, output: Any) -> Any:
        return output[0], output[1], torch.tensor([[4, 5]]).expand_as(output[2])

    for gate in gates(model):
        gate.module.register_forward_hook(replay)
    with torch.no_grad():
        found = sums_of(model, batch, has_gradient=False).metrics()
    assert found["router_dead_experts"] == 3 * 4 and found["router_max_load"] == 3
