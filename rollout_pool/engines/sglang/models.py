"""Features of a model that SGLang computes in another way than the trainer, or not at all.

Its classes say nothing about fields of a config.json that they do not read: the engines would
sample from another model than the one that is trained. The tables were read in the sources of the
version in the lock files. A class that is not in them is taken for one that computes everything but
sliding windows.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

WITH_WINDOWS = frozenset({"Gemma3ForCausalLM"})
"""Classes whose sliding windows are transformers'. Others have none, or windows that are one token
longer (Cohere 2, and models that only transformers has)."""
WITHOUT_SCALED_ROPE = frozenset(
    {
        "Gemma2ForCausalLM",
        "Gemma3ForCausalLM",
        "GemmaForCausalLM",
        "OlmoForCausalLM",
        "PersimmonForCausalLM",
        "Starcoder2ForCausalLM",
    }
)
"""Classes that read no more of the rotary embedding than its base."""
_COHERE = {"attention_bias": False, "hidden_act": "silu", "tie_word_embeddings": True}
_UNTIED: dict[str, object] = {"tie_word_embeddings": False}
_ALL_SPARSE: dict[str, object] = {**_UNTIED, "decoder_sparse_step": 1, "mlp_only_layers": []}
FIXED: dict[str, dict[str, object]] = {
    "ArceeForCausalLM": {**_UNTIED, "mlp_bias": False},
    "Cohere2ForCausalLM": _COHERE,
    "CohereForCausalLM": _COHERE,
    "GPT2LMHeadModel": {
        "activation_function": "gelu_new",
        "scale_attn_by_inverse_layer_idx": False,
        "scale_attn_weights": True,
        "tie_word_embeddings": True,
    },
    "GemmaForCausalLM": {
        "attention_bias": False,
        "hidden_act": "gelu",
        "tie_word_embeddings": True,
    },
    "Glm4MoeForCausalLM": _UNTIED,
    "GraniteForCausalLM": {"attention_bias": False, "mlp_bias": False},
    "LlamaForCausalLM": {"mlp_bias": False},
    "MixtralForCausalLM": {**_UNTIED, "hidden_act": "silu"},
    "Olmo2ForCausalLM": {"hidden_act": "silu"},
    "OlmoForCausalLM": {"hidden_act": "silu"},
    "OlmoeForCausalLM": {
        "attention_bias": False,
        "clip_qkv": None,
        "hidden_act": "silu",
        "norm_topk_prob": False,
        **_UNTIED,
    },
    "PersimmonForCausalLM": _UNTIED,
    "Qwen2MoeForCausalLM": _ALL_SPARSE,
    "Qwen3MoeForCausalLM": _ALL_SPARSE,
}
"""Fields of a config.json that a class does not read, and the one value that it computes."""
WITH_ROUTES = frozenset({"Glm4MoeForCausalLM", "Qwen2MoeForCausalLM", "Qwen3MoeForCausalLM"})
"""Classes that say which experts they have chosen, whose trainer's side can be sent to the same
ones. Mixtral and OLMoE would end the server: their TopK does not know its layer."""
WITH_ADAPTERS = frozenset(
    {
        "Gemma3ForCausalLM",
        "GraniteForCausalLM",
        "LlamaForCausalLM",
        "MistralForCausalLM",
        "MixtralForCausalLM",
        "Olmo2ForCausalLM",
        "OlmoeForCausalLM",
        "Qwen2ForCausalLM",
        "Qwen3ForCausalLM",
        "Qwen3MoeForCausalLM",
    }
)
"""Classes whose adapters by version were seen to be computed as peft does. In others, such as the
general class, a layer may have another name: its adapter would be left out without a word."""
_ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}
_MLP = {"gate_proj", "up_proj", "down_proj"}
EXAONE_THETA = 1e6
"""Base of EXAONE 4's rotary embedding, which SGLang looks for where transformers has it no more."""
_LONGEST = "rollout.max_prompt_tokens + rollout.max_response_tokens"


