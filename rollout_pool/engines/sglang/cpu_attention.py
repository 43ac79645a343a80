"""Attention of a server without a GPU, over many requests at once; only `server` loads it.

SGLang's backend for CPUs calls the kernel for each request and layer. With short requests that
takes longer than the rest of the model. Here requests of similar lengths share a call:

    lengths 3, 4, 9, 5    ->   {3, 4} as [2, 4]    {9, 5} as [2, 9]    each padded and masked

T tokens of a batch, B requests, Q new tokens of each, K tokens of each in all, H heads of queries,
G of them for each of N heads of keys, D numbers of a head.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch.nn.functional import scaled_dot_product_attention

MAX_KEYS = 2**15
"""Most keys of one call of several requests, whose keys are copied."""
MAX_SCORES = 2**21
"""Most pairs of a query and a key in one call."""


@dataclass(kw_only=True, slots=True)
class Bucket:
    """Requests of similar lengths."""

    slots_BK: torch.Tensor
    """Where their keys and values are in the cache."""
    rows_BQ: torch.Tensor
    """Places of their new tokens in the batch; some other's where they have fewer."""
    mask_B1QK: torch.Tensor
    real: torch.Tensor
    """Places among B * Q of what is no padding."""
    targets: torch.Tensor
    """The places of `real` in the batch."""

    @classmethod
    def of(
        cls,
        slots_BK: torch.Tensor,
        starts_B: torch.Tensor,
        num_before_B: torch.Tensor,
        num_new_B: torch.Tensor,
    ) -> Self:
        """`starts_B`: the place of the first new token of each request in the batch."""
        new_Q = torch.arange(int(num_new_B.max()))
        key_K = torch.arange(slots_BK.shape[1])
        is_new_BQ = new_Q < num_new_B[:, None]
        rows_BQ = starts_B[:, None] + torch.where(is_new_BQ, new_Q, 0)
        place_BQ = num_before_B[:, None] + torch.where(is_new_BQ, new_Q, 0)
        # Beyond a request's end there are slots of others, which may hold what is not finite.
        is_own_BK = key_K < (num_before_B + num_new_B)[:, None]
        real = is_new_BQ.flatten().nonzero().flatten()
        return cls(
            slots_BK=torch.where(is_own_BK, slots_BK, slots_BK[:, :1]),
            rows_BQ=rows_BQ,
            mask_B1QK=(key_K <= place_BQ[:, :, None])[:, None],
            real=real,
            targets=rows_BQ.flatten()[real],
        )

    def attend(
        self,
        query_THD: torch.Tensor,
        output_THD: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        scaling: float | None,
    ) -> None:
        """Writes its requests' rows of `output_THD`. The caches: [slot, N, D]."""
        (B, Q), H, N = self.rows_BQ.shape, query_THD.shape[1], key_cache.shape[1]
        # Heads that share keys are further queries of the same keys.
        query = query_THD[self.rows_BQ].view(B, Q, N, H // N, -1).permute(0, 2, 3, 1, 4)
        attended = scaled_dot_product_attention(
            query.reshape(B, N, H // N * Q, -1),
            key_cache[self.slots_BK].transpose(1, 2).to(query.dtype),
            value_cache[self.slots_BK].transpose(1, 2).to(query.dtype),
            attn_mask=self.mask_B1QK.repeat(1, 1, H // N, 1),
            scale=scaling,
        )
        rows = attended.view(B, N, H // N, Q, -1).permute(0, 3, 1, 2, 4).reshape(B * Q, H, -1)
        output_THD[self.targets] = rows[self.real]


@dataclass(kw_only=True, slots=True)
class Plan:
    """The buckets of one batch, the same in all layers."""

    seq_lens: torch.Tensor
    """SGLang's tensor of this batch."""
    buckets: list[Bucket] = field(default_factory=list)

    @classmethod
    def of(
        cls,
        seq_lens: torch.Tensor,
        num_new: torch.Tensor,
        pool_indices: torch.Tensor,
        req_to_token: torch.Tensor,
    ) -> Self | None:
        """`seq_lens`: tokens of each request; `num_new`: those of them that are in the batch, one
        request after the other. `req_to_token`: the slots of request `pool_indices`. None if the
        mask of a long prompt would be too large: SGLang's own way needs none."""
        by_size: dict[tuple[int, int], list[int]] = {}
        for place, sizes in enumerate(zip(num_new.tolist(), seq_lens.tolist(), strict=True)):
            # Powers of two: at most half of a call is padding, in each direction.
            queries, keys = ((size - 1).bit_length() for size in sizes)
            by_size.setdefault((queries, keys), []).append(place)
        plan, starts = cls(seq_lens=seq_lens), num_new.cumsum(0) - num_new
        if any(1 << (queries + keys) > MAX_SCORES for queries, keys in by_size):
            return None
        for (queries, keys), places in by_size.items():
            at_once = max(1, min(MAX_KEYS >> keys, MAX_SCORES >> (queries + keys)))
            for first in range(0, len(places), at_once):
                chosen = torch.tensor(places[first : first + at_once])
                new, length = num_new[chosen], seq_lens[chosen]
                slots = req_to_token[pool_indices[chosen], : int(length.max())]
                plan.buckets.append(Bucket.of(slots.long(), starts[chosen], length - new, new))
        return plan


def install() -> None:
    """Replaces what SGLang's backend does request by request, where its requests attend to all of
    their own tokens before; others stay as they are."""
    from sglang.srt.layers.attention import torch_native_backend

    backend = torch_native_backend.TorchNativeAttnBackend
    prepare = backend.init_forward_metadata

    def init_forward_metadata(self: Any, forward_batch: Any) -> None:
        prepare(self, forward_batch)
        mode, lengths = forward_batch.forward_mode, forward_batch.seq_lens
        self.plan = None
        new = torch.ones_like(lengths) if mode.is_decode() else forward_batch.extend_seq_lens
        if forward_batch.encoder_lens is None and new is not None:
            self.plan = Plan.of(
                lengths, new, forward_batch.req_pool_indices, self.req_to_token_pool.req_to_token
            )

    def together(one_by_one: Any, *, is_causal: bool) -> Any:
        def run(self: Any, query: Any, output: Any, keys: Any, values: Any, *args: Any, **kw: Any):  # type: ignore[no-untyped-def]
            plan: Plan | None = self.plan
            suits = kw["causal"] is is_causal and kw["sliding_window_size"] is None
            if plan is None or plan.seq_lens is not args[2] or not suits:
                return one_by_one(self, query, output, keys, values, *args, **kw)
            for bucket in plan.buckets:
                bucket.attend(query, output, keys, values, kw["scaling"])
            return output

        return run

    backend.plan = None
    backend.init_forward_metadata = init_forward_metadata
    # A decoding request's one new token may see all, which is called not causal.
    backend._run_sdpa_forward_extend = together(backend._run_sdpa_forward_extend, is_causal=True)
    backend._run_sdpa_forward_decode = together(backend._run_sdpa_forward_decode, is_causal=False)
