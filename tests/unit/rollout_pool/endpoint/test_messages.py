"""Anthropic's Messages API: its official client, and requests as coding agents send them."""

from __future__ import annotations

import asyncio
import itertools
import json

import anthropic
import pytest

from buffer.types import SamplingParams
from configs.rollout_schema import OpenAIConfig, RolloutConfig
from rollout_pool.endpoint.errors import ApiError
from rollout_pool.sampling.sample import SampleFailed
from tests.support.endpoint_scene import (
    MODEL,
    SAYS,
    TOKENIZER,
    WEATHER,
    call,
    chat,
    check_session,
    events_of,
    eventually,
)

MESSAGES = "/v1/messages"
COUNT, BETA = f"{MESSAGES}/count_tokens", f"{MESSAGES}?beta=true"
USER = {"role": "user", "content": "hello"}
TOOL = {
    "name": "weather",
    "description": "Tells the weather.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
}
CACHED = {"cache_control": {"type": "ephemeral"}}
REMINDER = {"type": "text", "text": "<system-reminder>hello</system-reminder>"}


def body(**more):
    return {"model": MODEL, "max_tokens": 500, "messages": [USER], **more}


KEEPS_THOUGHTS = {"type": "clear_thinking_20251015", "keep": "all"}


def agent_body(messages, **more):
    """A request as a coding agent sends it: cached blocks everywhere, bookkeeping, a stream."""
    asked = {
        "system": [
            {"type": "text", "text": "You are an agent.", **CACHED},
            {"type": "text", "text": "Be brief.", **CACHED},
        ],
        "tools": [{**TOOL, **CACHED, "eager_input_streaming": True}],
        "tool_choice": {"type": "auto"},
        "metadata": {"user_id": "user_0_account__session_1"},
        "stop_sequences": ["\n\nhello:"],
        "temperature": 1,
        "thinking": {"type": "adaptive"},
        "context_management": {"edits": [KEEPS_THOUGHTS]},
        "output_config": {"effort": "high"},
        "stream": True,
    }
    return body(messages=messages, **asked, **more)


def user(*blocks):
    return {"role": "user", "content": list(blocks)}


def result(call_id, content, **more):
    return {"type": "tool_result", "tool_use_id": call_id, "content": content, **more}


@pytest.mark.parametrize("way", ["stream", "create", "beta"])
async def test_conversation_of_the_official_client_is_one_trajectory(scene, way):
    """Thoughts, calls and their results; each answer is sent back as it came."""
    scene.author.says = iter(SAYS)
    session = scene.session()
    client, messages, answers = scene.anthropic(session), [USER], []
    asked = {"model": MODEL, "max_tokens": 900, "tools": [TOOL], "system": "Be brief."}
    for _ in SAYS:
        if way == "create":
            answer = await client.messages.create(**asked, messages=messages)
        else:
            api = client.beta.messages if way == "beta" else client.messages
            async with api.stream(**asked, messages=messages) as stream:
                answer = await stream.get_final_message()
        answers.append(answer)
        calls = [block for block in answer.content if block.type == "tool_use"]
        results = [result(one.id, [{"type": "text", "text": "hello 21"}]) for one in calls]
        messages = [*messages, answer.model_dump(include={"role", "content"})]
        messages.append(user(*results, REMINDER))
    shapes = [[block.type for block in answer.content] for answer in answers]
    assert shapes == [
        ["thinking", "text", "tool_use", "tool_use"],
        ["thinking", "tool_use"],
        ["text"],
    ]
    first, _, last = (answer.content for answer in answers)
    assert (first[0].thinking, first[1].text, last[0].text) == ("hm, hello", "I'll look.", SAYS[2])
    assert [block.input for block in first[2:]] == [{"city": "Zürich"}, {}]
    assert [answer.stop_reason for answer in answers] == ["tool_use", "tool_use", "end_turn"]
    samples = scene.author.samples
    counts = [(answer.usage.input_tokens, answer.usage.output_tokens) for answer in answers]
    assert counts == [(len(sample.prompt), len(sample.output_ids)) for sample in samples]
    assert answers[0].leash["session"] == session.session_id
    check_session(session, scene.author.written)


