"""Masks and version spans of a group's trajectories, concatenated, and their checks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, islice, pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from buffer.types import MAX_VERSION, MaskArray, Trajectory, VersionSpan

Array = NDArray[np.generic]
Lengths = NDArray[np.int64]

I4, F4, U4, U1 = np.dtype("<i4"), np.dtype("<f4"), np.dtype("<u4"), np.dtype("u1")


@dataclass(kw_only=True, slots=True, frozen=True, eq=False)
class FlatGroup:
    """Loss masks and version spans of n trajectories with N tokens in total.

    Masks are stored as run lengths. The runs of each trajectory begin with a run of zeros, the only
    one that may be empty.
    """

    lengths: Sequence[int]
    """[n] tokens of each trajectory."""
    run_counts: Sequence[int]
    """[n] number of runs of each trajectory."""
    span_counts: Sequence[int]
    """[n] number of version spans of each trajectory."""
    runs: NDArray[np.uint32]
    """[R]"""
    spans: NDArray[np.uint32]
    """[S, 3] version, start and end, relative to the start of the trajectory."""

    @classmethod
    def of(cls, trajectories: Sequence[Trajectory]) -> FlatGroup:
        """Raises ValueError if a mask or a span cannot be represented."""
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

    def check(self, tokens: Array, logprobs: Array) -> None:
        """Raises ValueError unless these tokens and log-probabilities, [N], may be trained on.

        Memory use is proportional to the arrays, whatever their values claim.
        """
        if min(self.lengths) == 0:
            raise ValueError("a trajectory without tokens")
        if tokens.min() < 0:
            raise ValueError(f"token id {tokens.min()} is negative")
        check_finite(logprobs, "rollout_logprobs")
        # Plain lists from here on: runs and spans are few, and numpy calls take longer.
        if sum(self.run_counts) != len(self.runs) or sum(self.span_counts) != len(self.spans):
            raise ValueError("other runs or spans than the trajectories have")
        runs, spans = iter(self.runs.tolist()), iter(self.spans.tolist())
        counts = zip(self.lengths, self.run_counts, self.span_counts, strict=True)
        num_ones = uncovered = 0
        for length, num_runs, num_spans in counts:
            mask = list(islice(runs, num_runs))
            _check_mask(mask, length)
            ones = sum(mask[1::2])
            num_ones += ones
            uncovered += ones - _ones_covered(mask, islice(spans, num_spans))
        if num_ones == 0:
            raise ValueError("no trainable token in any trajectory")
        if uncovered:
            raise ValueError(f"{uncovered} trainable tokens are in no version span")

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
    """Raises ValueError if a value is NaN or infinite. Accepts an empty array."""
    # min and max are NaN if any value is. Unlike isfinite() they allocate no array, and unlike a
    # sum they cannot overflow.
    if numbers.size and not (numbers.min() > -np.inf and numbers.max() < np.inf):
        raise ValueError(f"{name} holds NaN or infinity")


def exactly(array: Array, dtype: np.dtype[np.generic], name: str) -> Array:
    """The array as this type. Raises ValueError if that would change a value."""
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
        raise ValueError("loss_mask holds values other than 0 and 1")
    starts = np.array([0, *accumulate(lengths[:-1])])
    changes = masks[1:] != masks[:-1]
    changes[starts[1:] - 1] = False  # a new mask begins there
    inner = changes.nonzero()[0] + 1
    # A mask that begins with a one starts with two runs: an empty one of zeros, then the ones.
    bounds = np.concatenate((starts, starts[masks[starts] == 1], inner, [len(masks)]))
    bounds.sort()
    firsts = [*np.searchsorted(bounds, starts).tolist(), len(bounds) - 1]
    return bounds[1:] - bounds[:-1], [end - start for start, end in pairwise(firsts)]


def _span_rows(spans: Sequence[VersionSpan]) -> list[int]:
    rows = [number for span in spans for number in (span.version, span.start, span.end)]
    if rows and not 0 <= min(rows) <= max(rows) < 2**32:
        raise ValueError(f"version or position {max(rows)} does not fit 32 bits")
    return rows


def _check_mask(runs: Sequence[int], length: int) -> None:
    # Checked before anything is expanded: a forged run must not allocate more memory than the
    # tokens take.
    if sum(runs) != length:
        raise ValueError(f"the mask of a trajectory is {sum(runs)} long, not {length}")
    if 0 in runs[1:]:
        raise ValueError("a mask has an empty run")


def _ones_covered(runs: Sequence[int], spans: Iterable[Sequence[int]]) -> int:
    """Number of ones of a mask in these spans. Also checks the spans."""
    length, covered, before = sum(runs), 0, 0
    run, run_start, run_end = 0, 0, runs[0]
    for version, start, end in spans:
        if version > MAX_VERSION:
            raise ValueError(f"version {version} is above the highest, {MAX_VERSION}")
        if start >= end:
            raise ValueError("a version span without tokens")
        if end > length:
            raise ValueError("a version span ends after the tokens")
        if start < before:
            raise ValueError("a version span overlaps the one before")
        before = end
        while True:  # the runs that touch the span; the last one may touch the next span too
            if run % 2:
                covered += max(0, min(end, run_end) - max(start, run_start))
            if run_end >= end:
                break
            run += 1
            run_start, run_end = run_end, run_end + runs[run]
    return covered
