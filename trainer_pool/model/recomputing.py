"""Gradient checkpointing: of each decoder layer a pass keeps its input alone, and the backward pass
computes the layer again (Chen et al. 2016, arXiv 1604.06174).

    forward    input 0 ─► layer 0 ─► input 1 ─► layer 1 ─► ...     inputs stay, or go to the host
    backward                         input 1 ─► layer 1 again, its backward pass; then layer 0
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint


def recompute_layers(model: Any, *, offload: bool) -> None:
    """Switches it on for a transformers model; `offload`: inputs wait in pinned host memory."""
    model.gradient_checkpointing_enable({"use_reentrant": False})
    if offload:
        model._set_gradient_checkpointing(gradient_checkpointing_func=_with_input_on_host)


def _with_input_on_host(layer: Callable[..., Any], *inputs: Any) -> Any:
    # What the layer itself saves is not copied: hooks of the checkpoint, which are further inside,
    # drop it.
    with save_on_cpu(pin_memory=True):
        return checkpoint(layer, *inputs, use_reentrant=False)
