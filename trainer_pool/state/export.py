"""Writes the model of a checkpoint for `from_pretrained`, without any rank."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from trainer_pool.state.checkpoint import check_checkpoint
from trainer_pool.state.shards import ShardReader


def export_checkpoint(
    checkpoint: Path, model_path: str, folder: Path, *, trust_remote_code: bool = False
) -> int:
    """Write weights, config and tokenizer to `folder`; returns the number of parameters.

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
    model.save_pretrained(folder, state_dict=weights)  # which empties the dictionary
    tokenizer = AutoTokenizer.from_pretrained(model_path, trust_remote_code=trust_remote_code)
    tokenizer.save_pretrained(folder)
    return num_parameters
