"""Passes of models whose config.json has dropout, or noise in a router of experts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from transformers import AutoModelForCausalLM

from trainer_pool.data.packing import packed_row
from trainer_pool.model import attention
from trainer_pool.model.loading import load_model

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
GATED: dict[str, Any] = {**SIZES, "intermediate_size": 64, "num_key_value_heads": 2, "head_dim": 8}


def dropouts(config: hf.PreTrainedConfig) -> dict[str, Any]:
    return {name: value for name, value in config.to_dict().items() if "drop" in name}


@pytest.mark.parametrize(
    "config",
    [
        hf.Qwen3Config(**GATED, attention_dropout=0.5),
        hf.GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=64),
        hf.OPTConfig(**SIZES, ffn_dim=64, word_embed_proj_dim=32, dropout=0.5, layerdrop=0.5),
        hf.SeedOssConfig(**GATED, attention_dropout=0.5, residual_dropout=0.5),
        hf.MixtralConfig(**GATED, num_local_experts=4, router_jitter_noise=0.5),
        hf.PhiConfig(**SIZES, intermediate_size=64, resid_pdrop=0.5, embd_pdrop=0.5),
    ],
    ids=lambda config: config.model_type,
)
def test_passes_of_training_are_those_of_sampling(
    config: hf.PreTrainedConfig, tmp_path: Path
) -> None:
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    model = load_model(str(tmp_path), torch.float32, trust_remote_code=False)
    row = packed_row([torch.arange(20)])
    passes = [
        model.train(is_training)(
            input_ids=row.tokens_L.unsqueeze(0),
            position_ids=row.position_ids_L.unsqueeze(0),
            use_cache=False,
            **attention.arguments(row),
        ).logits
        for is_training in (True, False)
    ]
    assert torch.equal(*passes)
    # The model that is exported keeps its fields.
    assert dropouts(model.config) == dropouts(config)
