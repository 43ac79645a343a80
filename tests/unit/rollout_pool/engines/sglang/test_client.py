"""The client against a server that answers in SGLang's form."""

from __future__ import annotations

import asyncio
import math
import re
import threading
from array import array
from dataclasses import replace

import pytest

from buffer.probes import Probes, beginnings
from buffer.types import SamplingParams, VersionSpan
from configs.choices import PauseMode
from rollout_pool.engines.sglang import batching
from rollout_pool.engines.sglang.batching import Tokens, generate_body, new_tokens
from rollout_pool.engines.sglang.client import SGLangClient
from rollout_pool.sampling.engine_client import BadLogprobs, EngineError, EngineLoad, SampleRefused
from rollout_pool.sampling.sample import Priority, Sample
from tests.support.rollout import make_sample, spans, until


async def ask(client, sample, on_arrival=None):
    """The sample, or what was raised."""
    try:
        await client.generate_tokens(sample, f"{sample.sample_id}.1!", on_arrival)
    except (EngineError, BadLogprobs) as error:
        return error
    return sample


async def ask_all(client, samples):
    return await asyncio.gather(*(ask(client, sample) for sample in samples))


async def test_samples_of_one_moment_share_a_call_and_each_gets_its_own_tokens(fake, client):
    fake.says(
        output_ids=lambda rid: [int(rid[2]) + 10, 2], logprobs=[-1.5, -0.25], finish_type="stop"
    )
    samples = [make_sample(i, max_new_tokens=8 + i) for i in range(3)]
    await ask_all(client, samples)
    assert [sample.output_ids for sample in samples] == [[10, 2], [11, 2], [12, 2]]
    assert all(sample.logprobs == [-1.5, -0.25] for sample in samples)
    assert all(sample.finish_reason == "stop" for sample in samples)
    [body] = fake.bodies("/generate")
    assert body["input_ids"] == [[5, 6, 7]] * 3
    assert body["rid"] == ["g.0.1!", "g.1.1!", "g.2.1!"]
    assert body["return_logprob"] and body["stream"]
    assert [params["max_new_tokens"] for params in body["sampling_params"]] == [8, 9, 10]


async def test_each_request_has_its_own_seed_where_the_server_needs_one(fake, client):
    await ask(client, make_sample())
    seeded = fake.client("engine-0", needs_seeds=True)
    for _ in range(2):
        await ask_all(seeded, [make_sample(i) for i in range(8)])
    await seeded.close()
    plain, *both = fake.bodies("/generate")
    assert "sampling_seed" not in plain["sampling_params"][0]
    first, again = ([of_one["sampling_seed"] for of_one in b["sampling_params"]] for b in both)
    assert first == again and len(set(first)) == 8


async def test_all_sampling_parameters_are_sent(fake, client):
    params = {
        "temperature": 0.0,
        "top_p": 0.9,
        "top_k": 40,
        "min_p": 0.05,
        "frequency_penalty": 0.1,
        "presence_penalty": 0.2,
        "repetition_penalty": 1.1,
    }
    await ask(client, make_sample(sampling=SamplingParams(**params)))
    [body] = fake.bodies("/generate")
    assert body["sampling_params"] == [{**params, "max_new_tokens": 8, "stream_interval": 64}]


async def test_sample_continues_from_its_tokens(fake, client):
    fake.version = "9"
    fake.says(
        output_ids=[20, 21, 2],
        versions=[("8", 0, 1), ("9", 1, 2), ("9", 2, 3)],
        parts=[1, 1],
        labels=["8", "9"],
    )
    sample = make_sample(
        output_ids=[10, 11],
        logprobs=[-1.0, -2.0],
        version_spans=[
            VersionSpan(version=7, start=0, end=1),
            VersionSpan(version=8, start=1, end=2),
        ],
    )
    await ask(client, sample)
    [body] = fake.bodies("/generate")
    assert body["input_ids"] == [[5, 6, 7, 10, 11]]
    assert body["sampling_params"][0]["max_new_tokens"] == 6
    assert sample.output_ids == [10, 11, 20, 21, 2]
    assert sample.logprobs == [-1.0, -2.0, -0.5, -0.5, -0.5]
    assert spans(sample) == [(7, 0, 1), (8, 1, 3), (9, 3, 5)]


