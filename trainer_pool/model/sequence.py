"""Ulysses sequence parallelism: the ranks of a group split the tokens of each packed row.

    rank 0: tokens 0, 1, 2, every head ─┐ exchange ┌─ all tokens, heads 0, 1 ─┐ exchange ┌─ ...
    rank 1: tokens 3, 4, 5, every head ─┘          └─ all tokens, heads 2, 3 ─┘          └─ ...
            embedding, projections                      attention                MLP, output head

Attention alone looks at more than one token (DeepSpeed-Ulysses, arXiv 2309.14509). For it each rank
trades its part of all heads for the whole row of its own heads, so that packing, shared prefixes
and windows are computed as ever. Each rank ends with the scores of all tokens, and the same loss;
its gradient flows into its own part only, so that the gradients of all ranks add up to that of the
loss, as those of ranks with batches of their own do.

DeepSpeed's class for this, `UlyssesSPAttentionHF`, is not used: it wants rows whose length is a
multiple of the group, one shape of heads for all layers and a number of KV heads that divides the
group or is divided by it, keeps its group in a global variable and gathers position ids in every
layer. Nor does DeepSpeed's engine have to know of the groups: it shards over all ranks and adds
their gradients.

Letters: L tokens of the row, M those of this rank, N scored tokens, H heads, K heads of keys and
values, D size of a head, P ranks of the group; C columns of a token's experts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from trainer_pool.collectives import RankWaits
from trainer_pool.data.packing import PackedRow
from trainer_pool.model.head import TokensToScore


@dataclass(kw_only=True, slots=True, frozen=True, eq=False)
class SequenceGroup:
    """The ranks that split each row, as one of them sees it."""

    rank: int
    """Its place in the group."""
    size: int
    group: dist.ProcessGroup

    def part(self, row: PackedRow, places_N: Tensor) -> RowPart:
        """This rank's part of `row`, whose scored tokens `places_N` predict."""
        length = len(row.tokens_L)
        size = -(-length // self.size)
        start = self.rank * size

        def own(values_L: Tensor) -> Tensor:
            end_only = (0, 0) * (values_L.ndim - 1) + (0, size * self.size - length)
            return pad(values_L, end_only)[start : start + size]

        local_N = places_N - start
        own_places = ((local_N >= 0) & (local_N < size)).nonzero().squeeze(1)
        return RowPart(
            group=self,
            length=length,
            tokens_M=own(row.tokens_L),
            position_ids_M=own(row.position_ids_L),
            routes_MC=None if row.routes_LC is None else own(row.routes_LC),
            num_places=len(places_N),
            own_places=own_places,
            places=local_N[own_places],
        )


def join_sequence_group(size: int, timeout_s: float) -> SequenceGroup:
    """The group of this rank and its `size` - 1 neighbours; a collective of all ranks."""
    found = None
    for first in range(0, dist.get_world_size(), size):
        ranks = range(first, first + size)
        group = dist.new_group([*ranks], timeout=timedelta(seconds=timeout_s))
        if dist.get_rank() in ranks:
            found = SequenceGroup(rank=dist.get_rank() - first, size=size, group=group)
    assert found is not None
    return found


def check_heads(size: int, config: Any) -> None:
    """Raises ValueError if `trainer.sequence_parallel_size` is not possible for the model of this
    config of transformers."""
    num_heads = getattr(config.get_text_config(), "num_attention_heads", None)
    if size > 1 and num_heads is not None and num_heads % size:
        raise ValueError(
            f"trainer.sequence_parallel_size={size}: must divide the model's {num_heads} attention "
            "heads"
        )


@dataclass(kw_only=True, slots=True, frozen=True, eq=False)
class RowPart:
    """One rank's part of a packed row; the last ranks' parts are padded to the others' length."""

    group: SequenceGroup
    length: int
    """Tokens of the whole row."""
    tokens_M: Tensor
    position_ids_M: Tensor
    routes_MC: Tensor | None
    """Padding has no known routes."""
    num_places: int
    """Scored tokens of the whole row."""
    own_places: Tensor
    """Which of them this rank predicts."""
    places: Tensor
    """Where it does, in its own part."""

    def wanted(self, tokens: TokensToScore) -> TokensToScore:
        """The tokens among `tokens` that this rank scores."""
        return replace(
            tokens,
            places_N=self.places,
            targets_N=tokens.targets_N[self.own_places],
            temperatures_N=tokens.temperatures_N[self.own_places],
            candidates=tokens.candidates and tokens.candidates.of_rows(self.own_places),
        )

    def join(self, scores: Tensor) -> Tensor:
        """[..., N] the scores of all ranks from each one's own, on every rank."""
        joined = scores.new_zeros(*scores.shape[:-1], self.num_places)
        return self.add_up(joined.index_copy(-1, self.own_places, scores))

    def add_up(self, sums: Tensor) -> Tensor:
        """The sums over all ranks of each one's own, on every rank."""
        added: Tensor = _AddUp.apply(sums, self.group)  # type: ignore[no-untyped-call]
        return added

    @RankWaits.counted()
    def join_flags(self, flags_M: Tensor) -> Tensor:
        """Bool [L] from each rank's flags of its own tokens."""
        every = [torch.empty_like(flags_M) for _ in range(self.group.size)]
        dist.all_gather(every, flags_M.contiguous(), group=self.group.group)
        return torch.cat(every)[: self.length]

    def whole_rows(self, *parts_1HMD: Tensor) -> list[Tensor]:
        """[1, H / P, L, D] each: the whole row of this rank's heads, from its part of all heads.

        K heads that the group cannot share evenly are repeated first, the fewest times possible.
        """
        size, num_heads = self.group.size, parts_1HMD[0].shape[1]
        if num_heads % size:
            raise ValueError(
                f"trainer.sequence_parallel_size={size}: must divide the {num_heads} attention "
                "heads of each layer"
            )
        even = []
        for x in parts_1HMD:
            times = num_repeats(x.shape[1], size)
            even.append(x if times == 1 else x.repeat_interleave(times, dim=1))
        sent = [x.reshape(size, -1) for x in even]
        received = _exchange(torch.cat(sent, dim=1), self.group)
        rows = []
        widths = [x.shape[1] for x in sent]
        for x, flat in zip(even, torch.split(received, widths, dim=1), strict=True):
            _, heads, tokens, width = x.shape
            parts = flat.reshape(size, heads // size, tokens, width).transpose(0, 1)
            rows.append(parts.reshape(1, heads // size, size * tokens, width)[:, :, : self.length])
        return rows

    def own_tokens(self, output_1LHD: Tensor) -> Tensor:
        """[1, M, H, D] all heads of this rank's tokens, from all tokens of its heads."""
        size, tokens = self.group.size, len(self.tokens_M)
        _, length, heads, width = output_1LHD.shape
        padded = pad(output_1LHD, (0, 0, 0, 0, 0, size * tokens - length))
        received = _exchange(padded.reshape(size, tokens, heads, width), self.group)
        return received.transpose(0, 1).reshape(1, tokens, size * heads, width)


def num_repeats(num_heads: int, size: int) -> int:
    """How often each of K heads is repeated, so that every rank of a group gets as many.

    Heads of queries that share a key are neighbours, and so are those of a rank. If `size` divides
    H, a multiple of K, this divides H / K: the heads of a rank share its keys evenly.
    """
    return size // math.gcd(num_heads, size)


def _exchange(parts: Tensor, group: SequenceGroup) -> Tensor:
    """[P, ...] from rank p its element for this one, of this rank's elements for each."""
    received: Tensor = _Exchange.apply(parts, group)  # type: ignore[no-untyped-call]
    return received


class _Exchange(torch.autograd.Function):
    """It is its own transpose."""

    @staticmethod
    @RankWaits.counted()
    def forward(ctx: Any, parts: Tensor, group: SequenceGroup) -> Tensor:
        ctx.group = group
        received = torch.empty_like(parts, memory_format=torch.contiguous_format)
        dist.all_to_all_single(received, parts.contiguous(), group=group.group)
        return received

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _Exchange.forward(ctx, grad, ctx.group), None


class _AddUp(torch.autograd.Function):
    """All ranks compute the same loss of the sums, which counts once: each takes the gradient of
    its own, and does not add up the others'."""

    @staticmethod
    @RankWaits.counted()
    def forward(ctx: Any, sums: Tensor, group: SequenceGroup) -> Tensor:
        added = sums.clone()
        dist.all_reduce(added, group=group.group)
        return added

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None