def context_length(config: Any) -> int | None:
    """The most tokens that a model takes, by its transformers `config`; None: as many as you like.

    YaRN's and linear scaling reach further than `max_position_embeddings`, by their factor.
    """
    most: int | None = getattr(config, "max_position_embeddings", None)
    if most is None:
        return None
    for rope in _ropes(config):
        original = rope.get("original_max_position_embeddings") or most
        if rope.get("rope_type") in ("yarn", "linear"):
            most = max(most, int(original * float(rope.get("factor") or 1.0)))
    return most


def check_served(model_path: str, config: Any, windows: Iterable[int | None], longest: int) -> None:
    """Raises ValueError if engines would compute something else than the trainer for trajectories
    of up to `longest` tokens.

    `config`: transformers' config of the model; `windows`: those of the trainer's layers.
    """
    served_by, config = _served_by(config), config.get_text_config()
    setting = f"model.path={model_path!r}"
    window, pattern = (
        getattr(config, name, None) for name in ("sliding_window", "sliding_window_pattern")
    )
    if served_by == "Cohere2ForCausalLM" and window is None:
        raise ValueError(
            f"{setting}: sliding_window=null in its config.json: the trainer's side, transformers, "
            "computes its rotary embedding only in layers with a window, and the engines' side, "
            f"SGLang's {served_by}, does not start; set its own window there"
        )
    if served_by == "Exaone4ForCausalLM" and window is not None and not isinstance(pattern, str):
        raise ValueError(
            f"{setting}: sliding_window_pattern={pattern} in its config.json: the engines' side, "
            f'SGLang\'s {served_by}, takes text alone; set it to one letter a layer, as "LLLG", '
            "beside layer_types"
        )
    shorter = [window for window in windows if window is not None and window < longest]
    if shorter and served_by not in WITH_WINDOWS:
        raise ValueError(
            f"{setting}: its sliding_window={min(shorter)} is shorter than a trajectory "
            f"({_LONGEST}={longest}), and the engines' side, SGLang's {served_by}, does not "
            f"compute such a window; lower the limits to {min(shorter)} tokens in all, or train "
            "without the window: set sliding_window=null in its config.json (Qwen: "
            "use_sliding_window=false)"
        )
    if served_by == "PhiForCausalLM":
        raise ValueError(
            f"{setting}: the engines' side, SGLang's {served_by}, leaves out the bias of the "
            "output head; choose another model"
        )
    fixed = dict(FIXED.get(served_by, {}))
    if served_by == "OlmoForCausalLM":
        fixed["num_key_value_heads"] = config.num_attention_heads
    for name, value in fixed.items():
        found = getattr(config, name, value)
        if found != value and (found or value):
            raise ValueError(
                f"{setting}: the engines' side, SGLang's {served_by}, ignores "
                f"{name}={json.dumps(found)} of its config.json and computes "
                f"{json.dumps(value)}; choose a model with that"
            )
    for rope in _ropes(config):
        if problem := _rope_problem(served_by, rope, longest):
            raise ValueError(f"{setting}: {problem}")


def check_routes(model: str, config: Any) -> None:
    """Raises ValueError unless engines return the experts of each token, which the trainer takes.

    `model` names its setting; `config`: its transformers config.
    """
    setting = f"rollout.engine.routing_replay=true: {model}"
    served_by = _served_by(config)
    per_token = _experts_per_token(config)
    if per_token is None:
        raise ValueError(f"{setting} has no experts; set it to false")
    if served_by not in WITH_ROUTES:
        raise ValueError(
            f"{setting}: SGLang's {served_by} does not return the experts that it has chosen, or "
            f"the trainer has no place for them; only {', '.join(sorted(WITH_ROUTES))} do; set it "
            "to false"
        )
    if per_token < 2:
        raise ValueError(
            f"{setting} sends a token to num_experts_per_tok={per_token}; a token without known "
            "experts is marked by equal ones, so it takes at least 2; set it to false"
        )


