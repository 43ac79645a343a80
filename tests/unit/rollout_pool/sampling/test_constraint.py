"""Constrained answers, against a policy whose every probability is known."""

from __future__ import annotations

import itertools
import json
import math
from array import array
from collections import Counter
from functools import cache

import numpy as np
import pytest
import pytest_asyncio

from buffer.types import SamplingParams
from rollout_pool.sampling.constraint import Guide
from rollout_pool.sampling.grammars import ConstraintFailed, Grammars
from rollout_pool.sampling.sample import (
    ALTERNATIVES,
    PROBED,
    Alternatives,
    Constraint,
    Priority,
    merge_spans,
)
from tests.support.rollout import make_sample, write
from trainer_pool.model.scratch import byte_tokenizer

pytestmark = pytest.mark.asyncio(loop_scope="module")

TOKENIZER = byte_tokenizer()
EOS = TOKENIZER.eos_token_id
SIZE = len(TOKENIZER)
TOP_K = 3


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def grammars():
    grammars = Grammars(TOKENIZER, SIZE, [EOS])
    yield grammars
    await grammars.close()


@cache
def policy(tokens):
    """[V] log-probabilities of the next token after these."""
    random = np.random.default_rng([7, *tokens])
    logits = random.normal(0, 1, SIZE)
    logits[[97, 98, 99, EOS]] += 4  # a, b, c and the end are nearly always among the candidates
    return logits - np.logaddexp.reduce(logits)


def best_of(logprobs, ids, number=TOP_K):
    ids = np.array([*ids])
    return sorted(ids[np.argsort(-logprobs[ids])[:number]].tolist())


class Engine:
    """Samples a few tokens per request, and knows nothing of constraints."""

    def __init__(self, most=3):
        self.random = np.random.default_rng(0)
        self.most = most
        self.num_probes = 0

    def ask(self, sample):
        tokens = list(sample.output_ids)
        self.num_probes += sample.guidance.is_probe
        for _ in range(min(self.most, sample.num_left)):
            logprobs = policy(tuple(tokens))
            if sample.has_candidates:
                ids = np.array(best_of(logprobs, range(SIZE)))
                known = ids
            else:
                ids, known = np.arange(SIZE), np.array(best_of(logprobs, range(SIZE), ALTERNATIVES))
            shares = np.exp(logprobs[ids] - np.logaddexp.reduce(logprobs[ids]))
            token = int(self.random.choice(ids, p=shares / shares.sum()))
            if sample.guidance.is_probe:
                known = np.array(best_of(logprobs, range(SIZE), PROBED))
            write(sample, [token], 3, math.log(shares[list(ids).index(token)]))
            if sample.has_candidates:
                sample.candidates.append(array("i", ids.tolist()))
            sample.guidance.alternatives.append(Alternatives(known, logprobs[known]))
            tokens.append(token)
            if token == EOS:
                sample.finish_reason = "stop"
                return
        if sample.num_left <= 0:
            sample.finish_reason = "length"


async def complete(sample, grammars, engine):
    guide = await Guide.of(sample, grammars)
    try:
        while sample.finish_reason is None:
            engine.ask(sample)
            await follow(guide, sample)
            await correct(guide, sample)
    finally:
        guide.close()
    return sample


def arrive(sample, tokens):
    """Each the only one of its candidates."""
    write(sample, list(tokens), 3, 0.0)
    for token in tokens:
        sample.candidates.append(array("i", [token]))
        sample.guidance.alternatives.append(Alternatives(np.array([token], np.int32), np.zeros(1)))


async def follow(guide, sample):
    while sample.guidance.alternatives and sample.ends_at is None:
        await guide.follow(sample)


async def correct(guide, sample):
    """As Sampler does; whether something was to be corrected."""
    if not guide.correct(sample):
        return False
    while await guide.extend(sample):
        pass
    return True


NUMBERS = itertools.count()


def constrained(constraint, **fields):
    sampling = SamplingParams(temperature=1.0, top_k=TOP_K)
    return make_sample(
        next(NUMBERS),
        **{"sampling": sampling, "max_new_tokens": 12, "constraint": constraint, **fields},
    )


