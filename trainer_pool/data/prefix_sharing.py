"""Finds the tokens of several sequences that are the same computation; pure.

What a model computes at a token depends only on that token and those before it. So sequences with a
common prefix, such as the answers to one prompt or the branches of an episode, form a tree; each of
its spans is computed once, and sees the spans on the way to its root.

    prompt prompt prompt ┬ answer a answer a               spans, in the order of the row:
                         └ turn turn turn ┬ answer b       0 prompt  1 a  2 turn  3 b  4 c
                                          └ answer c       row c sees 0, 2, 4
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

MIN_SHARED = 16
"""A shorter common prefix is computed again, behind 96 tokens or more: each span has copies of all
keys that it sees, and without variable-length attention each length costs a call of its own."""

Tokens = NDArray[np.int32]


@dataclass(kw_only=True, slots=True, frozen=True)
class Span:
    """Tokens `start` to `stop` of a sequence, which all sequences below it in the tree share."""

    sequence: int
    start: int
    """Also the number of earlier tokens that it sees."""
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start


@dataclass(kw_only=True, slots=True, frozen=True)
class Forest:
    """The spans of several sequences."""

    spans: tuple[Span, ...]
    """Each comes after those that it sees."""
    paths: tuple[tuple[int, ...], ...]
    """For each sequence, the indices of its spans, in order."""

    def pieces(self, max_tokens: int) -> Iterator[list[int]]:
        """Groups sequences that share spans into pieces whose spans have at most `max_tokens`.

        A sequence that is longer has a piece of its own.
        """
        piece: list[int] = []
        num_tokens, above = 0, set[int]()
        for sequence in sorted(range(len(self.paths)), key=self.paths.__getitem__):
            path = self.paths[sequence]
            # In this order, a span that any sequence of the piece has is one of the last one's.
            added = sum(len(self.spans[i]) for i in path if i not in above)
            if piece and (above.isdisjoint(path) or num_tokens + added > max_tokens):
                yield piece
                piece, num_tokens = [], 0
                added = self.length(sequence)
            piece.append(sequence)
            num_tokens += added
            above = set(path)
        if piece:
            yield piece

    def length(self, sequence: int) -> int:
        """Tokens of the whole sequence."""
        return self.spans[self.paths[sequence][-1]].stop

    def spans_of(self, sequences: Sequence[int]) -> list[int]:
        """Indices of all spans of these sequences, each once, in order."""
        return sorted({i for sequence in sequences for i in self.paths[sequence]})


def separate(sequences: Sequence[Tokens]) -> Forest:
    """A span for each sequence: nothing is shared."""
    spans = (Span(sequence=i, start=0, stop=len(each)) for i, each in enumerate(sequences))
    return Forest(spans=tuple(spans), paths=tuple((i,) for i in range(len(sequences))))


def share_prefixes(sequences: Sequence[Tokens], min_shared: int = MIN_SHARED) -> Forest:
    """The tree of all prefixes that several sequences share.

    A span that is shared, at the root or below another span, has at least `min_shared` tokens, or
    an eighth of the tokens before it and 4 more.
    """
    # Big-endian bytes of token ids sort as the ids do, so common prefixes become neighbours.
    order = sorted(range(len(sequences)), key=lambda i: sequences[i].astype(">u4").tobytes())
    common = [_num_common(sequences[a], sequences[b]) for a, b in itertools.pairwise(order)]
    spans: list[Span] = []
    paths: list[tuple[int, ...]] = [()] * len(sequences)

    # Of the sequences at `first` to `last`, which have `start` tokens in common, all are below the
    # spans of `path`. A stack of its own: an episode may branch at more turns than Python recurses.
    to_grow: list[tuple[int, int, int, tuple[int, ...]]] = [(0, len(order), 0, ())]
    while to_grow:
        first, last, start, path = to_grow.pop()
        if first == last:
            continue
        end = first + 1
        least = start + min(min_shared, 4 + start // 8)
        while end < last and common[end - 1] >= least:
            end += 1
        own = order[first]
        stop = min(common[first : end - 1], default=len(sequences[own]))
        below = path
        if stop > start:  # otherwise the sequence ends where others go on
            below = (*path, len(spans))
            spans.append(Span(sequence=own, start=start, stop=stop))
        to_grow.append((end, last, start, path))
        if end == first + 1:
            paths[own] = below
        else:  # before the others
            to_grow.append((first, end, stop, below))
    return Forest(spans=tuple(spans), paths=tuple(paths))


def _num_common(a: Tokens, b: Tokens) -> int:
    length = min(len(a), len(b))
    different = a[:length] != b[:length]
    return int(different.argmax()) if different.any() else length
