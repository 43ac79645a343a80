"""Answers that end at a text."""

from __future__ import annotations

from random import Random

import pytest

from rollout_pool.sampling.router import Router
from rollout_pool.sampling.sampler import Sampler
from rollout_pool.sampling.stop import before_stop, find_stop, safe_length
from tests.support.rollout import make_sample, merging_tokenizer, spans
from trainer_pool.model.scratch import byte_tokenizer

MERGES = [("s", "t"), ("o", "p"), ("st", "op"), ("op", "!"), ("Ã", "¼")]
TOKENIZER = merging_tokenizer(MERGES, ["<|end|>", "<|stop|>"], "", eos_token="<|end|>")


def decode(tokens):
    return TOKENIZER.decode(list(tokens))


def expected(tokens, stop):
    for end in range(1, len(tokens) + 1):
        if any(text in decode(tokens[:end]) for text in stop):
            return end
    return None


@pytest.mark.parametrize("stop", [("stop",), ("op!", "ü"), ("x", "stop!"), ("<|stop|>",)])
def test_place_is_found_however_the_tokens_arrive(stop):
    random = Random(0)
    found = 0
    for _ in range(400):
        words = random.choices(["st", "op", "!", "s", "t", "o", "p", "ü", "é", "<|stop|>"], k=12)
        tokens = [t for word in words for t in TOKENIZER.encode(word, add_special_tokens=False)]
        right, seen, place = expected(tokens, stop), 0, None
        while seen < len(tokens) and place is None:
            arrived = min(len(tokens), seen + random.randint(1, 5))
            place = find_stop(tokens[:arrived], seen, stop, decode)
            seen = arrived
        assert place == right, (words, stop)
        found += right is not None
    assert found > 0


def test_text_before_a_stop_grows_and_never_shrinks():
    stop, text = ("stop!", "o\n"), "do sto stop it, stop! now"
    before = before_stop(text, stop)
    assert before == "do sto stop it, "
    sizes = [safe_length(text[:end], stop) for end in range(len(text) + 1)]
    assert sizes == sorted(sizes) and sizes[-1] == len(before)
    assert sizes[len("do st")] == len("do ") and sizes[len("do")] == len("d")
    assert before_stop("nothing", stop) == "nothing"


@pytest.fixture
def router(client, other_client):
    router = Router([client, other_client], wait_timeout_s=60.0)
    router.follow({"engine-0": 3, "engine-1": 3}, 3, 0)
    return router


@pytest.fixture
def sampler(router):
    return Sampler(router, max_retries=1, decode=byte_tokenizer().decode)


def spell(text):
    return list(byte_tokenizer().encode(text))


async def test_answer_ends_at_the_text_and_its_request_is_stopped(fake, sampler):
    fake.version = "3"
    said = spell("yes\nno way")
    fake.says(output_ids=said, logprobs=[-1.0 - i for i in range(len(said))], parts=[1, 2, 4, 3])
    seen = []
    sample = make_sample(
        stop=("\n", "w"), max_new_tokens=20, on_tokens=lambda s: seen.append(s.num_ready)
    )
    await sampler.complete(sample)
    assert sample.output_ids == spell("yes\n") and sample.finish_reason == "stop"
    assert sample.logprobs == [-1.0, -2.0, -3.0, -4.0] and spans(sample) == [(3, 0, 4)]
    assert sample.num_wasted == len(said) - 4
    assert seen == [1, 3, 4, 4, 4], "no owner is told of a token behind the end"
    [body] = fake.bodies("/generate")
    assert body["sampling_params"][0]["stream_interval"] == 8
    assert "stop" not in body["sampling_params"][0], "engines have no tokenizer"


async def test_text_is_found_across_the_loss_of_an_engine(fake, other_fake, sampler):
    fake.version = other_fake.version = "3"
    fake.says(output_ids=spell("go st"), parts=[5], breaks=True)
    other_fake.says(output_ids=spell("op now"), parts=[1])
    sample = make_sample(stop=("stop",), max_new_tokens=20)
    await sampler.complete(sample)
    assert sample.output_ids == spell("go stop") and sample.finish_reason == "stop"


async def test_kept_tokens_that_have_the_text_are_not_continued(fake, sampler):
    sample = make_sample(stop=("stop",))
    sample.output_ids, sample.logprobs = spell("stop it"), [-1.0] * 7
    await sampler.complete(sample)
    assert sample.output_ids == spell("stop") and sample.finish_reason == "stop"
    assert not fake.bodies("/generate")
