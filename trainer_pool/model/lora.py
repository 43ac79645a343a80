"""Low-rank adapters (LoRA, Hu et al. 2021, arXiv 2106.09685) in a transformers model, by peft.

    y = base(x) + scale B (A x)        A [rank, in], B [out, rank], scale = alpha / rank

Only A and B are trained; B begins as 0, so that the first policy is the base. The base's weights
are frozen: no gradient, no moments, in no checkpoint, and never sent.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from configs.schema import ALL_LINEAR, LoraConfig
from tensors.base_weights import BaseWeights
from trainer_pool.state.adapter import peft_config, read_adapter

_ADAPTER = "default"


def add_adapter(model: Any, config: LoraConfig, model_path: str) -> None:
    """Freeze `model` and put an adapter into it; its modules keep their places.

    Raises ValueError naming the setting if a target is not one of its linear layers, or if the
    adapter in `model.lora.resume_from` is not one of these settings.
    """
    import peft  # here: it costs every process half a second, and few runs need it

    layers = adapted_layers(model, config, model_path)
    targets = list(last_names(layers))
    with torch.no_grad():
        peft.inject_adapter_in_model(peft_config(config, model_path, targets), model, _ADAPTER)
        found = {name for name, module in model.named_modules() if hasattr(module, "lora_A")}
        if found != layers:  # of some mixtures peft takes the experts in place of their neighbours
            others = sorted(found.symmetric_difference(layers))
            raise ValueError(
                f"model.lora.targets={config.targets}: peft does not adapt these layers of "
                f"{type(model).__name__} as they are named ({', '.join(others[:3])} ...); set "
                "layers of attention alone, as [q_proj, k_proj, v_proj, o_proj]"
            )
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(is_adapters(name))
        if config.resume_from is not None:
            own = {
                adapter_name(name): parameter
                for name, parameter in model.named_parameters()
                if is_adapters(name)
            }
            for name, tensor in read_adapter(Path(config.resume_from), config, own).items():
                own[name].copy_(tensor)


def adapted_layers(model: Any, config: LoraConfig, model_path: str) -> set[str]:
    """The layers that get an adapter: linear ones, of a mixture of experts by default those of
    attention.

    Raises ValueError naming model.lora.targets if one of them is not one of the linear layers.
    """
    head = model.get_output_embeddings()
    linear = {
        name
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and module is not head
    }
    if not linear:
        raise ValueError(
            f"model.lora: {type(model).__name__} of model.path={model_path!r} has no linear layers "
            "for an adapter; choose another model, or train all weights (model.lora=null)"
        )
    known = {name.rpartition(".")[2] for name in linear}
    if wrong := sorted({*config.targets} - {ALL_LINEAR} - known):
        raise ValueError(
            f"model.lora.targets={config.targets}: {type(model).__name__} of "
            f"model.path={model_path!r} has no linear layer {', '.join(wrong)}; it has "
            f"{', '.join(sorted(known))}"
        )
    if ALL_LINEAR not in config.targets:
        return {name for name in linear if name.rpartition(".")[2] in config.targets}
    if any(len(getattr(p, "ds_shape", p.shape)) == 3 for p in model.parameters()):
        return {name for name in linear if "attn" in name or "attention" in name}
    return linear


def last_names(layers: Iterable[str]) -> tuple[str, ...]:
    """The names by which targets list these layers."""
    return tuple(sorted({name.rpartition(".")[2] for name in layers}))


def check_base(model: Any, base: BaseWeights) -> None:
    """Raises ValueError unless the files of the model's base have what its adapter changes."""
    for name, parameter in model.named_parameters():
        if ".base_layer.weight" in name:
            weight, shape = base_name(name), tuple(parameter.shape)
            if (found := base.shape(weight)) != shape:
                raise ValueError(
                    f"{weight} has the shape {list(found)} in the files of the model, and "
                    f"{list(shape)} by its config.json; copy the model again"
                )


def is_adapters(parameter: str) -> bool:
    """Whether a parameter of the adapted model is the adapter's."""
    return ".lora_A." in parameter or ".lora_B." in parameter


def adapter_name(parameter: str) -> str:
    """The name by which peft writes a parameter of the adapter."""
    return "base_model.model." + parameter.replace(f".{_ADAPTER}.", ".")


def base_name(parameter: str) -> str:
    """The name that a frozen parameter has in the base's checkpoint."""
    return parameter.replace(".base_layer.", ".")


@contextmanager
def without_adapter(model: Any) -> Iterator[None]:
    """Inside this block, `model` computes as its base does."""
    layers = [module for module in model.modules() if hasattr(module, "lora_A")]
    trained = [p for p in model.parameters() if p.requires_grad]
    try:
        for layer in layers:
            layer.enable_adapters(False)
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)
        for parameter in trained:  # peft freezes what it switches off
            parameter.requires_grad_(True)
