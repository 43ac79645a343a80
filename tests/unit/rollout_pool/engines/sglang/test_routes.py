"""Experts of tokens, from a server that answers in SGLang's form to the column of a trajectory."""

from __future__ import annotations

import asyncio
import base64

import numpy as np
import pytest

from buffer.types import SamplingParams, VersionSpan
from rollout_pool.engines.sglang.routes import read_routes
from rollout_pool.episodes.episode import EpisodeRequest, add_turn
from rollout_pool.sampling.engine_client import SampleRefused
from rollout_pool.sampling.kept_tokens import GroupTokens, KeptSample, _digest
from rollout_pool.sampling.sample import Priority, Routes
from tests.support.rollout import make_sample, spans, until


@pytest.fixture
async def asking(fake):
    client = fake.client("engine-0", returns_routes=True)
    yield client
    await client.close()


def experts(start, end, first=0):
    """The experts of tokens [start, end) of a request: the place of each, and that and 1."""
    return [[first + place, first + place + 1] for place in range(start, end)]


def table(start, end, first=0):
    return np.array(experts(start, end, first), "<i4").tobytes()


def parts(sample):
    return [(routes.start, routes.experts.tolist()) for routes in sample.routes]


async def ask(client, sample):
    await client.generate_tokens(sample, f"{sample.sample_id}.1!")


async def test_experts_of_all_tokens_but_the_last_come_at_the_end(fake, asking):
    fake.says(output_ids=[11, 12, 2], routed_experts=table(0, 5))
    sample = make_sample()
    await ask(asking, sample)
    [body] = fake.bodies("/generate")
    assert body["return_routed_experts"] is True and body["routed_experts_start_len"] == 0
    assert parts(sample) == [(0, experts(0, 5))]  # of three tokens of the prompt and two more
    assert sample.routes[0].experts.dtype == np.uint8


async def test_nothing_is_asked_for_where_it_is_off_or_nothing_is_trained(fake, asking, client):
    await ask(client, make_sample(0))
    await ask(asking, make_sample(1, priority=Priority.evaluation))
    assert not any("return_routed_experts" in body for body in fake.bodies("/generate"))


async def test_request_that_goes_on_brings_the_experts_of_its_own_tokens(fake, asking):
    ids, ends = iter([[11, 12], [13, 2]]), iter(["abort", "stop"])
    tables = iter([table(0, 4), table(4, 6, 50)])
    fake.says(
        output_ids=lambda rid: next(ids),
        finish_type=lambda rid: next(ends),
        routed_experts=lambda rid: next(tables),
    )
    sample = make_sample()
    asked = asyncio.create_task(ask(asking, sample))
    await until(lambda: asking._held)  # until the commit that has ended it is done
    asking.note_version(9)
    await asked
    assert sample.output_ids == [11, 12, 13, 2]
    assert [body["routed_experts_start_len"] for body in fake.bodies("/generate")] == [0, 4]
    assert parts(sample) == [(0, experts(0, 4)), (4, experts(4, 6, 50))]


async def test_samples_of_a_call_each_keep_theirs_though_it_has_one_start(fake, asking):
    fake.says(output_ids=[11, 2], routed_experts=table(0, 4))
    late = make_sample(1, first_route=2)
    early = make_sample(0)
    await asyncio.gather(ask(asking, early), ask(asking, late))
    [body] = fake.bodies("/generate")
    assert body["routed_experts_start_len"] == 0
    assert parts(early) == [(0, experts(0, 4))] and parts(late) == [(2, experts(2, 4))]


@pytest.mark.parametrize(("num_retractions", "start"), [(0, 0), (1, 5)])
async def test_experts_that_newer_weights_have_chosen_again_are_not_those_of_the_token(
    fake, asking, num_retractions, start
):
    """The last token of the older version is first processed by the newer one."""
    fake.says(
        output_ids=[11, 12, 13, 14, 2],
        versions=[("7", 0, 3), ("8", 3, 5)],
        num_retractions=num_retractions,
        routed_experts=table(0, 7),
    )
    sample = make_sample()
    await ask(asking, sample)
    assert spans(sample) == [(7, 0, 3), (8, 3, 5)]
    assert parts(sample) == [(start, experts(start, 7))]


