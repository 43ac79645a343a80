"""Says what a script lacks, instead of failing at some place that would not tell."""

from __future__ import annotations

import importlib.util
import inspect
import sys
from importlib import import_module
from typing import Any, cast

import torch
from torch import Tensor

NOT_RUN = 2
"""Exit code of a script that finds no GPU, or lacks a package."""


def require_gpu(what: str) -> int:
    """The number of GPUs; ends the process where there is none."""
    if not torch.cuda.is_available() or not torch.cuda.device_count():
        print(
            f"{what} needs a CUDA device, and this machine has none (or a torch without CUDA: "
            f"{torch.__version__}). Nothing was run.",
            file=sys.stderr,
        )
        sys.exit(NOT_RUN)
    return torch.cuda.device_count()


def require_packages(what: str, *names: str) -> None:
    """Ends the process where one of them is not installed."""
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    if missing:
        print(
            f"{what} needs {', '.join(missing)}, not installed here. Nothing was run.",
            file=sys.stderr,
        )
        sys.exit(NOT_RUN)


def take_older_torch() -> str | None:
    """Lets torch before 2.13, whose variable-length attention takes as many heads of keys as of
    queries, compute with fewer. Returns what is different then, for the report; None if nothing is.
    """
    attention: Any = import_module("trainer_pool.model.attention")
    attend = attention.varlen_attn
    if "enable_gqa" in inspect.signature(attend).parameters:
        return None

    def with_repeated_heads(
        query: Tensor, key: Tensor, value: Tensor, *borders: Any, **options: Any
    ) -> Tensor:
        options.pop("enable_gqa")
        times = query.shape[1] // key.shape[1]
        key, value = (heads.repeat_interleave(times, dim=1) for heads in (key, value))
        return cast(Tensor, attend(query, key, value, *borders, **options))

    attention.varlen_attn = with_repeated_heads
    return f"torch {torch.__version__}: heads of keys and values are repeated, which costs time"
