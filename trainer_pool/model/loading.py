"""Loads Hugging Face models as the trainer computes them: packed rows, no dropout."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig

from tensors.pictures import auto_class
from trainer_pool.model import attention
from trainer_pool.model.pictures import attention_of

_JITTER = {"jitter_noise", "input_jitter_noise"}
"""Attributes of routers: the noise that they add to their input in training."""


def load_model(
    model_path: str,
    dtype: torch.dtype,
    *,
    trust_remote_code: bool,
    setting: str = "model.path",
) -> Any:
    """The torch module, whose type transformers leaves open. Raises ValueError naming `setting` if
    there is no such model, or if it cannot be trained on packed rows."""

    def build() -> Any:
        config = AutoConfig.from_pretrained(model_path, trust_remote_code=trust_remote_code)
        return auto_class(config).from_pretrained(
            model_path,
            dtype=dtype,
            attn_implementation=attention_of(config, attention.PACKED),
            trust_remote_code=trust_remote_code,
        )

    try:
        return without_noise(attention.packable(model_path, build))
    except OSError as error:
        raise ValueError(
            f"{setting}={model_path!r}: neither a folder with a Hugging Face model nor the name "
            f"of one that can be reached; correct {setting} ({error})"
        ) from error


def without_noise(model: Any) -> Any:
    """The model with all its dropout, and the noise of its routers, at 0, in training too.

    The engines sample without them. With them the policy's log-probabilities would be noisy, and
    so would the ratio of policies, which multiplies the advantages.
    """
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        for name, value in list(vars(module).items()):
            is_noise = "drop" in name or name in _JITTER
            if is_noise and isinstance(value, float):
                setattr(module, name, 0.0)
    return model
