"""The size of a model's vocabulary."""

from __future__ import annotations

import json

import pytest

from rollout_pool.episodes.tokenizer import vocab_size
from trainer_pool.model.scratch import byte_tokenizer

QWEN = {"model_type": "qwen3", "vocab_size": 1000}
GEMMA = {"model_type": "gemma3", "text_config": {"model_type": "gemma3_text", "vocab_size": 2000}}


@pytest.mark.parametrize(
    ("config", "size"),
    [
        (QWEN, 1000),
        (GEMMA, 2000),
        ({"model_type": "nobody-knows"}, len(byte_tokenizer())),
        (None, len(byte_tokenizer())),
    ],
    ids=["plain", "nested", "unknown", "none"],
)
def test_vocabulary_is_as_large_as_the_embeddings_if_the_model_says_so(tmp_path, config, size):
    if config is not None:
        (tmp_path / "config.json").write_text(json.dumps(config))
    assert vocab_size(str(tmp_path), byte_tokenizer(), trust_remote_code=False) == size
