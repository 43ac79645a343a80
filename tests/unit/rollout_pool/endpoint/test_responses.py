"""OpenAI's Responses API: its official client, and requests as coding agents send them."""

from __future__ import annotations

import itertools
import json

import openai
import pytest
from openai.types.responses import Response

from configs.choices import ToolParser
from configs.rollout_schema import OpenAIConfig, RolloutConfig, TaskConfig
from rollout_pool.endpoint.responses import ResponsesRequest
from rollout_pool.endpoint.schema import decode
from rollout_pool.sampling.sample import SampleFailed
from tests.support.endpoint_scene import (
    CHATML,
    END,
    END_TOKEN,
    MERGES,
    MODEL,
    SAYS,
    SPECIALS,
    TOKENIZER,
    WEATHER,
    call,
    chat,
    check_session,
    events_of,
    spell,
)
from tests.support.rollout import merging_tokenizer

RESPONSES = "/v1/responses"
USER = {"role": "user", "content": "hello"}
TOOL = {"type": "function", **WEATHER["function"]}


def body(given="hello", **more):
    return {"model": MODEL, "input": given, **more}


def message(text, role="user"):
    kind = "output_text" if role == "assistant" else "input_text"
    return {"type": "message", "role": role, "content": [{"type": kind, "text": text}]}


def result(call_id, output):
    return {"type": "function_call_output", "call_id": call_id, "output": output}


def agent_body(items, **more):
    """A request as a coding agent sends it: without memory at the server, one call at a time."""
    usual = {
        "instructions": "You are an agent.",
        "tools": [{**TOOL, "strict": False}],
        "tool_choice": "auto",
        "parallel_tool_calls": False,
        "reasoning": {"summary": "auto"},
        "client_metadata": {"turn": "1"},
        "store": False,
        "stream": True,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "0199-conversation",
    }
    return body(items, **usual | more)


async def numbered(http, asked, path=RESPONSES):
    """The events of a stream."""
    events = await events_of(http, path, asked)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


def checked(model):
    """`model` as its own type reads it: the client does not check what it got."""
    return type(model).model_validate(model.to_dict())


async def answer_to(client, way, **asked):
    if way != "stream":
        return await client.responses.create(**asked)
    async with client.responses.stream(**asked) as stream:
        async for event in stream:
            assert event.type
        return await stream.get_final_response()


@pytest.mark.parametrize("way", ["create", "stream", "previous"])
async def test_conversation_of_the_official_client_is_one_trajectory(scene, way):
    """Thoughts, calls and their results; answers are sent back as they came, or named."""
    scene.author.says = iter(SAYS)
    session = scene.session()
    client, items, answers, last = scene.client(session), [USER], [], None
    asked = {"model": MODEL, "tools": [TOOL], "instructions": "Be brief."}
    for _ in SAYS:
        answer = await answer_to(client, way, **asked, input=items, previous_response_id=last)
        answers.append(answer)
        made = [one for one in answer.output if one.type == "function_call"]
        new = [*(result(one.call_id, "hello 21") for one in made), message("hello")]
        if way == "previous":
            items, last = new, answer.id
        else:
            items = [*items, *(one.model_dump() for one in answer.output), *new]
    kinds = [[item.type for item in answer.output] for answer in answers]
    assert kinds == [
        ["reasoning", "message", "function_call", "function_call"],
        ["reasoning", "function_call"],
        ["message"],
    ]
    assert [answer.output_text for answer in answers] == ["I'll look.", "", SAYS[2]]
    first = answers[0].output
    assert first[0].content[0].text == "hm, hello"
    assert [json.loads(one.arguments) for one in first[2:]] == [{"city": "Zürich"}, {}]
    samples = scene.author.samples
    counts = [(answer.usage.input_tokens, answer.usage.output_tokens) for answer in answers]
    assert counts == [(len(sample.prompt), len(sample.output_ids)) for sample in samples]
    assert answers[0].leash["session"] == session.session_id
    assert TOKENIZER.decode(samples[2].prompt).count("Be brief.") == 1
    check_session(session, scene.author.written)
    assert [one.role for one in session.messages if one.role == "tool"] == ["tool"] * 3
    assert {one.name for one in session.messages if one.role == "tool"} == {"weather"}


