"""Packs trajectories of different lengths into micro-batches without padding; pure.

    budget 12 tokens        sequences of one micro-batch lie end to end in one row

    [ a a a a a a b b b b b ]         position_ids 0 1 2 3 4 5 0 1 2 3 4
    [ c c c d d d e e ]               attention never crosses from one letter to another

Only logits that predict a trained token are computed: one for each of the N trained tokens.

Letters: L tokens of the row, N trained tokens, S spans.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trainer_pool.data.prefix_sharing import Forest, Tokens, separate, share_prefixes


@dataclass(kw_only=True, slots=True, eq=False)
class Row:
    """One sequence to train on; arrays are [T]."""

    tokens: NDArray[np.int32]
    loss_mask: NDArray[np.uint8]
    """1 where the token is trained on; never at position 0, which has no prediction."""
    rollout_logprobs: NDArray[np.float32]
    advantages: NDArray[np.float32] | None = None
    """None is 0."""
    staleness: NDArray[np.int64] | None = None
    """Versions between the one that sampled a trained token and the one being trained; None is 0.
    """
    weight: float = 1.0
    """Weight of each of its tokens in the policy's loss."""
    streams: Mapping[str, NDArray[np.float32]] = field(default_factory=dict)
    """By name of a further stream: the weight of each token in its loss; 0 for tokens that it does
    not train."""
    columns: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    """Further values of each token, by name."""
    temperatures: NDArray[np.float32] | None = None
    """Sampling temperature of each token: rollout log-probabilities are those of softmax(logits /
    this). None is 1."""
    candidates: NDArray[Any] | None = None
    """[T, k] int32 `CANDIDATES_COLUMN`; None: every token was drawn from the whole vocabulary."""
    routes: NDArray[Any] | None = None
    """[T, layers * experts of a token] `ROUTES_COLUMN`; None: the model chooses all experts."""
    is_current: bool = False
    """Sampled entirely by the version being trained: engine and trainer should agree."""
    group: int = -1
    """Index of its group in the batch; -1: it has none."""
    trajectory: int = -1
    """Index of its trajectory in the group."""
    pictures: tuple[bytes, ...] = ()
    """The files of its pictures, in the order of their places."""

    def __post_init__(self) -> None:
        assert self.tokens.shape == self.loss_mask.shape == self.rollout_logprobs.shape
        assert len(self.tokens) >= 2 and not self.loss_mask[0]
        for values in (self.advantages, self.staleness, self.temperatures):
            assert values is None or values.shape == self.tokens.shape
        assert self.weight >= 0
        for table in (self.candidates, self.routes):
            assert table is None or len(table) == len(self.tokens)

    @property
    def num_trained(self) -> int:
        return int(np.count_nonzero(self.loss_mask))

    @property
    def is_scored(self) -> NDArray[np.bool_]:
        """[T] tokens that the policy's loss or another stream trains."""
        scored: NDArray[np.bool_] = self.loss_mask != 0
        for mask in self.streams.values():
            scored = scored | (mask != 0)
        return scored


@dataclass(kw_only=True, slots=True, frozen=True)
class PassCost:
    """The cost of a sequence in a forward pass, in multiply-adds of the model.

    A token meets every weight once. A query and a key meet twice in each layer (their product, and
    the sum of values), and causal attention has T²/2 such pairs.
    """

    per_token: float = 1.0
    per_pair: float = 0.0

    def of(self, stop: int, start: int = 0) -> float:
        """The cost of the tokens from `start` to `stop`, which also see all tokens before."""
        return self.per_token * (stop - start) + self.per_pair * (stop**2 - start**2) / 2


