"""The size of the policy, without loading it: from its config, its folder or its name."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from configs.schema import ALL_LINEAR, ModelConfig, ScratchModelConfig
from controller.units import format_count

_NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""Fields of a config.json, one of which a mixture of experts has."""
BYTE_VOCABULARY = 264
"""Rows of a scratch model's embedding: 256 bytes and its special tokens, rounded up."""


@dataclass(kw_only=True, slots=True, frozen=True)
class ModelSize:
    """The size of a model as known without loading it or using the network."""

    label: str
    num_params: int | None = None
    num_layers: int = 0
    linear: Mapping[str, tuple[int, int]] = field(default_factory=dict, repr=False)
    """Rows and columns of a layer's linear weights by their names; empty if unknown."""
    kv_elements: int | None = None
    """Elements that one token adds to the KV cache, over all layers."""
    num_routed: int = 0
    """Experts of a token, over all layers; 0 if it has none, or they are unknown."""
    num_adapted: int | None = None
    """Parameters of the weights that an adapter changes, at most."""
    num_adapter: int | None = None
    source: str = "size unknown until it is loaded"
    """Where the numbers come from, in words."""


def model_size(config: ModelConfig) -> ModelSize:
    """The size of the model of `config`; unknown numbers are None."""
    size, lora = _whole_size(config), config.lora
    if lora is None:
        return size
    label = f"{size.label}, of which an adapter of rank {lora.rank} is trained"
    is_all = lora.targets == [ALL_LINEAR]
    if not size.linear or not (is_all or {*lora.targets} <= size.linear.keys()):
        return replace(size, label=label, num_adapted=size.num_params if is_all else None)
    adapted = [shape for name, shape in size.linear.items() if is_all or name in lora.targets]
    return replace(
        size,
        label=label,
        num_adapted=size.num_layers * sum(rows * columns for rows, columns in adapted),
        num_adapter=size.num_layers * lora.rank * sum(map(sum, adapted)),
    )


def num_trained(config: ModelConfig, size: ModelSize) -> int | None:
    """Parameters that are trained, sent and saved: the adapter's, or all."""
    return size.num_params if config.lora is None else size.num_adapter


def _whole_size(config: ModelConfig) -> ModelSize:
    if config.scratch is not None:
        return _size_from_scratch(config.scratch)
    assert config.path is not None
    file = Path(config.path) / "config.json"
    if file.is_file():
        return _size_from_fields(Path(config.path).name, json.loads(file.read_text()))
    return _size_from_name(config.path)


def _size_from_scratch(config: ScratchModelConfig) -> ModelSize:
    """A Qwen3 with tied embeddings: two norms per layer, plus one for queries and one for keys."""
    hidden, head = config.hidden_size, config.head_dim
    attention = hidden * head * 2 * (config.num_heads + config.num_kv_heads) + 2 * head
    layer = attention + 3 * hidden * config.intermediate_size + 2 * hidden
    params = BYTE_VOCABULARY * hidden + config.num_layers * layer + hidden
    return ModelSize(
        label=f"Qwen3 of {format_count(params)} parameters",
        num_params=params,
        num_layers=config.num_layers,
        linear=_linear(
            hidden, config.intermediate_size, config.num_heads * head, config.num_kv_heads * head
        ),
        kv_elements=2 * config.num_layers * config.num_kv_heads * head,
        source="built with random weights",
    )


def _size_from_fields(name: str, fields: Mapping[str, Any]) -> ModelSize:
    """A decoder with gated MLPs (Llama, Qwen, Mistral, Gemma), dense or of experts, from its
    config.json; of a model with pictures without its tower."""
    text = fields.get("text_config")
    fields = {**fields, **(text or {})}
    needed = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
    hidden, layers, heads, inner = (fields.get(key) for key in needed)
    vocabulary = fields.get("vocab_size")
    if not (hidden and layers and heads and inner and vocabulary):
        return ModelSize(label=name)
    kv_heads = fields.get("num_key_value_heads") or heads
    head = fields.get("head_dim") or hidden // heads
    attention = hidden * head * 2 * (heads + kv_heads)
    num_embeddings = 1 if fields.get("tie_word_embeddings") else 2
    params = layers * attention + num_embeddings * vocabulary * hidden
    experts = next((fields[key] for key in _NUM_EXPERTS if fields.get(key)), None)
    if experts is None:
        params += layers * 3 * hidden * inner
    else:  # each layer, or all but the first
        dense = fields.get("first_k_dense_replace") or 0
        expert = 3 * hidden * (fields.get("moe_intermediate_size") or inner)
        shared = 3 * hidden * (fields.get("shared_expert_intermediate_size") or 0)
        shared += (fields.get("n_shared_experts") or 0) * expert
        params += dense * 3 * hidden * inner
        params += (layers - dense) * (experts * (expert + hidden) + shared)
    return ModelSize(
        label=f"{name} of {format_count(params)} parameters",
        num_params=params,
        num_layers=layers,
        linear=_linear(hidden, inner, heads * head, kv_heads * head) if experts is None else {},
        kv_elements=2 * layers * kv_heads * head,
        num_routed=layers * (fields.get("num_experts_per_tok") or 0) if experts else 0,
        source="counted from its config.json" + (", without the tower of pictures" if text else ""),
    )


def _linear(hidden: int, inner: int, queries: int, keys: int) -> dict[str, tuple[int, int]]:
    """[rows, columns] of a dense layer's weights, of attention and of a gated MLP."""
    return {
        "q_proj": (queries, hidden),
        "k_proj": (keys, hidden),
        "v_proj": (keys, hidden),
        "o_proj": (hidden, queries),
        "gate_proj": (inner, hidden),
        "up_proj": (inner, hidden),
        "down_proj": (hidden, inner),
    }


def _size_from_name(name: str) -> ModelSize:
    """From a name on the hub such as "...-7B-..." or "...-0.6B"."""
    found = re.search(r"(\d+(?:\.\d+)?)([BM])(?![A-Za-z])", name, re.IGNORECASE)
    if found is None:
        return ModelSize(label=name)
    params = int(float(found[1]) * {"B": 1e9, "M": 1e6}[found[2].upper()])
    return ModelSize(label=name, num_params=params, source="size taken from its name")