async def test_answer_has_what_the_clients_types_ask_for(scene):
    scene.author.says = iter(SAYS)
    client = scene.client(scene.session())
    asked = {"model": MODEL, "tools": [TOOL], "input": "hello", "metadata": {"a": "b"}}
    answer = checked(await client.responses.create(**asked))
    assert (answer.status, answer.error, answer.incomplete_details) == ("completed", None, None)
    assert answer.tools[0].name == "weather" and answer.tool_choice == "auto"
    assert answer.metadata == {"a": "b"} and answer.created_at > 0
    async for event in await client.responses.create(**asked, stream=True):
        checked(event)
    assert isinstance(event.response, Response) and event.response.usage.total_tokens > 0


@pytest.mark.parametrize("piece", [1, 1000])
async def test_stream_is_items_one_after_the_other(scene, piece):
    scene.author.says, scene.author.piece = iter(SAYS), piece
    http = scene.http(scene.session().key)
    events = await numbered(http, body(stream=True, tools=[TOOL]))
    kinds = [event["type"].removeprefix("response.") for event in events]
    assert [kind for kind, _ in itertools.groupby(kinds)] == [
        "created",
        "in_progress",
        *("output_item.added", "content_part.added", "reasoning_text.delta"),
        *("reasoning_text.done", "content_part.done", "output_item.done"),
        *("output_item.added", "content_part.added", "output_text.delta"),
        *("output_text.done", "content_part.done", "output_item.done"),
        *("output_item.added", "function_call_arguments.delta"),
        *("function_call_arguments.done", "output_item.done"),
        *("output_item.added", "function_call_arguments.delta"),
        *("function_call_arguments.done", "output_item.done"),
        "completed",
    ]
    places = [event["output_index"] for event in events[2:-1]]
    assert places == sorted(places) and set(places) == {0, 1, 2, 3}
    added = [event["item"] for event in events if event["type"].endswith("item.added")]
    done = [event["item"] for event in events if event["type"].endswith("item.done")]
    assert [one["id"] for one in added] == [one["id"] for one in done]
    assert {one["status"] for one in added} == {"in_progress"}
    assert events[-1]["response"]["output"] == done and events[0]["response"]["output"] == []
    for place, text in ((0, "hm, hello"), (1, "I'll look."), (2, '{"city": "Z\\u00fcrich"}')):
        own = [event for event in events[2:-1] if event["output_index"] == place]
        deltas = [event["delta"] for event in own if "delta" in event]
        assert "".join(deltas) == text
        assert len(deltas) > (1 if piece == 1 and place < 2 else 0)
        ends = [event for event in own if event["type"].endswith(("_text.done", "arguments.done"))]
        assert [event.get("text", event.get("arguments")) for event in ends] == [text]
        assert {event["item_id"] for event in own if "item_id" in event} == {done[place]["id"]}
    usage = events[-1]["response"]["usage"]
    assert usage["output_tokens"] == len(scene.author.samples[0].output_ids)
    assert events[-1]["response"]["leash"]["version_max"] == 7


