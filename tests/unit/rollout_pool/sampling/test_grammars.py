"""Grammars that take long or much: within limits, and never in the way of the loop."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import signal
import time
from array import array

import numpy as np
import pytest
import pytest_asyncio
from llguidance import LLMatcher, LLTokenizer

from buffer.types import SamplingParams
from rollout_pool.cancelling import end_tasks
from rollout_pool.sampling import grammars as limits
from rollout_pool.sampling.engine_client import EngineError
from rollout_pool.sampling.grammar_process import Rules, Vocabulary
from rollout_pool.sampling.grammars import ConstraintFailed, Grammars
from rollout_pool.sampling.router import Router
from rollout_pool.sampling.sample import Alternatives, Constraint
from rollout_pool.sampling.sampler import Sampler
from tests.support.rollout import make_sample, merging_tokenizer, until, write
from trainer_pool.model.scratch import byte_tokenizer

TOKENIZER = byte_tokenizer()
EOS = TOKENIZER.eos_token_id
SIZE = len(TOKENIZER)
MOST_S = 0.05
"""Processor time of the loop's thread in one turn: a busy machine does not lengthen it."""


def json_form(schema):
    return f"start: form\nform: %json {json.dumps(schema)}\n"


LONG = "x" * 100_000
AMBIGUOUS = 'start: x\nx: x x x x | "a" | "b" | ""'
MULTIPLE = json_form({"type": "integer", "multipleOf": 999983})
MANY = json_form(
    {"type": "object", "properties": {f"p{n}": {"type": "integer"} for n in range(8000)}}
)


class Letters:
    """An engine that says "a" at every place, and knows nothing of forms."""

    name = "engine-0"

    def __init__(self, dies_after=None):
        self.stopped = set()
        self.dies_after = dies_after
        """Tokens of its first request."""

    def note_version(self, version):
        return

    async def generate_tokens(self, sample, request_id, on_arrival=None):
        ids = np.arange(SIZE, dtype=np.int32)
        most, self.dies_after = self.dies_after, None
        for number in range(sample.num_asked):
            if request_id in self.stopped:
                return
            if number == most:
                raise EngineError("it died")
            write(sample, [ord("a")], 0, -5.0)
            sample.candidates.append(array("i", ids.tolist()))
            sample.guidance.alternatives.append(Alternatives(ids, np.full(SIZE, -5.0)))
            on_arrival()
            await asyncio.sleep(0)
        if sample.num_left <= 0:
            sample.finish_reason = "length"

    def stop(self, request_id):
        self.stopped.add(request_id)


@pytest_asyncio.fixture
async def make_grammars():
    made = []

    def make():
        made.append(Grammars(TOKENIZER, SIZE, [EOS]))
        return made[-1]

    yield make
    for one in made:
        await one.close()


@pytest.fixture
def grammars(make_grammars):
    return make_grammars()


@contextlib.asynccontextmanager
async def free_loop():
    """Yields a list that gets an entry at each turn; fails if a turn took MOST_S."""
    turns = []

    async def watch():
        since = time.thread_time()
        while True:
            await asyncio.sleep(0.001)
            now = time.thread_time()
            turns.append(now - since)
            since = now

    gc.disable()  # a collection takes as long as all objects that the tests before have left
    watching = asyncio.create_task(watch())
    try:
        yield turns
        await asyncio.sleep(0.002)
    finally:
        watching.cancel()
        gc.enable()
    assert max(turns) < MOST_S


def constrained(grammar, **fields):
    sampling = SamplingParams(temperature=1.0, top_k=SIZE)
    constraint = Constraint(grammar=grammar)
    fields = {"sampling": sampling, "constraint": constraint, "max_new_tokens": 300_000, **fields}
    return make_sample(**fields)


async def complete(sample, grammars, engine=None):
    engine = engine or Letters()
    router = Router([engine], 60.0)
    router.follow({engine.name: 0}, 0, 0)
    await Sampler(router, 1, TOKENIZER.decode, grammars).complete(sample)
    return bytes(token for token in sample.output_ids if token != EOS).decode()


