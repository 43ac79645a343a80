"""The size of the policy, without loading it: from its config, its folder or its name."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from configs.schema import ModelConfig, ScratchModelConfig
from controller.units import format_count

BYTE_VOCABULARY = 264
"""Rows of a scratch model's embedding: 256 bytes and its special tokens, rounded up."""


@dataclass(kw_only=True, slots=True, frozen=True)
class ModelSize:
    """The size of a model as known without loading it or using the network."""

    label: str
    num_params: int | None = None
    kv_elements: int | None = None
    """Elements that one token adds to the KV cache, over all layers."""
    source: str = "size unknown until it is loaded"
    """Where the numbers come from, in words."""


def model_size(config: ModelConfig) -> ModelSize:
    """The size of the model of `config`; unknown numbers are None."""
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
        kv_elements=2 * config.num_layers * config.num_kv_heads * head,
        source="built with random weights",
    )


def _size_from_fields(name: str, fields: Mapping[str, int | None]) -> ModelSize:
    """A dense decoder with gated MLPs (Llama, Qwen, Mistral, Gemma), from its config.json."""
    needed = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
    hidden, layers, heads, inner = (fields.get(key) for key in needed)
    vocabulary = fields.get("vocab_size")
    if not (hidden and layers and heads and inner and vocabulary):
        return ModelSize(label=name)
    kv_heads = fields.get("num_key_value_heads") or heads
    head = fields.get("head_dim") or hidden // heads
    layer = hidden * head * 2 * (heads + kv_heads) + 3 * hidden * inner
    num_embeddings = 1 if fields.get("tie_word_embeddings") else 2
    params = layers * layer + num_embeddings * vocabulary * hidden
    return ModelSize(
        label=f"{name} of {format_count(params)} parameters",
        num_params=params,
        kv_elements=2 * layers * kv_heads * head,
        source="counted from its config.json",
    )


def _size_from_name(name: str) -> ModelSize:
    """From a name on the hub such as "...-7B-..." or "...-0.6B"."""
    found = re.search(r"(\d+(?:\.\d+)?)([BM])(?![A-Za-z])", name, re.IGNORECASE)
    if found is None:
        return ModelSize(label=name)
    params = int(float(found[1]) * {"B": 1e9, "M": 1e6}[found[2].upper()])
    return ModelSize(label=name, num_params=params, source="size taken from its name")