async def test_request_of_a_coding_agent_is_read_and_goes_on_with_its_tokens(scene):
    """It sends thoughts back without their text, and wants one call an answer."""
    said = "<think>\nhm\n</think>\n\nLet me see." + call("weather", city="Bern")
    scene.author.says = iter([said + call("weather"), "hello"])
    session = scene.session()
    http = scene.http()
    path = f"/sessions/{session.key}{RESPONSES}"
    opening = [
        message("Never ask.", "developer"),
        {**message("<environment_context/>"), "id": "m1", "status": "completed"},
        message("What is it like in Bern?"),
    ]
    *_, last = await numbered(http, agent_body(opening), path)
    thought, text, made = last["response"]["output"]
    assert thought["content"] == [{"type": "reasoning_text", "text": "hm"}]
    assert json.loads(made["arguments"]) == {"city": "Bern"}
    assert last["response"]["store"] is False
    own = [
        {"type": "reasoning", "summary": [], "encrypted_content": None},
        message(text["content"][0]["text"], "assistant"),
        {
            "type": "function_call",
            "call_id": "c1",
            "name": "weather",
            "arguments": '{"city":"Bern"}',
        },
    ]
    results = [result("c1", [{"type": "input_text", "text": "no such city"}])]
    await numbered(http, agent_body([*opening, *own, *results]), path)
    one_call, other = scene.author.samples
    assert TOKENIZER.decode(one_call.output_ids) == said and one_call.ends_at is not None
    check_session(session, [one_call.output_ids, other.output_ids])
    shown = TOKENIZER.decode(other.prompt)
    parts = [
        "<|im_start|>system\nTools:",
        "<|im_start|>system\nYou are an agent.<|im_end|>",
        "<|im_start|>system\nNever ask.<|im_end|>",
        "<|im_start|>user\n<environment_context/><|im_end|>",
        "<|im_start|>user\nWhat is it like in Bern?<|im_end|>",
        f"<|im_start|>assistant\n{said}<|im_end|>",
        "<|im_start|>user\n<tool_response>\nno such city\n</tool_response><|im_end|>",
    ]
    places = [shown.index(part) for part in parts]
    assert places == sorted(places)


@pytest.mark.parametrize(("within", "name"), [("sky", "now.rain"), ("sky.high", "rain")])
async def test_names_with_dots_come_back_as_they_were_given(scene, within, name):
    scene.author.says = iter([call(f"{within}.{name}")])
    tools = [{"type": "namespace", "name": within, "tools": [{**TOOL, "name": name}]}]
    events = await numbered(scene.http(scene.session().key), agent_body([USER], tools=tools))
    [made] = events[-1]["response"]["output"]
    assert (made["namespace"], made["name"]) == (within, name)


@pytest.mark.parametrize("way", ["items", "named"])
async def test_function_of_a_namespace_is_called_by_its_own_name_within_it(scene, way):
    said = call("sky.weather", city="Bern") + call("weather.rain")
    scene.author.says = iter([said, "hello"])
    session = scene.session()
    http = scene.http(session.key)
    tools = [TOOL, {"type": "namespace", "name": "sky", "description": "Above.", "tools": [TOOL]}]
    asked = agent_body([USER], tools=tools, parallel_tool_calls=True, store=way == "named")
    events = await numbered(http, asked)
    made, unknown = events[-1]["response"]["output"]
    assert (made["namespace"], made["name"]) == ("sky", "weather")
    assert "namespace" not in unknown and unknown["name"] == "weather.rain"
    results = [result(made["call_id"], "warm"), result(unknown["call_id"], "no such tool")]
    if way == "named":
        more = {**asked, "input": results, "previous_response_id": events[-1]["response"]["id"]}
    else:
        more = {**asked, "input": [USER, made, unknown, *results]}
    await numbered(http, more)
    check_session(session, scene.author.written)
    shown = TOKENIZER.decode(scene.author.samples[0].prompt)
    assert '"sky.weather"' in shown and "Above.\\nTells the weather." in shown


async def test_session_may_be_continued_through_the_chat_api(scene):
    scene.author.says = iter(SAYS)
    session = scene.session()
    client = scene.client(session)
    answer = await client.responses.create(model=MODEL, input="hello", tools=[TOOL])
    made = [one for one in answer.output if one.type == "function_call"]
    functions = [{"name": one.name, "arguments": one.arguments} for one in made]
    own = {
        "role": "assistant",
        "content": answer.output_text,
        "tool_calls": [{"id": "c", "type": "function", "function": one} for one in functions],
    }
    results = [{"role": "tool", "tool_call_id": "c", "content": "21"} for _ in functions]
    await chat(client, [USER, own, *results], tools=[WEATHER])
    check_session(session, scene.author.written)


