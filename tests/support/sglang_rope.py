"""Prints the largest difference between SGLang's and transformers' rotary embeddings of some cases.

A program, whose argument is a JSON list of `difference`'s arguments: its stubs for SGLang's imports
stay out of the tests' process.
"""

from __future__ import annotations

import json
import sys

import torch

if not torch.cuda.is_available():
    from rollout_pool.engines.sglang import cpu_stubs

    cpu_stubs.install()

from sglang.srt.layers.rotary_embedding import get_rope
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

HEAD_DIM = 16


def difference(most: int, rope: dict[str, object], num_positions: int) -> float:
    config = Qwen3Config(
        head_dim=HEAD_DIM, max_position_embeddings=most, rope_parameters={**rope, "rope_theta": 1e4}
    )
    positions = torch.arange(num_positions)
    parts = Qwen3RotaryEmbedding(config)(torch.zeros(1), positions.unsqueeze(0))
    theirs = torch.cat([part[0, :, : HEAD_DIM // 2] for part in parts], dim=-1)
    sglang = get_rope(
        HEAD_DIM, HEAD_DIM, most, 10000, rope_scaling=config.rope_parameters, dtype=torch.float32
    )
    name = "cos_sin_cache" if hasattr(sglang, "cos_sin_cache") else "short_cos_sin_cache"
    return float((getattr(sglang, name)[:num_positions] - theirs).abs().max())


if __name__ == "__main__":
    print(json.dumps([difference(*case) for case in json.loads(sys.argv[1])]))