async def test_tokens_of_a_lost_engine_are_kept_and_mixed_ones_count_as_the_older(fake, client):
    fake.says(
        output_ids=[1, 2, 3, 4, 5, 6, 7],
        parts=[1, 2, 2, 2],
        labels=["7", "7", "8", "8"],
        breaks=True,
    )
    sample = make_sample()
    error = await ask(client, sample)
    assert isinstance(error, EngineError) and "engine-0 did not answer /generate" in str(error)
    assert sample.output_ids == [1, 2, 3, 4, 5, 6, 7] and sample.finish_reason is None
    assert spans(sample) == [(7, 0, 5), (8, 5, 7)]
    assert sample.num_wasted == 1  # it had room for no more than that


async def test_closed_port_is_an_error_that_names_the_engine(fake, client):
    fake.stop()
    error = await ask(client, make_sample())
    assert isinstance(error, EngineError) and "engine-0 did not answer /generate" in str(error)


async def test_first_tokens_that_come_late_count_as_the_version_known_before(fake, client):
    client.note_version(6)
    fake.says(output_ids=[1, 2, 3, 4], parts=[3], labels=["8"], breaks=True)
    sample = make_sample()
    await ask(client, sample)
    assert spans(sample) == [(6, 0, 3)]


@pytest.mark.parametrize(
    ("num_gathered", "joined"), [(5, []), (4, []), (2, []), (0, []), (3, [4, 5]), (2, [3])]
)
async def test_abort_from_the_queue_repeats_nothing_and_loses_nothing(num_gathered, joined):
    pairs = {token: [-0.1 * token, token, None] for token in range(1, 6)}
    meta = {
        "finish_reason": {"type": "abort"},
        "completion_tokens": 5,
        "output_token_logprobs": [*(pairs[token] for token in joined), *pairs.values()],
    }
    answer = {"output_ids": [*joined, 5], "meta_info": meta}
    new = range(num_gathered + 1, 6)
    expected = Tokens(list(new), [pairs[token][0] for token in new])
    assert new_tokens("engine-0", answer, num_gathered) == expected


def truncated(**fields):
    """An answer of two tokens, each drawn among a few."""
    meta = {
        "finish_reason": None,
        "completion_tokens": 2,
        "output_token_logprobs": [[-1.5, 9, None], [-0.5, 4, None]],
        "output_token_sampling_mask": [[9, 3], [4]],
        "output_token_sampling_logprobs": [-1.0, 0.0],
        **fields,
    }
    return {"output_ids": [9, 4], "meta_info": meta}


async def test_log_probabilities_of_truncated_sampling_are_those_among_the_candidates():
    found = new_tokens("engine-0", truncated(), 0, has_candidates=True)
    assert found == Tokens([9, 4], [-1.0, 0.0], [array("i", [9, 3]), array("i", [4])])
    assert new_tokens("engine-0", truncated(), 0) == Tokens([9, 4], [-1.5, -0.5])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"output_token_sampling_mask": [[3, 5], [4]]}, r"token 0 is 9, which is not among its ca"),
        ({"output_token_sampling_mask": [[9], None]}, "token 1 is 4, which is not among"),
        ({"output_token_sampling_mask": [[9]]}, "2 tokens came with 1 sets of candidates and 2"),
        ({"output_token_sampling_mask": None}, "2 tokens came with 0 sets"),
        ({"output_token_sampling_logprobs": [-1.0, None]}, "log-probability of token 1 is None"),
    ],
)
async def test_tokens_without_usable_candidates_are_refused(fields, message):
    with pytest.raises(BadLogprobs, match=message):
        new_tokens("engine-0", truncated(**fields), 0, has_candidates=True)