async def test_thoughts_that_the_prompt_opened_are_the_same_in_a_named_answer(make_scene):
    template = CHATML.replace(
        "<|im_start|>assistant\\n' if", "<|im_start|>assistant\\n<think>\\n' if"
    )
    tokenizer = merging_tokenizer(MERGES, SPECIALS, template, eos_token=END)
    scene = await make_scene(tokenizer=tokenizer)
    scene.author.says = iter(["hm\n</think>\n\none", "so\n</think>\n\ntwo"])
    session = scene.session()
    client = scene.client(session)
    answer = await client.responses.create(model=MODEL, input="hello")
    assert answer.output_text == "one" and answer.output[0].content[0].text == "hm"
    named = {"input": "hello too", "previous_response_id": answer.id}
    await client.responses.create(model=MODEL, **named)
    check_session(session, scene.author.written)


async def test_answer_that_was_cut_or_is_empty_says_so_and_can_be_continued(scene):
    scene.author.says = iter(["one two", "", [*spell("so"), END_TOKEN]])
    session = scene.session()
    client = scene.client(session)
    cut = checked(await client.responses.create(model=MODEL, input="hello", max_output_tokens=3))
    assert (cut.output_text, cut.status) == ("one", "incomplete")
    assert cut.incomplete_details.reason == "max_output_tokens"
    asked = {"model": MODEL, "input": "And?", "previous_response_id": cut.id}
    events = [event async for event in await client.responses.create(**asked, stream=True)]
    empty = events[-1].response
    assert (events[-1].type, empty.output_text) == ("response.completed", "")
    assert [item.type for item in empty.output] == ["message"]
    asked["previous_response_id"] = empty.id
    await client.responses.create(**asked)
    written = [sample.output_ids for sample in scene.author.samples]
    assert len(written[0]) == 3 and written[1] == [END_TOKEN]
    check_session(session, written)


async def test_retry_gets_the_answer_that_was_sampled_whole_or_streamed(scene):
    session = scene.session()
    http = scene.http(session.key)
    first = (await http.post(RESPONSES, json=body())).json()
    http.headers["x-stainless-retry-count"] = "1"
    assert (await http.post(RESPONSES, json=body())).json() == first
    streams = [await numbered(http, body(stream=True)) for _ in range(2)]
    last, again = (events[-1]["response"] for events in streams)
    assert last == again and last["id"] != first["id"]
    assert len(scene.author.samples) == session.num_turns == 2