def allowed_after(words, said):
    """Tokens of which one of the words can be continued after `said`; the end after a whole one."""
    return {
        word[len(said)] for word in words if word[: len(said)] == said and len(word) > len(said)
    }


def exact(words):
    """Probability of each word, and for every beginning of one the distribution of the next
    token."""
    nexts, found = {}, Counter({(): 1.0})
    for length in range(max(map(len, words))):
        for said, share in [pair for pair in found.items() if len(pair[0]) == length]:
            ids = allowed_after(words, said)
            if not ids:
                continue
            logprobs = policy(said)
            likely = [t for t in best_of(logprobs, range(SIZE)) if t in ids]
            likely = likely or best_of(logprobs, ids)
            norm = np.logaddexp.reduce(logprobs[likely])
            nexts[said] = {token: logprobs[token] - norm for token in likely}
            for token in likely:
                found[(*said, token)] += share * math.exp(nexts[said][token])
    return {word: found[word] for word in words}, nexts


WORDS = ["a", "ab", "abc", "b", "bca", "xyz", "xq", "cc"]
GRAMMAR = "start: " + " | ".join(f'"{word}"' for word in WORDS)


@pytest.mark.parametrize("most", [1, 3, 8])
async def test_answers_have_the_probabilities_of_the_policy_among_what_is_allowed(grammars, most):
    """However many tokens the engine has sampled when the first is refused."""
    words = {(*word.encode(), EOS) for word in WORDS}
    shares, nexts = exact(words)
    assert abs(sum(shares.values()) - 1) < 1e-9
    counts, engine, number = Counter(), Engine(most), 1000
    for _ in range(number):
        sample = await complete(constrained(Constraint(grammar=GRAMMAR)), grammars, engine)
        answer = tuple(sample.output_ids)
        assert sample.finish_reason == "stop" and answer in words
        [span] = merge_spans(sample.version_spans)
        assert (span.start, span.end) == (0, len(answer))
        counts[answer] += 1
        for place, token in enumerate(answer):
            expected = nexts[answer[:place]]
            assert sample.candidates[place].tolist() == sorted(expected)
            assert abs(sample.logprobs[place] - expected[token]) < 1e-9
    for word, share in shares.items():
        spread = math.sqrt(number * share * (1 - share)) + 1e-9
        assert abs(counts[word] - number * share) < 6 * spread + 1, (word, share)
    assert sum(share > 0.05 for share in shares.values()) >= 3


async def test_unlikely_tokens_that_alone_are_allowed_are_probed(grammars):
    words = {(*word.encode(), EOS) for word in ("xyz", "qr", "zz")}
    engine = Engine()
    grammar = 'start: "xyz" | "qr" | "zz"'
    sample = await complete(constrained(Constraint(grammar=grammar)), grammars, engine)
    _, nexts = exact(words)
    assert engine.num_probes == 1, "what follows can only be one thing"
    assert sample.candidates[0].tolist() == sorted(nexts[()])
    assert abs(sample.logprobs[0] - nexts[()][sample.output_ids[0]]) < 1e-9
    assert sample.logprobs[1:] == [0.0] * (len(sample.output_ids) - 1)
    assert all(len(ids) == 1 for ids in sample.candidates[1:])


async def test_probe_that_finds_no_token_that_is_allowed_takes_the_first(grammars):
    sample = constrained(Constraint(grammar='start: "x" | "q"'))
    guide = await Guide.of(sample, grammars)
    Engine(1).ask(sample)
    await follow(guide, sample)
    await correct(guide, sample)
    assert sample.guidance.is_probe
    write(sample, [97], 3)
    sample.candidates.append(array("i", [97]))
    sample.guidance.alternatives.append(Alternatives(np.zeros(0, np.int32), np.zeros(0)))
    await follow(guide, sample)
    await correct(guide, sample)
    assert sample.output_ids == [ord("q"), EOS] and sample.logprobs == [0.0, 0.0]


