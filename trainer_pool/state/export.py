"""Writes models for `from_pretrained`: that of a checkpoint without any rank, or a live one."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.utils import GENERATION_CONFIG_NAME, cached_file

from trainer_pool.state.checkpoint import check_checkpoint
from trainer_pool.state.shards import ShardReader


def export_checkpoint(
    checkpoint: Path, model_path: str, folder: Path, *, trust_remote_code: bool = False
) -> int:
    """Write weights, configs and tokenizer to `folder`; returns the number of parameters.

    Casts the float32 weights to the dtype in the model's own config. Needs memory for the
    whole model. Raises ValueError if the checkpoint is not as it was written or of another model,
    and OSError.
    """
    check_checkpoint(checkpoint)
    config = AutoConfig.from_pretrained(model_path, trust_remote_code=trust_remote_code)
    dtype = config.dtype or torch.float32
    with torch.device("meta"):  # only its names and how it is saved are of use
        model = AutoModelForCausalLM.from_config(
            config, dtype=dtype, trust_remote_code=trust_remote_code
        )
    weights, names = {}, [name for name, _ in model.named_parameters()]
    with ShardReader(checkpoint) as reader:
        known = {spec.name for spec in reader.layout.tensors}
        if missing := [name for name in names if name not in known]:
            raise ValueError(f"{checkpoint} is not of {model_path!r}: it has no {missing[0]}")
        for name in names:
            weights[name] = reader.tensor(name).to(dtype)
    num_parameters = sum(weight.numel() for weight in weights.values())
    write_model(folder, model, weights, model_path, trust_remote_code=trust_remote_code)
    return num_parameters


def write_model(
    folder: Path,
    model: Any,
    weights: dict[str, Tensor],
    model_path: str,
    *,
    trust_remote_code: bool,
) -> None:
    """Write `weights`, and all that `model_path` has beside its own; empties `weights`.

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
        generation = cached_file(
            model_path, GENERATION_CONFIG_NAME, _raise_exceptions_for_missing_entries=False
        )
        if generation is not None:
            shutil.copyfile(generation, part / GENERATION_CONFIG_NAME)
        tokenizer = AutoTokenizer.from_pretrained(model_path, trust_remote_code=trust_remote_code)
        tokenizer.save_pretrained(part)
        shutil.rmtree(folder, ignore_errors=True)
        part.rename(folder)
    finally:
        shutil.rmtree(part, ignore_errors=True)