@dataclass(kw_only=True, slots=True, frozen=True, eq=False)
class PackedRow:
    """The input of a forward pass: spans of tokens, laid end to end.

    A span is a whole sequence, which sees only itself, or part of a tree of sequences: then it also
    sees the spans above it.
    """

    tokens_L: Tensor
    """int64"""
    position_ids_L: Tensor
    """int64, from 0 in each sequence."""
    starts: Tensor
    """int32 [S + 1]: where each span begins, and L."""
    longest: int
    """Tokens of the longest span."""
    key_starts: Tensor
    """int32 [S + 1]: where the keys of each span begin, and their number. A span's keys are the
    tokens that it sees, its own last."""
    longest_keys: int
    """Keys of the span that has the most."""
    key_places: Tensor | None = None
    """int64: positions in the row of the keys; None if every span sees only itself."""
    routes_LC: Tensor | None = None
    """int32: `Row.routes` of each token, and all 0 where the model chooses its experts itself; None
    if it does so everywhere."""
    pictures: tuple[bytes, ...] = ()
    """`Row.pictures` of all its sequences, in the order of their places."""

    @property
    def known_routes(self) -> Tensor:
        """float64 [2]: how many tokens have known routes, and how many there are."""
        routes_LC = self.tokens_L.new_zeros(1, 1) if self.routes_LC is None else self.routes_LC
        num_known = routes_LC.any(1).sum().double()
        return torch.stack([num_known, torch.full_like(num_known, len(self.tokens_L))])

    def to(self, device: torch.device) -> PackedRow:
        return replace(self, **_moved(self, device))


@dataclass(kw_only=True, slots=True, frozen=True, eq=False)
class MicroBatch:
    """A packed row, and the inputs of the loss for each of its N trained tokens.

    A row without a trained token gets one with mask 0, so that every rank runs backward.
    """

    row: PackedRow
    places_N: Tensor
    """int64: positions in the row whose logits predict the N tokens."""
    segment_ids_N: Tensor
    """int64, ascending: the trajectory of the micro-batch that a token belongs to, from 0."""
    num_segments: int
    targets_N: Tensor
    """int64: the ids of the tokens."""
    mask_N: Tensor
    """float32: 1 if the policy's loss trains the token, 0 if only another stream does."""
    rollout_logprobs_N: Tensor
    advantages_N: Tensor
    staleness_N: Tensor
    """int64: `Row.staleness`"""
    weights_N: Tensor
    """`Row.weight`"""
    temperatures_N: Tensor
    """`Row.temperatures`, and 1 for tokens that the policy did not sample."""
    candidates_K: Tensor
    """int64: the ids of `Row.candidates`, one token's after the other's."""
    num_candidates_N: Tensor
    """int64: how many of them are the token's; 0: it was drawn from the whole vocabulary."""
    is_current_N: Tensor
    """Bool: `Row.is_current`"""
    groups_N: Tensor
    """int64: `Row.group`"""
    streams: Mapping[str, Tensor]
    """[N] each: `Row.streams`"""
    columns: Mapping[str, Tensor]
    """[N] each: `Row.columns`; NaN for a row without a column that another has."""
    rows: tuple[int, ...]
    """The indices of its trajectories among the rows that were packed, by segment."""
    num_tokens: int
    """Tokens of all its trajectories; the row has fewer if they share some."""
    num_padding: int = 0
    """Tokens of the row that belong to no trajectory."""
    cost: float = 0.0
    """Multiply-adds of its pass: see `PassCost`."""

    @property
    def is_trained_N(self) -> Tensor:
        """Bool: the policy's loss or another stream trains the token."""
        masks = [self.mask_N, *self.streams.values()]
        return torch.stack([mask_N != 0 for mask_N in masks]).any(0)

    def to(self, device: torch.device) -> MicroBatch:
        return replace(self, row=self.row.to(device), **_moved(self, device))


def _moved(record: PackedRow | MicroBatch, device: torch.device) -> dict[str, Any]:
    values = {item.name: getattr(record, item.name) for item in fields(record)}
    moved: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Tensor):
            moved[name] = value.to(device, non_blocking=True)
        elif isinstance(value, dict):
            moved[name] = {key: each.to(device, non_blocking=True) for key, each in value.items()}
    return moved


