"""Probes, by which engines and trainer are compared, and the words if they disagree."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from buffer.probes import Probes, beginnings
from buffer.redis.connection import connect
from buffer.redis.keys import Keys
from buffer.run_state import RunState

LENGTHS = [9, 18, 37, 75, 150, 300]


def probes(apart: float = 0.0) -> Probes:
    """Makes probes of 300 tokens, all of the same probability."""
    logprobs = [[apart - 2.0] * (n - start) for n, start in beginnings(300)]
    return Probes(version=3, text=[7] * 300, logprobs=logprobs, most=0.1)


def test_last_tokens_of_a_text_and_of_its_beginnings_are_compared() -> None:
    assert beginnings(300) == [(9, 1), (18, 1), (37, 1), (75, 1), (150, 1), (300, 44)]
    assert beginnings(2) == [(2, 1)]
    assert [(len(text), start) for text, start in probes().texts] == beginnings(300)


def test_sides_that_agree_have_no_problem() -> None:
    found = probes().compare("engine-1", probes(0.05).logprobs)
    assert found.problem is None and found.mean == pytest.approx(0.05)
    assert found.record() == {
        "engine": "engine-1",
        "version": 3,
        "mean": pytest.approx(0.05),
        "largest": pytest.approx(0.05),
        "most": 0.1,
    }


def test_problem_names_both_sides_and_the_length_at_which_they_part() -> None:
    logprobs = [list(values) for values in probes().logprobs]
    logprobs[4] = [value - 0.25 for value in logprobs[4]]
    logprobs[5] = [*logprobs[5][:-1], -5.0]  # one token of 256 is no reason
    found = probes().compare("engine-0", logprobs)
    assert found.problem == (
        "engines and trainer do not compute the same policy. Of a text of 150 tokens, engine-0 "
        "(the engines' side, SGLang) and the trainer's side (transformers) give the last tokens "
        "log-probabilities that differ by 0.25 nats on average and 0.25 at most, at version 3; "
        "their dtypes explain 0.1 on average. At 75 tokens they agree, so they part at a length: "
        "one side ignores a field of config.json such as sliding_window or rope_parameters; "
        "correct it, or set rollout.max_prompt_tokens + rollout.max_response_tokens to at most 75"
    )
    assert found.record()["error"] == found.problem


@pytest.mark.parametrize("value", [math.nan, -math.inf, -9.0])
def test_other_weights_differ_at_all_lengths(value: float) -> None:
    logprobs = [[value] * len(values) for values in probes().logprobs]
    problem = probes().compare("engine-0", logprobs).problem
    assert problem is not None and "Of a text of 9 tokens" in problem
    assert "Their weights differ (the engine's log names those that its loader" in problem


async def test_probes_are_left_for_the_engines(
    redis_url: str, run_name: str, buffer_factory: Any
) -> None:
    await buffer_factory()
    redis = await connect(redis_url)
    state = RunState(redis, run_name)
    version = probes().version
    assert await state.probes(version) is None
    await state.leave_probes(probes())
    assert await state.probes(version) == probes()
    assert await state.probes(version + 1) is None
    await state.leave_probes(replace(probes(), version=version + 1))
    assert await state.probes(version) is None  # an earlier version's make way
    assert await state.probes(version + 1) == replace(probes(), version=version + 1)
    for damaged in ("{", "[]", '{"version": 1}', "9" * 5000):
        await redis.hset(Keys(run_name)("probes"), str(version), damaged)
        assert await state.probes(version) is None
    await state.close()
