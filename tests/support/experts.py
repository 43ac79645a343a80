"""A small mixture of experts, and how it sends tokens to given experts, written out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.functional import linear, silu
from transformers import AutoModelForCausalLM, Glm4MoeConfig, Qwen3MoeConfig

from trainer_pool.model.scratch import VOCAB_SIZE, byte_tokenizer


def build_experts(folder: Path, seed: int = 0) -> None:
    """Two layers of four experts, two of them for each token, with the tokenizer of bytes."""
    tokenizer = byte_tokenizer()
    config = Qwen3MoeConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=32,
        intermediate_size=64,
        moe_intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        num_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=2048,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        initializer_range=0.1,
        dtype="float32",
    )
    torch.manual_seed(seed)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def random_routes(num_tokens: int, seed: int = 0) -> NDArray[np.uint8]:
    """[T, 2 layers * 2 experts]; those of the last token, which engines do not process, are 0."""
    dice = np.random.default_rng(seed)
    routes = np.stack([dice.permutation(4)[:2] for _ in range(2 * num_tokens)]).astype(np.uint8)
    routes = routes.reshape(num_tokens, 4)
    routes[-1] = 0
    return routes


def send_to(model: Any, routes: NDArray[np.uint8]) -> None:
    """Makes the model send the tokens of a sequence to these experts, one by one; those whose row
    is 0 go where it chooses."""
    for number, layer in enumerate(model.model.layers):
        layer.mlp.forward = _Block(layer.mlp, routes[:, 2 * number : 2 * number + 2])


class _Block:
    def __init__(self, block: Any, routes: NDArray[np.uint8]) -> None:
        self._block = block
        self._routes = torch.from_numpy(routes).long()

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        found = []
        for token, chosen in zip(hidden[0], self._routes, strict=True):
            shares = linear(token, self._block.gate.weight).softmax(-1)
            if not chosen.any():
                chosen = shares.topk(2).indices
            total = shares[chosen].sum() if self._block.gate.norm_topk_prob else 1.0
            parts = (shares[e] / total * expert(self._block.experts, int(e), token) for e in chosen)
            found.append(sum(parts))
        return torch.stack(found)[None]


SCALE = 1.5
Weigh = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def scored_model(*, is_normalized: bool) -> Any:
    """A GLM-4 MoE of a dense layer and two of six experts in three groups, two for each token, with
    corrections of their scores that change most choices."""
    config = Glm4MoeConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=32,
        intermediate_size=64,
        moe_intermediate_size=24,
        num_hidden_layers=3,
        first_k_dense_replace=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        n_routed_experts=6,
        num_experts_per_tok=2,
        n_shared_experts=1,
        n_group=3,
        topk_group=2,
        routed_scaling_factor=SCALE,
        norm_topk_prob=is_normalized,
        initializer_range=0.1,
        dtype="float32",
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    for layer in model.model.layers[1:]:
        layer.mlp.gate.e_score_correction_bias.normal_(0, 0.3)
    return model.train()


def scored_weights(
    logits_E: torch.Tensor, corrections_E: torch.Tensor, chosen: torch.Tensor
) -> torch.Tensor:
    """[K]: the weights of the chosen experts in such a model, if it normalizes them."""
    scores_K = logits_E[chosen].sigmoid()
    return SCALE * scores_K / scores_K.sum()


class ScoredBlock:
    """The block of such a model, token by token; the routes [T, 2] of a token are all 0 if it goes
    where the model chooses."""

    def __init__(self, block: Any, routes: NDArray[np.uint8], weigh: Weigh = scored_weights):
        self._block = block
        self._routes = torch.from_numpy(routes).long()
        self._weigh = weigh

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        found, gate = [], self._block.gate
        for token, chosen in zip(hidden[0], self._routes, strict=True):
            logits, corrections = linear(token, gate.weight), gate.e_score_correction_bias
            if not chosen.any():
                chosen = _best_of_groups(logits.sigmoid() + corrections)
            weights = self._weigh(logits, corrections, chosen)
            parts = [
                w * expert(self._block.experts, int(e), token)
                for w, e in zip(weights, chosen, strict=True)
            ]
            found.append(self._block.shared_experts(token) + sum(parts))
        return torch.stack(found)[None]


def _best_of_groups(scores_E: torch.Tensor) -> torch.Tensor:
    """The best two in the best two of three pairs."""
    pairs = scores_E.view(3, 2).sum(1)
    kept = scores_E.clone()
    worst = int(pairs.argmin())
    kept[2 * worst : 2 * worst + 2] = -torch.inf
    return kept.topk(2).indices


def expert(experts: Any, number: int, token: torch.Tensor) -> torch.Tensor:
    """The answer of one expert of a block to a token."""
    gate, up = linear(token, experts.gate_up_proj[number]).chunk(2)
    return linear(silu(gate) * up, experts.down_proj[number])