def plan_micro_batches(
    lengths: Sequence[int], costs: Sequence[float], max_tokens: int
) -> list[list[int]]:
    """Indices of the sequences in each micro-batch of at most `max_tokens`; the costliest first.

    `costs` has that of each sequence, in the unit of `PassCost`. Example: the long one lies alone
    where attention makes it cost more than the other five together.

        lengths [40, 20, 20, 20, 10, 10], costs [840, 220, 220, 220, 60, 60], max_tokens 80
        -> [[0], [1, 2, 3, 4, 5]]

    First-fit decreasing (Johnson 1973: at most 11/9 of the fewest possible, plus 1) gives their
    number. If the sequences also fit when each, from the longest on, goes to the cheapest
    micro-batch with room, the micro-batches get these, whose costs are nearly equal. In the order
    of their costs, the passes of the ranks, which wait for each other, take about the same time.
    Raises ValueError if a single sequence is longer than `max_tokens`.
    """
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    if lengths and lengths[order[0]] > max_tokens:
        raise ValueError(
            f"trainer.micro_batch_tokens={max_tokens}: a trajectory has {lengths[order[0]]} tokens;"
            " set it to at least the longest prompt and response together"
        )
    plan = _first_fit(order, lengths, max_tokens)
    if len(plan) == 1:
        return plan
    even = _evened_out(order, lengths, costs, max_tokens, len(plan))

    def costliest(plan: list[list[int]]) -> float:
        return max((sum(costs[i] for i in part) for part in plan), default=0.0)

    if even is not None and costliest(even) < costliest(plan):
        plan = even
    return sorted(plan, key=lambda part: -sum(costs[i] for i in part))


