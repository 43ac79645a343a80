"""Splits a global batch into one share per rank, balanced by tokens."""

from __future__ import annotations

import heapq
from collections.abc import Sequence


def split_by_tokens(tokens: Sequence[int], num_shares: int) -> tuple[tuple[int, ...], ...]:
    """Indices of `tokens` in `num_shares` shares, each ascending and none empty.

    Longest processing time first (Graham 1969): the largest group goes to the lightest share. The
    heaviest share is at most 4/3 - 1/(3 num_shares) of the optimum. A pure function, so ranks that
    know the same batch split it identically without communicating.

    Raises ValueError if there are fewer groups than shares.
    """
    if not 1 <= num_shares <= len(tokens):
        raise ValueError(
            f"num_shares={num_shares} with {len(tokens)} groups: every rank needs at least one"
        )
    shares: list[list[int]] = [[] for _ in range(num_shares)]
    # The size breaks ties, so that groups without tokens spread out too.
    lightest = [(0, 0, share) for share in range(num_shares)]
    for index in sorted(range(len(tokens)), key=lambda i: (-tokens[i], i)):
        load, size, share = heapq.heappop(lightest)
        shares[share].append(index)
        heapq.heappush(lightest, (load + tokens[index], size + 1, share))
    return tuple(tuple(sorted(share)) for share in shares)
