"""Turns become branches, token by token."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from buffer.types import VersionSpan
from rollout_pool.episodes.episode import add_turn
from tests.support.rollout import ended_episode, make_sample


def span(version, start, end):
    return VersionSpan(version=version, start=start, end=end)


def add(branches, prompt, output, *, spans=None, logprobs=None, finish_reason="stop", pictures=()):
    sample = make_sample(
        prompt=prompt,
        output_ids=output,
        logprobs=logprobs or [-float(token) for token in output],
        version_spans=spans or [span(1, 0, len(output))],
        finish_reason=finish_reason,
        pictures=pictures,
    )
    add_turn(branches, sample)


def test_turns_that_extend_each_other_are_one_branch():
    branches = []
    add(branches, [5, 6], [7, 8, 2], spans=[span(3, 0, 1), span(4, 1, 3)])
    add(branches, [5, 6, 7, 8, 2, 9], [7], spans=[span(4, 0, 1)], finish_reason="length")
    [branch] = branches
    assert branch.tokens == [5, 6, 7, 8, 2, 9, 7]
    assert branch.loss_mask == [0, 0, 1, 1, 1, 0, 1]
    assert branch.logprobs == [0, 0, -7, -8, -2, 0, -7]
    assert branch.version_spans == [span(3, 2, 3), span(4, 3, 5), span(4, 6, 7)]
    assert (branch.prompt_length, branch.finish_reason) == (2, "length")


def test_two_answers_to_one_prompt_are_two_branches_and_each_can_go_on():
    branches = []
    add(branches, [5], [6])
    add(branches, [5], [7])
    add(branches, [5, 7, 8], [9])
    add(branches, [5, 6], [10])
    assert [branch.tokens for branch in branches] == [[5, 6, 10], [5, 7, 8, 9]]
    assert ended_episode("?", "!", branches=branches).num_tokens == 4


def test_prompt_extends_the_longest_matching_branch():
    branches = []
    add(branches, [5], [6])
    add(branches, [5], [6])  # the same again: the prompt is shorter than the branch
    add(branches, [5, 6, 7], [8])
    add(branches, [5, 6, 7, 8, 9], [10])
    lengths = [len(branch.tokens) for branch in branches]
    assert lengths == [6, 2]


def test_turn_with_another_picture_of_the_same_tokens_begins_a_branch():
    branches = []
    add(branches, [5], [6], pictures=(b"a",))
    add(branches, [5, 6, 7], [8], pictures=(b"b",))
    add(branches, [5, 6, 9], [10], pictures=(b"a", b"c"))
    assert [(branch.tokens, branch.pictures) for branch in branches] == [
        ([5, 6, 9, 10], (b"a", b"c")),
        ([5, 6, 7, 8], (b"b",)),
    ]


TOKENS = st.lists(st.integers(0, 2), max_size=3)
OUTPUTS = st.lists(st.integers(0, 2), min_size=1, max_size=3)


@given(st.data())
def test_every_sampled_token_is_trained_once_and_every_turn_is_read_as_it_was(data):
    """Prompts are new, or made of anything that was there before."""
    branches, turns, known = [], [], [[]]
    for number in range(data.draw(st.integers(0, 6))):
        prompt = [*data.draw(st.sampled_from(known)), *data.draw(TOKENS)]
        output = data.draw(OUTPUTS)
        # The turn's number is its version, and its tokens' log-probabilities.
        add(
            branches,
            prompt,
            output,
            logprobs=[-1.0 - number] * len(output),
            spans=[span(number, 0, len(output))],
        )
        turns.append((prompt, output))
        known += [prompt, [*prompt, *output]]
    found = {}
    for branch in branches:
        assert len(branch.tokens) == len(branch.loss_mask) == len(branch.logprobs)
        assert branch.loss_mask[: branch.prompt_length] == [0] * branch.prompt_length
        covered = [0] * len(branch.tokens)
        for one in branch.version_spans:
            assert one.version not in found
            found[one.version] = (branch.tokens[: one.start], branch.tokens[one.start : one.end])
            covered[one.start : one.end] = [1] * (one.end - one.start)
            assert set(branch.logprobs[one.start : one.end]) == {-1.0 - one.version}
        assert covered == branch.loss_mask
        assert [value != 0 for value in branch.logprobs] == [mask == 1 for mask in covered]
    assert found == dict(enumerate(turns))
