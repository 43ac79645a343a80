"""Masks and version spans of a group's trajectories end to end, and what must hold of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from buffer.types import MAX_VERSION, MaskArray, Trajectory, VersionSpan

Array = NDArray[np.generic]
Lengths = NDArray[np.int64]

I4, F4, U4, U1 = np.dtype("<i4"), np.dtype("<f4"), np.dtype("<u4"), np.dtype("u1")


@dataclass(kw_only=True, slots=True, frozen=True, eq=False)
class FlatGroup:
    """What says which of the N tokens of n trajectories are trained, and who sampled them.

    The loss masks are kept as the lengths of their runs of equal values. Those of one trajectory
    begin with a run of zeros, which alone may be empty.
    """

    lengths: Sequence[int]
    """[n] tokens of each trajectory."""
    run_counts: Sequence[int]
    """[n] how many of the runs are its."""
    span_counts: Sequence[int]
    """[n] how many of the version spans are its."""
    runs: NDArray[np.uint32]
    """[R]"""
    spans: NDArray[np.uint32]
    """[S, 3] version, start and end, counted from the start of the trajectory."""

    @classmethod
    def of(cls, trajectories: Sequence[Trajectory]) -> FlatGroup:
        """Raises ValueError if a mask or a span cannot be written so."""
        lengths = [t.num_tokens for t in trajectories]
        masks = [exactly(t.loss_mask, U1, "loss_mask") for t in trajectories]
        runs, run_counts = _runs_of(np.concatenate(masks), lengths)
        spans = [_span_rows(t.version_spans) for t in trajectories]
        return cls(
            lengths=lengths,
            run_counts=run_counts,
            span_counts=[len(rows) // 3 for rows in spans],
            runs=runs.astype(U4),
            spans=np.array([number for rows in spans for number in rows], U4).reshape(-1, 3),
        )

    @property
    def num_tokens(self) -> int:
        return sum(self.lengths)

    def check(self, tokens: Array, logprobs: Array) -> None:
        """Raises ValueError unless these tokens and log-probabilities, [N], may be trained on.

        Takes memory in proportion to the arrays that it is given, whatever their numbers claim.
        """
        if min(self.lengths) == 0:
            raise ValueError("a trajectory without tokens")
        if tokens.min() < 0:
            raise ValueError(f"token id {tokens.min()} is negative")
        check_finite(logprobs, "rollout_logprobs")
        bounds, ones = self._check_runs()
        if ones[-1] == 0:
            raise ValueError("no trainable token in any trajectory")
        starts, ends = self._check_spans()
        covered = _ones_before(ends, bounds, ones) - _ones_before(starts, bounds, ones)
        uncovered = int(ones[-1] - covered.sum())
        if uncovered:
            raise ValueError(f"{uncovered} trainable tokens are in no version span")

    def _check_runs(self) -> tuple[Lengths, Lengths]:
        """Where each run starts, with N at the end, and the ones before each of these places."""
        if min(self.run_counts) == 0:
            raise ValueError("a trajectory without a mask")
        bounds = np.zeros(len(self.runs) + 1, np.int64)
        np.cumsum(self.runs, out=bounds[1:])
        last_runs = list(accumulate(self.run_counts))
        # Compared before anything is expanded: a forged run must not ask for more memory than the
        # tokens took.
        wrong = bounds[last_runs] != list(accumulate(self.lengths))
        if wrong.any():
            number = int(wrong.argmax())
            raise ValueError(f"the mask of trajectory {number} is not as long as its tokens")
        firsts = np.array([0, *last_runs[:-1]])
        if np.count_nonzero(self.runs) + np.count_nonzero(self.runs[firsts] == 0) < len(self.runs):
            raise ValueError("a mask has an empty run")
        is_one = (np.arange(len(self.runs)) - np.repeat(firsts, self.run_counts)) & 1
        ones = np.zeros_like(bounds)
        np.cumsum(self.runs * is_one, out=ones[1:])
        return bounds, ones

    def _check_spans(self) -> tuple[Lengths, Lengths]:
        """Where each span starts and ends, counted from the first token of the group."""
        version, start, end = (self.spans[:, i].astype(np.int64) for i in range(3))
        if version.size and version.max() > MAX_VERSION:
            raise ValueError(f"version {version.max()} is above the highest, {MAX_VERSION}")
        if (start >= end).any():
            raise ValueError("a version span without tokens")
        if (end > np.repeat(self.lengths, self.span_counts)).any():
            raise ValueError("a version span ends after the tokens")
        offset = np.repeat([0, *accumulate(self.lengths[:-1])], self.span_counts)
        start, end = start + offset, end + offset
        if (start[1:] < end[:-1]).any():
            raise ValueError("a version span overlaps the one before")
        return start, end

    def masks(self) -> MaskArray:
        """[N] the loss masks, read-only. Call `check` first."""
        is_one = np.zeros(len(self.runs), np.uint8)
        first = 0
        for count in self.run_counts:
            is_one[first + 1 : first + count : 2] = 1
            first += count
        mask = np.repeat(is_one, self.runs)
        mask.flags.writeable = False
        return mask

    def version_spans(self) -> list[tuple[VersionSpan, ...]]:
        """[n] the spans of each trajectory. Call `check` first."""
        spans = [VersionSpan(version=v, start=a, end=b) for v, a, b in self.spans.tolist()]
        ends = list(accumulate(self.span_counts, initial=0))
        return [tuple(spans[a:b]) for a, b in pairwise(ends)]


def check_finite(numbers: Array, name: str) -> None:
    """Raises ValueError if one is NaN or infinite. Says nothing of an empty array."""
    # Both are NaN if any number is. Unlike isfinite() this makes no array, and unlike a sum it
    # cannot overflow.
    if numbers.size and not (numbers.min() > -np.inf and numbers.max() < np.inf):
        raise ValueError(f"{name} holds NaN or infinity")


def exactly(array: Array, dtype: np.dtype[np.generic], name: str) -> Array:
    """The array as this type. Raises ValueError if that would change a number."""
    if array.dtype == dtype:
        return array
    with np.errstate(invalid="ignore"):
        converted = array.astype(dtype)
    if (converted != array).any():
        raise ValueError(f"{name} of {array.dtype} do not fit {dtype}")
    return converted


def _runs_of(masks: NDArray[Any], lengths: Sequence[int]) -> tuple[Lengths, list[int]]:
    """Lengths of the runs of equal values, and how many there are in each mask."""
    if min(lengths) == 0:
        raise ValueError("a trajectory without tokens")
    if masks.max() > 1:
        raise ValueError("loss_mask holds something else than 0 and 1")
    starts = np.array([0, *accumulate(lengths[:-1])])
    changes = masks[1:] != masks[:-1]
    changes[starts[1:] - 1] = False  # a mask begins there, whatever came before it
    inner = changes.nonzero()[0] + 1
    # A mask that begins with a one gets two runs there, of which the first, of zeros, is empty.
    bounds = np.concatenate((starts, starts[masks[starts] == 1], inner, [len(masks)]))
    bounds.sort()
    firsts = [*np.searchsorted(bounds, starts).tolist(), len(bounds) - 1]
    return bounds[1:] - bounds[:-1], [end - start for start, end in pairwise(firsts)]


def _span_rows(spans: Sequence[VersionSpan]) -> list[int]:
    rows = [number for span in spans for number in (span.version, span.start, span.end)]
    if rows and not 0 <= min(rows) <= max(rows) < 2**32:
        raise ValueError(f"version or position {max(rows)} does not fit 32 bits")
    return rows


def _ones_before(places: Lengths, bounds: Lengths, ones: Lengths) -> Lengths:
    """How many trainable tokens lie before each of these places."""
    run = np.searchsorted(bounds[1:-1], places, side="right")
    before: Lengths = np.minimum(ones[run] + places - bounds[run], ones[run + 1])
    return before  # the minimum, for in a run of zeros `ones` does not grow
