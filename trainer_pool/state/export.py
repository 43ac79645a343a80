"""Writes models for `from_pretrained`: that of a checkpoint without any rank, or a live one."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.utils import GENERATION_CONFIG_NAME, cached_file

from configs.schema import LoraConfig
from tensors.base_weights import BaseWeights
from tensors.pictures import auto_class
from trainer_pool.state.adapter import Adapter
from trainer_pool.state.checkpoint import check_checkpoint
from trainer_pool.state.shards import ShardReader

ADAPTER_FOLDER = "adapter"
"""Folder of an exported model with its adapter as peft writes it."""
PROCESSORS = ("preprocessor_config.json", "video_preprocessor_config.json", "processor_config.json")
"""Files of a model that takes pictures; engines and trainers of the exported one need them too."""


def export_checkpoint(
    checkpoint: Path,
    model_path: str,
    folder: Path,
    *,
    trust_remote_code: bool = False,
    lora: LoraConfig | None = None,
) -> int:
    """Write weights, configs and tokenizer to `folder`; returns the number of parameters.

    Casts the float32 weights to the dtype in the model's own config. `lora`: the checkpoint is of
    an adapter, which is merged into the model's weights and written beside them, too. Needs memory
    for the whole model. Raises ValueError if the checkpoint is not as it was written or of another
    model, and OSError.
    """
    check_checkpoint(checkpoint)
    config = AutoConfig.from_pretrained(model_path, trust_remote_code=trust_remote_code)
    dtype = config.dtype or torch.float32
    with torch.device("meta"):  # only its names and how it is saved are of use
        model = auto_class(config).from_config(
            config, dtype=dtype, trust_remote_code=trust_remote_code
        )
    weights = dict[str, Tensor]()
    names = [name for name, _ in model.named_parameters()]
    adapter = None
    with ShardReader(checkpoint) as reader:
        known = {spec.name for spec in reader.layout.tensors}
        if lora is not None:
            trained = (name for name in known if ":" not in name)
            adapter = Adapter(config=lora, tensors={n: reader.tensor(n) for n in trained})
            adapter.check_fits(names, model_path)
            base = AutoModelForCausalLM.from_pretrained(
                model_path, trust_remote_code=trust_remote_code
            )
            for name, weight in base.named_parameters():
                weights[name] = adapter.merged(name, weight.detach(), dtype)
        elif missing := [name for name in names if name not in known]:
            raise ValueError(f"{checkpoint} is not of {model_path!r}: it has no {missing[0]}")
        else:
            weights = {name: reader.tensor(name).to(dtype) for name in names}
    num_parameters = sum(weight.numel() for weight in weights.values())
    saved = model.state_dict()
    if buffers := [name for name, _ in model.named_buffers() if name in saved]:
        with BaseWeights(model_path) as files:  # no training changes them
            weights |= {name: files.tensor(name) for name in buffers}
    write_model(
        folder, model, weights, model_path, trust_remote_code=trust_remote_code, adapter=adapter
    )
    return num_parameters


def write_model(
    folder: Path,
    model: Any,
    weights: dict[str, Tensor],
    model_path: str,
    *,
    trust_remote_code: bool,
    adapter: Adapter | None = None,
) -> None:
    """Write `weights`, and all that `model_path` has beside its own; empties `weights`. An adapter,
    which they contain already, goes into a folder of its own.

    `folder` is replaced once all of it is written. Raises OSError.
    """
    part = folder.with_name(f".{folder.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    try:
        part.mkdir(parents=True)
        # Its main process would refuse configs here that it has loaded.
        model.save_pretrained(part, state_dict=weights, is_main_process=False)
        config = model.config
        config.dtype = str(model.dtype).removeprefix("torch.")
        config.architectures = [type(model).__name__]
        config.to_json_file(part / "config.json", use_diff=True)
        for code in Path(model_path).glob("*.py"):
            shutil.copyfile(code, part / code.name)
        # Ends of a turn and sampling defaults may stand there alone.
        for name in (GENERATION_CONFIG_NAME, *PROCESSORS):
            beside = cached_file(model_path, name, _raise_exceptions_for_missing_entries=False)
            if beside is not None:
                shutil.copyfile(beside, part / name)
        tokenizer = AutoTokenizer.from_pretrained(model_path, trust_remote_code=trust_remote_code)
        tokenizer.save_pretrained(part)
        if adapter is not None:
            adapter.write(part / ADAPTER_FOLDER, model_path)
        shutil.rmtree(folder, ignore_errors=True)
        part.rename(folder)
    finally:
        shutil.rmtree(part, ignore_errors=True)