async def test_candidates_are_requested_for_rollouts_with_truncated_sampling_alone():
    top_k = SamplingParams(top_k=20)
    samples = [
        make_sample(0, sampling=top_k),
        make_sample(1),
        make_sample(2, sampling=top_k, priority=Priority.evaluation),
    ]
    named = {sample.sample_id: sample for sample in samples}
    assert generate_body(named, None, 64)["return_sampling_mask"] == [True, False, False]
    assert "return_sampling_mask" not in generate_body({"a": samples[1]}, None, 64)


async def test_tokens_lost_in_transit_are_detected():
    meta = {
        "finish_reason": None,
        "completion_tokens": 6,
        "output_token_logprobs": [[-1.0, 9, None]],
    }
    with pytest.raises(SampleRefused, match="4 tokens and 1 more do not make the 6"):
        new_tokens("engine-0", {"output_ids": [9], "meta_info": meta}, 4)


@pytest.mark.parametrize("version", ["default", "", "-1", "1.0", "0x1", "\u0661"])
@pytest.mark.parametrize("says_first_token", [False, True])
async def test_version_that_nobody_published_is_refused(fake, client, version, says_first_token):
    fake.version = version
    fake.says(says_first_token=says_first_token)
    sample = make_sample()
    error = await ask(client, sample)
    assert isinstance(error, SampleRefused) and "which no trainer published" in str(error)
    assert sample.output_ids == [] and sample.num_wasted > 0


@pytest.mark.parametrize(
    "logprobs",
    [[-0.5, None, -0.5], [-0.5, float("nan"), -0.5], [-0.5, float("-inf"), -0.5], [-0.5, 0.1, 0.0]],
)
async def test_untrainable_logprobs_are_refused_for_their_sample_alone(fake, client, logprobs):
    fake.says(logprobs=lambda rid: logprobs if rid == "g.0.1!" else None)
    samples = [make_sample(i) for i in range(2)]
    refused, good = await ask_all(client, samples)
    assert isinstance(refused, BadLogprobs) and good is samples[1]
    assert (samples[0].output_ids, samples[0].logprobs) == ([11], [-0.5])  # those were good
    assert samples[0].num_wasted == 2
    num_finite = sum(one is not None and math.isfinite(one) for one in logprobs)
    assert client.counters.num_logprobs == {0: 6}
    assert +client.counters.num_not_finite == ({0: 3 - num_finite} if num_finite < 3 else {})


@pytest.mark.parametrize(
    ("reply", "error", "message", "num_kept"),
    [
        ({"finish_type": "abort"}, EngineError, "aborted a sample 4 times at version 0", 12),
        ({"finish_type": "abort", "abort_status": 500}, SampleRefused, "aborted a sample", 1),
        (
            {"finish_type": None},
            EngineError,
            "engine-0 ended a response before 1 of its samples",
            1,
        ),
        ({"logprobs": [-0.5]}, BadLogprobs, "of other tokens", 1),
        ({"versions": [("1", 0, 2)]}, SampleRefused, "do not cover 3 tokens", 1),
        ({"versions": [("1", 1, 3)]}, SampleRefused, "do not cover 3 tokens", 1),
        ({"versions": [("1", 0, 1), ("2", 2, 3)]}, SampleRefused, "do not cover 3 tokens", 1),
    ],
)
async def test_broken_answer_is_an_error_and_earlier_tokens_are_kept(
    fake, client, monkeypatch, reply, error, message, num_kept
):
    monkeypatch.setattr(batching, "HELD_S", 0.05)
    fake.says(**reply)
    sample = make_sample(max_new_tokens=99)
    raised = await ask(client, sample)
    assert isinstance(raised, error) and message in str(raised)
    assert len(sample.output_ids) == num_kept and sample.finish_reason is None


async def test_sample_whose_counts_cannot_be_read_ends_nevertheless(fake, client):
    fake.says(num_retractions=None)
    sample = make_sample()
    async with asyncio.timeout(60):
        assert await ask(client, sample) is sample
    assert sample.finish_reason == "stop" and len(sample.output_ids) == 3


async def test_refused_call_is_an_error_with_the_engines_words(fake, client):
    fake.status = 503
    error = await ask(client, make_sample())
    assert isinstance(error, EngineError) and not isinstance(error, SampleRefused)
    assert "engine-0 refused /generate (503)" in str(error) and "out of order" in str(error)