@pytest.mark.parametrize(
    "grammar, said",
    [(json_form({"const": LONG}), json.dumps(LONG)), (f'start: "{LONG}"', LONG)],
    ids=["const", "literal"],
)
async def test_long_forced_text_is_added_in_pieces_between_other_work(grammars, grammar, said):
    pieces = []
    sample = constrained(grammar, on_tokens=lambda sample: pieces.append(sample.num_ready))
    async with free_loop():
        assert await complete(sample, grammars) == said
    assert sample.finish_reason == "stop" and len(sample.logprobs) == len(said) + 1
    sizes = np.diff(pieces)
    assert max(sizes) <= limits.STEP_TOKENS and len(sizes) > len(LONG) / limits.STEP_TOKENS


async def test_ambiguous_grammar_is_followed_beside_the_loop(grammars):
    sample = constrained(AMBIGUOUS, max_new_tokens=64)
    async with free_loop() as turns:
        assert await complete(sample, grammars) == 64 * "a"
    assert len(turns) > 1


@pytest.mark.parametrize("grammar", [MULTIPLE, MANY], ids=["multipleOf", "properties"])
async def test_grammar_that_compiles_too_long_is_refused(make_grammars, monkeypatch, grammar):
    monkeypatch.setattr(limits, "COMPILE_S", 0.2)
    grammars = make_grammars()
    async with free_loop():
        with pytest.raises(ConstraintFailed, match=r"compiling it takes more than 0\.2 s of proc"):
            await grammars.check(Constraint(grammar=grammar))
        await grammars.check(Constraint(grammar='start: "a"'))
    assert grammars.num_bytes == limits.PROCESS_BYTES, "only the last is kept"


async def test_grammar_that_takes_too_much_memory_is_refused(make_grammars, monkeypatch):
    monkeypatch.setattr(limits, "MAX_GRAMMAR_BYTES", 2**23)
    with pytest.raises(ConstraintFailed, match="or 8 MiB of memory"):
        await make_grammars().check(Constraint(grammar=MULTIPLE))


async def test_answer_that_is_followed_too_long_fails_its_request(make_grammars, monkeypatch):
    monkeypatch.setattr(limits, "STEP_S", 0.001)
    sample = constrained(json_form({"const": LONG}))
    with pytest.raises(ConstraintFailed, match=r"following an answer in it takes more than 0\.001"):
        await complete(sample, make_grammars())
    assert sample.finish_reason is None and sample.num_ready == 0


async def test_tokens_are_no_part_of_the_answer_before_the_grammar_has_allowed_them(grammars):
    seen = []
    sample = constrained(
        'start: "aab"', on_tokens=lambda s: seen.append(s.output_ids[: s.num_ready])
    )
    assert await complete(sample, grammars) == "aab"
    assert all(one == [*b"aab", EOS][: len(one)] for one in seen), seen


async def test_tokens_of_an_engine_that_dies_are_followed_before_the_next_goes_on(grammars):
    sample = constrained("start: /a{40}/")
    assert await complete(sample, grammars, Letters(dies_after=30)) == 40 * "a"
    assert (sample.num_attempts > 1, sample.num_failures) == (True, 1)
    assert {len(one) for one in sample.candidates} == {1} and set(sample.logprobs) == {0.0}


async def test_cancelled_sample_leaves_its_grammar(grammars):
    began = asyncio.Event()
    sample = constrained("start: /a*/", on_tokens=lambda sample: began.set())
    working = asyncio.create_task(complete(sample, grammars))
    await began.wait()
    await end_tasks([working])
    [process] = grammars._processes.values()
    assert working.cancelled() and process.num_completions == 0
    await grammars.check(sample.constraint)


MERGES = [("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"), ("o", "\u0120"), ("1", "2")]


