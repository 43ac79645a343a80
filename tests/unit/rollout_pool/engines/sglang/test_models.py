"""Models that SGLang would compute in another way than transformers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import transformers as hf

from rollout_pool.engines.sglang.models import check_adapters, check_served, context_length

YARN = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
WITHOUT_WINDOW = {"sliding_window": None, "layer_types": ["full_attention"], "num_hidden_layers": 1}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0] * 48,
    "long_factor": [2.0] * 48,
    "original_max_position_embeddings": 16,
}


def config_of(served_by: str, **fields: Any) -> Any:
    name = served_by.removesuffix("ForCausalLM").removesuffix("LMHeadModel")
    name = {"Gemma3": "Gemma3Text"}.get(name, name)
    sizes = {} if name == "GPT2" else {"max_position_embeddings": 64, "pad_token_id": 0}
    return getattr(hf, f"{name}Config")(architectures=[served_by], **sizes, **fields)


def test_class_of_a_model_with_pictures_is_named_and_its_text_part_checked() -> None:
    name = "Qwen3VLForConditionalGeneration"
    config = hf.Qwen3VLConfig(architectures=[name])
    with pytest.raises(ValueError, match=rf"SGLang's {name}, does not compute such a window"):
        check_served("m", config, {16}, 17)


@pytest.mark.parametrize(
    "served_by", ["MistralForCausalLM", "Qwen2ForCausalLM", "Cohere2ForCausalLM", "OtherModel"]
)
def test_window_that_engines_do_not_compute_holds_the_longest_trajectory(served_by: str) -> None:
    config = hf.MistralConfig(architectures=[served_by], tie_word_embeddings=True)
    with pytest.raises(
        ValueError,
        match=rf"^model\.path='m': its sliding_window=16 is shorter .*=17\), and the engines' "
        rf"side, SGLang's {served_by}, does not compute .*; lower the limits to 16",
    ):
        check_served("m", config, {None, 16, 900}, 17)
    check_served("m", config, {None, 16}, 16)


def test_windows_of_gemma_3_are_the_same_on_both_sides() -> None:
    check_served("m", config_of("Gemma3ForCausalLM"), {None, 16}, 1000)


@pytest.mark.parametrize(
    ("served_by", "fields", "reason"),
    [
        ("LlamaForCausalLM", {"mlp_bias": True}, "the engines' side, SGLang's .* mlp_bias=true"),
        ("GraniteForCausalLM", {"attention_bias": True}, "ignores attention_bias=true"),
        ("PhiForCausalLM", {}, "SGLang's PhiForCausalLM, leaves out the bias of the output head"),
        ("GPT2LMHeadModel", {"scale_attn_by_inverse_layer_idx": True}, "inverse_layer_idx=true"),
        ("CohereForCausalLM", {"attention_bias": True}, "attention_bias=true"),
        ("Cohere2ForCausalLM", {"tie_word_embeddings": False}, "embeddings=false .* computes true"),
        (
            "Cohere2ForCausalLM",
            {"sliding_window": None},
            "sliding_window=null .* set its own window",
        ),
        ("ArceeForCausalLM", {"tie_word_embeddings": True}, "embeddings=true .* computes false"),
        ("GemmaForCausalLM", {}, 'hidden_act="gelu_pytorch_tanh" of .* computes "gelu"'),
        ("GPT2LMHeadModel", {"activation_function": "relu"}, 'activation_function="relu"'),
        ("OlmoForCausalLM", {"num_key_value_heads": 8}, "num_key_value_heads=8 .* computes 32"),
        (
            "Exaone4ForCausalLM",
            WITHOUT_WINDOW,
            r"SGLang's Exaone4ForCausalLM, ignores rope_theta=10000\.0 .* computes 1e\+06",
        ),
        ("Exaone4ForCausalLM", {"sliding_window": 64}, "sliding_window_pattern=4 .* text alone"),
        ("OlmoForCausalLM", {"rope_parameters": YARN}, "SGLang's .* ignores rope_type='yarn'"),
        (
            "Gemma3ForCausalLM",
            {
                "layer_types": ["full_attention"],
                "num_hidden_layers": 1,
                "rope_parameters": {
                    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}
                },
            },
            "ignores rope_type='linear'",
        ),
        (
            "Qwen3ForCausalLM",
            {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
            "rope_type='dynamic' .*the trainer's side, transformers, by the longest",
        ),
        (
            "Phi3ForCausalLM",
            {"rope_parameters": LONGROPE, "original_max_position_embeddings": 16},
            r"beyond .*=16 tokens .*=17 to that",
        ),
        (
            "Qwen3ForCausalLM",
            {"rope_parameters": {**YARN, "attention_factor": 1.3}},
            r"the engines' side, SGLang, ignores attention_factor=1\.3 of rope_type='yarn'",
        ),
        (
            "Qwen3ForCausalLM",
            {"rope_parameters": {**YARN, "attn_factor": 1.3}},
            "the trainer's side, transformers, ignores attn_factor",
        ),
    ],
)
def test_field_that_one_side_ignores_is_refused_with_that_side(
    served_by: str, fields: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ValueError, match=rf"^model\.path='m': .*{reason}"):
        check_served("m", config_of(served_by, **fields), {None}, 17)


@pytest.mark.parametrize(
    ("served_by", "fields", "longest"),
    [
        ("LlamaForCausalLM", {}, 64),
        ("LlamaForCausalLM", {"rope_parameters": LLAMA3}, 64),
        (
            "Phi3ForCausalLM",
            {"rope_parameters": LONGROPE, "original_max_position_embeddings": 16},
            16,
        ),
        ("Qwen3ForCausalLM", {"rope_parameters": YARN}, 256),
        ("OlmoForCausalLM", {}, 64),
        ("GemmaForCausalLM", {"hidden_act": "gelu"}, 64),
        ("CohereForCausalLM", {}, 64),
        (
            "Exaone4ForCausalLM",
            {**WITHOUT_WINDOW, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
            64,
        ),
        ("GPT2LMHeadModel", {}, 64),
    ],
)
def test_model_computed_alike_passes(served_by: str, fields: dict[str, Any], longest: int) -> None:
    check_served("m", config_of(served_by, **fields), {None}, longest)


@pytest.mark.parametrize(
    ("fields", "most"),
    [
        ({}, 64),
        ({"rope_parameters": {**YARN, "original_max_position_embeddings": 64}}, 256),
        ({"rope_parameters": {**YARN, "original_max_position_embeddings": 16}}, 64),
        # The older spelling, as in the model cards of Qwen.
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}, "rope_theta": 1e4}, 256),
        (
            {
                "rope_scaling": {
                    "rope_type": "yarn",
                    "factor": 4.0,
                    "original_max_position_embeddings": 64,
                }
            },
            256,
        ),
        ({"rope_parameters": LLAMA3}, 64),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, 128),
    ],
)
def test_yarn_and_linear_scaling_lengthen_the_context(fields: dict[str, Any], most: int) -> None:
    assert context_length(config_of("Qwen3ForCausalLM", **fields)) == most
    assert context_length(hf.GPT2Config(n_positions=48)) == 48


ALL_LAYERS = ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]


@pytest.mark.parametrize(
    ("served_by", "layers", "why"),
    [
        ("Qwen3ForCausalLM", ["v_proj", "o_proj"], "not both q_proj and v_proj"),
        ("Qwen3ForCausalLM", ["q_proj", "k_proj"], "not both q_proj and v_proj"),
        ("Qwen3ForCausalLM", ["up_proj", "down_proj"], "has up_proj, but not gate_proj"),
        ("Qwen3ForCausalLM", [*ALL_LAYERS, "lone"], "lone is none of down_proj, gate_proj, k_proj"),
        ("Qwen3MoeForCausalLM", ALL_LAYERS, "a mixture of experts, it is not one of attention"),
        ("GPT2LMHeadModel", ["q_proj", "v_proj"], "SGLang's GPT2LMHeadModel has not been tested"),
        ("Qwen3ForCausalLM", ["q_proj", "v_proj"], ""),
        ("Qwen3ForCausalLM", ["gate_proj"], ""),
        ("Qwen3ForCausalLM", ALL_LAYERS, ""),
        ("Qwen3MoeForCausalLM", ["k_proj", "o_proj", "q_proj", "v_proj"], ""),
    ],
)
def test_adapter_that_engines_would_compute_wrongly_by_versions_is_refused(
    served_by: str, layers: list[str], why: str
) -> None:
    model = SimpleNamespace(config=config_of(served_by))
    if not why:
        check_adapters("model.path='m'", layers, model, layers)
        return
    with pytest.raises(
        ValueError, match=r"^model\.lora\..* choose .*model\.lora\.mode=merged"
    ) as told:
        check_adapters("model.path='m'", layers, model, layers)
    assert why in str(told.value)