async def test_one_bad_sample_does_not_fail_those_that_shared_its_call(fake, client):
    fake.bad_tokens = {99}
    samples = [make_sample(i, prompt=[5, 99] if i == 1 else [5, 6]) for i in range(4)]
    ends = await ask_all(client, samples)
    assert isinstance(ends[1], SampleRefused) and "too long" in str(ends[1])
    assert [samples[i].finish_reason for i in (0, 2, 3)] == ["stop"] * 3


async def test_silence_longer_than_the_limit_is_an_error_but_a_long_answer_is_not(
    advance_clock, fake
):
    client = fake.client("engine-0", request_timeout_s=60.0)
    fake.says(never_ends=True)
    asking = asyncio.create_task(ask(client, sample := make_sample()))
    await until(lambda: sample.output_ids)
    advance_clock(61.0)
    assert "engine-0 did not answer /generate: Timeout on reading" in str(await asking)
    samples, may_end = [make_sample(i) for i in range(8)], [threading.Event() for _ in range(8)]
    fake.says(may_end=lambda rid: may_end[int(rid[2])])
    asking = asyncio.create_task(ask_all(client, samples))
    await until(lambda: all(sample.output_ids for sample in samples))
    for sample, event in zip(samples, may_end, strict=True):
        advance_clock(20.0)  # 160 s in all
        event.set()
        await until(lambda sample=sample: sample.finish_reason)
    assert await asking == samples
    await client.close()


async def test_cancelled_samples_are_stopped_at_the_engine(fake, client):
    fake.says(never_ends=lambda rid: rid != "g.0.1!")
    samples = [make_sample(i) for i in range(3)]
    task = asyncio.create_task(ask_all(client, samples))
    await until(lambda: samples[0].finish_reason is not None)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task  # as soon as one of them has ended; the others still send their stops
    await until(lambda: sorted(fake.aborted) == ["g.1.1!", "g.2.1!"])


async def test_stopped_sample_has_all_its_tokens_with_exact_versions_and_others_go_on(fake, client):
    fake.says(
        output_ids=[1, 2, 3, 4, 5],
        parts=[1, 1],
        never_ends=lambda rid: rid == "g.1.1!",
        at_abort=[8, 9],
        versions=lambda rid: [("0", 0, 3), ("1", 3, 4)] if rid == "g.1.1!" else None,
        delay_s=0.5,
    )
    samples = [make_sample(1), make_sample(10)]
    tasks = [asyncio.create_task(ask(client, sample)) for sample in samples]
    await until(lambda: len(samples[0].output_ids) == 2)
    client.stop("g.1.1!")
    client.stop("g.1.1!")
    await asyncio.gather(*tasks)
    assert samples[0].output_ids == [1, 2, 8, 9] and spans(samples[0]) == [(0, 0, 3), (1, 3, 4)]
    assert samples[0].finish_reason is None and samples[0].num_wasted == 0
    assert samples[1].output_ids == [1, 2, 3, 4, 5] and samples[1].finish_reason == "stop"
    assert fake.aborted == ["g.1.1!"]


async def test_stop_that_overtakes_its_request_is_repeated(fake, client):
    fake.num_lost_aborts = 1
    fake.says(never_ends=True)
    sample = make_sample()
    task = asyncio.create_task(ask(client, sample))
    await until(lambda: sample.output_ids)
    client.stop("g.0.1!")
    assert await task is sample
    assert fake.aborted == ["g.0.1!"] * 2


@pytest.fixture
async def sole(fake):
    client = fake.client("engine-0", is_only_client=True)
    yield client
    await client.close()


async def running(fake, client, count):
    fake.says(
        output_ids=[4, 5],
        never_ends=lambda rid: not rid.startswith("late"),
        at_abort=[9],
        delay_s=0.4,
    )
    samples = [make_sample(i) for i in range(count)]
    asking = asyncio.create_task(ask_all(client, samples))
    await until(lambda: all(sample.output_ids for sample in samples))
    return samples, asking