async def test_end_comes_after_the_least_length_and_banned_tokens_never(grammars):
    constraint = Constraint(min_tokens=5, banned=(97, 98))
    for _ in range(200):
        sample = await complete(constrained(constraint), grammars, Engine())
        assert len(sample.output_ids) >= 6 or sample.finish_reason == "length"
        assert not {97, 98} & set(sample.output_ids)
        assert EOS not in sample.output_ids[:5]


async def test_answer_that_is_cut_at_its_limit_ends_with_length(grammars):
    constraint = Constraint(grammar='start: "abcabcabcabc"')
    sample = await complete(constrained(constraint, max_new_tokens=4), grammars, Engine())
    assert bytes(sample.output_ids) == b"abca" and sample.finish_reason == "length"


async def test_continued_sample_goes_on_in_the_middle_of_its_grammar(grammars):
    sample = constrained(Constraint(grammar='start: "abc" | "xyz"'))
    write(sample, [*b"xy"], 3, 0.0)
    sample.candidates = [array("i", [token]) for token in b"xy"]
    await complete(sample, grammars, Engine())
    assert bytes(sample.output_ids[:-1]) == b"xyz" and sample.output_ids[-1] == EOS


async def test_evaluation_needs_no_candidates_and_takes_the_likeliest_when_greedy(grammars):
    sampling = SamplingParams(temperature=0.0)
    sample = constrained(
        Constraint(grammar='start: "x" | "q" | "z"'),
        sampling=sampling,
        priority=Priority.evaluation,
    )
    await complete(sample, grammars, Engine())
    logprobs = policy(())
    assert sample.output_ids == [max(b"xqz", key=lambda token: logprobs[token]), EOS]
    assert not sample.candidates


@pytest.mark.parametrize(
    "grammar, problem",
    [("start: start", "NoExtension"), ("start: " + 2**18 * "x", "and may have 262144")],
)
async def test_grammar_that_cannot_be_compiled_says_why(grammars, grammar, problem):
    with pytest.raises(ConstraintFailed, match=problem):
        await grammars.check(Constraint(grammar=grammar))


async def test_rules_nested_deeper_than_a_usual_stack_holds_are_compiled(grammars):
    rules = "".join(f'r{i}: "x" r{i + 1}\n' for i in range(9000))
    await grammars.check(Constraint(grammar=f'start: r0\n{rules}r9000: "y"'))


async def test_grammar_that_gives_up_in_the_middle_fails_the_sample(grammars):
    """Its matcher then counts as stopped, which would look like the end of the form."""
    properties = {f"p{number}": {"type": "integer"} for number in range(1000)}
    schema = json.dumps({"type": "object", "properties": properties})
    sample = constrained(Constraint(grammar=f"start: form\nform: %json {schema}\n"))
    with pytest.raises(ConstraintFailed, match="Current row has"):
        await complete(sample, grammars, Engine())
    assert sample.finish_reason is None


async def test_any_token_that_ends_an_answer_ends_its_form():
    other = 257
    own = Grammars(TOKENIZER, SIZE, [other, EOS])
    for ends in (other, EOS):
        sample = constrained(Constraint(grammar="start: /[ab]{1,9}/"))
        guide = await Guide.of(sample, own)
        arrive(sample, [97, ends])
        await follow(guide, sample)
        assert sample.ends_at is None and sample.num_ready == 2
    await own.close()


async def test_stop_right_before_a_refused_token_ends_the_sample(grammars):
    sample = constrained(Constraint(grammar='start: "ab" "x"'))
    guide = await Guide.of(sample, grammars)
    arrive(sample, b"aba")
    await follow(guide, sample)
    assert sample.ends_at == 2
    guide.forget()  # "ab" is a text of stop
    assert not await correct(guide, sample) and sample.ends_at == 2


async def test_sample_without_a_token_that_may_follow_fails(grammars):
    sample = constrained(Constraint(grammar='start: "ab"', banned=(98,)))
    guide = await Guide.of(sample, grammars)
    Engine().ask(sample)
    with pytest.raises(ConstraintFailed, match="no token may follow"):
        await follow(guide, sample)
        await correct(guide, sample)
    with pytest.raises(ConstraintFailed, match="no token may follow"):
        await grammars.check(Constraint(grammar='start: "b"', banned=(98,)))
