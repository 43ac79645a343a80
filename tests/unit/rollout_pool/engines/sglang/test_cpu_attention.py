"""Attention over many requests at once against each request's alone."""

from __future__ import annotations

import pytest
import torch

from rollout_pool.engines.sglang import cpu_attention
from rollout_pool.engines.sglang.cpu_attention import Plan

HEADS, KEY_HEADS, DIM, SCALE = 4, 2, 8, 0.3


def _expected(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """[new, heads, dim] of one request, whose new tokens are its last, head by head."""
    new, length = len(query), len(keys)
    output = torch.empty_like(query)
    for head in range(HEADS):
        shared = head // (HEADS // KEY_HEADS)
        scores = SCALE * query[:, head] @ keys[:, shared].T
        is_later = torch.arange(length) > torch.arange(length - new, length)[:, None]
        output[:, head] = scores.masked_fill(is_later, -torch.inf).softmax(-1) @ values[:, shared]
    return output


@pytest.mark.parametrize(
    ("before", "new"),
    [
        pytest.param([0, 0, 0], [3, 7, 1], id="prompts"),
        pytest.param([4, 0, 30, 6], [3, 5, 2, 1], id="prompts with a cached beginning"),
        pytest.param([2, 3, 9, 4, 40], [1, 1, 1, 1, 1], id="decoding"),
    ],
)
@pytest.mark.parametrize("max_keys", [2**15, 8])
def test_requests_attend_together_as_each_alone(
    before: list[int], new: list[int], max_keys: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_attention, "MAX_KEYS", max_keys)  # a few calls, or one a request
    torch.manual_seed(0)
    lengths = [b + n for b, n in zip(before, new, strict=True)]
    slots = torch.randperm(sum(lengths)).split(lengths)
    keys, values = torch.randn(2, sum(lengths) + 1, KEY_HEADS, DIM)
    keys[-1] = values[-1] = torch.nan  # a slot of another request, to which the table points
    table = torch.full((9, 50), sum(lengths), dtype=torch.int32)
    rows = torch.randperm(9)[: len(lengths)]
    for row, own in zip(rows, slots, strict=True):
        table[row, : len(own)] = own
    query = torch.randn(sum(new), HEADS, DIM)

    output = torch.full_like(query, torch.nan)
    plan = Plan.of(torch.tensor(lengths), torch.tensor(new), rows, table)
    assert plan is not None
    for bucket in plan.buckets:
        bucket.attend(query, output, keys, values, SCALE)

    expected = [
        _expected(own, keys[at], values[at])
        for own, at in zip(query.split(new), slots, strict=True)
    ]
    torch.testing.assert_close(output, torch.cat(expected))


def test_prompt_whose_mask_would_be_too_large_is_left_to_the_engine() -> None:
    table, row = torch.zeros(1, 4096, dtype=torch.int32), torch.tensor([0])
    assert Plan.of(torch.tensor([4096]), torch.tensor([1]), row, table) is not None
    assert Plan.of(torch.tensor([4096]), torch.tensor([2048]), row, table) is None