async def test_request_of_a_coding_agent_is_read_and_goes_on_with_its_tokens(scene):
    said = "<think>\nhm\n</think>\n\nLet me see." + call("weather", city="Bern")
    scene.author.says = iter([said, "hello"])
    session = scene.session()
    http = scene.http()
    http.headers["x-api-key"] = session.key
    http.headers["anthropic-beta"] = "interleaved-thinking-2025-05-14"
    opening = user({**REMINDER, **CACHED}, {"type": "text", "text": "What is it like in Bern?"})
    [start, *_, last, stop] = await events_of(http, BETA, agent_body([opening]))
    assert start["message"]["usage"]["output_tokens"] == 0 and stop == {"type": "message_stop"}
    assert last["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    own = [
        {"type": "thinking", "thinking": "hm", "signature": "leash"},
        {"type": "text", "text": "Let me see."},
        {
            "type": "tool_use",
            "id": "toolu_1",
            "name": "weather",
            "input": {"city": "Bern"},
            **CACHED,
        },
    ]
    more = user({**result("toolu_1", "no such city", is_error=True), **CACHED}, REMINDER)
    messages = [opening, {"role": "assistant", "content": own}, more]
    await events_of(http, BETA, agent_body(messages))
    check_session(session, scene.author.written)
    shown = TOKENIZER.decode(scene.author.samples[1].prompt)
    parts = [
        "<|im_start|>system\nTools:",
        "<|im_start|>system\nYou are an agent.\n\nBe brief.<|im_end|>",
        f"<|im_start|>user\n{REMINDER['text']}\n\nWhat is it like in Bern?<|im_end|>",
        f"<|im_start|>assistant\n{said}<|im_end|>",
        "<|im_start|>user\n<tool_response>\nError: no such city\n</tool_response><|im_end|>",
        f"<|im_start|>user\n{REMINDER['text']}<|im_end|>\n<|im_start|>assistant\n",
    ]
    places = [shown.index(part) for part in parts]
    assert places == sorted(places)


async def test_client_that_leaves_thoughts_out_goes_on_with_its_tokens(scene):
    scene.author.says = iter(["<think>hm</think>one", "two"])
    session = scene.session()
    client = scene.anthropic(session)
    ask = {"model": MODEL, "max_tokens": 50}
    answer = await client.messages.create(**ask, messages=[USER])
    [thinking, text] = answer.content
    assert (thinking.thinking, text.text) == ("hm", "one")
    own = {"role": "assistant", "content": [text.model_dump()]}
    await client.messages.create(**ask, messages=[USER, own, USER])
    check_session(session, scene.author.written)


async def test_session_may_be_continued_through_the_other_api(scene):
    scene.author.says = iter(SAYS)
    session = scene.session()
    answer = await scene.anthropic(session).messages.create(
        model=MODEL, max_tokens=500, messages=[USER], tools=[TOOL]
    )
    functions = [
        {"name": block.name, "arguments": json.dumps(block.input)} for block in answer.content[2:]
    ]
    own = {
        "role": "assistant",
        "content": answer.content[1].text,
        "tool_calls": [{"id": "c", "type": "function", "function": one} for one in functions],
    }
    results = [{"role": "tool", "tool_call_id": "c", "content": "21"} for _ in functions]
    await chat(scene.client(session), [USER, own, *results], tools=[WEATHER])
    check_session(session, scene.author.written)


async def test_numbers_come_back_as_javascript_writes_them(scene):
    scene.author.says = iter([call("weather", at=[1.0, -0.5, 1e20], n=2**53 + 1), "two"])
    session = scene.session()
    asked = {"model": MODEL, "max_tokens": 200, "tools": [TOOL]}
    client = scene.anthropic(session)
    [made] = (await client.messages.create(**asked, messages=[USER])).content
    assert made.input == {"at": [1.0, -0.5, 1e20], "n": 2**53 + 1}
    own = {**made.model_dump(), "input": {"at": [1, -0.5, 10**20], "n": 2**53}}
    messages = [USER, {"role": "assistant", "content": [own]}, user(result(made.id, "21"))]
    await client.messages.create(**asked, messages=messages)
    check_session(session, scene.author.written)


