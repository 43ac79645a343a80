"""Which requests are allowed, with which keys, and how others are refused."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import re
import sys
import threading
from dataclasses import replace

import httpx
import openai
import pytest
from llguidance import LLMatcher
from llguidance.hf import from_tokenizer
from tokenizers import processors

from buffer.types import SamplingParams
from configs.rollout_schema import OpenAIConfig, RolloutConfig, TaskConfig
from host.http_server import HttpLimits
from rollout_pool.endpoint import app as endpoint_app
from rollout_pool.sampling.sample import Constraint, Priority, SampleFailed
from tests.support.endpoint_scene import (
    ADMIN_KEY,
    END,
    END_TOKEN,
    MERGES,
    MODEL,
    SPECIALS,
    TOKENIZER,
    WEATHER,
    chat,
    check_branch,
    check_session,
    eventually,
    spell,
)
from tests.support.repository import ROOT
from tests.support.rollout import merging_tokenizer

USER = {"role": "user", "content": "hello"}
CHAT = "/v1/chat/completions"


def body(**more):
    return {"model": MODEL, "messages": [USER], **more}


JSON = {"type": "json_object"}


def named(tool):
    return {"type": "function", "function": {"name": tool}}


def calling(arguments):
    calls = [{"id": "1", "function": {"name": "f", "arguments": arguments}}]
    return body(messages=[{"role": "assistant", "tool_calls": calls}, USER])


REFUSED = [
    (body(temperature=0.2), "temperature", "0.2 was requested"),
    (body(top_p=0.9), "top_p", "sampled as the run is configured"),
    (body(top_k=5), "top_k", "configured"),
    (body(presence_penalty=1), "presence_penalty", "configured"),
    (body(temperature="hot"), "temperature", "must be a number"),
    (body(temperature=True), "temperature", "must be a number"),
    (body(temperature=10**400), "temperature", "must be a number, not 1000"),
    (body(top_k=-(10**400)), "top_k", "must be a number"),
    (body(n=129), "n", "at most 128"),
    (body(stop=["x"] * 17), "stop", "a list of length at most 16"),
    (body(stop=["x", ""]), "stop[1]", "length at least 1"),
    (body(stop=5), "stop", "must be a string or a list, not 5"),
    (body(seed=1.5), "seed", "whole number"),
    (body(logit_bias={"5": 1}), "logit_bias.5", "only -100"),
    (body(logit_bias={"99999": -100}), "logit_bias", "there is no token '99999'"),
    (body(logit_bias=[5]), "logit_bias", "must be an object"),
    (body(logit_bias=[]), "logit_bias", "must be an object"),
    (body(response_format={"type": "grammar", "grammar": " "}), "response_format.grammar", "empty"),
    (body(logit_bias={"5": -100}), "logit_bias", "needs rollout.sampling.top_k"),
    (body(min_tokens=5), "min_tokens", "needs rollout.sampling.top_k"),
    (body(min_tokens=-1), "min_tokens", "at least 0"),
    (body(ignore_eos=True), "ignore_eos", "needs rollout.sampling.top_k"),
    (body(response_format=JSON), "response_format", "needs rollout.sampling.top_k"),
    (body(response_format={"type": "xml"}), "response_format.type", "only text, json_object"),
    (body(response_format=JSON, min_tokens=5), "min_tokens", "says itself where"),
    (
        body(response_format={"type": "json_schema", "json_schema": {"name": "x"}}),
        "response_format.json_schema.schema",
        "is missing",
    ),
    (body(tool_choice="required"), "tool_choice", "needs tools"),
    (body(tool_choice="must", tools=[WEATHER]), "tool_choice", "auto, none, required"),
    (body(tool_choice=named("rain"), tools=[WEATHER]), "tool_choice.function.name", "no tool"),
    (body(tool_choice="required", tools=[WEATHER]), "tool_choice", "rollout.sampling.top_k"),
    (
        body(tool_choice="required", tools=[WEATHER], response_format=JSON),
        "response_format",
        "forced call",
    ),
    (body(parallel_tool_calls=False), "parallel_tool_calls", "chooses"),
    (body(logprobs=True, top_logprobs=2), "top_logprobs", "recorded"),
    (body(max_tokens=0), "max_tokens", "at least 1"),
    (body(max_completion_tokens=1.5), "max_completion_tokens", "whole number"),
    (body(stream="yes"), "stream", "must be true or false"),
    (body(stream_options={"include_usage": True}), "stream_options", "stream=true"),
    (body(functions=[]), "functions", "not supported"),
    (body(web_search_options={"x": 1}), "web_search_options", "not supported"),
    (body(messages=[]), "messages", "at least 1"),
    (body(messages="hello"), "messages", "must be a list"),
    (body(messages=["hello"]), "messages[0]", "must be an object"),
    (body(messages=[USER, {"role": "wizard", "content": ""}]), "messages[1].role", "only system, "),
    (body(messages=[{"role": "user"}]), "messages[0].content", "missing"),
    (body(messages=[USER, {"role": "assistant", "content": "x"}]), "messages[1].role", "own"),
    (body(messages=[{"role": "tool", "content": "x"}]), "messages[0].tool_call_id", "missing"),
    (body(messages=[{**USER, "refusal": "no"}]), "messages[0].refusal", "only text and tool calls"),
    (
        body(messages=[{**USER, "reasoning_content": "so"}]),
        "messages[0].reasoning_content",
        "a user message has none",
    ),
    (body(messages=[{**USER, "reasoning": "so"}]), "messages[0].reasoning", "not supported"),
    (
        body(messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]),
        "messages[0].content[0].type",
        "reads nothing else",
    ),
    (calling("[1"), "messages[0].tool_calls[0].function.arguments", "not JSON"),
    (calling('{"x": ' + "9" * 5000 + "}"), "messages[0].tool_calls[0].function.arguments", ""),
    (body(tools=[{"type": "custom"}]), "tools[0].type", "function"),
    (body(tools=[{"type": "function"}]), "tools[0].function", "missing"),
    (
        body(tools=[{"type": "function", "function": {"name": ""}}]),
        "tools[0].function.name",
        "length at least 1",
    ),
    (
        body(
            tools=[{"type": "function", "function": {"name": "f", "parameters": {"type": "array"}}}]
        ),
        "tools[0].function.parameters",
        "of an object",
    ),
    ({"messages": [USER]}, "model", "missing"),
]


REFUSED_COMPLETIONS = [
    ({"prompt": ["a", "b"]}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": "x", "echo": True}, "echo"),
    ({"prompt": "x", "suffix": "y"}, "suffix"),
    ({"prompt": "x", "best_of": 3}, "best_of"),
    ({"prompt": "x", "logprobs": 5}, "logprobs"),
    ({"prompt": "x", "messages": []}, "messages"),
]


async def refuse(http, asked, param, words="", path=CHAT, **more):
    """The error of a request whose field `param` is refused with these words."""
    answer = await http.post(path, json=asked, **more)
    error = answer.json()["error"]
    assert (answer.status_code, error["type"]) == (400, "invalid_request_error"), error
    assert error["param"] == param and words in error["message"], (param, error)
    return error


async def test_unsupported_field_is_refused_by_name(scene):
    http = scene.http(scene.session().key)
    for asked, param, words in REFUSED:
        await refuse(http, asked, param, words)
    for more, param in REFUSED_COMPLETIONS:
        await refuse(http, {"model": MODEL, **more}, param, path="/v1/completions")
    for token in (len(TOKENIZER), -1, 2**31, 10**30, 10**400):
        asked = {"model": MODEL, "prompt": [5, token, 6]}
        words = f"0 to {len(TOKENIZER) - 1}"
        error = await refuse(http, asked, "prompt", words, path="/v1/completions")
        assert len(error["message"]) < 200
    name = "x-stainless-retry-count"
    for count in ("9" * 5000, "-1", "1.5", "many"):
        await refuse(http, body(), name, headers={name: count})
    for timeout_s in (int("9" * 400), 2147483648, -1, "1"):  # a wait has an end
        await refuse(scene.http(ADMIN_KEY), {"timeout_s": timeout_s}, "timeout_s", path="/groups")
    assert scene.author.samples == []


async def test_field_without_effect_is_accepted(scene):
    session = scene.session()
    answer = await scene.http(session.key).post(
        CHAT,
        json=body(
            temperature=1,
            top_p=1.0,
            n=1,
            stop=None,
            logit_bias={},
            seed=7,
            user="me",
            metadata={"a": "b"},
            response_format={"type": "text"},
            parallel_tool_calls=True,
            frequency_penalty=0,
            messages=[{**USER, "refusal": None, "reasoning_content": None, "parsed": {"a": 1}}],
        ),
    )
    assert answer.status_code == 200, answer.text


async def test_form_of_a_request_becomes_the_constraint_of_its_answer(make_scene):
    scene = await make_scene(sampling=SamplingParams(top_k=20))
    client = scene.client(scene.session())
    ask = functools.partial(client.chat.completions.create, model=MODEL, messages=[USER])
    await ask(response_format=JSON, logit_bias={"7": -100, "5": -100})
    await ask(extra_body={"min_tokens": 5})
    await ask(extra_body={"ignore_eos": True})
    await ask(tools=[WEATHER], tool_choice="required")
    await ask(tools=[WEATHER], tool_choice=named("weather"), parallel_tool_calls=False)
    await ask(tools=[WEATHER], response_format=JSON)
    await ask(tools=[WEATHER])
    *asked, free = [sample.constraint for sample in scene.author.samples]
    assert free is None
    assert asked[0].banned == (5, 7) and "%json" in asked[0].grammar
    assert (asked[1].grammar, asked[1].min_tokens) == ("", 5)
    assert asked[2].min_tokens == 4000, "longer than any answer"
    said = [
        '{"a": [1, true]}',
        '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>',
    ]
    said.append("\n".join([said[1], said[1]]))
    fits = {0: [said[0]], 3: said[1:], 4: [said[1]], 5: said}
    for place, texts in fits.items():
        for text in said:
            assert follows(asked[place], text) == (text in texts), (place, text)


def follows(constraint, text):
    """Whether an answer of this form may be this text."""
    tokens = spell(text)
    matcher = LLMatcher(from_tokenizer(TOKENIZER), constraint.grammar)
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


async def test_form_that_cannot_be_compiled_is_refused_with_the_reason(make_scene):
    scene = await make_scene(sampling=SamplingParams(top_k=20))
    http = scene.http(scene.session().key)
    schema = {"type": "json_schema", "json_schema": {"schema": {"type": "object", "if": {}}}}
    broken = {**WEATHER, "function": {"name": "f", "parameters": {"$ref": "#/no"}}}
    for asked, param, words in (
        (body(response_format=schema), "response_format", "Unimplemented keys"),
        (
            body(response_format={"type": "grammar", "grammar": "start: x"}),
            "response_format",
            "unknown name",
        ),
        (body(tools=[broken], tool_choice="required"), "tool_choice", "does not exist"),
        (
            body(response_format={"type": "grammar", "grammar": "start: A\nA: /a/ & /b/"}),
            "response_format",
            "no completion can",
        ),
    ):
        error = await refuse(http, asked, param, words)
        assert "no completion can have this form" in error["message"], error
    assert scene.author.samples == []


async def test_task_gives_a_form_to_requests_without_one(make_scene):
    task = TaskConfig(chat_template=True, grammar='start: "yes" | "no"')
    scene = await make_scene(sampling=SamplingParams(top_k=20), task=task)
    client = scene.client(scene.session())
    for wish in ({}, {"logit_bias": {"5": -100}}, {"response_format": JSON}):
        await chat(client, [USER], extra_body=wish)
    usual, banned, own = [sample.constraint for sample in scene.author.samples]
    assert usual == Constraint(grammar=task.grammar)
    assert banned == Constraint(grammar=task.grammar, banned=(5,))
    assert "%json" in own.grammar
    with pytest.raises(openai.BadRequestError, match=r"min_tokens: does not go with task\.grammar"):
        await chat(client, [USER], extra_body={"min_tokens": 3})


async def test_session_is_sampled_as_the_run_is_configured(make_scene):
    scene = await make_scene(sampling=SamplingParams(temperature=0.7))
    session = scene.session()
    client = scene.client(session)
    await chat(client, [USER], temperature=0.7)
    assert scene.author.samples[0].sampling == SamplingParams(temperature=0.7)
    with pytest.raises(openai.BadRequestError, match=r"sampled with 0\.7"):
        await chat(client, [USER], temperature=1.0)


async def test_run_may_let_requests_choose_their_sampling(make_scene):
    rollout = RolloutConfig(openai=OpenAIConfig(sampling_overrides=True))
    usual = SamplingParams(temperature=0.7, top_k=40)
    scene = await make_scene(sampling=usual, rollout=rollout)
    http = scene.http(scene.session().key)
    mine = {"temperature": 1.3, "top_k": 5, "top_p": 0.9, "min_p": 0.1}
    for asked, expected in (({}, usual), (mine, SamplingParams(**mine))):
        answer = await http.post(CHAT, json=body(**asked))
        assert answer.status_code == 200, answer.text
        assert scene.author.samples[-1].sampling == expected
    for name, value in (
        ("temperature", 0),
        ("temperature", 1e-46),
        ("temperature", 2.5),
        ("top_k", 41),
        ("top_k", -1),
        ("top_k", 1.5),
        ("top_p", 0),
        ("min_p", 2),
        ("frequency_penalty", 0.5),
    ):
        await refuse(http, body(**{name: value}), name, "sampling_overrides allows")
    whole = await make_scene(rollout=rollout)
    answer = await whole.http(whole.session().key).post(CHAT, json=body(top_p=0.9))
    assert answer.status_code == 400, "a token would need an unbounded number of candidates"
    greedy = SamplingParams(temperature=0.0)
    evaluated = whole.sessions.open(
        replace(whole.ask(priority=Priority.evaluation), sampling=greedy)
    )
    answer = await whole.http(evaluated.key).post(CHAT, json=body(temperature=0.5, top_p=0.9))
    assert answer.status_code == 200, "nothing of an evaluation is trained"


async def test_invalid_body_is_refused(scene):
    http = scene.http(scene.session().key)
    half = b'{"model": "policy", "messages": [{"role": "user", "content": "\\ud800"}]}'
    for content, status, words in (
        (b"{", 400, "not valid JSON"),
        (b"\xff\xfe\x00", 400, "not valid JSON"),
        (b"[" * 20_000, 400, "not valid JSON"),
        (b"[" + b"[]," * 60_000 + b"1]", 400, "values"),
        (b"[1]", 400, "must be an object"),
        (half, 400, "not valid JSON"),
        (b" " * (16 * 2**20 + 1), 413, "at most"),
    ):
        answer = await http.post(CHAT, content=content)
        assert answer.status_code == status and words in answer.json()["error"]["message"], words


async def test_key_opens_only_its_own_session(scene):
    mine, other = scene.session(), scene.session()
    for key in (None, "wrong", mine.key + "x", mine.session_id):
        answer = await scene.http(key).post(CHAT, json=body())
        assert answer.status_code == 401, key
        assert answer.json()["error"]["code"] == "invalid_api_key"
    with pytest.raises(openai.AuthenticationError):
        await scene.client_of("wrong", f"{scene.endpoint.url}/v1").models.list()
    answer = await scene.http(mine.key).post(CHAT, json=body())
    assert answer.json()["leash"]["session"] == mine.session_id
    assert (mine.num_turns, other.num_turns) == (1, 0)
    reward = f"/sessions/{other.session_id}/reward"
    assert (await scene.http(mine.key).post(reward, json={"reward": 1})).status_code == 401
    assert (await scene.http(mine.key).post("/groups")).status_code == 401
    assert (await scene.http(ADMIN_KEY).post(CHAT, json=body())).status_code == 401


async def test_key_may_stand_in_the_address(scene):
    session = scene.session()
    url = f"{scene.endpoint.url}/sessions/{session.key}/v1"
    client = scene.client_of("nothing", url)
    await chat(client, [USER])
    assert session.num_turns == 1
    wrong = scene.client_of(session.key, f"{scene.endpoint.url}/sessions/wrong/v1")
    with pytest.raises(openai.AuthenticationError):
        await chat(wrong, [USER])


async def test_models_and_health_reveal_no_secret(scene):
    session = scene.session()
    client = scene.client(session)
    assert [model.id for model in (await client.models.list()).data] == [MODEL]
    assert (await client.models.retrieve(MODEL)).id == MODEL
    with pytest.raises(openai.NotFoundError):
        await client.models.retrieve("gpt-4")
    with pytest.raises(openai.NotFoundError, match="'policy'"):
        await client.chat.completions.create(model="gpt-4", messages=[USER])
    health = await scene.http().get("/health")
    assert health.json() == {"status": "ok", "num_sessions": 1}
    nowhere = await scene.http().get("/v1/nowhere")
    assert nowhere.status_code == 404 and "error" in nowhere.json()


async def test_answers_are_as_long_as_there_is_room(make_scene):
    scene = await make_scene(
        task=TaskConfig(chat_template=True, max_turn_tokens=6),
        rollout=RolloutConfig(max_prompt_tokens=60, max_response_tokens=30),
    )
    session = scene.session()
    client, messages = scene.client(session), [USER]
    answer = await chat(client, messages, max_tokens=4)
    assert answer.choices[0].finish_reason == "length"
    assert answer.choices[0].message.content == "hell" and answer.usage.completion_tokens == 4
    answer = await chat(client, messages, max_tokens=999)
    assert answer.usage.completion_tokens == 6
    messages += [{"role": "assistant", "content": "hello"}, {"role": "user", "content": "x" * 39}]
    answer = await chat(client, messages)
    room = 90 - answer.usage.prompt_tokens
    assert 0 < room < 6 and answer.usage.completion_tokens == room
    messages[-1]["content"] += "x" * room
    with pytest.raises(openai.BadRequestError) as full:
        await chat(client, messages)
    assert full.value.code == "context_length_exceeded"
    assert session.is_full and session.num_turns == 3


async def test_plain_completions_continue_the_tokens_as_sampled(scene):
    scene.author.says = iter([spell(" hello too"), spell(" at last"), "end"])
    session = scene.session()
    client = scene.client(session)
    first = await client.completions.create(
        model=MODEL, prompt="hell in", max_tokens=10, logprobs=1
    )
    assert first.choices[0].text == " hello too" and first.choices[0].finish_reason == "length"
    assert first.choices[0].logprobs.token_logprobs == scene.author.samples[0].logprobs
    assert first.choices[0].logprobs.text_offset == list(range(10))
    assert first.choices[0].token_ids == scene.author.ended[0][1]
    stream = await client.completions.create(
        model=MODEL, prompt="hell in hello too, hello", max_tokens=8, stream=True
    )
    text = "".join([choice.text async for chunk in stream for choice in chunk.choices])
    assert text == " at last"
    tokens = scene.author.samples[1].prompt + scene.author.ended[1][1]
    last = await client.completions.create(model=MODEL, prompt=tokens, max_tokens=50)
    assert last.choices[0].text == "end" and last.usage.prompt_tokens == len(tokens)
    [branch] = check_session(session, scene.author.written)
    assert branch.tokens[-1] == END_TOKEN
    assert TOKENIZER.decode(branch.tokens).startswith("hell in hello too, hello at last")


async def test_plain_prompt_does_not_end_where_the_tokenizer_adds_an_end(make_scene):
    made = merging_tokenizer(MERGES, SPECIALS, None, eos_token=END)
    made.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=f"$A {END}", special_tokens=[(END, END_TOKEN)]
    )
    scene = await make_scene(tokenizer=made)
    await scene.client(scene.session()).completions.create(model=MODEL, prompt="hell in")
    assert made.encode("hell in") == [*scene.author.samples[0].prompt, END_TOKEN]


async def test_many_sessions_run_concurrently(scene):
    sessions = [scene.session() for _ in range(50)]
    http = scene.http()  # OpenAI's client would take longer than the endpoint

    async def talk(session, number):
        messages = [{"role": "user", "content": f"hello, I am number {number}"}]
        key = {"Authorization": f"Bearer {session.key}"}
        for turn in range(3):
            asked = body(messages=messages, stream=turn == 1)
            answer = await http.post(CHAT, json=asked, headers=key)
            if turn == 1:
                chunks = re.findall(r"^data: (\{.*\})$", answer.text, re.MULTILINE)
                deltas = [json.loads(chunk)["choices"][0]["delta"] for chunk in chunks]
                text = "".join(delta.get("content") or "" for delta in deltas)
            else:
                text = answer.json()["choices"][0]["message"]["content"]
            messages += [{"role": "assistant", "content": text}, USER]

    async with asyncio.timeout(60):
        await asyncio.gather(*(talk(session, n) for n, session in enumerate(sessions)))
    hello = [*spell("hello"), END_TOKEN]
    for number, session in enumerate(sessions):
        [branch] = session.episode(end="done", outcome=None).branches
        check_branch(branch, [hello] * 3)
        assert f"I am number {number}<" in TOKENIZER.decode(branch.tokens)


# What would harm the engines or the worker ----------------------------------------------------


async def test_tokens_that_only_the_model_has_are_accepted(make_scene):
    """Embeddings are padded to a round number, and a tokenizer does not know of those."""
    scene = await make_scene(vocab_size=len(TOKENIZER) + 8)
    for token, status in ((len(TOKENIZER) + 7, 200), (len(TOKENIZER) + 8, 400)):
        asked = {"model": MODEL, "prompt": [5, token]}
        answer = await scene.http(scene.session().key).post("/v1/completions", json=asked)
        assert answer.status_code == status, answer.text


@contextlib.contextmanager
def texts_encoded():
    """Yields a list of the thread and the length of each text that a tokenizer encodes."""
    encoded = []

    def note(frame, event, arg):
        is_encode = frame.f_code.co_name == "encode" and event == "call"
        if is_encode and "transformers" in frame.f_code.co_filename:
            encoded.append((threading.get_ident(), len(frame.f_locals.get("text", ""))))

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        yield encoded
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


@pytest.mark.parametrize("page", ["chat/completions", "completions"])
async def test_oversized_text_is_refused_before_it_is_tokenized(scene, page):
    text = "word " * 13_000  # the room is 4000 tokens
    asked = {"prompt": text} if page == "completions" else {"messages": [{**USER, "content": text}]}
    session = scene.session()
    with texts_encoded() as encoded:
        answer = await scene.http(session.key).post(f"/v1/{page}", json={"model": MODEL, **asked})
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (400, "context_length_exceeded"), error
    assert session.is_full and "characters" in error["message"] and encoded == []


async def test_large_text_is_tokenized_off_the_event_loop(make_scene):
    scene = await make_scene(
        rollout=RolloutConfig(max_prompt_tokens=400_000, max_response_tokens=2000)
    )
    asked = body(messages=[{**USER, "content": "hello " * 30_000}])
    with texts_encoded() as encoded:
        answer = await scene.http(scene.session().key).post(CHAT, json=asked)
    assert answer.status_code == 200, answer.text
    threads = {thread for thread, length in encoded if length > 100_000}
    assert threads and threading.get_ident() not in threads


async def begin_request(scene, key, path=CHAT, length=1000):
    """The streams of a request of which one byte of the body has been sent."""
    url = httpx.URL(scene.endpoint.url)
    reader, writer = await asyncio.open_connection(url.host, url.port)
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key}\r\n"
    writer.write(f"{head}Content-Length: {length}\r\n\r\n{{".encode())
    return reader, writer


async def test_body_that_never_arrives_times_out_and_keeps_no_session_alive(make_scene):
    counted = []
    scene = await make_scene(limits=HttpLimits(body_s=0.4), count=counted.append)
    session = scene.session()
    idle = asyncio.create_task(session.wait_idle(0.2))

    reader, writer = await begin_request(scene, session.key)
    async with asyncio.timeout(60):
        await idle
        answer = await reader.read()
    writer.close()
    assert b" 408 " in answer and b"did not arrive within 0.4 s" in answer
    assert counted == ["requests_refused:slow"]


async def test_session_that_sends_slowly_takes_no_room_from_the_others(make_scene, monkeypatch):
    monkeypatch.setattr(endpoint_app, "MAX_OPEN_BYTES", 8 * 2**20)
    scene = await make_scene(limits=HttpLimits(body_s=60.0))
    slow = scene.session()
    length = endpoint_app.RequestLimits(scene.sessions.serving).max_body_bytes
    begun = [await begin_request(scene, slow.key, length=length) for _ in range(12)]
    await eventually(lambda: slow.reading.locked())
    async with asyncio.timeout(30):
        other = scene.http(scene.session().key)
        answer = await other.post(CHAT, json=body())
    assert answer.status_code == 200, answer.text
    for _, writer in begun:
        writer.close()


# What would take the worker's time ------------------------------------------------------------


async def unread(scene, path, key):
    """The status of the answer to a request whose body does not come."""
    reader, writer = await begin_request(scene, key, path)
    async with asyncio.timeout(60):
        line = await reader.readline()
    writer.close()
    return int(line.split()[1])


async def test_every_route_checks_the_key_before_it_reads_the_body(scene):
    session, other = scene.session(), scene.session()
    for path in (CHAT, "/v1/completions", "/groups", f"/sessions/{session.session_id}/reward"):
        assert await unread(scene, path, "sk-wrong") == 401
    assert await unread(scene, f"/sessions/{session.session_id}/reward", other.key) == 401
    assert await unread(scene, "/sessions/unknown/reward", ADMIN_KEY) == 404


async def test_request_is_as_large_as_its_conversation_can_be(scene):
    """The room is 4000 tokens, and 1 MiB is for what is not the conversation."""
    http = scene.http(scene.session().key)
    for num_bytes, status in ((2**20 + 300_000, 400), (2**20 + 400_000, 413)):
        asked = body(messages=[{**USER, "content": "x" * num_bytes}])
        assert (await http.post(CHAT, json=asked)).status_code == status


async def test_invalid_or_too_large_reward_is_refused(scene):
    session = scene.session()
    http = scene.http(session.key)
    assert (await http.post(CHAT, json=body())).status_code == 200
    path = f"/sessions/{session.session_id}/reward"
    for outcome, param in (
        ({"reward": 10**400}, "reward"),
        ({"reward": 1, "parts": {"style": 10**400}}, "parts"),
        ({"reward": 1, "parts": {f"part {n}": 0.5 for n in range(101)}}, "parts"),
        ({"reward": 1, "parts": {"\x1b[2J": 1}}, "parts"),
    ):
        await refuse(http, outcome, param, path=path)
    for page in ("/groups", path):  # a body without a conversation is small
        answer = await scene.http(ADMIN_KEY).post(page, json={"parts": {"x" * 70_000: 1}})
        assert answer.status_code == 413 and "65536 bytes" in answer.json()["error"]["message"]


async def test_tools_and_messages_count_as_text_before_they_are_tokenized(scene):
    long_call = {"id": "1", "function": {"name": "x" * 70_000}}
    for more in (
        {"tools": [named("x" * 70_000)]},
        {"tools": [named("x")] * 4001},
        {"messages": [{"role": "user", "content": ""}] * 4001},
        {
            "messages": [
                {"role": "assistant", "tool_calls": [long_call]},
                {"role": "tool", "tool_call_id": "1", "content": ""},
            ]
        },
        {"messages": [USER, {"role": "tool", "tool_call_id": "x" * 70_000, "content": ""}]},
    ):
        session = scene.session()
        answer = await scene.http(session.key).post(CHAT, json=body(**more))
        error = answer.json()["error"]
        assert (answer.status_code, error["code"]) == (400, "context_length_exceeded"), error
        assert session.is_full and scene.author.samples == []
        assert " characters, more than" in error["message"] or " messages, " in error["message"]


async def test_commas_inside_a_string_do_not_count_as_values(make_scene):
    scene = await make_scene(
        rollout=RolloutConfig(max_prompt_tokens=200_000, max_response_tokens=2000)
    )
    content = 'a "quoted", \\ {[,' * 12_000
    asked = body(messages=[{**USER, "content": content}])
    answer = await scene.http(scene.session().key).post(CHAT, json=asked)
    error = answer.json()["error"]
    assert error["code"] == "context_length_exceeded", error  # and not too_many_values


# Other fields of a response -------------------------------------------------------------------


async def test_every_response_has_the_id_of_its_request_and_so_do_errors(scene):
    session = scene.session()
    http = scene.http(session.key)
    for asked, status in ((body(), 200), (body(stream=True), 200), (body(n=0), 400)):
        answer = await http.post(CHAT, json=asked, headers={"x-request-id": "mine-7"})
        assert (answer.status_code, answer.headers["x-request-id"]) == (status, "mine-7")
    assert answer.json()["error"]["request_id"] == "mine-7"
    made = set()
    for given in ({}, {"x-request-id": "x" * 200}, {"x-request-id": "two words"}):
        answer = await http.get("/nowhere", headers=given)
        made.add(answer.headers["x-request-id"])
        assert answer.json()["error"]["request_id"] in made
    assert len(made) == 3 and all(one.startswith("req-") for one in made)
    with pytest.raises(openai.BadRequestError) as refused:
        await chat(scene.client(session), [USER], n=0)
    assert refused.value.request_id == refused.value.body["request_id"]


async def test_error_in_the_middle_of_a_stream_has_the_id(scene):
    scene.author.says = iter([SampleFailed("the engine is gone")])
    http = scene.http(scene.session().key)
    answer = await http.post(CHAT, json=body(stream=True), headers={"x-request-id": "mine"})
    last = [line for line in answer.text.splitlines() if line.startswith("data: ")][-1]
    error = json.loads(last.removeprefix("data: "))["error"]
    assert error["request_id"] == "mine" and "engine is gone" in error["message"]


async def test_model_name_is_the_documented_one(scene):
    page = (ROOT / "docs" / "openai.md").read_text()
    [name] = set(re.findall(r'"model": "(.*?)"', page))
    http = scene.http(scene.session().key)
    assert (await http.get("/v1/models")).json()["data"][0]["id"] == name
    assert (await http.post(CHAT, json={**body(), "model": name})).json()["model"] == name


async def test_plain_completions_name_the_token_of_each_log_probability(scene):
    client = scene.client(scene.session())
    for is_streamed in (False, True):
        asked = {"model": MODEL, "prompt": "x", "logprobs": 1, "max_tokens": 50}
        answer = await client.completions.create(**asked, stream=is_streamed)
        chunks = [one async for one in answer] if is_streamed else [answer]
        entries = [one for chunk in chunks for choice in chunk.choices if (one := choice.logprobs)]
        assert sum(len(one.tokens) for one in entries) == len(spell("hello")) + 1
        for one in entries:
            pairs = zip(one.tokens, one.token_logprobs, strict=True)
            assert one.top_logprobs == [{token: logprob} for token, logprob in pairs]
