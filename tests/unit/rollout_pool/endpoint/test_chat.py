"""Conversations with the official client are recorded token by token."""

from __future__ import annotations

import asyncio
import json
from random import Random

import pytest
from openai import BadRequestError

from configs.choices import ToolParser
from configs.rollout_schema import TaskConfig
from tests.support.endpoint_scene import (
    END,
    END_TOKEN,
    MERGES,
    MODEL,
    SPECIALS,
    TOKENIZER,
    WEATHER,
    call,
    chat,
    check_branch,
    check_session,
    said_in,
    spell,
)
from tests.support.rollout import merging_tokenizer

USER = {"role": "user", "content": "hello, what is the weather too?"}


async def test_streamed_conversation_with_tools_is_one_trajectory_of_the_tokens_as_written(scene):
    says = [
        "I'll look. " + call("weather", city="Zürich") + call("weather", city="he\nll"),
        "   " + call("weather", city="Bern"),
        "It is warm in all of them: 21 °C 🌞, hell too.",
    ]
    scene.author.says = iter(says)
    session = scene.session()
    client, messages = scene.client(session), [{"role": "system", "content": "Be brief."}, USER]
    for turn in range(3):
        scene.author.version = 7 + turn
        stream = await chat(
            client, messages, tools=[WEATHER], stream=True, stream_options={"include_usage": True}
        )
        text, calls, reason, chunks = await said_in(stream)
        messages.append({"role": "assistant", "content": text})
        assert chunks[-1].usage.completion_tokens == len(scene.author.ended[-1][1])
        assert chunks[-1].leash["version_max"] == 7 + turn
        assert all(chunk.choices for chunk in chunks[:-1]) and not chunks[-1].choices
        if turn == 2:
            assert (text, calls, reason) == (says[2], [], "stop")
            continue
        assert reason == "tool_calls" and text == ("I'll look." if turn == 0 else "")
        cities = [json.loads(one["arguments"])["city"] for one in calls]
        assert cities == (["Zürich", "he\nll"] if turn == 0 else ["Bern"])
        messages[-1]["tool_calls"] = [
            {
                "id": c["id"],
                "type": "function",
                "function": {k: c[k] for k in ("name", "arguments")},
            }
            for c in calls
        ]
        messages += [
            {"role": "tool", "tool_call_id": c["id"], "content": "hello 21"} for c in calls
        ]
    episode = session.episode(end="done", outcome=None)
    [branch] = episode.branches
    check_branch(branch, [[*spell(text), END_TOKEN] for text in says])
    assert [span.version for span in branch.version_spans] == [7, 8, 9]
    assert branch.tokens == scene.author.samples[2].prompt + scene.author.samples[2].output_ids
    assert episode.num_turns == 3 and episode.answer == says[2]
    again = TOKENIZER.encode(TOKENIZER.decode(branch.tokens), add_special_tokens=False)
    assert again != branch.tokens  # the author spells in its own way: drift would have shown
    assert TOKENIZER.decode(again) == TOKENIZER.decode(branch.tokens)


async def test_openai_stream_helper_finds_the_calls(scene):
    """It checks the order of chunks, and puts calls together by their index."""
    scene.author.says = iter(["Both. " + call("weather", city="é") + call("weather", n=[1, {}])])
    scene.author.piece = 1
    client, events = scene.client(scene.session()), []
    tool = {"type": "function", "function": {**WEATHER["function"], "strict": True}}
    async with client.chat.completions.stream(
        model=MODEL, messages=[USER], tools=[tool], stream_options={"include_usage": True}
    ) as stream:
        async for event in stream:
            events.append(event.type)
        answer = await stream.get_final_completion()
    [choice] = answer.choices
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", "Both.")
    calls = [(c.function.name, json.loads(c.function.arguments)) for c in choice.message.tool_calls]
    assert calls == [("weather", {"city": "é"}), ("weather", {"n": [1, {}]})]
    assert len({c.id for c in choice.message.tool_calls}) == 2
    assert events.count("tool_calls.function.arguments.done") == 2
    assert answer.usage.completion_tokens == len(scene.author.ended[0][1])


async def test_stream_cut_within_a_call_says_so_and_has_no_call(scene):
    scene.author.says = iter([call("weather", city="Bern")])
    stream = await chat(
        scene.client(scene.session()), [USER], tools=[WEATHER], stream=True, max_tokens=20
    )
    text, calls, reason, _ = await said_in(stream)
    assert (calls, reason) == ([], "length") and text == call("weather", city="Bern")[:20]