IMAGE = {"type": "input_image", "image_url": "data:image/png;base64,", "detail": "auto"}
FILE = {"type": "input_file", "file_id": "f"}
OWN = message("x", "assistant")
CALL = {"type": "function_call", "call_id": "c", "name": "weather", "arguments": "{}"}
FORM = {"type": "json_schema", "name": "form", "schema": {"type": "object"}}
REFUSED = [
    (body(temperature=0.2), "temperature", "0.2 was requested"),
    (body(top_p=0.9), "top_p", "0.9 was requested"),
    (body(max_output_tokens=0), "max_output_tokens", "must be a whole number at least 1"),
    ({"model": MODEL}, "input", "is missing"),
    (body([]), "input", "must be a list of length at least 1"),
    (body(""), "input", "must be a string"),
    (body(["x"]), "input[0]", "must be an object"),
    (body([USER, OWN]), "input[1]", "the last item is the model's own"),
    (body([USER, CALL]), "input[1]", "the last item is the model's own"),
    (body([{"role": "tool", "content": "x"}]), "input[0].role", "'tool' is not supported, only us"),
    (body([{**USER, "name": "x"}]), "input[0].name", "is not supported here; leave it out"),
    (body([{"role": "user", "content": [IMAGE]}]), "input[0].content[0].type", "only input_text"),
    (body([{"role": "user", "content": [FILE]}]), "input[0].content[0].type", "only input_text"),
    (body([result("c", [IMAGE])]), "input[0].output[0].type", "'input_image' is not supported"),
    (body([{"type": "item_reference", "id": "i"}]), "input[0].type", "only message, reasoning"),
    (body([{"type": "local_shell_call"}, USER]), "input[0].type", "'local_shell_call' is not"),
    (body([{**CALL, "arguments": "{"}, USER]), "input[0].arguments", "is not JSON"),
    (body([{**CALL, "arguments": "[]"}, USER]), "input[0].arguments", "must be a JSON object"),
    (body([OWN, {"type": "reasoning"}, USER]), "input[1].type", "thoughts come before the rest"),
    (body(tools=[{**TOOL, "name": ""}]), "tools[0].name", "must be a string of length at least 1"),
    (body(tools=[{**TOOL, "parameters": {"type": "array"}}]), "tools[0].parameters", "must be a"),
    *(
        (body(tools=[{"type": kind, "name": "x"}]), "tools[0].type", f"'{kind}' is not supported")
        for kind in ("web_search", "computer_use_preview", "file_search", "code_interpreter")
    ),
    (
        body(tools=[{"server_label": "s", "type": "mcp"}]),
        "tools[0].type",
        "only function or a namespace",
    ),
    (
        body(tools=[{"name": "x", "type": "namespace", "tools": [{"type": "custom"}]}]),
        "tools[0].tools[0].type",
        "'custom' is not supported, only function",
    ),
    (body(tools=[{"name": "x", "type": "custom"}]), "tools[0].type", "arguments in JSON"),
    (body(tool_choice="all"), "tool_choice", "must be auto, none, required or a function"),
    (body(tool_choice="required"), "tool_choice", "'required' needs tools"),
    (body(tool_choice="required", tools=[TOOL]), "tool_choice", "needs rollout.sampling.top_k"),
    (body(tool_choice={"type": "allowed_tools"}), "tool_choice.type", "'allowed_tools' is not"),
    (
        body(tool_choice={"type": "function", "name": "rain"}, tools=[TOOL]),
        "tool_choice.name",
        "there is no tool 'rain' in tools",
    ),
    (body(text={"format": FORM}), "text.format", "needs rollout.sampling.top_k"),
    (body(text={"format": {"type": "grammar"}}), "text.format.type", "'grammar' is not supported"),
    (body(text={"verbosity": "low"}), "text.verbosity", "is not supported here; leave it out"),
    (body(truncation="auto"), "truncation", "'auto' is not supported, only disabled"),
    (body(include=["file_search_call.results"]), "include[0]", "only reasoning.encrypted_content"),
    (body(conversation="c"), "conversation", "is not supported here; leave it out"),
    (body(background=True), "background", "is not supported here; leave it out"),
    (body(reasoning={"effort": "high"}), "reasoning.effort", "is not supported here; leave it"),
    (body(prompt={"id": "p"}), "prompt", "is not supported here; leave it out"),
    (body(store="no"), "store", "must be true or false, not 'no'"),
    (body(previous_response_id="resp-x"), "previous_response_id", "this session stored no answer"),
    (body("x" * 99_999), "input", "maximum context length is 4000 tokens"),
]


async def test_unsupported_field_is_refused_by_name(scene):
    http = scene.http(scene.session().key)
    for asked, param, words in REFUSED:
        answer = await http.post(RESPONSES, json=asked)
        told = answer.json()["error"]
        assert answer.status_code == 400 and told["param"] == param, (param, told)
        assert words in told["message"] and told["type"] == "invalid_request_error", (words, told)
        assert told["request_id"] == answer.headers["x-request-id"]
    assert scene.author.samples == []