async def test_stop_of_all_samples_is_one_call_and_a_sample_sent_meanwhile_goes_on(fake, sole):
    samples, asking = await running(fake, sole, 40)
    fake.slow["/abort_request"] = 0.2
    for sample in samples:
        sole.stop(f"{sample.sample_id}.1!")
    await until(lambda: fake.bodies("/abort_request"))
    late = make_sample(sample_id="late")
    await asyncio.gather(asking, ask(sole, late))
    assert fake.bodies("/abort_request") == [{"abort_all": True}]
    assert all(sample.output_ids == [4, 9] and not sample.finish_reason for sample in samples)
    assert late.output_ids == [4, 5] and late.finish_reason == "stop"
    assert len(fake.bodies("/generate")) == 40 // batching.MAX_SAMPLES + 2


async def test_stop_spares_whatever_else_runs_at_the_engine(fake, client, sole):
    samples, asking = await running(fake, sole, 3)
    for sample in samples[:2]:
        sole.stop(f"{sample.sample_id}.1!")
    await until(lambda: len(fake.aborted) == 2)
    assert not asking.done()
    sole.stop("g.2.1!")
    await asking
    samples, asking = await running(fake, client, 3)  # it may not be the only client
    for sample in samples:
        client.stop(f"{sample.sample_id}.1!")
    await asking
    assert len(fake.aborted) == len(fake.bodies("/abort_request")) == 6


async def test_stop_of_all_that_overtakes_a_request_is_repeated_for_it(fake, sole):
    samples, asking = await running(fake, sole, 3)
    fake.num_lost_aborts = 1
    for sample in samples:
        sole.stop(f"{sample.sample_id}.1!")
    await asking
    assert fake.bodies("/abort_request") == [{"abort_all": True}] * 2


async def test_sample_that_is_stopped_before_it_is_sent_is_never_sent(fake, client):
    sample = make_sample()
    task = asyncio.create_task(ask(client, sample))
    await asyncio.sleep(0)
    client.stop("g.0.1!")
    assert await task is sample and sample.output_ids == []
    await asyncio.sleep(0.05)
    assert fake.calls == []


# Samples of one group ----------------------------------------------------------------------------


@pytest.fixture
async def sharing(fake):
    client = fake.client("engine-0", has_prefix_cache=True)
    yield client
    await client.close()


def siblings(count, first=0, length=batching.LONG_PREFIX):
    numbers = range(first, first + count)
    return [make_sample(number, prompt=[5] * length, group="g") for number in numbers]


def calls_of(fake):
    """The numbers of the samples in each call."""
    return [[int(rid.split(".")[1]) for rid in body["rid"]] for body in fake.bodies("/generate")]


async def test_one_sample_of_a_group_goes_ahead_until_its_prompt_is_cached(fake, sharing):
    fake.says(never_ends=lambda rid: rid == "g.0.1!")
    leader, *others = siblings(4)
    leading = asyncio.create_task(ask(sharing, leader))
    ended = await ask_all(sharing, others)  # while the leader is still decoding
    assert [sample.finish_reason for sample in ended] == ["stop"] * 3
    await ask_all(sharing, siblings(2, first=4))
    assert calls_of(fake) == [[0], [1, 2, 3], [4, 5]]
    sharing.stop("g.0.1!")
    await leading
    sharing.note_version(1)  # with other weights the prompt is computed anew
    await ask_all(sharing, siblings(3, first=6))
    assert calls_of(fake)[3:] == [[6], [7, 8]]


async def test_next_sample_of_a_group_goes_ahead_if_the_first_gets_no_token(fake, sharing):
    fake.says(says_first_token=lambda rid: rid != "g.0.1!", never_ends=lambda rid: rid == "g.0.1!")
    asking = asyncio.create_task(ask_all(sharing, siblings(4)))
    await until(lambda: calls_of(fake) == [[0]])
    sharing.stop("g.3.1!")  # it waits
    sharing.stop("g.0.1!")
    ended = await asking
    assert [sample.finish_reason for sample in ended] == [None, "stop", "stop", None]
    assert calls_of(fake) == [[0], [1], [2]]


