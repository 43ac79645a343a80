"""Features of a model that SGLang computes in another way than the trainer, or not at all.

Its classes say nothing about fields of a config.json that they do not read: the engines would
sample from another model than the one that is trained. The tables were read in the sources of the
version in the lock files. A class that is not in them is taken for one that computes everything but
sliding windows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
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
        "PhiForCausalLM",
        "Starcoder2ForCausalLM",
    }
)
"""Classes that read no more of the rotary embedding than its base."""
IGNORED = {
    "attention_bias": frozenset({"GemmaForCausalLM", "GraniteForCausalLM"}),
    "mlp_bias": frozenset({"ArceeForCausalLM", "GraniteForCausalLM", "LlamaForCausalLM"}),
    "qk_layernorm": frozenset({"PhiForCausalLM"}),
    "scale_attn_by_inverse_layer_idx": frozenset({"GPT2LMHeadModel"}),
}
"""Switches of a config.json, and the classes that take them for off."""
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
    served_by = (getattr(config, "architectures", None) or ["class"])[0]
    setting = f"model.path={model_path!r}"
    shorter = [window for window in windows if window is not None and window < longest]
    if shorter and served_by not in WITH_WINDOWS:
        raise ValueError(
            f"{setting}: its sliding_window={min(shorter)} is shorter than a trajectory "
            f"({_LONGEST}={longest}), and the engines' side, SGLang's {served_by}, does not "
            f"compute such a window; lower the limits to {min(shorter)} tokens in all, or train "
            "without the window: set sliding_window=null in its config.json (Qwen: "
            "use_sliding_window=false)"
        )
    for name, classes in IGNORED.items():
        if getattr(config, name, False) and served_by in classes:
            raise ValueError(
                f"{setting}: the engines' side, SGLang's {served_by}, ignores {name}=true of its "
                "config.json; choose a model without"
            )
    for rope in _ropes(config):
        if problem := _rope_problem(served_by, rope, longest):
            raise ValueError(f"{setting}: {problem}")


def _ropes(config: Any) -> Iterator[Mapping[str, Any]]:
    """The parameters of the rotary embeddings, which some models have by kinds of layers."""
    parameters = getattr(config, "rope_parameters", None) or {}
    by_layer = [value for value in parameters.values() if isinstance(value, dict)]
    yield from by_layer or [parameters]


def _rope_problem(served_by: str, rope: Mapping[str, Any], longest: int) -> str | None:
    kind = rope.get("rope_type", "default")
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