@pytest.mark.parametrize("piece", [1, 1000])
async def test_stream_is_blocks_one_after_the_other(scene, piece):
    scene.author.says, scene.author.piece = iter(SAYS), piece
    http = scene.http(scene.session().key)
    events = await events_of(http, MESSAGES, body(stream=True, tools=[TOOL]))
    kinds = [event["type"] for event in events]
    assert kinds[0] == "message_start" and kinds[-2:] == ["message_delta", "message_stop"]
    blocks, deltas = [], {}
    for index, own in itertools.groupby(events[1:-2], key=lambda event: event["index"]):
        start, *grown, stop = own
        assert (start["type"], stop["type"]) == ("content_block_start", "content_block_stop")
        assert {one["type"] for one in grown} == {"content_block_delta"} and index == len(blocks)
        blocks.append(start["content_block"])
        deltas[index] = [one["delta"] for one in grown]
    assert [block["type"] for block in blocks] == ["thinking", "text", "tool_use", "tool_use"]
    assert "".join(one.get("thinking", "") for one in deltas[0]) == "hm, hello"
    assert deltas[0][-1] == {"type": "signature_delta", "signature": "leash"}
    assert "".join(one["text"] for one in deltas[1]) == "I'll look."
    assert len(deltas[1]) > (1 if piece == 1 else 0)
    [arguments] = deltas[2]
    assert json.loads(arguments["partial_json"]) == {"city": "Zürich"}
    assert blocks[2]["input"] == {} and blocks[2]["id"] != blocks[3]["id"]
    usage = events[-2]["usage"]
    assert usage["output_tokens"] == len(scene.author.samples[0].output_ids)
    assert events[-2]["leash"]["version_max"] == 7


async def test_answer_says_why_it_ended(scene):
    scene.author.says = iter(["one two", "one two", "one <|im_end|> two", "one"])
    client = scene.anthropic(scene.session())
    for more, text, reason, sequence in (
        ({"max_tokens": 3}, "one", "max_tokens", None),
        ({"stop_sequences": [" three", " two"]}, "one", "stop_sequence", " two"),
        ({"stop_sequences": ["two", "<|im_end|>"]}, "one ", "stop_sequence", "<|im_end|>"),
        ({"stop_sequences": ["two"]}, "one", "end_turn", None),
    ):
        asked = {"model": MODEL, "max_tokens": 50, "messages": [USER], **more}
        answer = await client.messages.create(**asked)
        assert [block.text for block in answer.content] == [text]
        assert (answer.stop_reason, answer.stop_sequence) == (reason, sequence)


async def test_tokens_are_counted_as_a_request_would_have_them_and_nothing_is_sampled(scene):
    session = scene.session()
    client = scene.anthropic(session)
    asked = {"model": MODEL, "messages": [USER], "tools": [TOOL], "system": "Be brief."}
    counted = await client.messages.count_tokens(**asked)
    assert scene.author.samples == []
    answer = await client.messages.create(**asked, max_tokens=50)
    assert counted.input_tokens == answer.usage.input_tokens > 50
    with pytest.raises(anthropic.BadRequestError, match="maximum context length"):
        await client.messages.count_tokens(
            model=MODEL, messages=[{**USER, "content": "x" * 99_999}]
        )
    assert session.num_turns == 1 and not session.is_full, "counting ends no episode"