@pytest.mark.parametrize(
    "grammar",
    [
        'start: "hello hello hell" ("o" | "x")',
        'start: /hel{2}o/ "hello " /[0-9]/',
        json_form({"const": "hello 1212 hello"}),
        json_form(
            {
                "x-guidance": {"whitespace_flexible": False},
                "type": "object",
                "properties": {"hello": {"const": 12}, "llo": {"enum": ["hell", "hello"]}},
                "required": ["hello", "llo"],
                "additionalProperties": False,
            }
        ),
    ],
)
def test_forced_tokens_are_those_of_which_each_is_the_only_one_allowed(grammar):
    """Looked for all at once, or one by one."""
    tokenizer = merging_tokenizer(MERGES, ["<eos>"], None, eos_token="<eos>")
    size, eos = len(tokenizer), tokenizer.eos_token_id
    known = LLTokenizer(tokenizer.backend_tokenizer.to_str(), n_vocab=size, eos_token=[eos])
    matcher = LLMatcher(known, grammar, log_level=0)
    rules = Rules(Vocabulary(size, [eos]), matcher.deep_copy(), 0, [])
    expected = []
    while eos not in expected:
        bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
        allowed = np.flatnonzero(bits).tolist()
        if len(allowed) > 1:
            break
        expected += allowed
        matcher.consume_token(allowed[0])
    assert rules.force([], 3) + rules.force([], 100) == expected and len(expected) > 1


async def test_grammars_are_forgotten_by_the_sum_of_their_memory(make_grammars, monkeypatch):
    monkeypatch.setattr(limits, "KEPT_BYTES", 3 * limits.PROCESS_BYTES)
    grammars = make_grammars()
    used = await grammars.open(Constraint(grammar='start: "0"'))
    for number in range(1, 6):
        await grammars.check(Constraint(grammar=f'start: "{number}"'))
        assert grammars.num_bytes <= limits.KEPT_BYTES
    assert await used.force([], 9) == [ord("0"), EOS], "one that an answer follows is kept"
    others = [await grammars.open(Constraint(grammar=f'start: "{n}"')) for n in (7, 8)]
    with pytest.raises(ConstraintFailed, match="more than 24 MiB of memory together"):
        await grammars.open(Constraint(grammar='start: "9"'))
    others[0].close()
    await grammars.check(Constraint(grammar='start: "9"'))
    assert await others[1].force([], 9) == [ord("8"), EOS]


async def test_grammars_in_use_that_grow_past_the_sum_end(make_grammars, monkeypatch):
    grammars = make_grammars()
    answer = await grammars.open(Constraint(grammar='start: "a"'))
    monkeypatch.setattr(limits, "KEPT_BYTES", limits.PROCESS_BYTES - 1)
    await answer.accept([ord("a")])
    with pytest.raises(ConstraintFailed, match="ask again when some have ended"):
        await answer.accept([EOS])


async def test_next_grammar_is_compiled_after_the_processes_were_killed(grammars):
    answer = await grammars.open(Constraint(grammar='start: "a"'))
    child, _ = grammars._starter
    os.kill(child.pid, signal.SIGKILL)
    await child.exit()
    await until(lambda: not grammars.num_bytes)
    with pytest.raises(ConstraintFailed, match="following an answer"):
        await answer.force([], 1)
    await grammars.check(Constraint(grammar='start: "a"'))


async def test_answers_of_one_grammar_wait_for_one_compilation(grammars):
    answers = await asyncio.gather(
        *(grammars.open(Constraint(grammar='start: "ab" | "ac"')) for _ in range(5))
    )
    assert grammars.num_bytes == limits.PROCESS_BYTES
    assert [await one.force([], 9) for one in answers] == 5 * [[ord("a")]]


async def test_cancelled_wait_for_a_compilation_leaves_the_others_waiting(grammars):
    form = Constraint(grammar='start: "a"')
    first, second = (asyncio.create_task(grammars.open(form)) for _ in range(2))
    await asyncio.sleep(0)
    first.cancel()
    answer = await second
    assert first.cancelled() and await answer.force([], 9) == [ord("a"), EOS]
