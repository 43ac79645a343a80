"""Names in the files of real small models against those that the trainer would publish."""

from __future__ import annotations

import json
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    Glm4MoeConfig,
    MixtralConfig,
    OlmoeConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Qwen3VLConfig,
)

from tensors.layout import Part
from trainer_pool.model import checkpoint_names as checkpoint_names_module
from trainer_pool.model.checkpoint_names import (
    check_names,
    check_reference,
    check_tied_head,
    checkpoint_parts,
    model_without_weights,
    name_patterns,
)

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


def parts_of(folder: Path) -> dict[str, tuple[Part, ...]]:
    return checkpoint_parts(model_without_weights(str(folder), trust_remote_code=False))


def names_of(folder: Path) -> list[str]:
    return [part.name for parts in parts_of(folder).values() for part in parts]


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
    check_names(str(tmp_path), parts_of(tmp_path))


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
    check_names(str(tmp_path), parts_of(tmp_path))


SMALL: dict[str, Any] = {**SIZES, "num_hidden_layers": 1, "max_position_embeddings": 64}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
FAMILIES: list[PreTrainedConfig] = [
    Qwen3MoeConfig(**SMALL, **EXPERTS),
    Qwen2MoeConfig(**SMALL, **EXPERTS, shared_expert_intermediate_size=24),
    MixtralConfig(**SMALL, num_local_experts=4),
    OlmoeConfig(**SMALL, num_experts=4, num_experts_per_tok=2),
    Glm4MoeConfig(
        **SMALL,
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
        first_k_dense_replace=0,
    ),
]


@pytest.mark.parametrize("config", FAMILIES, ids=lambda config: config.model_type)
def test_experts_are_cut_into_the_tensors_of_the_files(
    tmp_path: Path, config: PreTrainedConfig
) -> None:
    """The flat bytes of what transformers has in memory give the tensors that it writes."""
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(tmp_path)
    parts, files = parts_of(tmp_path), load_file(tmp_path / "model.safetensors")
    check_names(str(tmp_path), parts)
    found = {}
    for name, parameter in model.named_parameters():
        sizes = [prod(part.shape) for part in parts[name]]
        for part, flat in zip(parts[name], parameter.detach().flatten().split(sizes), strict=True):
            found[part.name] = flat.view(part.shape)
    buffers = {name for name, _ in model.named_buffers()}
    assert files.keys() - buffers == found.keys()
    assert len(found) > len(parts) and all(torch.equal(files[name], found[name]) for name in found)


def test_parameter_that_is_more_than_cut_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def transposed(model: object, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {name: tensor.transpose(-1, 0) for name, tensor in tensors.items()}

    monkeypatch.setattr(checkpoint_names_module, "revert_weight_conversion", transposed)
    with pytest.raises(
        ValueError, match=r"^Qwen3ForCausalLM has the parameter model\.embed_tokens\.weight in"
    ):
        checkpoint_parts(dense(is_tied=True))


def test_weights_by_other_names_than_the_files_are_refused(tmp_path: Path) -> None:
    experts().save_pretrained(tmp_path)
    parts = parts_of(tmp_path)
    fused = {name: (Part(name, ()),) for name in parts}  # as they are in memory
    with pytest.raises(ValueError, match="holds 4 weights by names") as refused:
        check_names(str(tmp_path), fused)
    assert "model.layers.*.mlp.experts.gate_up_proj (2)" in str(refused.value)
    assert "model.layers.*.mlp.experts.down_proj (2)" in str(refused.value)


def test_long_lists_of_names_are_shortened_to_patterns() -> None:
    names = [f"a.{i}.b.{j}.weight" for i in range(3) for j in range(4)]
    assert name_patterns([*names, "head.weight"]) == "a.*.b.*.weight (12), head.weight"
    assert name_patterns([f"{letter}.weight" for letter in "abcdefghij"]).endswith("and 2 more")


def test_parts_of_a_reference_with_pictures_are_compared_field_by_field() -> None:
    free = {"max_position_embeddings": 99, "attention_dropout": 0.5}
    check_reference("r", Qwen3VLConfig(), Qwen3VLConfig(text_config=free))
    other = Qwen3VLConfig(vision_config={"hidden_act": "relu"})
    with pytest.raises(ValueError, match="r: vision_config: its hidden_act is 'relu', the policy"):
        check_reference("r", Qwen3VLConfig(), other)