async def test_unstreamed_answers_are_the_same(scene):
    scene.author.says = iter(["Let me see." + call("weather", city="Bern"), "hello, warm"])
    session = scene.session()
    client, messages = scene.client(session), [USER]
    answer = await chat(client, messages, tools=[WEATHER], logprobs=True, max_tokens=500)
    [choice] = answer.choices
    [asked] = choice.message.tool_calls
    written = scene.author.ended[0][1]
    assert choice.finish_reason == "tool_calls" and choice.message.content == "Let me see."
    assert (asked.function.name, asked.function.arguments) == ("weather", '{"city": "Bern"}')
    assert [entry.logprob for entry in choice.logprobs.content] == scene.author.samples[0].logprobs
    assert b"".join(bytes(e.bytes) for e in choice.logprobs.content[:-1]).startswith(b"Let me")
    assert answer.usage.completion_tokens == len(written)
    assert answer.leash == {"session": session.session_id, "version_min": 7, "version_max": 7}
    messages += [
        choice.message.model_dump(),  # with all its empty fields, as agents do
        {"role": "tool", "tool_call_id": asked.id, "content": [{"type": "text", "text": "hell"}]},
    ]
    last = await chat(client, messages, tools=[WEATHER])
    assert last.choices[0].message.content == "hello, warm"
    assert last.choices[0].finish_reason == "stop"
    check_session(session, scene.author.written)


CALLED = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {
            "id": "c1",
            "type": "function",
            "function": {"name": "weather", "arguments": '{"city": "Bern"}'},
        }
    ],
}


async def test_tools_that_the_template_does_not_write_are_refused_at_the_first_request(make_scene):
    silent = "{% for m in messages %}{{ m.role + ' ' + m.content }}<|im_end|>{% endfor %}"
    scene = await make_scene(tokenizer=merging_tokenizer(MERGES, SPECIALS, silent, eos_token=END))
    client = scene.client(scene.session())
    await chat(client, [USER])
    for more, lost in (({"tools": [WEATHER]}, "the description of a tool"), ({}, "a tool call")):
        result = {"role": "tool", "tool_call_id": "c1", "content": "21"}
        messages = [USER, CALLED, result] if not more else [USER]
        with pytest.raises(BadRequestError, match=f"task.chat_template=true: .* leaves out {lost}"):
            await chat(client, messages, **more)


async def test_edited_history_begins_a_branch_and_no_token_is_trained_twice(scene):
    scene.author.says = iter(["hello one", "hello two", "hello three", "hello four"])
    session = scene.session()
    client = scene.client(session)

    async def say(*messages):
        answer = await chat(client, list(messages))
        return {"role": "assistant", "content": answer.choices[0].message.content}

    one = await say(USER)
    two = await say(USER, one, {"role": "user", "content": "go on"})
    summary = {"role": "user", "content": "hello: summed up"}
    await say(summary, two, USER)
    await say(USER, one, {"role": "user", "content": "go on otherwise"})
    first, second, third = session.episode(end="done", outcome=None).branches
    written = scene.author.written
    check_branch(first, written[:2])
    check_branch(second, [written[2]])
    check_branch(third, [written[3]])
    # The last goes on from the first answer as it was written, though it is not trained there.
    start = scene.author.samples[0].prompt + written[0]
    assert third.tokens[: len(start)] == start and third.prompt_length > len(start)


async def test_white_space_that_a_client_strips_is_no_edit_and_other_tools_are_one(scene):
    scene.author.says = iter(["  hello\n\n", "too", "at"])
    session = scene.session()
    client, messages = scene.client(session), [USER]
    answer = await chat(client, messages)
    assert answer.choices[0].message.content == "  hello\n\n"
    messages += [{"role": "assistant", "content": "hello"}, USER]
    await chat(client, messages)
    await chat(client, messages, tools=[WEATHER])
    first, second = session.episode(end="done", outcome=None).branches
    check_branch(first, [tokens for _, tokens in scene.author.ended[:2]])
    check_branch(second, [scene.author.ended[2][1]])


async def test_requests_of_one_session_may_run_concurrently(scene):
    scene.author.says = iter([f"hello {n}" for n in range(8)])
    session = scene.session()
    client = scene.client(session)
    asked = [{"role": "user", "content": f"number {n}"} for n in range(8)]
    await asyncio.gather(*(chat(client, [one]) for one in asked))
    branches = session.episode(end="done", outcome=None).branches
    assert len(branches) == 8 and sum(len(b.tokens) for b in branches) > 0


async def test_tokens_are_streamed_as_they_come_and_characters_are_whole(scene):
    gate = asyncio.Event()
    text = "é🌞 hello é"
    scene.author.says, scene.author.piece, scene.author.gates = iter([text]), 1, {9: gate}
    client = scene.client(scene.session())
    stream = await chat(client, [USER], stream=True)
    pieces = []
    async for chunk in stream:
        pieces += [choice.delta.content or "" for choice in chunk.choices]
        if "".join(pieces) == "é🌞 he":
            gate.set()
    assert "".join(pieces) == text and "\ufffd" not in "".join(pieces)
    assert len(pieces) > 8


@pytest.mark.parametrize("tools", [[], [WEATHER]])
async def test_invalid_utf8_is_recorded_as_it_is(scene, tools):
    """Decoded in pieces they need not give what they give as a whole; the client has the pieces."""
    random = Random(5)
    says = [[random.randrange(128, 256) for _ in range(60)] for _ in range(6)]
    scene.author.says, scene.author.piece = iter(says), 1
    session = scene.session()
    client, messages = scene.client(session), [USER]
    for _ in says:
        stream = await chat(client, messages, tools=tools, stream=True, max_tokens=60)
        text, _, reason, _ = await said_in(stream)
        assert reason == "length"
        messages += [{"role": "assistant", "content": text}, USER]
    check_session(session, says)