def _first_fit(order: Iterable[int], lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    plan: list[list[int]] = []
    room: list[int] = []
    for i in order:
        place = next((p for p, free in enumerate(room) if free >= lengths[i]), len(plan))
        if place == len(plan):
            plan.append([])
            room.append(max_tokens)
        plan[place].append(i)
        room[place] -= lengths[i]
    return plan


def _evened_out(
    order: Iterable[int],
    lengths: Sequence[int],
    costs: Sequence[float],
    max_tokens: int,
    count: int,
) -> list[list[int]] | None:
    """`count` micro-batches of nearly equal costs; None if they do not fit."""
    plan: list[list[int]] = [[] for _ in range(count)]
    room, spent = [max_tokens] * count, [0.0] * count
    for i in order:
        places = [place for place in range(count) if room[place] >= lengths[i]]
        if not places:
            return None
        place = min(places, key=spent.__getitem__)
        plan[place].append(i)
        room[place] -= lengths[i]
        spent[place] += costs[i]
    return plan


def pack(
    rows: Sequence[Row],
    max_tokens: int,
    cost: PassCost | None = None,
    *,
    should_share_prefixes: bool = False,
) -> list[MicroBatch]:
    """Put every row into exactly one micro-batch of at most `max_tokens` tokens.

    With `should_share_prefixes`, rows with a common prefix go into one micro-batch as far as it has
    room; tokens are the same if their experts are, too. If any row has pictures none are shared,
    since the tokens of two pictures may be the same.
    Raises ValueError if a single row is longer than `max_tokens`.
    """
    cost = cost or PassCost()
    tokens = [row.tokens for row in rows]
    has_pictures = any(row.pictures for row in rows)
    should_share_prefixes = should_share_prefixes and not has_pictures
    forest = share_prefixes(_computed(rows)) if should_share_prefixes else separate(tokens)
    pieces = [[i] for i in range(len(rows))]
    if should_share_prefixes:
        pieces = [*forest.pieces(max_tokens)]
    spans = [[forest.spans[i] for i in forest.spans_of(piece)] for piece in pieces]
    plan = plan_micro_batches(
        [sum(len(span) for span in each) for each in spans],
        [sum(cost.of(span.stop, span.start) for span in each) for each in spans],
        max_tokens,
    )
    batches = []
    for part in plan:
        batch = _lay(rows, forest, sorted(i for piece in part for i in pieces[piece]))
        costs = (cost.of(span.stop, span.start) for piece in part for span in spans[piece])
        batches.append(replace(batch, cost=sum(costs)))
    return batches


def fill_up(batches: Sequence[MicroBatch], count: int) -> list[MicroBatch]:
    """`batches`, with empty ones added up to `count`.

    ZeRO-3 gathers weights and reduces gradients in every pass, so all ranks must make the same
    number of passes; an empty micro-batch has no token to train on.
    """
    assert len(batches) <= count
    if len(batches) == count:
        return [*batches]
    empty = Row(
        tokens=np.zeros(2, np.int32),
        loss_mask=np.zeros(2, np.uint8),
        rollout_logprobs=np.zeros(2, np.float32),
    )
    padding = _lay([empty], separate([empty.tokens]), [0])
    padding = replace(padding, num_tokens=0, num_padding=2, rows=())
    return [*batches, *[padding] * (count - len(batches))]


def packed_row(sequences: Sequence[Tensor]) -> PackedRow:
    """The row of sequences of token ids [T], on their device."""
    rows = [sequence.cpu().numpy() for sequence in sequences]
    return _row(rows, separate(rows), range(len(rows)))[0].to(sequences[0].device)


def _row(
    sequences: Sequence[Tokens], forest: Forest, chosen: Sequence[int]
) -> tuple[PackedRow, list[NDArray[np.int64]]]:
    """The row of the `chosen` sequences, and for each of them the positions of its tokens in it."""
    indices = forest.spans_of(chosen)
    spans = [forest.spans[i] for i in indices]
    lengths, seen = [len(span) for span in spans], [span.stop for span in spans]
    starts = np.cumsum([0, *lengths])
    every = np.arange(starts[-1])
    places = {
        i: every[start : start + length]
        for i, start, length in zip(indices, starts.tolist(), lengths, strict=False)
    }
    key_places: list[NDArray[np.int64]] = []
    if any(span.start for span in spans):
        key_places = [
            places[above]
            for i, span in zip(indices, spans, strict=True)
            for above in forest.paths[span.sequence]
            if above <= i
        ]
    row = PackedRow(
        tokens_L=torch.from_numpy(
            np.concatenate([sequences[s.sequence][s.start : s.stop] for s in spans], dtype=np.int64)
        ),
        position_ids_L=torch.from_numpy(
            every - np.repeat(starts[:-1] - [span.start for span in spans], lengths)
        ),
        starts=torch.from_numpy(starts.astype(np.int32)),
        longest=max(lengths),
        key_starts=torch.from_numpy(np.cumsum([0, *seen]).astype(np.int32)),
        longest_keys=max(seen),
        key_places=torch.from_numpy(np.concatenate(key_places)) if key_places else None,
    )
    return row, [np.concatenate([places[i] for i in forest.paths[each]]) for each in chosen]


def _lay(every: Sequence[Row], forest: Forest, chosen: Sequence[int]) -> MicroBatch:
    rows = [every[i] for i in chosen]
    packed, places = _row([row.tokens for row in every], forest, chosen)
    packed = replace(
        packed,
        routes_LC=_routes(rows, places, len(packed.tokens_L)),
        pictures=tuple(picture for row in rows for picture in row.pictures),
    )
    lengths = [len(row.tokens) for row in rows]
    trained = np.flatnonzero(np.concatenate([row.is_scored for row in rows]))
    if not len(trained):
        trained = np.array([1])  # the second token of the first row, whose mask is 0
    segments = np.repeat(np.arange(len(rows)), lengths)[trained]

    def by_token(arrays: Sequence[NDArray[Any] | None], dtype: type, absent: float = 0.0) -> Tensor:
        whole = [
            np.full(length, absent) if array is None else array
            for array, length in zip(arrays, lengths, strict=True)
        ]
        return torch.from_numpy(np.concatenate(whole)[trained].astype(dtype))

    def by_row(values: Sequence[float], dtype: type = np.float32) -> Tensor:
        return torch.from_numpy(np.asarray(values, dtype)[segments])

    mask_N = by_token([row.loss_mask for row in rows], np.float32)
    candidates_K, num_candidates_N = _candidates(rows, trained)
    return MicroBatch(
        row=packed,
        places_N=torch.from_numpy(np.concatenate(places)[trained - 1]),
        segment_ids_N=torch.from_numpy(segments),
        num_segments=len(rows),
        targets_N=by_token([row.tokens for row in rows], np.int64),
        mask_N=mask_N,
        rollout_logprobs_N=by_token([row.rollout_logprobs for row in rows], np.float32),
        advantages_N=by_token([row.advantages for row in rows], np.float32),
        staleness_N=by_token([row.staleness for row in rows], np.int64),
        weights_N=by_row([row.weight for row in rows]),
        # The policy sampled its own tokens only with that temperature.
        temperatures_N=torch.where(
            mask_N != 0,
            by_token([row.temperatures for row in rows], np.float32, absent=1.0),
            1.0,
        ),
        candidates_K=candidates_K,
        num_candidates_N=num_candidates_N,
        is_current_N=by_row([row.is_current for row in rows], np.bool_),
        groups_N=by_row([row.group for row in rows], np.int64),
        streams={
            name: by_token([row.streams.get(name) for row in rows], np.float32)
            for name in sorted({name for row in every for name in row.streams})
        },
        columns={
            # NaN: what reads it skips the update, and is told the groups; 0 would be taken for a
            # log-probability.
            name: by_token([row.columns.get(name) for row in rows], np.float32, absent=np.nan)
            for name in sorted({name for row in every for name in row.columns})
        },
        rows=tuple(chosen),
        num_tokens=sum(lengths),
    )


def _candidates(rows: Sequence[Row], trained: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
    """The candidates of the tokens at the positions `trained` of all rows, and their numbers."""
    ids, counts, start = [np.zeros(0, np.int32)], np.zeros(len(trained), np.int64), 0
    for row in rows:
        if row.candidates is not None:
            is_own = (start <= trained) & (trained < start + len(row.tokens))
            sets = row.candidates[trained[is_own] - start]
            counts[is_own] = (sets >= 0).sum(1)
            ids.append(sets[sets >= 0])
        start += len(row.tokens)
    return torch.from_numpy(np.concatenate(ids).astype(np.int64)), torch.from_numpy(counts)


def _routes(
    rows: Sequence[Row], places: Sequence[NDArray[np.int64]], num_tokens: int
) -> Tensor | None:
    """The experts of the tokens of a packed row, where `rows` have theirs at these `places`."""
    width = _routes_width(rows)
    if not width:
        return None
    found = np.zeros((num_tokens, width), np.int32)
    for row, own in zip(rows, places, strict=True):
        if row.routes is not None:
            found[own] = row.routes
    return torch.from_numpy(found)


def _routes_width(rows: Sequence[Row]) -> int:
    return next((row.routes.shape[1] for row in rows if row.routes is not None), 0)


def _computed(rows: Sequence[Row]) -> list[Tokens]:
    """A number for each token of each row; equal ones go the same way through the model: equal
    tokens to equal experts, since versions and engines may have chosen others."""
    width = _routes_width(rows)
    if not width:
        return [row.tokens for row in rows]
    numbers: dict[bytes, int] = {}
    computed = []
    for row in rows:
        routes = np.zeros((len(row.tokens), width), np.int32) if row.routes is None else row.routes
        ways = np.column_stack([row.tokens, routes.astype(np.int32)])
        computed.append(np.array([numbers.setdefault(way.tobytes(), len(numbers)) for way in ways]))
    return computed
