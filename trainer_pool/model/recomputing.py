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
from typing import Any, cast

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

    Raises ValueError for a model whose layers have no module `mlp` of their own, or experts in it:
    their router, and what is recorded and replayed of it, is for whole rows.
    """
    decoder = model.get_decoder()
    layers: Any = decoder.layers if hasattr(decoder, "layers") else decoder.h  # GPT-2's
    for layer in layers:
        kind = type(layer).__name__
        mlp: Any = getattr(layer, "mlp", None)
        problem = None
        if not isinstance(mlp, nn.Module):
            problem = f"its {kind} has no module `mlp`"
        elif hasattr(mlp, "experts"):
            problem = f"its {kind} has a mixture of experts"
        elif kind not in (model._no_split_modules or ()):
            # Else ZeRO-3 gathers weights for each tile, and ranks differ in their number of tiles.
            problem = f"its _no_split_modules do not name {kind}"
        if problem is not None:
            raise ValueError(
                f"trainer.mlp_tile_tokens={num_tokens}: not possible for this model: {problem}; do "
                "not set it, and split rows over more ranks (trainer.sequence_parallel_size)"
            )
        mlp.forward = _in_tiles(mlp, mlp.forward, num_tokens)


def _in_tiles(
    mlp: nn.Module, forward: Callable[[Tensor], Tensor], num_tokens: int
) -> Callable[[Tensor], Tensor]:
    def tiled(hidden: Tensor) -> Tensor:
        if hidden.shape[-2] <= num_tokens:
            return forward(hidden)
        weights = [weight for weight in mlp.parameters() if weight.requires_grad]
        return cast(Tensor, cast(Any, _Tiles).apply(forward, num_tokens, hidden, *weights))

    return tiled


class _Tiles(torch.autograd.Function):
    """Not a checkpoint of each tile: of hundreds of gradients in bfloat16, autograd would round
    each sum."""

    @staticmethod
    def forward(
        ctx: Any,
        forward: Callable[[Tensor], Tensor],
        num_tokens: int,
        hidden: Tensor,
        *weights: Tensor,
    ) -> Tensor:
        ctx.save_for_backward(hidden)
        ctx.compute, ctx.num_tokens, ctx.weights = forward, num_tokens, weights
        return torch.cat([forward(tile) for tile in torch.split(hidden, num_tokens, -2)], -2)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (hidden,) = ctx.saved_tensors
        of_hidden = torch.empty_like(hidden)
        sums = [torch.zeros_like(weight, dtype=torch.float32) for weight in ctx.weights]
        parts = (torch.split(each, ctx.num_tokens, -2) for each in (hidden, gradient, of_hidden))
        for tile, its_gradient, its_result in zip(*parts, strict=True):
            tile = tile.detach().requires_grad_()
            with torch.enable_grad():
                output = ctx.compute(tile)
            of_tile, *of_weights = torch.autograd.grad(output, (tile, *ctx.weights), its_gradient)
            its_result.copy_(of_tile)
            for total, part in zip(sums, of_weights, strict=True):
                total.add_(part)
        of_weights = [total.to(w.dtype) for total, w in zip(sums, ctx.weights, strict=True)]
        return None, None, of_hidden, *of_weights
