"""Names in the files of real small models against those that the trainer would publish."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from configs.load import load_config
from controller.start.preflight import check_inputs
from trainer_pool.model.checkpoint_names import (
    check_engines_agree,
    check_names,
    check_tied_head,
    checkpoint_names,
    model_without_weights,
    name_patterns,
    parameter_names,
)
from trainer_pool.model.scratch import byte_tokenizer

SIZES: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
}


def dense(*, is_tied: bool) -> PreTrainedModel:
    return Qwen3ForCausalLM(Qwen3Config(**SIZES, tie_word_embeddings=is_tied))


def experts() -> PreTrainedModel:
    config = Qwen3MoeConfig(
        **SIZES,
        moe_intermediate_size=8,
        num_experts=4,
        num_experts_per_tok=2,
        decoder_sparse_step=1,
    )
    return Qwen3MoeForCausalLM(config)


def names_of(folder: Path) -> list[str]:
    return parameter_names(model_without_weights(str(folder), trust_remote_code=False))


@pytest.mark.parametrize("is_tied", [True, False])
@pytest.mark.parametrize("shard_size", ["1GB", "4KB"])
def test_dense_model_publishes_the_names_of_its_files(
    tmp_path: Path, is_tied: bool, shard_size: str
) -> None:
    dense(is_tied=is_tied).save_pretrained(tmp_path, max_shard_size=shard_size)
    assert (tmp_path / "model.safetensors.index.json").exists() == (shard_size == "4KB")
    names = names_of(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert names == [name for name, _ in loaded.named_parameters()]
    assert ("lm_head.weight" in names) == (not is_tied)
    check_names(str(tmp_path), names)


@pytest.mark.parametrize("file", ["safetensors", "sharded", "bin"])
def test_tied_head_of_the_files_must_be_the_embeddings(tmp_path: Path, file: str) -> None:
    model = dense(is_tied=False)

    def save() -> None:
        if file == "bin":
            torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
        else:
            size = "4KB" if file == "sharded" else "1GB"
            model.save_pretrained(tmp_path, max_shard_size=size)
        config = json.loads((tmp_path / "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))

    model.config.save_pretrained(tmp_path)
    save()
    built = model_without_weights(str(tmp_path), trust_remote_code=False)
    with pytest.raises(
        ValueError,
        match=r"tie_word_embeddings=true .* hold a lm_head\.weight that differs from "
        r"model\.embed_tokens\.weight\. .*set tie_word_embeddings=false",
    ):
        check_tied_head(str(tmp_path), built)
    model.lm_head.weight.data.copy_(model.model.embed_tokens.weight)
    save()
    check_tied_head(str(tmp_path), built)
    assert "lm_head.weight" not in names_of(tmp_path)
    check_names(str(tmp_path), names_of(tmp_path))


def test_names_of_an_older_file_of_weights_are_read(tmp_path: Path) -> None:
    model = dense(is_tied=False)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    assert checkpoint_names(str(tmp_path)) == set(model.state_dict())
    index = {"weight_map": {"a.weight": "pytorch_model-00001-of-00001.bin"}}
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    assert checkpoint_names(str(tmp_path)) == {"a.weight"}


def test_model_with_fused_experts_is_refused_by_their_names(tmp_path: Path) -> None:
    experts().save_pretrained(tmp_path)
    names = names_of(tmp_path)
    with pytest.raises(ValueError, match="not supported yet") as refused:
        check_names(str(tmp_path), names)
    assert "holds 4 weights by names" in str(refused.value)
    assert "model.layers.*.mlp.experts.gate_up_proj (2)" in str(refused.value)
    assert "model.layers.*.mlp.experts.down_proj (2)" in str(refused.value)


def test_launch_refuses_a_model_with_fused_experts_before_anything_starts(tmp_path: Path) -> None:
    experts().save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    config = load_config(["model=pretrained", f"model.path={tmp_path}"])
    with pytest.raises(ValueError, match=r"experts\.gate_up_proj \(2\)"):
        check_inputs(config)
    dense(is_tied=True).save_pretrained(tmp_path)
    check_inputs(config)


def test_engines_that_serve_other_weights_are_an_error_with_names() -> None:
    check_engines_agree(0.05, 200, ["a.0.weight"], 1.0)
    with pytest.raises(RuntimeError, match=r"200 tokens .* 2\.5 nats .* \(a\.\*\.weight \(2\)\)"):
        check_engines_agree(2.5, 200, ["a.0.weight", "a.1.weight"], 1.0)
    with pytest.raises(RuntimeError, match=r"by 0\.06 nats on average, more than 0\.001"):
        check_engines_agree(0.06, 200, ["a.0.weight"], 0.001)


def test_folder_without_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no weights: neither model\.safetensors"):
        checkpoint_names(str(tmp_path))


def test_long_lists_of_names_are_shortened_to_patterns() -> None:
    names = [f"a.{i}.b.{j}.weight" for i in range(3) for j in range(4)]
    assert name_patterns([*names, "head.weight"]) == "a.*.b.*.weight (12), head.weight"
    assert name_patterns([f"{letter}.weight" for letter in "abcdefghij"]).endswith("and 2 more")
