"""An adapter outside of its model: as peft writes and reads it, and merged into the base's weights.

adapter_config.json           rank, alpha, targets, the base
adapter_model.safetensors     A and B of each adapted layer
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from configs.choices import LoraInit
from configs.schema import LoraConfig
from tensors.adapters import factor_names, merged
from trainer_pool.state.shards import differences

if TYPE_CHECKING:
    import peft

_PLAIN_STARTS = (True, False, None, "gaussian", "eva", "orthogonal")
"""Values of peft's init_lora_weights that leave the base as it is."""
_CONFIG_FILE, _WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"


@dataclass(kw_only=True, slots=True, frozen=True, eq=False)
class Adapter:
    """An adapter outside of its model."""

    config: LoraConfig
    tensors: Mapping[str, Tensor]
    """A and B of each adapted layer, by the names of the file."""

    def merged(self, weight: str, base: Tensor, dtype: torch.dtype) -> Tensor:
        """The base's weight of this name with the adapter's part, if it has one."""
        a, b = factor_names(weight)
        if a not in self.tensors:
            return base.to(dtype)
        return merged(base, self.tensors[a], self.tensors[b], self.config.scale, dtype)

    def check_fits(self, weights: Iterable[str], model_path: str) -> None:
        """Raises ValueError unless all that it has belongs to one of these weights of the base."""
        known = {factor for weight in weights for factor in factor_names(weight)}
        strange = sorted(self.tensors.keys() - known)
        if strange or not self.tensors:
            what = f"{strange[0]} belongs to none of its weights" if strange else "there is none"
            raise ValueError(f"the adapter is not of model.path={model_path!r}: {what}")

    def write(self, folder: Path, model_path: str) -> None:
        """Write it as peft's `save_pretrained` does. Raises OSError."""
        folder.mkdir(parents=True, exist_ok=True)
        tensors = {name: tensor.contiguous() for name, tensor in self.tensors.items()}
        save_file(tensors, folder / _WEIGHTS_FILE, metadata={"format": "pt"})
        layers = {name.split(".lora_")[0].rpartition(".")[2] for name in tensors}
        saved = peft_config(self.config, model_path, sorted(layers))
        saved.inference_mode = True
        saved.save_pretrained(str(folder))


def read_adapter(folder: Path, config: LoraConfig, own: dict[str, Any]) -> dict[str, Tensor]:
    """The tensors of an adapter that peft wrote. `own`: those expected, by their names.

    Raises ValueError naming model.lora.resume_from if there is none, or if it is another kind of
    adapter than `config`'s: its scale, rank and modules would silently be others.
    """
    where = f"model.lora.resume_from={str(folder)!r}"
    try:
        fields = json.loads((folder / _CONFIG_FILE).read_text())
        tensors = load_file(folder / _WEIGHTS_FILE)
    except (OSError, ValueError, SafetensorError) as error:
        raise ValueError(
            f"{where}: not a folder with {_CONFIG_FILE} and {_WEIGHTS_FILE} as peft writes them "
            f"({error})"
        ) from error
    if fields.get("peft_type") != "LORA":
        raise ValueError(f"{where}: its peft_type is {fields.get('peft_type')!r}, not LORA")
    for name, wanted in (("r", config.rank), ("lora_alpha", config.alpha)):
        if fields.get(name) != wanted:
            setting = {"r": "model.lora.rank", "lora_alpha": "model.lora.alpha"}[name]
            raise ValueError(
                f"{where}: its {name} is {fields.get(name)}; set {setting}={fields.get(name)}"
            )
    for name in ("use_rslora", "use_dora", "rank_pattern", "alpha_pattern", "modules_to_save"):
        if fields.get(name):
            raise ValueError(f"{where}: it has {name}={fields[name]}, which is not supported")
    if (start := fields.get("init_lora_weights", True)) not in _PLAIN_STARTS:
        raise ValueError(
            f"{where}: its init_lora_weights is {start!r}, so it has a changed base; convert "
            "it with peft's path_initial_model_for_weight_conversion"
        )
    if wrong := differences(own, tensors):
        raise ValueError(
            f"{where}: it and the adapter of these settings differ in {wrong}; its "
            f"target_modules are {fields.get('target_modules')}: set model.lora.targets to them, "
            "and model.path to the model that it was trained on"
        )
    return tensors


def peft_config(config: LoraConfig, model_path: str, targets: list[str]) -> peft.LoraConfig:
    """The adapter as peft describes it, in adapter_config.json too."""
    import peft  # here: it costs every process half a second, and few runs need it

    return peft.LoraConfig(
        task_type="CAUSAL_LM",
        base_model_name_or_path=model_path,
        r=config.rank,
        lora_alpha=config.alpha,
        target_modules=targets,
        lora_dropout=0.0,
        bias="none",
        init_lora_weights="gaussian" if config.init is LoraInit.gaussian else True,
    )