def check_adapters(setting: str, targets: Sequence[str], model: Any, layers: Iterable[str]) -> None:
    """Raises ValueError unless engines compute versions of an adapter as the trainer does; SGLang
    would refuse it late, end with it, or leave parts of it out.

    `setting` names the `model` (transformers'), `targets` are model.lora.targets, and `layers` the
    last names of the layers that have it.
    """
    served_by, names = _served_by(model.config, type(model).__name__), {*layers}
    if served_by not in WITH_ADAPTERS:
        raise ValueError(
            f"model.lora.mode=versions: {setting}: SGLang's {served_by} has not been tested with "
            f"adapters, only {', '.join(sorted(WITH_ADAPTERS))}; choose model.lora.mode=merged"
        )
    why = ""
    if strange := sorted(names - _ATTENTION - _MLP):
        why = f"{', '.join(strange)} is none of {', '.join(sorted(_ATTENTION | _MLP))}"
    elif _experts_per_token(model.config) is not None and not names <= _ATTENTION:
        why = f"of {served_by}, a mixture of experts, it is not one of attention alone"
    elif names & {"q_proj", "k_proj", "v_proj"} and not names >= {"q_proj", "v_proj"}:
        why = "it has one of q_proj, k_proj and v_proj, but not both q_proj and v_proj"
    elif "up_proj" in names and "gate_proj" not in names:
        why = "it has up_proj, but not gate_proj"
    if why:
        raise ValueError(
            f"model.lora.targets={[*targets]}: {why}, as an engine needs it for "
            "model.lora.mode=versions; choose other layers, or model.lora.mode=merged"
        )


def _served_by(config: Any, otherwise: str = "class") -> str:
    """The class of SGLang that serves the model of this config."""
    served_by: str = (getattr(config, "architectures", None) or [otherwise])[0]
    return served_by


def _experts_per_token(config: Any) -> int | None:
    return getattr(config, "num_experts_per_tok", None)


def _ropes(config: Any) -> Iterator[Mapping[str, Any]]:
    """The parameters of the rotary embeddings, which some models have by kinds of layers."""
    parameters = getattr(config, "rope_parameters", None) or {}
    by_layer = [value for value in parameters.values() if isinstance(value, dict)]
    yield from by_layer or [parameters]


def _rope_problem(served_by: str, rope: Mapping[str, Any], longest: int) -> str | None:
    kind, theta = rope.get("rope_type", "default"), rope.get("rope_theta")
    if served_by == "Exaone4ForCausalLM" and theta != EXAONE_THETA:
        return (
            f"the engines' side, SGLang's {served_by}, ignores rope_theta={theta} of its "
            f"config.json and computes {EXAONE_THETA:g}; choose a model with that"
        )
    if kind == "default":
        return None
    if served_by in WITHOUT_SCALED_ROPE:
        return (
            f"the engines' side, SGLang's {served_by}, ignores rope_type={kind!r} of its "
            "config.json; remove it there, or choose another model"
        )
    if kind == "dynamic":
        return (
            "rope_type='dynamic' in its config.json: SGLang scales all lengths alike, and the "
            "trainer's side, transformers, by the longest sequence of a row; set 'yarn' or "
            "'linear' there"
        )
    original = rope.get("original_max_position_embeddings")
    if kind == "longrope" and original is not None and longest > original:
        return (
            f"rope_type='longrope' in its config.json: beyond "
            f"original_max_position_embeddings={original} tokens both SGLang and the trainer's "
            "side, transformers, choose the factors by the longest sequence of a batch, which is "
            f"not the same; lower {_LONGEST}={longest} to that"
        )
    for name, side in (
        ("attention_factor", "the engines' side, SGLang,"),
        ("attn_factor", "the trainer's side, transformers,"),
        ("extrapolation_factor", "the trainer's side, transformers,"),
    ):
        if kind == "yarn" and rope.get(name) is not None:
            return (
                f"{side} ignores {name}={rope[name]} of rope_type='yarn' in its config.json; "
                "remove it there"
            )
    return None