async def test_samples_of_a_group_fail_with_the_engine_not_with_their_first(fake, sharing):
    fake.status = 500
    errors = await ask_all(sharing, siblings(3))
    assert all(isinstance(error, EngineError) for error in errors)
    assert calls_of(fake) == [[0], [1], [2]]


async def test_close_ends_the_samples_that_wait_for_the_first_of_their_group(sharing, monkeypatch):
    begun = asyncio.Event()

    async def never_answers(body):
        begun.set()
        await asyncio.Event().wait()
        yield body

    monkeypatch.setattr(sharing, "_post_generate", never_answers)
    asking = asyncio.create_task(ask_all(sharing, siblings(3)))
    await begun.wait()
    await sharing.close()
    late = asyncio.create_task(ask(sharing, make_sample(9)))
    async with asyncio.timeout(60):
        errors = [*await asking, await late]
    assert [type(error) for error in errors] == [EngineError] * 4


@pytest.mark.parametrize(
    ("has_cache", "length"), [(False, 10 * batching.LONG_PREFIX), (True, batching.LONG_PREFIX - 1)]
)
async def test_samples_of_a_group_share_a_call_where_waiting_gains_nothing(fake, has_cache, length):
    client = fake.client("engine-0", has_prefix_cache=has_cache)
    await ask_all(client, siblings(4, length=length))
    assert calls_of(fake) == [[0, 1, 2, 3]]
    await client.close()


# Samples that a commit ends ----------------------------------------------------------------------


@pytest.fixture
def taken_back(fake, client):
    """A sample of three tokens that a commit has ended, and the task that asks for it."""
    fake.says(output_ids=[11, 12], parts=[2], at_abort=[13], never_ends=lambda rid: rid == "g.0.1!")

    async def take() -> tuple[Sample, asyncio.Task[object]]:
        sample = make_sample()
        asking = asyncio.create_task(ask(client, sample))
        await until(lambda: sample.output_ids == [11, 12])
        await client.pause(PauseMode.resubmit)
        await until(lambda: sample.output_ids == [11, 12, 13])
        return sample, asking

    return take


async def test_sample_that_a_commit_ended_goes_on_under_the_next_version(fake, client, taken_back):
    sample, asking = await taken_back()
    fake.says(output_ids=[14, 2])
    client.note_version(0)  # known for long
    assert len(fake.bodies("/generate")) == 1
    fake.version = "1"
    client.note_version(1)
    assert await asking is sample and sample.finish_reason == "stop"
    assert sample.output_ids == [11, 12, 13, 14, 2]
    assert spans(sample) == [(0, 0, 3), (1, 3, 5)]
    first, again = fake.bodies("/generate")
    assert again["input_ids"] == [[*first["input_ids"][0], 11, 12, 13]]
    most = [body["sampling_params"][0]["max_new_tokens"] for body in (first, again)]
    assert most[1] == most[0] - 3
    assert (sample.num_failures, sample.num_wasted) == (0, 0)


@pytest.mark.parametrize(
    ("last", "limit", "finish"), [(2, 99, "stop"), (13, 3, "length"), (2, 3, "stop")]
)
@pytest.mark.parametrize("ends", ["commit", "stop"])
async def test_last_token_that_came_with_the_abort_ends_its_sample(fake, last, limit, finish, ends):
    client = fake.client("engine-0", end_tokens={2})
    fake.says(output_ids=[11, 12], parts=[2], at_abort=[last], never_ends=True)
    sample = make_sample(max_new_tokens=limit)
    asking = asyncio.create_task(ask(client, sample))
    await until(lambda: sample.output_ids == [11, 12])
    if ends == "commit":
        await client.pause(PauseMode.resubmit)
    else:
        client.stop("g.0.1!")
    assert await asking is sample and sample.finish_reason == finish
    assert sample.output_ids == [11, 12, last] and spans(sample) == [(0, 0, 3)]
    assert len(fake.bodies("/generate")) == 1
    await client.close()


