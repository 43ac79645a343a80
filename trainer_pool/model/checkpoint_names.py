"""Checks by name that engines can load the published weights, and by log-probability that they did.

Engines load a published version by the names of the checkpoint. SGLang's loaders silently skip an
unknown name, and the engine keeps the old weight. So a model whose names in memory differ from
those in its files is rejected.
"""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import Any

import torch
from transformers import AutoConfig, PreTrainedConfig
from transformers.core_model_loading import revert_weight_conversion

from tensors.base_weights import BaseWeights
from tensors.layout import Part
from tensors.pictures import auto_class
from trainer_pool.model.attention import PACKED, packable
from trainer_pool.model.pictures import attention_of

_FREE = {
    *(field.name for field in dataclasses.fields(PreTrainedConfig)),
    *("bos_token_id", "eos_token_id", "pad_token_id", "initializer_range", "use_cache"),
    *("max_position_embeddings", "max_window_layers", "use_sliding_window"),
}
"""Fields of a config in which a reference may differ: what they do to the computation is said by
others too, as `layer_types`."""
_SHOWN = 8
"""Patterns of names in a message."""


def model_without_weights(model_path: str, *, trust_remote_code: bool) -> Any:
    """The model as the trainer builds it, on the meta device.

    Raises ValueError if the trainer cannot pack the model's sequences.
    """
    config = AutoConfig.from_pretrained(model_path, trust_remote_code=trust_remote_code)

    def build() -> Any:
        return auto_class(config).from_config(
            config,
            attn_implementation=attention_of(config, PACKED),
            trust_remote_code=trust_remote_code,
        )

    with torch.device("meta"):
        model = packable(model_path, build).eval()
    model.tie_weights()
    return model


def check_reference(setting: str, own: PreTrainedConfig, other: PreTrainedConfig) -> None:
    """Raises ValueError if a model of the config `other` would compute something else than one of
    the config `own` with the same weights.

    A reference is computed by the policy's code: its rotary embeddings, windows, norms.
    """
    names = {field.name for field in dataclasses.fields(own)} | {"model_type", "head_dim"}
    # The types of layers differ where their number does.
    for name in sorted(names - _FREE, key=lambda name: (name == "layer_types", name)):
        mine, theirs = getattr(own, name, None), getattr(other, name, None)
        if isinstance(mine, PreTrainedConfig) and type(mine) is type(theirs):
            check_reference(f"{setting}: {name}", mine, theirs)  # parts of a model with pictures
        elif "drop" not in name and mine != theirs:
            raise ValueError(
                f"{setting}: its {name} is {theirs!r}, the policy's {mine!r}, and it is "
                "computed as the policy; choose a model whose config.json agrees with the policy's"
            )


def checkpoint_parts(model: Any) -> dict[str, tuple[Part, ...]]:
    """The tensors of a checkpoint that each parameter of `model` is made of, by its name.

    transformers itself says so: it converts tiny numbered tensors in the parameters' place back to
    those that it would save. Raises ValueError for a parameter that is not simply these tensors,
    one after the other.
    """
    shapes = {
        name: tuple(getattr(parameter, "ds_shape", parameter.shape))
        for name, parameter in model.named_parameters()
    }
    wholes = revert_weight_conversion(
        model, {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    )
    parts = {}
    for name, shape in shapes.items():
        # Experts are counted, by the first size of three; the others are told apart by theirs.
        tiny = (shape[0], 6, 5) if len(shape) == 3 else (7, 5, 3, 2)[: len(shape)]
        numbered = torch.arange(prod(tiny)).view(tiny)
        found = revert_weight_conversion(model, {name: numbered})
        parts[name] = tuple(
            Part(own, tuple(wholes[own].shape))
            for own in sorted(found, key=lambda own: int(found[own].flatten()[0]))
        )
        in_order = torch.cat([found[part.name].flatten() for part in parts[name]])
        if not torch.equal(in_order, numbered.flatten()):
            raise ValueError(
                f"{type(model).__name__} has the parameter {name} in memory, of which transformers "
                f"makes {', '.join(part.name for part in parts[name][:3])} ... in a file otherwise "
                "than by cutting it: its weights cannot be sent; choose another model"
            )
    return parts


def check_names(model_path: str, parts: Mapping[str, Sequence[Part]]) -> None:
    """Raises ValueError naming weights that would be sent but are not in the checkpoint's files."""
    with BaseWeights(model_path) as files:
        known = files.names
    unknown = [part.name for some in parts.values() for part in some if part.name not in known]
    if unknown:
        raise ValueError(
            f"model.path={model_path!r}: the trainer holds {len(unknown)} weights by names that "
            f"the checkpoint does not have: {name_patterns(unknown)}. Engines load by the "
            "checkpoint's names and silently keep the old weight of any other: save the model "
            "again with save_pretrained of this transformers version"
        )


def is_tied(config: Any) -> bool:
    """The output head is the embeddings; models with pictures do not say so of their text."""
    text = config.get_text_config()
    return bool(getattr(text, "tie_word_embeddings", config.tie_word_embeddings))


def check_tied_head(model_path: str, model: Any) -> None:
    """Raises ValueError if config.json ties the output head to the embeddings, but the files hold
    another head."""
    if not is_tied(model.config):
        return
    tied = model.get_expanded_tied_weights_keys(all_submodels=True)
    with BaseWeights(model_path) as files:
        for head, embeddings in tied.items():
            if {head, embeddings} <= files.names and not torch.equal(
                files.tensor(head), files.tensor(embeddings)
            ):
                raise ValueError(
                    f"model.path={model_path!r}: tie_word_embeddings=true in its config.json, but "
                    f"its files hold a {head} that differs from {embeddings}. Engines and trainer "
                    "would use the embeddings as the head, and this head would be lost: set "
                    f"tie_word_embeddings=false there, or remove {head} from the files"
                )


def name_patterns(names: Iterable[str]) -> str:
    """Merges names that differ only in a number: `model.layers.*.mlp.up_proj.weight (24)`."""
    counts = Counter(re.sub(r"\.\d+(?=\.|$)", ".*", name) for name in names)
    shown = [f"{name} ({n})" if n > 1 else name for name, n in counts.most_common(_SHOWN)]
    more = len(counts) - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more else "")