async def test_calls_without_an_end_of_their_own_cannot_be_held_to_one(make_scene):
    task = TaskConfig(chat_template=True, tool_parser=ToolParser.llama3_json)
    scene = await make_scene(task=task)
    http = scene.http(scene.session().key)
    asked = body(tools=[TOOL], parallel_tool_calls=False)
    told = (await http.post(RESPONSES, json=asked)).json()["error"]
    assert told["param"] == "parallel_tool_calls" and "tool_parser=hermes" in told["message"]
    for more in ({"tools": []}, {"tool_choice": "none"}):
        answer = await http.post(RESPONSES, json={**asked, **more})
        assert answer.status_code == 200, answer.json()


async def test_fields_without_effect_are_accepted(scene):
    http = scene.http(scene.session().key)
    for more in (
        {"temperature": 1.0, "top_p": 1, "metadata": {}, "user": "u", "service_tier": "auto"},
        {"truncation": "disabled", "safety_identifier": "s", "text": {"format": {"type": "text"}}},
        {"tools": [TOOL], "tool_choice": "none", "instructions": None, "store": None},
    ):
        answer = await http.post(RESPONSES, json=body(**more))
        assert answer.status_code == 200, (more, answer.json())
    assert {sample.constraint for sample in scene.author.samples} == {None}


def test_forms_are_those_of_chat_requests():
    def as_chat(**more):
        asked = body(tools=[TOOL], parallel_tool_calls=False, **more)
        return decode(json.dumps(asked).encode(), ResponsesRequest).as_chat()

    form = as_chat(text={"format": FORM}).response_format
    assert (form.type, form.json_schema.schema) == ("json_schema", {"type": "object"})
    assert as_chat(text={"format": {"type": "json_object"}}).response_format.type == "json_object"
    named = as_chat(tool_choice={"type": "function", "name": "weather"})
    assert named.tool_choice.function.name == "weather" and not named.parallel_tool_calls
    assert not as_chat(tool_choice="required").parallel_tool_calls
    assert as_chat().parallel_tool_calls, "with a free choice the answer is ended after one call"


async def test_only_an_answer_that_was_stored_can_be_named_and_in_its_own_session(scene):
    session = scene.session()
    client, other = scene.client(session), scene.client(scene.session())
    stored = await client.responses.create(model=MODEL, input="hello")
    unstored = await client.responses.create(model=MODEL, input="hello", store=False)
    for one, answer in ((client, unstored), (other, stored)):
        with pytest.raises(openai.BadRequestError, match="stored no answer") as refused:
            await one.responses.create(model=MODEL, input="x", previous_response_id=answer.id)
        assert refused.value.code == "previous_response_not_found"


async def test_errors_are_those_of_the_client(make_scene):
    limits = OpenAIConfig(max_answers=3)
    scene = await make_scene(rollout=RolloutConfig(group_size=2, openai=limits))
    session = scene.session()
    client = scene.client(session)
    asked = {"model": MODEL, "input": "hello"}
    with pytest.raises(openai.AuthenticationError, match="there is no session with this key"):
        await scene.client_of("sk-wrong", str(client.base_url)).responses.create(**asked)
    with pytest.raises(openai.NotFoundError, match="there is no 'gpt' here"):
        await client.responses.create(**{**asked, "model": "gpt"})
    scene.author.says = iter(["hello", SampleFailed("no engine"), SampleFailed("no engine")])
    await client.responses.create(**asked)
    with pytest.raises(openai.InternalServerError, match="no engine gave"):
        await client.responses.create(**asked)
    with pytest.raises(openai.APIError, match="no engine gave") as failed:
        [event async for event in await client.responses.create(**asked, stream=True)]
    assert failed.value.code == "sample_failed"
    with pytest.raises(openai.BadRequestError, match=r"rollout.openai.max_answers"):
        await client.responses.create(**asked)
    await scene.sessions.close(session, "its reward was posted")
    with pytest.raises(openai.APIStatusError, match="is over: its reward was posted") as over:
        await client.responses.create(**asked)
    assert over.value.status_code == 410
