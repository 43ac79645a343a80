"""Properties of every tree of common beginnings, and of the rows laid from it."""

from __future__ import annotations

import sys
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from trainer_pool.data.packing import MicroBatch, PassCost, Row, pack
from trainer_pool.data.prefix_sharing import (
    MIN_SHARED,
    Span,
    Tokens,
    separate,
    share_prefixes,
)


@st.composite
def families(draw: st.DrawFn) -> list[Tokens]:
    """Sequences of which many begin as another one does, as far as any place; some are equal."""
    dice = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    found: list[Tokens] = []
    for _ in range(draw(st.integers(1, 12))):
        beginning = np.empty(0, np.int32)
        if found and draw(st.booleans()):
            other = found[draw(st.integers(0, len(found) - 1))]
            beginning = other[: draw(st.integers(0, len(other)))]
        own = dice.integers(0, 3, draw(st.integers(0 if len(beginning) > 1 else 2, 40)))
        found.append(np.concatenate([beginning, own]).astype(np.int32))
    return found


@given(families(), st.integers(1, 6))
def test_spans_of_a_sequence_are_its_tokens_and_none_is_there_twice(
    sequences: list[Tokens], min_shared: int
) -> None:
    forest = share_prefixes(sequences, min_shared)
    for tokens, path in zip(sequences, forest.paths, strict=True):
        spans = [forest.spans[i] for i in path]
        parts = [sequences[span.sequence][span.start : span.stop] for span in spans]
        assert np.concatenate(parts).tolist() == tokens.tolist()
        assert [span.start for span in spans] == [0, *(span.stop for span in spans[:-1])]
        for i in path:  # what it sees is on the way to the root for its own sequence, too
            assert forest.paths[forest.spans[i].sequence][: path.index(i)] == path[: path.index(i)]
    beginnings = set()
    for i, span in enumerate(forest.spans):
        above = next(path[: path.index(i)] for path in forest.paths if i in path)
        own = sequences[span.sequence][span.start : span.stop][:min_shared].tolist()
        if len(own) == min_shared:
            assert (above, *own) not in beginnings
            beginnings.add((above, *own))


def test_tree_of_a_prompt_with_a_shared_turn_is_that_worked_out_by_hand() -> None:
    a, b, c, alone = [1, 2, 3, 4, 5], [1, 2, 3, 7, 8, 9], [1, 2, 3, 7, 8, 6, 6], [1, 5]
    sequences = [np.array(tokens, np.int32) for tokens in (c, alone, a, b)]
    forest = share_prefixes(sequences, 2)
    assert forest.spans == (
        Span(sequence=2, start=0, stop=3),
        Span(sequence=2, start=3, stop=5),
        Span(sequence=0, start=3, stop=5),
        Span(sequence=0, start=5, stop=7),
        Span(sequence=3, start=5, stop=6),
        Span(sequence=1, start=0, stop=2),
    )
    assert forest.paths == ((0, 2, 3), (5,), (0, 1), (0, 2, 4))
    assert list(forest.pieces(100)) == [[2, 0, 3], [1]]
    assert list(forest.pieces(8)) == [[2], [0, 3], [1]]  # 5 tokens; 3 + 2 + 2 + 1; 2


def test_shorter_beginnings_are_shared_where_few_tokens_are_before_them() -> None:
    def num_spans(length: int, num_common: int) -> int:
        """Spans of three answers to a prompt of that length, two of which begin alike."""
        answers = [[1] * (num_common + 1), [*[1] * num_common, 2], [3]]
        sequences = [np.array([0] * length + answer, np.int32) for answer in answers]
        return len(share_prefixes(sequences).spans)

    assert [num_spans(3, 0), num_spans(4, 0)] == [3, 4]
    assert [num_spans(4, 3), num_spans(4, 4)] == [4, 5]
    assert [num_spans(200, 15), num_spans(200, 16)] == [4, 5]


@given(families(), st.integers(50, 120))
def test_pieces_have_every_sequence_once_and_are_within_the_budget(
    sequences: list[Tokens], budget: int
) -> None:
    for forest in (share_prefixes(sequences, 2), separate(sequences)):
        pieces = list(forest.pieces(budget))
        assert sorted(i for piece in pieces for i in piece) == list(range(len(sequences)))
        for piece in pieces:
            assert piece and [forest.length(i) for i in piece] == [len(sequences[i]) for i in piece]
            num_tokens = sum(len(forest.spans[i]) for i in forest.spans_of(piece))
            assert len(piece) == 1 or num_tokens <= budget


def rows_of(sequences: list[Tokens]) -> list[Row]:
    """Every other token is trained; its advantage says whose it is."""
    return [
        Row(
            tokens=tokens,
            loss_mask=(np.arange(len(tokens)) % 2).astype(np.uint8),
            rollout_logprobs=-np.arange(len(tokens), dtype=np.float32),
            advantages=np.full(len(tokens), i, np.float32),
        )
        for i, tokens in enumerate(sequences)
    ]


