"""What must hold of every way to lay rows out as micro-batches."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trainer_pool.data.packing import MicroBatch, Row, fill_up, pack, plan_micro_batches


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
        temperature=temperature,
    )


@given(st.lists(st.integers(2, 50), max_size=40), st.integers(50, 400))
def test_every_row_is_in_one_micro_batch_within_the_budget(lengths: list[int], budget: int) -> None:
    plan = plan_micro_batches(lengths, budget)
    assert sorted(i for part in plan for i in part) == list(range(len(lengths)))
    for part in plan:
        assert part and len(part) * max(lengths[i] for i in part) <= budget


@given(st.lists(st.tuples(st.integers(2, 30), st.integers(1, 30)), min_size=1, max_size=20))
def test_packing_keeps_every_trained_token(shapes: list[tuple[int, int]]) -> None:
    rows = [make_row(n, p, advantage=i + 1) for i, (n, p) in enumerate(shapes)]
    seen = []
    for batch in pack(rows, max_tokens=90):
        for b in range(len(batch.tokens_BT)):
            trained = batch.mask_BP[b] == 1
            for token, logprob, advantage in zip(
                batch.targets_BP[b][trained].tolist(),
                batch.rollout_logprobs_BP[b][trained].tolist(),
                batch.advantages_BP[b][trained].tolist(),
                strict=True,
            ):
                seen.append((advantage, token, logprob))
    expected = [
        (float(row.advantages[t]), int(row.tokens[t]), float(row.rollout_logprobs[t]))
        for row in rows
        if row.advantages is not None
        for t in range(len(row.tokens))
        if row.loss_mask[t]
    ]
    assert sorted(seen) == sorted(expected)


def test_rows_are_padded_on_the_right_and_cut_to_the_trained_part() -> None:
    rows = [make_row(4, 3, 0.5, 0.5, 0.7), make_row(6, 4, -1.0)]
    (batch,) = pack(rows, max_tokens=100)
    assert batch.tokens_BT.tolist() == [
        [100, 101, 102, 103, 104, 105],
        [100, 101, 102, 103, 0, 0],
    ]
    # The first trained position of any row is 3; its prediction comes from position 2.
    assert batch.mask_BP.tolist() == [[0, 1, 1], [1, 0, 0]]
    assert batch.num_last == 4
    assert batch.targets_BP.tolist() == [[103, 104, 105], [103, 0, 0]]
    assert batch.advantages_BP.tolist() == [[-1, -1, -1], [0.5, 0, 0]]
    assert batch.staleness_BP.tolist() == [[3, 4, 5], [3, 0, 0]]
    assert batch.weights_B1.tolist() == [[1.0], [0.5]]
    torch.testing.assert_close(batch.temperatures_B1, torch.tensor([[1.0], [0.7]]))


def test_trajectory_over_the_budget_is_refused_with_the_fix() -> None:
    with pytest.raises(ValueError, match=r"trainer\.micro_batch_tokens=8: a trajectory has 9"):
        pack([make_row(9, 3)], max_tokens=8)


def test_filling_up_adds_batches_without_a_trained_token() -> None:
    batches = pack([make_row(5, 2)], max_tokens=100)
    filled = fill_up(batches, 3)
    assert len(filled) == 3 and filled[0] is batches[0]
    assert all(batch.mask_BP.sum() == 0 for batch in filled[1:])
    assert all(batch.num_last <= batch.tokens_BT.shape[1] for batch in filled)


def test_moving_a_micro_batch_keeps_its_values() -> None:
    (batch,) = pack([make_row(5, 2, 1.5)], max_tokens=100)
    moved = batch.to(torch.device("cpu"))
    assert isinstance(moved, MicroBatch)
    torch.testing.assert_close(moved.rollout_logprobs_BP, batch.rollout_logprobs_BP)


def test_row_may_not_train_its_first_token() -> None:
    with pytest.raises(AssertionError):
        make_row(3, 0)
