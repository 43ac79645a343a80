"""Log-probabilities of given tokens from logits, without a second tensor of the logits' size.

`log_softmax(logits)[token]` in float32 would keep 4 bytes for every entry of the vocabulary until
the backward pass. Here the logits are read in chunks of rows. Only the logits and one normalizer
per row are kept, and the backward pass recomputes the softmax chunk by chunk.

Letters: N positions, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

_CHUNK_ELEMENTS = 2**25
"""Float32 logits at once: 128 MiB."""


def selected_logprobs(
    logits: Tensor, tokens: Tensor, temperatures: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """log p(token) and the entropy of p = softmax(logits / temperature), both float32.

    `logits` [..., V] of any float type, `tokens` [...] ids, `temperatures` float32 that broadcast
    to `tokens` (None is 1). The entropy has no gradient.
    """
    shape = tokens.shape
    if temperatures is None:
        temperatures = torch.ones((), dtype=torch.float32, device=logits.device)
    temperatures_N1 = temperatures.expand(shape).reshape(-1, 1)
    logits_NV = logits.reshape(-1, logits.shape[-1])
    logprobs_N, entropy_N = _SelectedLogprobs.apply(  # type: ignore[no-untyped-call]
        logits_NV, tokens.reshape(-1), temperatures_N1
    )
    return logprobs_N.view(shape), entropy_N.view(shape)


class _SelectedLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: FunctionCtx, logits_NV: Tensor, tokens_N: Tensor, temperatures_N1: Tensor
    ) -> tuple[Tensor, Tensor]:
        logprobs_N = torch.empty(len(tokens_N), device=logits_NV.device)
        normalizer_N, entropy_N = torch.empty_like(logprobs_N), torch.empty_like(logprobs_N)
        for part in _chunks(logits_NV):
            scaled = logits_NV[part].float() / temperatures_N1[part]
            normalizer_N[part] = scaled.logsumexp(-1)
            chosen = scaled.gather(-1, tokens_N[part].unsqueeze(-1)).squeeze(-1)
            logprobs_N[part] = chosen - normalizer_N[part]
            every = scaled.sub_(normalizer_N[part].unsqueeze(-1))
            entropy_N[part] = -(every.exp() * every).sum(-1)
        ctx.save_for_backward(logits_NV, tokens_N, temperatures_N1, normalizer_N)
        ctx.mark_non_differentiable(entropy_N)
        return logprobs_N, entropy_N

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad_logprobs_N: Tensor, _: Tensor) -> tuple[Tensor, None, None]:
        """d log p(token) / d logits = (onehot(token) - p) / temperature."""
        saved: tuple[Tensor, ...] = ctx.saved_tensors  # type: ignore[attr-defined]
        logits_NV, tokens_N, temperatures_N1, normalizer_N = saved
        grad_NV = torch.empty_like(logits_NV)
        for part in _chunks(logits_NV):
            grad_N1 = grad_logprobs_N[part].unsqueeze(-1) / temperatures_N1[part]
            scaled = logits_NV[part].float() / temperatures_N1[part]
            grad = (scaled - normalizer_N[part].unsqueeze(-1)).exp_().mul_(-grad_N1)
            grad.scatter_add_(-1, tokens_N[part].unsqueeze(-1), grad_N1)
            grad_NV[part] = grad
        return grad_NV, None, None


def _chunks(logits_NV: Tensor) -> list[slice]:
    num_rows, vocab = logits_NV.shape
    rows = max(1, _CHUNK_ELEMENTS // vocab)
    return [slice(start, start + rows) for start in range(0, num_rows, rows)]