async def test_retraction_under_the_same_weights_changes_nothing(fake, asking):
    fake.says(num_retractions=2, routed_experts=table(0, 5))
    await ask(asking, sample := make_sample())
    assert parts(sample) == [(0, experts(0, 5))]


async def test_completion_without_experts_is_refused_and_an_abort_may_have_none(fake, asking):
    with pytest.raises(SampleRefused, match=r"engine-0 returned .* without the experts .*=false"):
        await ask(asking, make_sample())
    fake.says(output_ids=[11], finish_type="abort")
    sample = make_sample(1)
    asked = asyncio.create_task(ask(asking, sample))
    await until(lambda: asking._held)
    asked.cancel()
    await asyncio.wait([asked])
    assert not sample.routes and sample.next_route == 3


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ([[1, 2]] * 3, r"6 numbers of experts for 4 tokens"),
        ([], r"0 numbers of experts for 4 tokens"),
        ([[1, 2], [0, 0], [1, 2], [2, 1]], "tokens without experts.*remove --moe-runner-backend"),
        ([[1, 2], [-1, 2], [1, 2], [2, 1]], "tokens without experts"),
    ],
)
def test_table_of_another_size_or_with_gaps_is_refused(numbers, message):
    text = base64.b64encode(np.array(numbers, "<i4").tobytes()).decode()
    meta = {"routed_experts": text, "finish_reason": {"type": "stop"}}
    with pytest.raises(ValueError, match=message):
        read_routes(meta, 4)


def test_more_than_256_experts_take_two_bytes():
    text = base64.b64encode(np.array([[1, 2], [3, 256]], "<i4").tobytes()).decode()
    found = read_routes({"routed_experts": text}, 2)
    assert found.dtype == np.uint16 and found.tolist() == [[1, 2], [3, 256]]


def routed_sample(**fields):
    """Three tokens of the prompt, four of the completion."""
    sample = make_sample(output_ids=[11, 12, 13, 14], logprobs=[-1.0] * 4, **fields)
    sample.note_processed()
    sample.routes.append(Routes(0, np.array(experts(0, 6), np.uint8)))
    return sample


def test_tokens_that_are_cut_lose_their_experts_and_the_last_one_left_is_processed_again():
    sample = routed_sample()
    sample.cut(2)
    assert parts(sample) == [(0, experts(0, 4))] and sample.next_route == 4
    sample.cut(2)
    assert sample.next_route == 4
    sample.drop_tokens()
    assert not sample.routes and sample.next_route == 0


def test_tokens_that_are_added_are_processed_by_the_next_request():
    sample = routed_sample()
    sample.version_spans.append(spans_of(4))
    sample.extend_last([20, 21])
    assert sample.next_route == 6


def spans_of(length):
    return VersionSpan(version=0, start=0, end=length)


def test_sample_with_kept_tokens_knows_no_experts_of_them():
    tokens = GroupTokens("g", {})
    sample = make_sample()
    kept = KeptSample(prompt=_digest(sample), chain="c", output_ids=[11, 12], logprobs=[-1.0] * 2)
    kept.version_spans.append(spans_of(2))
    tokens._found[sample.sample_id.removeprefix("g.")] = kept
    tokens.begin(sample)
    assert sample.output_ids == [11, 12] and sample.next_route == 4


def test_later_turn_asks_from_the_last_token_of_the_one_before():
    first, branches = routed_sample(finish_reason="stop"), []
    first.version_spans.append(spans_of(4))
    add_turn(branches, first)
    request = EpisodeRequest(session="s", sampling=SamplingParams())
    said = [*first.prompt, *first.output_ids, 30, 31]
    assert request.new_sample(1, said, 8, branches=branches).first_route == 6
    assert request.new_sample(2, [1, 2, 3], 8, branches=branches).first_route == 0
    branches[0].routes.clear()  # as of a turn whose engine died
    assert request.new_sample(3, said, 8, branches=branches).first_route == 6