async def test_sample_that_commits_of_one_version_ended_thrice_is_no_failure_of_its_engine(
    fake, client, monkeypatch
):
    monkeypatch.setattr(batching, "HELD_S", 0.05)
    first, ends = "g.0.1!", iter(["abort"] * 2)  # two more fail after that
    fake.says(
        output_ids=lambda rid: [11, 12] if rid == first else [14],
        parts=lambda rid: [2] if rid == first else None,
        at_abort=lambda rid: [13] if rid == first else [],
        never_ends=lambda rid: rid == first,
        finish_type=lambda rid: "stop" if rid == first else next(ends, "stop"),
    )
    sample = make_sample()
    asking = asyncio.create_task(ask(client, sample))
    await until(lambda: sample.output_ids == [11, 12])
    await client.pause(PauseMode.resubmit)
    assert await asking is sample and sample.finish_reason == "stop"
    assert sample.output_ids == [11, 12, 13, 14, 14, 14]


async def test_sample_between_two_versions_is_stopped_without_a_request(fake, client, taken_back):
    sample, asking = await taken_back()
    client.stop("g.0.1!")
    assert await asking is sample and sample.finish_reason is None
    _, asking = await taken_back()
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    client.note_version(1)
    assert fake.aborted == [] and len(fake.bodies("/generate")) == 2


async def test_stop_at_the_moment_at_which_a_commit_ended_a_sample_is_kept(fake, client):
    fake.says(output_ids=[11, 12], parts=[2], at_abort=[13], never_ends=lambda rid: rid == "g.0.1!")
    sample = make_sample()

    def stop_at_the_last() -> None:
        if len(sample.output_ids) == 3:
            client.stop("g.0.1!")

    asking = asyncio.create_task(ask(client, sample, stop_at_the_last))
    await until(lambda: sample.output_ids == [11, 12])
    await client.pause(PauseMode.resubmit)
    await until(lambda: len(sample.output_ids) >= 3)
    client.note_version(1)
    assert await asking is sample and sample.finish_reason is None
    assert sample.output_ids == [11, 12, 13] and len(fake.bodies("/generate")) == 1


async def test_callback_that_raises_fails_only_its_own_sample(fake, client):
    fake.says(never_ends=lambda rid: rid == "g.0.1!")

    def raise_it():
        raise ZeroDivisionError

    bad = asyncio.create_task(ask(client, make_sample(0), raise_it))
    good = asyncio.create_task(ask(client, make_sample(1)))
    assert (await good).finish_reason == "stop"
    with pytest.raises(ZeroDivisionError):
        await bad
    await until(lambda: fake.aborted == ["g.0.1!"])


async def test_prefixes_are_keyed_by_the_latest_version_seen(fake):
    client = fake.client("engine-0", keys_prefix_by_version=True)
    fake.version = "12"
    await ask(client, make_sample(0))
    await ask(client, make_sample(1))
    client.note_version(14)
    client.note_version(13)
    await ask(client, make_sample(2))
    assert [body["extra_key"] for body in fake.bodies("/generate")] == ["v0", "v12", "v14"]
    await client.close()


async def test_preemptions_are_counted_and_pauses_for_commits_are_not(fake, client):
    fake.says(num_retractions=3, versions=[("0", 0, 1), ("1", 1, 2), ("2", 2, 3)])
    await ask(client, make_sample())
    assert client.counters.num_preemptions == 1 and client.counters.queue_s == 0.0
    # Paused before its first token: its versions do not show it.
    fake.says(num_retractions=2, parts=[], delay_s=0.3)
    asking = asyncio.create_task(ask(client, make_sample(3)))
    await until(lambda: len(fake.bodies("/generate")) == 2)
    client.note_version(4)  # two commits, heard of at once
    await asking
    assert client.counters.num_preemptions == 1
    fake.says(queue_s=0.25)  # of a server with --enable-metrics
    await ask(client, make_sample(1))
    fake.says(queue_s=-1e6)  # as for one that was aborted in the queue
    await ask(client, make_sample(2))
    assert client.counters.queue_s == 0.25


