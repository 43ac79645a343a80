"""An answer's thoughts travel as reasoning_content, and come back in any of the ways of clients."""

from __future__ import annotations

import asyncio

import pytest

from buffer.types import SamplingParams
from configs.choices import Thoughts
from configs.rollout_schema import TaskConfig
from tests.support.endpoint_scene import (
    CHATML,
    END,
    END_TOKEN,
    MERGES,
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
MORE = {"role": "user", "content": "hello, and there?"}
STRIPPED = TaskConfig(chat_template=True, thoughts=Thoughts.stripped)


def thoughts_of(chunks):
    deltas = [choice.delta.model_extra for chunk in chunks for choice in chunk.choices]
    return [one["reasoning_content"] for one in deltas if "reasoning_content" in one]


def dropped(message):
    return {key: value for key, value in message.items() if key != "reasoning_content"}


def as_field(message):
    return message


def as_text(message):
    thoughts, content = message["reasoning_content"], message.get("content")
    return {**dropped(message), "content": f"<think>{thoughts}</think>{content or ''}"}


async def say(client, messages, **more):
    """The message of an unstreamed answer, as a client that keeps all its fields has it."""
    answer = await chat(client, messages, **more)
    return answer.choices[0].message.model_dump(exclude_none=True)


@pytest.mark.parametrize("tools", [[], [WEATHER]])
@pytest.mark.parametrize("piece", [1, 3, 1000])
async def test_thoughts_are_streamed_apart_from_content(scene, tools, piece):
    said = "<think>\nhm, hello </thin\n</think>\n\nIt may rain: "
    scene.author.says = iter([said + call("weather", city="Bern")] * 2)
    scene.author.piece = piece
    client = scene.client(scene.session())
    whole = (await chat(client, [USER], tools=tools)).choices[0].message
    text, calls, reason, chunks = await said_in(
        await chat(client, [USER], tools=tools, stream=True)
    )
    streamed = thoughts_of(chunks)
    assert "".join(streamed) == whole.model_extra["reasoning_content"] == "hm, hello </thin"
    assert len(streamed) > (1 if piece < 10 else 0)
    assert text == whole.content and text.startswith("It may rain:")
    assert len(calls) == len(whole.tool_calls or []) == len(tools)
    assert reason == ("tool_calls" if tools else "stop")


async def test_content_is_as_before_where_there_are_no_thoughts(scene):
    scene.author.says = iter(["  7 </think>\n", "<think>\n\n</think>\n\n7"])
    client = scene.client(scene.session())
    for content in ("  7 </think>\n", "7"):
        message = await say(client, [USER])
        assert message == {"role": "assistant", "content": content}


@pytest.mark.parametrize("sent", [dropped, as_field, as_text])
async def test_kept_thoughts_make_one_trajectory_however_a_client_sends_them_back(scene, sent):
    """Eight episodes of three questions, the second with a call, stay eight trajectories."""

    async def play(session):
        client, messages = scene.client(session), [USER]
        for _ in range(4):
            message = await say(client, messages, tools=[WEATHER])
            assert message["reasoning_content"] == "hm, hello"
            messages.append(sent(message))
            results = [
                {"role": "tool", "tool_call_id": one["id"], "content": "hell"}
                for one in message.get("tool_calls", ())
            ]
            messages += results or [MORE]

    for _ in range(8):
        texts = ("one", "two " + call("weather", city="Bern"), "", "four")
        says = [f"<think>\nhm, hello\n</think>\n\n{text}" for text in texts]
        scene.author.says, scene.author.ended = iter(says), []
        session = scene.session()
        await play(session)
        [branch] = check_session(session, scene.author.written)
        own = [one.content for one in session.messages if one.role == "assistant"]
        assert [one.count("hm, hello") for one in own] == [1] * 4, "rewards get them all"
        assert TOKENIZER.decode(branch.tokens).count("hm, hello") == 4


@pytest.mark.parametrize("sent", [dropped, as_field, as_text])
async def test_stripped_thoughts_are_not_read_at_the_next_question(make_scene, sent):
    scene = await make_scene(task=STRIPPED)
    texts = (call("weather", city="Bern"), "one", "two")
    says = [f"<think>hm {n}</think>{text}" for n, text in enumerate(texts)]
    scene.author.says = iter([*says, "three", "four"])
    session = scene.session()
    client, messages = scene.client(session), [USER]
    for turn in range(5):
        message = await say(client, messages, tools=[WEATHER])
        messages.append(sent(message) if "reasoning_content" in message else message)
        if turn == 0:
            [asked] = message["tool_calls"]
            messages.append({"role": "tool", "tool_call_id": asked["id"], "content": "hell"})
        else:
            messages.append(MORE)
    written = scene.author.written
    # The call's thoughts are there with its result; a question without thoughts before it goes on.
    check_session(session, written[:2], [written[2]], written[3:])
    prompts = [TOKENIZER.decode(sample.prompt) for sample in scene.author.samples]
    assert [prompt.count("hm") for prompt in prompts] == [0, 1, 0, 0, 0]
    assert "one" in prompts[2] and '"city": "Bern"' in prompts[2] and "hell" in prompts[2]


OPENED = CHATML.replace("assistant\\n' if", "assistant\\n<think>\\n' if")


@pytest.fixture
async def opened(make_scene):
    """Its template opens the model's thoughts, as DeepSeek R1's does."""
    made = merging_tokenizer(MERGES, SPECIALS, OPENED, eos_token=END)
    return await make_scene(tokenizer=made, sampling=SamplingParams(top_k=20))


@pytest.mark.parametrize("sent", [dropped, as_field, as_text])
@pytest.mark.parametrize("stream", [False, True])
async def test_thoughts_that_the_prompt_opened_are_told_apart(opened, sent, stream):
    says = ["hm\n</think>\n\none", "hm</think>two " + call("weather"), "hm, " + call("weather")]
    opened.author.says, opened.author.piece = iter(says), 1
    session = opened.session()
    client, messages = opened.client(session), [USER]
    seen = []
    for _ in says:
        answer = await chat(client, messages, tools=[WEATHER], stream=stream)
        if stream:
            text, calls, _, chunks = await said_in(answer)
            thoughts = "".join(thoughts_of(chunks))
        else:
            message = answer.choices[0].message
            text, calls = message.content, message.tool_calls or []
            thoughts = message.model_extra["reasoning_content"]
        seen.append((thoughts, text, len(calls)))
        back = {"role": "assistant", "content": text, "reasoning_content": thoughts}
        if calls:
            back["tool_calls"] = [
                {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
            ]
        result = {"role": "tool", "tool_call_id": "c1", "content": "hell"}
        messages += [sent(back), result if calls else MORE]
    # A model that does not end its thoughts has called nothing.
    assert seen == [("hm", "one", 0), ("hm", "two", 1), ("hm, " + call("weather"), "", 0)]
    check_session(session, opened.author.written)
    own = [one.content for one in session.messages if one.role == "assistant"]
    assert own == [says[0], "hm</think>two", says[2]], "rewards get them as they were sampled"


@pytest.mark.parametrize("stream", [False, True])
async def test_form_without_room_for_opened_thoughts_is_content(opened, stream):
    form = {"type": "grammar", "grammar": r"start: /[a-z ]*/ /<\/think>/ /[a-z]*/"}
    wishes = [
        ({"response_format": {"type": "json_object"}}, '{"a": 1}', ("", '{"a": 1}', 0)),
        ({"tools": [WEATHER], "tool_choice": "required"}, call("weather"), ("", "", 1)),
        ({"extra_body": {"response_format": form}}, "hm</think>so", ("hm", "so", 0)),
    ]
    opened.author.says = iter([text for _, text, _ in wishes])
    client = opened.client(opened.session())
    for wish, _, expected in wishes:
        answer = await chat(client, [USER], stream=stream, **wish)
        if stream:
            text, calls, _, chunks = await said_in(answer)
            thoughts = "".join(thoughts_of(chunks))
        else:
            message = answer.choices[0].message
            text, calls = message.content or "", message.tool_calls or []
            thoughts = message.model_extra.get("reasoning_content", "")
        assert (thoughts, text, len(calls)) == expected


async def test_thoughts_that_were_cut_go_on_as_they_were_sampled(scene):
    scene.author.says = iter([[*spell("<think>hm, hell")], "o"])
    session = scene.session()
    client = scene.client(session)
    message = await say(client, [USER], max_tokens=15)
    assert (message["reasoning_content"], message["content"]) == ("hm, hell", "")
    await say(client, [USER, message, MORE])
    check_session(session, scene.author.written)


async def test_thoughts_tell_answers_with_the_same_content_apart(scene):
    scene.author.says = iter(
        [f"<think>hm {n}</think>hello" for n in range(3)] + ["so", "too", "at"]
    )
    session = scene.session()
    client = scene.client(session)
    answer = await chat(client, [USER], n=3)
    first, second, _ = (one.message.model_dump(exclude_none=True) for one in answer.choices)
    for message in (first, second, dropped(second)):
        await say(client, [USER, message, MORE])
    starts = [TOKENIZER.decode(sample.prompt) for sample in scene.author.samples[3:]]
    assert [text.split("hm ")[1][0] for text in starts] == ["0", "1", "2"]
    edited = {**first, "reasoning_content": "hm, otherwise"}
    scene.author.says = iter(["there"])
    await say(client, [USER, edited, MORE])
    branches = session.episode(end="done", outcome=None).branches
    check_branch(branches[-1], [[*spell("there"), END_TOKEN]])
    assert "<think>\nhm, otherwise\n</think>\n\nhello" in TOKENIZER.decode(branches[-1].tokens)


async def test_thoughts_are_sent_before_they_have_ended(scene):
    gate = asyncio.Event()
    scene.author.says, scene.author.gates = iter(["<think>hm, hello</think>so"]), {12: gate}
    stream, thoughts = await chat(scene.client(scene.session()), [USER], stream=True), ""
    async for chunk in stream:
        thoughts += "".join(thoughts_of([chunk]))
        if thoughts == "hm, h":
            gate.set()
    assert thoughts == "hm, hello"
