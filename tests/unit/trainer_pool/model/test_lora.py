"""An adapter in a model: what is trained, its files, and those of others."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Glm4MoeConfig, GPT2Config, Qwen3MoeConfig

from configs.choices import LoraInit
from configs.schema import LoraConfig, ScratchModelConfig
from trainer_pool.model.lora import (
    adapter_name,
    add_adapter,
    base_name,
    is_adapters,
    without_adapter,
)
from trainer_pool.model.scratch import build_scratch_model
from trainer_pool.state.adapter import Adapter

LORA = LoraConfig(rank=4, alpha=8, targets=["q_proj", "down_proj"])
TOKENS = torch.arange(12).unsqueeze(0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    build_scratch_model(
        ScratchModelConfig(hidden_size=32, intermediate_size=64, num_layers=2), folder, seed=0
    )
    return folder


def base_of(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder)


def adapted(folder: Path, config: LoraConfig = LORA) -> Any:
    """The model with an adapter that changes something."""
    model = base_of(folder)
    add_adapter(model, config, str(folder))
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_B." in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return model


def tensors_of(model: Any) -> dict[str, torch.Tensor]:
    named = model.named_parameters()
    return {adapter_name(name): p.detach() for name, p in named if is_adapters(name)}


def test_first_policy_is_the_base_and_only_the_adapter_is_trained(folder: Path) -> None:
    base = base_of(folder)
    expected, names = base(TOKENS).logits, [name for name, _ in base.named_parameters()]
    add_adapter(base, LORA, str(folder))
    assert torch.equal(base(TOKENS).logits, expected)
    parameters = dict(base.named_parameters())
    frozen = [base_name(name) for name, p in parameters.items() if not p.requires_grad]
    assert frozen == names
    trained = [name for name, p in parameters.items() if p.requires_grad]
    assert len(trained) == 2 * 2 * 2 and all(map(is_adapters, trained))
    assert {parameters[name].dtype for name in trained} == {torch.float32}


@pytest.mark.parametrize("init", LoraInit)
def test_a_begins_at_random_and_b_at_zero(folder: Path, init: LoraInit) -> None:
    model = base_of(folder)
    add_adapter(model, replace(LORA, init=init), str(folder))
    for name, tensor in tensors_of(model).items():
        assert bool(tensor.any()) == (".lora_A." in name)


def test_adapter_takes_the_dtype_of_its_base(folder: Path) -> None:
    """The optimizer has float32 copies of both."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    add_adapter(model, LORA, str(folder))
    assert {tensor.dtype for tensor in tensors_of(model).values()} == {torch.bfloat16}


def test_base_computes_inside_the_block_and_the_adapter_is_trained_after_it(folder: Path) -> None:
    model, expected = adapted(folder), base_of(folder)(TOKENS).logits
    before = model(TOKENS).logits
    assert not torch.allclose(before, expected, atol=1e-2)
    with without_adapter(model):
        assert torch.equal(model(TOKENS).logits, expected)
    assert torch.equal(model(TOKENS).logits, before)
    assert all(p.requires_grad == is_adapters(name) for name, p in model.named_parameters())


def test_written_adapter_is_one_of_peft_and_merges_to_the_same_weights(
    folder: Path, tmp_path: Path
) -> None:
    model = adapted(folder)
    adapter = Adapter(config=LORA, tensors=tensors_of(model))
    adapter.write(tmp_path, str(folder))
    loaded = peft.PeftModel.from_pretrained(base_of(folder), tmp_path)
    torch.testing.assert_close(loaded(TOKENS).logits, model(TOKENS).logits, rtol=0, atol=1e-5)
    unloaded = loaded.merge_and_unload()
    for name, weight in base_of(folder).named_parameters():
        merged = adapter.merged(name, weight.detach(), torch.float32)
        torch.testing.assert_close(merged, unloaded.get_parameter(name), rtol=0, atol=1e-6)


@pytest.fixture
def saved(folder: Path, tmp_path: Path) -> Path:
    peft.get_peft_model(
        base_of(folder),
        peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "down_proj"]),
    ).save_pretrained(str(tmp_path))
    weights = load_file(tmp_path / "adapter_model.safetensors")
    changed = {name: tensor + 0.5 for name, tensor in weights.items()}
    save_file(changed, tmp_path / "adapter_model.safetensors")
    return tmp_path