def block(role, **one):
    return body(messages=[{"role": role, "content": [one]}, USER])


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}
SEARCH = {"type": "web_search_20250305", "name": "web_search"}
FORM = {"type": "json_schema", "schema": {"type": "object"}}
REFUSED = [
    (body(temperature=0.2), "temperature: 0.2 was requested"),
    (body(top_p=0.9), "top_p: 0.9 was requested"),
    (body(top_k=5), "top_k: 5 was requested"),
    (body(max_tokens=0), "max_tokens: must be a whole number at least 1"),
    ({"model": MODEL, "messages": [USER]}, "max_tokens: is missing"),
    (body(messages=[]), "messages: must be"),
    (body(messages=[USER, {"role": "assistant", "content": "x"}]), "messages[1].role: the last"),
    (
        body(messages=[{"role": "tool", "content": "x"}]),
        "messages[0].role: 'tool' is not supported",
    ),
    (body(messages=[{**USER, "name": "x"}]), "messages[0].name: is not supported"),
    (
        block("user", **IMAGE),
        "messages[0].content[0].type: 'image' is not supported, only text, th",
    ),
    (block("user", type="document", source={}), "messages[0].content[0].type: 'document'"),
    (block("assistant", type="redacted_thinking", data=""), "content[0].type: 'redacted_thinking'"),
    (block("assistant", type="server_tool_use"), "content[0].type: 'server_tool_use'"),
    (block("user", type="thinking", thinking="x"), "content[0].type: a user message has no such"),
    (block("system", **result("t", "")), "content[0].type: a system message has no such"),
    (block("assistant", **result("t", "")), "content[0].type: an assistant message has no such"),
    (block("user", text="x"), "messages[0].content[0].type: is missing"),
    (block("user", type="text", text="x", citations=[]), "content[0].citations: must be null"),
    (block("user", type="text", text="x", more=1), "messages[0].content[0].more: is not supported"),
    (
        block("user", **result("t", [IMAGE])),
        "messages[0].content[0].content[0].type: 'image' is not supported, only text: the model",
    ),
    (
        body(
            messages=[
                {
                    "role": "assistant",
                    "content": [REMINDER, {"type": "thinking", "thinking": "so"}],
                },
                USER,
            ]
        ),
        "messages[0].content[1].type: thoughts come before all other blocks",
    ),
    (body(system=[IMAGE]), "system[0].type: 'image' is not supported, only text"),
    (body(tools=[SEARCH]), "tools[0].type: 'web_search_20250305' is not supported, only custom"),
    (body(tools=[{**TOOL, "defer_loading": True}]), "tools[0].defer_loading: is not supported"),
    (body(tools=[{**TOOL, "name": ""}]), "tools[0].name: must be a string of length at least 1"),
    (body(tools=[{**TOOL, "input_schema": {"type": "array"}}]), "tools[0].input_schema: must be a"),
    (
        body(tool_choice={"type": "tool", "name": "rain"}, tools=[TOOL]),
        "tool_choice.name: there is",
    ),
    (body(tool_choice={"type": "all"}), "tool_choice.type: 'all' is not supported, only auto, any"),
    (body(tool_choice={"type": "any"}), "tool_choice: 'required' needs tools"),
    (body(tool_choice={"type": "any"}, tools=[TOOL]), "tool_choice: needs rollout.sampling.top_k"),
    (
        body(tool_choice={"type": "auto", "disable_parallel_tool_use": True}, tools=[TOOL]),
        "tool_choice.disable_parallel_tool_use: without a forced call the model chooses",
    ),
    (body(stop_sequences=["x"] * 17), "stop_sequences: must be a list of length at most 16"),
    (body(stop_sequences=[""]), "stop_sequences[0]: must be a string of length at least 1"),
    (body(thinking={"type": "enabled"}), "thinking.type: 'enabled' is not supported, only adapt"),
    (body(thinking={"type": "disabled"}), "thinking.type: 'disabled' is not supported"),
    (
        body(thinking={"type": "adaptive", "budget_tokens": 9}),
        "thinking.budget_tokens: is not supp",
    ),
    (body(thinking={"type": "adaptive", "display": "omitted"}), "thinking.display: 'omitted'"),
    (
        body(output_config={"effort": "low"}),
        "output_config.effort: 'low' is not supported, only hi",
    ),
    (body(output_config={"verbosity": 1}), "output_config.verbosity: is not supported here"),
    (body(output_config={"format": FORM}), "output_config.format: needs rollout.sampling.top_k"),
    (
        body(context_management={"edits": [{"type": "clear_tool_uses_20250919"}]}),
        "context_management.edits[0].type: 'clear_tool_uses_20250919' is not supported, only clear",
    ),
    (
        body(context_management={"edits": [{**KEEPS_THOUGHTS, "keep": "none"}]}),
        "context_management.edits[0].keep: 'none' is not supported, only all: which thoughts stay",
    ),
    (body(mcp_servers=[]), "mcp_servers: is not supported"),
    (body(container="c"), "container: is not supported"),
    (body(stream="yes"), "stream: must be true or false"),
    (body(n=2), "n: is not supported"),
]


async def test_unsupported_field_is_refused_by_name_in_the_apis_own_shape(scene):
    http = scene.http(scene.session().key)
    for asked, words in REFUSED:
        for path in (MESSAGES, COUNT):
            if path == COUNT and "is missing" in words:
                continue
            answer = await http.post(path, json=asked)
            told = answer.json()
            if path == COUNT and "stream" in asked:
                continue
            assert answer.status_code == 400, (words, told)
            assert set(told) == {"type", "error", "request_id"} and told["type"] == "error"
            assert told["error"]["type"] == "invalid_request_error"
            assert words in told["error"]["message"], told
            assert told["request_id"] == answer.headers["x-request-id"]
    assert scene.author.samples == []