async def test_tool_call_is_never_streamed_as_text_but_similar_text_is(scene):
    says = ["a < b <tool", "x <tool_call>{broken", "no tools " + call("weather")]
    scene.author.says, scene.author.piece = iter(says), 1
    client = scene.client(scene.session())
    for text, more in zip(says, ({"tools": [WEATHER]}, {"tools": [WEATHER]}, {}), strict=True):
        stream = await chat(client, [USER], stream=True, **more)
        got, calls, reason, _ = await said_in(stream)
        assert (got, calls, reason) == (text, [], "stop")


async def converse(client, *turns):
    """Each turn is the text and the number of calls that its answer must have."""
    messages = [USER]
    for content, num_calls in turns:
        stream = await chat(client, messages, tools=[WEATHER], stream=True)
        text, calls, _, _ = await said_in(stream)
        assert (text, len(calls)) == (content, num_calls)
        functions = [{k: c[k] for k in ("name", "arguments")} for c in calls]
        asked = [{"id": "mine", "type": "function", "function": one} for one in functions]
        messages.append({"role": "assistant", "content": text, "tool_calls": asked})
        messages += [{"role": "tool", "tool_call_id": "mine", "content": "21"} for _ in calls]


async def test_calls_in_llama_format_are_streamed_as_calls(make_scene):
    scene = await make_scene(
        task=TaskConfig(chat_template=True, tool_parser=ToolParser.llama3_json)
    )
    [tag] = TOKENIZER.encode("<|python_tag|>", add_special_tokens=False)
    written = '{"name": "weather", "parameters": {"city": "Bern"}}'
    scene.author.says = iter(
        [[*spell("Let me see. "), tag, *spell(written), END_TOKEN], written, '{"warm": true}']
    )
    session = scene.session()
    await converse(scene.client(session), ("Let me see.", 1), ("", 1), ('{"warm": true}', 0))
    check_session(session, scene.author.written)


async def test_renderers_answers_are_streamed_once_read_and_keep_their_tokens(make_scene):
    tags = ("think", "tool_call", "tool_response")
    marks = [f"<{end}{tag}>" for tag in tags for end in ("", "/")]
    made = merging_tokenizer(MERGES, [*SPECIALS, *marks], None, eos_token=END)
    scene = await make_scene(task=TaskConfig(chat_template=True, renderer="qwen3"), tokenizer=made)
    think, thought, opens, closes = made.convert_tokens_to_ids(marks[:4])
    called = [opens, *spell('{"name": "weather", "arguments": {"city": "Bern"}}'), closes]
    thinks = [think, *spell("\nhm\n"), thought, *spell("\n\nIt rains.")]
    scene.author.says = iter([[*spell("Let me see."), *called, END_TOKEN], [*thinks, END_TOKEN]])
    session = scene.session()
    client = scene.client(session)
    await converse(client, ("Let me see.", 1), ("It rains.", 0))
    with pytest.raises(BadRequestError, match=r"tool_choice.*this run has a task.renderer"):
        await chat(client, [USER], tools=[WEATHER], tool_choice="required")
    check_session(session, scene.author.written)


async def test_call_is_text_when_tool_choice_is_none_and_the_prompt_stays(scene):
    scene.author.says = iter([call("weather"), call("weather")])
    session = scene.session()
    client, messages = scene.client(session), [USER]
    for choice in ("none", "auto"):
        answer = await chat(client, messages, tools=[WEATHER], tool_choice=choice)
        message = answer.choices[0].message
        messages += [message.model_dump(exclude_none=True), USER]
        assert (message.tool_calls is None) == (choice == "none")
    check_session(session, scene.author.written)


async def test_last_chunk_is_sent_after_the_turn_is_recorded(scene):
    session = scene.session()
    stream = await chat(scene.client(session), [USER], stream=True)
    async for chunk in stream:
        if chunk.choices[0].finish_reason:
            assert session.num_turns == 1


async def test_quiet_stream_sends_comments_that_clients_ignore(make_scene):
    scene = await make_scene(keep_alive_s=0.05)
    gate = asyncio.Event()
    scene.author.gates = {2: gate}
    session = scene.session()
    body = {"model": MODEL, "messages": [USER], "stream": True}
    async with scene.http(session.key).stream("POST", "/v1/chat/completions", json=body) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = []
        async for line in answer.aiter_lines():
            lines.append(line)
            if sum(line.startswith(":") for line in lines) == 3:
                gate.set()
    assert lines[-2] == "data: [DONE]" and session.num_turns == 1
    gate.clear()
    stream = await chat(scene.client(session), [USER], stream=True)
    asyncio.get_running_loop().call_later(0.2, gate.set)
    assert (await said_in(stream))[0] == "hello"