async def test_prompts_are_scored_by_the_version_that_is_asked_for(fake, client):
    logprobs = [[-1.0] * (length - start) for length, start in beginnings(600)]
    probes = Probes(version=0, text=[5] * 600, logprobs=logprobs, most=0.1)
    assert (await client.compare(probes)).mean == 0
    [body] = fake.bodies("/generate")
    assert body["logprob_start_len"] == [0, 0, 0, 0, 0, 43, 343]
    assert body["extra_key"] == "probes of 0"
    with pytest.raises(EngineError, match=r"serves \{'0'\} and not version 1"):
        await client.compare(replace(probes, version=1))
    fake.prompt_logprob = None  # SGLang's word for NaN
    assert math.isnan((await client.compare(probes)).mean)


async def test_load_is_reported_or_none(fake, client):
    assert await client.load() is None
    fake.load = {
        "num_running_reqs": 5,
        "num_waiting_reqs": 2,
        "num_total_tokens": 900,
        "max_total_num_tokens": 2000,
        "token_usage": 0.4,
    }
    assert await client.load() == EngineLoad(
        num_running=5, num_queued=2, num_tokens=900, capacity=2000, kv_usage=0.4
    )


@pytest.mark.parametrize("body", ["<p>It works</p>", '{"status": "up"}', "[]"])
async def test_load_from_a_program_that_got_the_engines_port_is_an_error(body):
    async def answer(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        head = f"HTTP/1.1 200 OK\r\nContent-Length: {len(body)}\r\nConnection: close"
        writer.write(f"{head}\r\n\r\n{body}".encode())
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        client = SGLangClient("engine-0", url, key="a-key", request_timeout_s=60.0)
        words = f"a server other than engine-0 answers at {url}/v1/loads?include=core: {body}"
        with pytest.raises(EngineError, match=re.escape(words)):
            await client.load()
        await client.close()


async def test_weight_calls_carry_what_the_server_needs_and_never_a_flush(fake, client):
    update = {"flush_cache": False, "abort_all_requests": False, "weight_version": "3"}
    await client.pause(PauseMode.retract)
    await client.update_from_disk("/dev/shm/staged", 3, timeout_s=60)
    await client.update_from_ipc({"GPU-1": "ipc://@a"}, 3, timeout_s=60)
    await client.resume()
    assert fake.calls == [
        ("/pause_generation", {"mode": "retract"}),
        (
            "/update_weights_from_disk",
            {"model_path": "/dev/shm/staged", "load_format": "safetensors", **update},
        ),
        (
            "/update_weights_from_ipc",
            {"zmq_handles": {"GPU-1": "ipc://@a"}, "flush_cache": False, "weight_version": "3"},
        ),
        ("/continue_generation", {}),
    ]
    assert await client.served_version() == 3


async def test_requests_that_come_in_while_an_engine_drains_keep_their_cache(
    fake, client, monkeypatch
):
    is_empty = iter([True, False, True, True])  # some came in before the first pause

    async def flush_cache(wait_s=0.0):
        return next(is_empty)

    monkeypatch.setattr(client, "_flush_cache", flush_cache)
    assert await client.drain(60)
    pause = ("/pause_generation", {"mode": "in_place"})
    assert fake.calls == [pause, ("/continue_generation", {}), pause]


async def test_server_with_another_name_is_refused(fake, client):
    assert await client.is_ready("fake", timeout_s=60)
    with pytest.raises(EngineError, match="a server other than engine-0"):
        await client.is_ready("ours", timeout_s=60)
    fake.is_ready = False
    assert not await client.is_ready("fake", timeout_s=60)


@pytest.mark.parametrize(
    "fields",
    [{"prompt": [5, 264]}, {"prompt": [-1, 5]}, {"output_ids": [264]}, {"prompt": [10**30]}],
)
async def test_sample_with_a_token_that_would_crash_the_engine_is_not_sent(fake, fields):
    client = fake.client("engine-0", vocab_size=264)
    bad, good = make_sample(0, **fields), make_sample(1, prompt=[0, 263])
    error, ended = await ask_all(client, [bad, good])
    await client.close()
    assert isinstance(error, SampleRefused) and "engine-0: not sent" in str(error)
    assert ended is good and good.finish_reason is not None
    [call] = fake.bodies("/generate")
    assert call["input_ids"] == [[0, 263]]
