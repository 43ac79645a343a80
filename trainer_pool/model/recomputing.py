"""Gradient checkpointing: of each decoder layer a pass keeps its input alone, and the backward pass
computes the layer again (Chen et al. 2016, arXiv 1604.06174).

    forward    input 0 ─► layer 0 ─► input 1 ─► layer 1 ─► ...     inputs stay, or go to the host
    backward                         input 1 ─► layer 1 again, its backward pass; then layer 0

Of a long row even one layer's MLP is much: at 131,072 tokens that of a 7B has 20 GB. In tiles
(Bekman et al. 2025, arXiv 2506.13996) the row passes it by some tokens at a time, which are
computed once more in the backward pass, so that the values of one tile exist at any time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
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


def tile_mlps(model: Any, num_tokens: int) -> None:
    """Lets the MLP of each layer of a transformers model compute `num_tokens` tokens at a time.

    Raises ValueError for a model whose layers have none, or experts in its place: their router, and
    what is recorded and replayed of it, is for whole rows.
    """
    for layer in model.get_decoder().layers:
        mlp = getattr(layer, "mlp", None)
        if not isinstance(mlp, nn.Module) or hasattr(mlp, "experts"):
            what = "no module `mlp`" if mlp is None else "a mixture of experts"
            raise ValueError(
                f"trainer.mlp_tile_tokens={num_tokens}: a layer ({type(layer).__name__}) of this "
                f"model has {what}; do not set it, and split rows over more ranks "
                "(trainer.sequence_parallel_size)"
            )
        mlp.forward = _in_tiles(mlp.forward, num_tokens)


def _in_tiles(forward: Callable[[Tensor], Tensor], num_tokens: int) -> Callable[[Tensor], Tensor]:
    def tiled(hidden: Tensor) -> Tensor:
        if hidden.shape[-2] <= num_tokens:
            return forward(hidden)
        tiles = torch.split(hidden, num_tokens, dim=-2)
        return torch.cat([checkpoint(forward, tile, use_reentrant=False) for tile in tiles], dim=-2)

    return tiled