def test_training_begins_with_an_adapter_of_peft(folder: Path, saved: Path) -> None:
    model = base_of(folder)
    add_adapter(model, replace(LORA, resume_from=str(saved)), str(folder))
    expected = load_file(saved / "adapter_model.safetensors")
    found = tensors_of(model)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"r": 8}, r"its r is 8; set model\.lora\.rank=8"),
        ({"lora_alpha": 16}, r"its lora_alpha is 16; set model\.lora\.alpha=16"),
        ({"use_rslora": True}, r"it has use_rslora=True, which is not supported"),
        ({"use_dora": True}, r"it has use_dora="),
        ({"rank_pattern": {"q_proj": 2}}, r"it has rank_pattern="),
        ({"alpha_pattern": {"q_proj": 2}}, r"it has alpha_pattern="),
        ({"modules_to_save": ["lm_head"]}, r"it has modules_to_save="),
        ({"init_lora_weights": "pissa"}, r"its init_lora_weights is 'pissa', so it has a changed"),
        ({"peft_type": "IA3"}, r"its peft_type is 'IA3', not LORA"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_adapter_that_would_be_another_one_is_refused(
    folder: Path, saved: Path, changes: dict[str, object], message: str
) -> None:
    path = saved / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(ValueError, match=rf"^model\.lora\.resume_from='{saved}': {message}"):
        add_adapter(base_of(folder), replace(LORA, resume_from=str(saved)), str(folder))


def test_adapter_with_a_missing_tensor_or_of_other_targets_is_refused(
    folder: Path, saved: Path
) -> None:
    config = replace(LORA, resume_from=str(saved), targets=["q_proj", "up_proj"])
    with pytest.raises(
        ValueError, match=r"differ in .*down_proj.*; its target_modules are .*: set model"
    ):
        add_adapter(base_of(folder), config, str(folder))
    weights = load_file(saved / "adapter_model.safetensors")
    lost = sorted(weights)[0]
    del weights[lost]
    save_file(weights, saved / "adapter_model.safetensors")
    config = replace(LORA, resume_from=str(saved))
    with pytest.raises(ValueError, match=lost.replace(".", r"\.")):
        add_adapter(base_of(folder), config, str(folder))


def mixture(kind: str) -> Any:
    sizes: dict[str, Any] = {
        "vocab_size": 32,
        "hidden_size": 32,
        "intermediate_size": 64,
        "moe_intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "num_experts_per_tok": 2,
    }
    if kind == "qwen3_moe":
        config: Any = Qwen3MoeConfig(**sizes, num_experts=4)
    else:
        config = Glm4MoeConfig(**sizes, n_routed_experts=4, first_k_dense_replace=1)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize("kind", ["qwen3_moe", "glm4_moe"])
def test_adapter_of_a_mixture_is_one_of_its_attention(kind: str) -> None:
    model = mixture(kind)
    add_adapter(model, LoraConfig(rank=4), "a/mixture")
    adapted = {name.split(".lora_")[0] for name in tensors_of(model)}
    assert len(adapted) == 2 * 4 and all(".self_attn." in name for name in adapted)


@pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys did not match")
def test_layers_that_peft_takes_for_experts_are_refused() -> None:
    config = LoraConfig(rank=4, targets=["gate_proj", "up_proj", "down_proj"])
    with pytest.raises(ValueError, match=r"^model\.lora\.targets=.*: peft does not adapt"):
        add_adapter(mixture("glm4_moe"), config, "a/mixture")


def test_adapter_that_belongs_to_other_weights_is_not_merged(folder: Path) -> None:
    adapter = Adapter(config=LORA, tensors=tensors_of(adapted(folder)))
    names = [name for name, _ in base_of(folder).named_parameters()]
    adapter.check_fits(names, "a/model")
    with pytest.raises(ValueError, match=r"not of model\.path='a/model': .*layers\.1.* belongs"):
        adapter.check_fits([name for name in names if ".1." not in name], "a/model")
    with pytest.raises(ValueError, match="there is none"):
        Adapter(config=LORA, tensors={}).check_fits(names, "a/model")


def test_model_without_linear_layers_is_refused() -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(GPT2Config(n_layer=1, n_embd=32, n_head=4))
    with pytest.raises(ValueError, match=r"^model\.lora: GPT2LMHeadModel .* has no linear layers"):
        add_adapter(model, LoraConfig(rank=4), "gpt2")


def test_unknown_target_is_refused_with_those_that_there_are(folder: Path) -> None:
    config = replace(LORA, targets=["q_proj", "lm_head", "w1"])
    with pytest.raises(
        ValueError,
        match=r"^model\.lora\.targets=.*: Qwen3ForCausalLM of model\.path=.* has no linear layer "
        r"lm_head, w1; it has down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj$",
    ):
        add_adapter(base_of(folder), config, str(folder))
