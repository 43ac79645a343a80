"""Says that there is no GPU, instead of failing at some place that would not tell."""

from __future__ import annotations

import sys

import torch

NO_GPU = 2
"""Exit code of a script that finds none."""


def require_gpu(what: str) -> int:
    """The number of GPUs; ends the process where there is none."""
    if not torch.cuda.is_available() or not torch.cuda.device_count():
        print(
            f"{what} needs a CUDA device, and this machine has none (or a torch without CUDA: "
            f"{torch.__version__}). Nothing was run.",
            file=sys.stderr,
        )
        sys.exit(NO_GPU)
    return torch.cuda.device_count()
