"""Properties of every way to lay rows out as micro-batches."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trainer_pool.data.packing import (
    MicroBatch,
    PassCost,
    Row,
    fill_up,
    pack,
    plan_micro_batches,
)

LENGTHS = st.lists(st.integers(2, 50), max_size=40)
COST = PassCost(per_token=30.0, per_pair=4.0)


def make_row(
    length: int,
    prompt_length: int,
    advantage: float = 0.0,
    weight: float = 1.0,
    temperature: float = 1.0,
) -> Row:
    return Row(
        tokens=np.arange(100, 100 + length, dtype=np.int32),
        loss_mask=(np.arange(length) >= prompt_length).astype(np.uint8),
        rollout_logprobs=-np.arange(length, dtype=np.float32),
        advantages=np.full(length, advantage, np.float32),
        staleness=np.arange(length),
        weight=weight,
        temperatures=np.full(length, temperature, np.float32),
    )


def plan_of(lengths: list[int], budget: int, cost: PassCost) -> list[list[int]]:
    return plan_micro_batches(lengths, [cost.of(length) for length in lengths], budget)


@given(LENGTHS, st.integers(50, 400))
def test_every_row_is_in_one_micro_batch_within_the_budget(lengths: list[int], budget: int) -> None:
    plan = plan_of(lengths, budget, COST)
    assert sorted(i for part in plan for i in part) == list(range(len(lengths)))
    for part in plan:
        assert part and sum(lengths[i] for i in part) <= budget


@given(LENGTHS, st.integers(50, 400))
def test_micro_batches_are_no_more_than_first_fit_decreasing_promises(
    lengths: list[int], budget: int
) -> None:
    """No fewer than the tokens need; all but one are more than half full on average, as no two of
    first-fit's could be one."""
    count = len(plan_of(lengths, budget, COST))
    assert -(-sum(lengths) // budget) <= count
    assert count <= 1 or count * budget < 2 * sum(lengths)
    assert count == len(plan_of(lengths, budget, PassCost()))  # whatever a pass costs


@given(LENGTHS, st.integers(50, 400))
def test_costliest_micro_batches_come_first_and_cost_no_more_than_those_of_first_fit(
    lengths: list[int], budget: int
) -> None:
    plan = plan_of(lengths, budget, COST)
    costs = [sum(COST.of(lengths[i]) for i in part) for part in plan]
    assert costs == sorted(costs, reverse=True)
    room: list[int] = []
    first_fit: list[float] = []
    for length in sorted(lengths, reverse=True):
        if (place := next((p for p, free in enumerate(room) if free >= length), None)) is None:
            room.append(budget)
            first_fit.append(0.0)
            place = len(room) - 1
        room[place] -= length
        first_fit[place] += COST.of(length)
    assert len(plan) == len(first_fit)
    assert max(costs, default=0) <= max(first_fit, default=0) * (1 + 1e-9)


def test_passes_of_equal_tokens_are_balanced_by_what_attention_costs() -> None:
    """By tokens alone the long row could lie with any two of the short ones."""
    plan = plan_of([40, 20, 20, 20, 10, 10], 80, PassCost(per_token=1, per_pair=1))
    assert [sorted(part) for part in plan] == [[0], [1, 2, 3, 4, 5]]


def test_cost_of_a_sequence_worked_out_by_hand() -> None:
    cost = PassCost(per_token=3.0, per_pair=2.0)
    assert cost.of(10) == 30 + 2 * 50
    assert cost.of(10, start=6) == cost.of(10) - cost.of(6) == 3 * 4 + 2 * (50 - 18)


@given(st.lists(st.tuples(st.integers(2, 30), st.integers(1, 30)), min_size=1, max_size=20))
def test_packing_keeps_every_trained_token(shapes: list[tuple[int, int]]) -> None:
    rows = [make_row(n, p, advantage=i + 1) for i, (n, p) in enumerate(shapes)]
    seen = []
    for batch in pack(rows, max_tokens=90):
        trained = batch.mask_N == 1
        seen += zip(
            batch.advantages_N[trained].tolist(),
            batch.targets_N[trained].tolist(),
            batch.rollout_logprobs_N[trained].tolist(),
            # Tokens count up from 100, so a prediction comes from the token before.
            (batch.row.tokens_L[batch.places_N[trained]] + 1).tolist(),
            (batch.row.position_ids_L[batch.places_N[trained]] + 101).tolist(),
            strict=True,
        )
    expected = [
        (float(row.advantages[t]), int(token), float(row.rollout_logprobs[t]), token, token)
        for row in rows
        if row.advantages is not None
        for t, token in enumerate(row.tokens.tolist())
        if row.loss_mask[t]
    ]
    assert sorted(seen) == sorted(expected)


def test_rows_lie_end_to_end_and_only_trained_tokens_are_predicted() -> None:
    rows = [make_row(4, 3, 0.5, 0.5, 0.7), make_row(6, 4, -1.0)]
    (batch,) = pack(rows, max_tokens=10)
    assert batch.row.tokens_L.tolist() == [100, 101, 102, 103, 100, 101, 102, 103, 104, 105]
    assert batch.row.position_ids_L.tolist() == [0, 1, 2, 3, 0, 1, 2, 3, 4, 5]
    assert (batch.row.starts.tolist(), batch.row.longest) == ([0, 4, 10], 6)
    assert batch.row.key_places is None and batch.row.key_starts.equal(batch.row.starts)
    assert batch.places_N.tolist() == [2, 7, 8]
    assert batch.targets_N.tolist() == [103, 104, 105]
    assert (batch.segment_ids_N.tolist(), batch.num_segments) == ([0, 1, 1], 2)
    assert batch.mask_N.tolist() == [1, 1, 1]
    assert batch.advantages_N.tolist() == [0.5, -1.0, -1.0]
    assert batch.staleness_N.tolist() == [3, 4, 5]
    assert batch.weights_N.tolist() == [0.5, 1.0, 1.0]
    torch.testing.assert_close(batch.temperatures_N, torch.tensor([0.7, 1.0, 1.0]))
    assert batch.num_padding == 0


def test_trajectory_over_the_budget_is_refused_with_the_fix() -> None:
    with pytest.raises(ValueError, match=r"trainer\.micro_batch_tokens=8: a trajectory has 9"):
        pack([make_row(9, 3)], max_tokens=8)


def test_filling_up_adds_batches_without_a_trained_token() -> None:
    batches = pack([make_row(5, 2)], max_tokens=100)
    filled = fill_up(batches, 3)
    assert len(filled) == 3 and filled[0] is batches[0]
    for batch in filled[1:]:
        assert batch.mask_N.tolist() == [0]  # one token, so that there is a gradient
        assert batch.num_padding == len(batch.row.tokens_L) == 2


def test_moving_a_micro_batch_keeps_its_values() -> None:
    (batch,) = pack([make_row(5, 2, 1.5)], max_tokens=100)
    moved = batch.to(torch.device("cpu"))
    assert isinstance(moved, MicroBatch)
    torch.testing.assert_close(moved.rollout_logprobs_N, batch.rollout_logprobs_N)
    assert moved.row.longest == 5
    assert batch.to(torch.device("meta")).row.tokens_L.is_meta


def test_row_may_not_train_its_first_token() -> None:
    with pytest.raises(AssertionError):
        make_row(3, 0)


def test_tokens_keep_their_candidates_in_any_order_of_rows() -> None:
    def drawn(length: int, sizes: list[int]) -> Row:
        sets = np.full((length, max(sizes)), -1, np.int32)
        for place, size in enumerate(sizes, start=length - len(sizes)):
            sets[place, :size] = 100 * length + 10 * place + np.arange(size)
        return replace(make_row(length, length - len(sizes)), candidates=sets)

    rows = [drawn(3, [2]), make_row(5, 3), drawn(4, [1, 3])]
    (batch,) = pack(rows, 20)
    assert batch.rows == (0, 1, 2)
    assert batch.num_candidates_N.tolist() == [2, 0, 0, 1, 3]
    assert batch.candidates_K.tolist() == [320, 321, 420, 430, 431, 432]
    (plain,) = pack([make_row(5, 3)], 20)
    assert not len(plain.candidates_K) and plain.num_candidates_N.tolist() == [0, 0]
