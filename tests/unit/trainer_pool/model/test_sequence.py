"""How heads of keys are spread over the ranks that split a row.

Whole passes are in `test_zero3_training.py`.
"""

from __future__ import annotations

import pytest
import torch

from trainer_pool.model.sequence import num_repeats


@pytest.mark.parametrize(
    ("num_heads", "num_keys", "size", "times"),
    [(8, 8, 4, 1), (8, 4, 4, 1), (8, 2, 4, 2), (8, 1, 8, 8), (12, 6, 4, 2), (28, 4, 14, 7)],
)
def test_keys_are_repeated_as_little_as_gives_each_rank_those_of_its_queries(
    num_heads: int, num_keys: int, size: int, times: int
) -> None:
    assert num_repeats(num_keys, size) == times
    wanted = torch.arange(num_keys).repeat_interleave(num_heads // num_keys).view(size, -1)
    keys = torch.arange(num_keys).repeat_interleave(times).view(size, -1)
    found = keys.repeat_interleave(num_heads // (num_keys * times), dim=1)
    assert torch.equal(found, wanted)