def what_is_seen(batch: MicroBatch) -> list[tuple[list[int], list[int]]]:
    """For each place in the row, the tokens that it sees and their positions, its own last."""
    row, seen = batch.row, []
    places = row.key_places if row.key_places is not None else np.arange(len(row.tokens_L))
    for first, last, keys, keys_end in zip(
        row.starts, row.starts[1:], row.key_starts, row.key_starts[1:], strict=False
    ):
        own = places[int(keys) : int(keys_end)]
        for place in range(int(first), int(last)):
            upto = own[: len(own) - (int(last) - 1 - place)]
            seen.append((row.tokens_L[upto].tolist(), row.position_ids_L[upto].tolist()))
    return seen


@given(families())
def test_every_trained_token_is_predicted_from_all_before_it_in_its_sequence(
    sequences: list[Tokens],
) -> None:
    common = np.arange(MIN_SHARED + 4, dtype=np.int32)
    sequences = [np.concatenate([common, tokens]) for tokens in sequences]
    found = []
    for batch in pack(rows_of(sequences), 150, PassCost(), should_share_prefixes=True):
        seen = what_is_seen(batch)
        assert len(seen) == len(batch.row.tokens_L) <= 150
        assert batch.num_tokens == sum(
            len(sequences[int(i)]) for i in set(batch.advantages_N.tolist())
        )
        for own, place, target in zip(
            batch.advantages_N.tolist(), batch.places_N.tolist(), batch.targets_N, strict=True
        ):
            tokens, positions = seen[place]
            sequence = sequences[int(own)].tolist()
            assert [*tokens, int(target)] == sequence[: len(tokens) + 1]
            assert positions == list(range(len(tokens)))
            found.append((int(own), len(tokens)))
    expected = [(i, t) for i, tokens in enumerate(sequences) for t in range(1, len(tokens), 2)]
    assert sorted(found) == expected


def test_answers_to_one_prompt_have_its_tokens_once() -> None:
    prompt = np.arange(40, dtype=np.int32)
    answers = [np.concatenate([prompt, np.full(20, 50 + i, np.int32)]) for i in range(16)]
    (batch,) = pack(rows_of(answers), 400, PassCost(), should_share_prefixes=True)
    assert len(batch.row.tokens_L) == 40 + 16 * 20 and batch.num_tokens == 16 * 60
    assert len(pack(rows_of(answers), 400)) == 3


def test_longest_trajectory_must_fit_also_where_its_beginning_is_shared() -> None:
    prompt = np.arange(40, dtype=np.int32)
    answers = [np.concatenate([prompt, np.full(20, 50 + i, np.int32)]) for i in range(2)]
    with pytest.raises(ValueError, match=r"micro_batch_tokens=59: a trajectory has 60"):
        pack(rows_of(answers), 59, PassCost(), should_share_prefixes=True)


def test_episode_may_branch_at_more_turns_than_python_recurses() -> None:
    whole = np.arange(sys.getrecursionlimit() + 100, dtype=np.int32)
    branches = [np.append(whole[:turn], 0).astype(np.int32) for turn in range(1, len(whole))]
    forest = share_prefixes(branches, 1)
    assert sum(map(len, forest.spans)) == len(whole) - 1 + len(branches)
    assert len(forest.paths[-1]) == len(branches)


def test_experts_of_a_token_are_where_it_is_in_the_row_and_shared_tokens_have_equal_experts() -> (
    None
):
    common = np.arange(MIN_SHARED + 8)
    rows = []
    for number, last in enumerate((90, 91, 92, 93)):
        tokens = np.append(common, last).astype(np.int32)
        routes = np.full((len(tokens), 2), 1, np.uint8)
        routes[-1] = 0
        if number == 2:  # another version sent the end of the prefix to another expert
            routes[MIN_SHARED:-1, 1] = 2
        rows.append(row_of(tokens, None if number == 3 else routes))
    [batch] = pack(rows, 200, should_share_prefixes=True)
    assert batch.row.routes_LC is not None
    found = Counter(
        (token, *experts)
        for token, experts in zip(
            batch.row.tokens_L.tolist(), batch.row.routes_LC.tolist(), strict=True
        )
    )
    expected = Counter({(token, 1, 1): 1 for token in common.tolist()})
    expected.update((token, 1, 2) for token in common[MIN_SHARED:].tolist())
    expected.update((token, 0, 0) for token in (90, 91, 92, *common.tolist(), 93))
    assert found == expected
    [apart] = pack(rows, 200)
    assert apart.row.routes_LC is not None
    by_place = zip(apart.row.tokens_L.tolist(), apart.row.routes_LC.tolist(), strict=True)
    assert sorted(by_place) == sorted(
        (token, [0, 0] if row.routes is None else row.routes[place].tolist())
        for row in rows
        for place, token in enumerate(row.tokens.tolist())
    )
    [plain] = pack([rows[3]], 100)
    assert plain.row.routes_LC is None


def row_of(tokens: Tokens, routes: NDArray[np.uint8] | None) -> Row:
    return Row(
        tokens=tokens,
        loss_mask=(np.arange(len(tokens)) > 0).astype(np.uint8),
        rollout_logprobs=np.zeros(len(tokens), np.float32),
        routes=routes,
    )