async def test_fields_without_effect_and_the_models_own_thoughts_are_accepted(make_scene):
    scene = await make_scene(sampling=SamplingParams(top_k=20))
    http = scene.http(scene.session().key)
    for more in (
        {"temperature": 1.0, "top_p": 1, "top_k": 20, "system": None, "metadata": None},
        {"service_tier": "auto", **CACHED, "inference_geo": "eu", "stop_sequences": []},
        {"thinking": {"type": "adaptive", "display": "summarized"}},
        {"tools": [{**TOOL, "type": "custom", "strict": True}], "tool_choice": {"type": "none"}},
        {"tools": [TOOL], "tool_choice": {"type": "any", "disable_parallel_tool_use": True}},
        {"tools": [TOOL], "tool_choice": {"type": "tool", "name": "weather"}},
        {"messages": [USER, {"role": "system", "content": "Be brief."}]},
        {"output_config": {"format": FORM}},
    ):
        answer = await http.post(MESSAGES, json=body(**more))
        assert answer.status_code == 200, (more, answer.json())
    forms = [sample.constraint is not None for sample in scene.author.samples]
    assert forms == [*[False] * 4, True, True, False, True]


async def test_errors_have_the_types_of_the_clients(make_scene):
    rollout = RolloutConfig(
        group_size=2,
        max_prompt_tokens=200,
        max_response_tokens=200,
        openai=OpenAIConfig(max_requests=1, max_answers=3),
    )
    scene = await make_scene(rollout=rollout)
    session, gate = scene.session(), asyncio.Event()
    client = scene.anthropic(session)
    ask = {"model": MODEL, "max_tokens": 50, "messages": [USER]}
    with pytest.raises(anthropic.AuthenticationError, match="there is no session with this key"):
        await scene.anthropic(session, api_key="sk-wrong").messages.create(**ask)
    with pytest.raises(anthropic.NotFoundError, match="there is no 'claude' here"):
        await client.messages.create(**{**ask, "model": "claude"})
    unkeyed = await scene.http().post(MESSAGES, json=body())
    assert unkeyed.status_code == 401 and "'x-api-key: KEY'" in unkeyed.json()["error"]["message"]
    scene.author.says, scene.author.gates = iter(["hello"]), {2: gate}
    first = asyncio.create_task(client.messages.create(**ask))
    await eventually(lambda: scene.author.samples)
    with pytest.raises(anthropic.RateLimitError) as limited:
        await client.messages.create(**ask)
    assert limited.value.body["error"]["type"] == "rate_limit_error"
    gate.set()
    await first
    scene.author.says = itertools.repeat(SampleFailed("no engine"))
    with pytest.raises(anthropic.InternalServerError, match="no engine gave") as failed:
        await client.messages.create(**ask)
    assert failed.value.body["error"]["type"] == "overloaded_error"
    with pytest.raises(anthropic.APIStatusError, match="no engine gave") as failed:
        async with client.messages.stream(**ask) as stream:
            await stream.get_final_message()
    assert failed.value.body["error"]["type"] == "overloaded_error"
    with pytest.raises(anthropic.BadRequestError, match=r"rollout.openai.max_answers"):
        await client.messages.create(**ask)
    await scene.sessions.close(session, "its reward was posted")
    with pytest.raises(anthropic.APIStatusError, match="is over: its reward was posted") as over:
        await client.messages.create(**ask)
    assert over.value.status_code == 410


async def test_retry_gets_the_answer_that_was_sampled(scene):
    session = scene.session()
    retry = {"x-stainless-retry-count": "1"}
    http = scene.http()
    path = f"/sessions/{session.key}{MESSAGES}"
    first, again = [await http.post(path, json=body(), headers=h) for h in ({}, retry)]
    assert first.json() == again.json() and len(scene.author.samples) == session.num_turns == 1


async def test_quiet_stream_is_kept_alive(make_scene):
    scene = await make_scene(keep_alive_s=0.05)
    gate, num_comments = asyncio.Event(), 0
    scene.author.gates = {2: gate}
    http = scene.http(scene.session().key)
    async with http.stream("POST", MESSAGES, json=body(stream=True)) as answer:
        async for line in answer.aiter_lines():
            num_comments += line.startswith(":")
            if num_comments == 3:
                gate.set()
    assert num_comments >= 3


def test_words_of_a_request_are_not_taken_for_the_name_of_a_field():
    own, quoted = "response_format: no", "stop: 'response_format: x' is odd"
    said = [ApiError(400, one).anthropic_body("r")["error"]["message"] for one in (own, quoted)]
    assert said == ["output_config.format: no", quoted]
