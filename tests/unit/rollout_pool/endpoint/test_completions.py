"""Several answers to one request, and answers that end at a text."""

from __future__ import annotations

import asyncio
import json

import pytest

from configs.rollout_schema import TaskConfig
from rollout_pool.endpoint import sessions
from tests.support.endpoint_scene import (
    END_TOKEN,
    MODEL,
    TOKENIZER,
    WEATHER,
    call,
    chat,
    check_branch,
    check_session,
    eventually,
    said_in,
    spell,
)

USER = {"role": "user", "content": "hello"}
SAYS = ["one", "two and more", "three " + call("weather", city="Bern")]


def asked(**more):
    return {"model": MODEL, "messages": [USER], **more}


async def streamed(client, **more):
    """Text, calls and finish reason of each answer."""
    chunks = [chunk async for chunk in await chat(client, [USER], **more)]

    async def of(index):
        for chunk in chunks:
            choices = [choice for choice in chunk.choices if choice.index == index]
            yield chunk.model_copy(update={"choices": choices})

    assert len({chunk.id for chunk in chunks}) == 1
    return [(await said_in(of(index)))[:3] for index in range(more["n"])], chunks


async def test_answers_of_one_request_are_branches_of_their_own(scene):
    scene.author.says = iter([*SAYS, "four"])
    session = scene.session()
    answer = await chat(scene.client(session), [USER], n=3, tools=[WEATHER])
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert [c.message.content for c in answer.choices] == ["one", "two and more", "three"]
    assert [c.finish_reason for c in answer.choices] == ["stop", "stop", "tool_calls"]
    given = len(scene.author.samples[0].prompt)
    written = [[*spell(text), END_TOKEN] for text in SAYS]
    assert answer.usage.prompt_tokens == given
    assert answer.usage.completion_tokens == sum(map(len, written))
    episode = session.episode(end="done", outcome=None)
    assert episode.num_turns == len(episode.branches) == 3
    for branch, tokens in zip(episode.branches, written, strict=True):
        check_branch(branch, [tokens])
    # The conversation goes on from the one that the agent chose.
    messages = [USER, answer.choices[1].message.model_dump(exclude_none=True), USER]
    await chat(scene.client(session), messages, tools=[WEATHER])
    chosen = scene.author.samples[1]
    prompt = scene.author.samples[3].prompt
    assert prompt[: given + len(written[1])] == [*chosen.prompt, *chosen.output_ids]


async def test_answers_of_one_request_are_streamed_side_by_side(scene):
    scene.author.says = iter(SAYS)
    gate = scene.author.gates[8] = asyncio.Event()
    client = scene.client(scene.session())
    stream = await chat(client, [USER], n=3, tools=[WEATHER], stream=True)
    text, ended = ["", "", ""], []
    async with asyncio.timeout(60):
        async for chunk in stream:
            for choice in chunk.choices:
                text[choice.index] += choice.delta.content or ""
                ended += [choice.index] if choice.finish_reason else []
            if ended == [0] and text[1] == "two and":
                gate.set()  # the first has ended, the second says something, the others go on
    assert text == ["one", "two and more", "three"] and sorted(ended) == [0, 1, 2]
    scene.author.says = iter(SAYS)
    options = {"include_usage": True}
    answers, chunks = await streamed(
        client, n=3, tools=[WEATHER], stream=True, stream_options=options
    )
    assert [text for text, _, _ in answers] == ["one", "two and more", "three"]
    assert [reason for _, _, reason in answers] == ["stop", "stop", "tool_calls"]
    assert json.loads(answers[2][1][0]["arguments"]) == {"city": "Bern"}
    assert chunks[-1].usage.completion_tokens == sum(len(spell(text)) + 1 for text in SAYS)


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_answer_ends_before_a_stop_text_and_keeps_its_tokens(scene, is_streamed):
    scene.author.says = iter(["I look.\nObs: 21 °C\nand so on", "Obs: it is"])
    session = scene.session()
    client = scene.client(session)
    messages = [USER]
    for text in ("I look.\n", ""):
        more = {"stop": ["Obs:", "###"], "logprobs": True}
        if is_streamed:
            stream = await chat(client, messages, stream=True, **more)
            said, _, reason, chunks = await said_in(stream)
            tokens = [
                entry.token
                for chunk in chunks
                for choice in chunk.choices
                if choice.logprobs
                for entry in choice.logprobs.content
            ]
        else:
            answer = await chat(client, messages, **more)
            [choice] = answer.choices
            said, reason = choice.message.content, choice.finish_reason
            tokens = [entry.token for entry in choice.logprobs.content]
        assert (said, reason) == (text, "stop")
        assert "".join(tokens) == text + "Obs:", "log-probabilities are of all its tokens"
        messages = [*messages, {"role": "assistant", "content": said}, USER]
    check_session(session, [spell("I look.\nObs:"), spell("Obs:")])


async def test_request_without_stop_ends_as_the_run_says(make_scene):
    scene = await make_scene(task=TaskConfig(chat_template=True, stop=["."]))
    scene.author.says = iter(["Yes. No.", "Yes. No."])
    client = scene.client(scene.session())
    assert (await chat(client, [USER])).choices[0].message.content == "Yes"
    answer = await chat(client, [USER], stop=[])
    assert answer.choices[0].message.content == "Yes. No."


async def test_plain_completions_have_n_and_stop_too(scene):
    scene.author.says = iter(["a b", "c\nd", "e|f"])
    client = scene.client(scene.session())
    answer = await client.completions.create(
        model=MODEL, prompt="say", n=3, stop="|", logprobs=1, max_tokens=9
    )
    assert [choice.text for choice in answer.choices] == ["a b", "c\nd", "e"]
    assert answer.choices[2].token_ids == spell("e|")
    assert answer.choices[2].logprobs.tokens == ["e", "|"]


async def test_next_prompt_may_repeat_the_text_that_ended_a_plain_completion(scene):
    scene.author.says = iter(["Act: x\nObs: 7 and more", "done"])
    client = scene.client(scene.session())
    first = await client.completions.create(model=MODEL, prompt="say\n", stop="Obs:", max_tokens=40)
    assert first.choices[0].text == "Act: x\n"
    for sent in ("say\nAct: x\nObs: 42\n", "say\nAct: x\n|"):
        scene.author.says = iter(["done"])
        await client.completions.create(model=MODEL, prompt=sent, stop="Obs:")
    asked = [TOKENIZER.decode(sample.prompt) for sample in scene.author.samples]
    # The tokens of an answer include those of the text that ended it.
    assert asked[1:] == ["say\nAct: x\nObs: 42\n", "say\nAct: x\nObs:|"]
    own = spell("Act: x\nObs:")
    start = len(scene.author.samples[0].prompt)
    assert all(one.prompt[start : start + len(own)] == own for one in scene.author.samples[1:])


@pytest.mark.parametrize("stop", ["Obs:\n", "Obs: ", "k.<to", "\n"])
async def test_stop_text_is_never_streamed_where_the_model_may_call_tools(scene, stop):
    scene.author.piece = 1
    said = {"\n": "I look.\nObs:", "k.<to": "I look.<tool> "}.get(stop, f"I look.\n{stop}and")
    scene.author.says = iter([said, said])
    client = scene.client(scene.session())
    more = {"tools": [WEATHER], "stop": stop}
    stream = await chat(client, [USER], stream=True, **more)
    text, calls, reason, _ = await said_in(stream)
    answer = await chat(client, [USER], **more)
    assert (text.rstrip(), calls, reason) == (said.split(stop)[0].rstrip(), [], "stop")
    assert text.rstrip() == answer.choices[0].message.content.rstrip()


async def test_answers_of_one_request_stay_for_a_retry_while_one_runs(make_scene, monkeypatch):
    monkeypatch.setattr(sessions, "RETRY_WINDOW_S", 0.0)
    scene = await make_scene(grace_s=60.0)
    scene.author.says = iter(["a", "b b b", "c"])
    gate = scene.author.gates[4] = asyncio.Event()
    session = scene.session()
    http = scene.http(session.key)
    first = asyncio.create_task(http.post("/v1/chat/completions", json=asked(n=3)))
    await eventually(lambda: len(scene.author.ended) == 2)
    first.cancel()
    retry = {"x-stainless-retry-count": "1"}
    again = asyncio.create_task(http.post("/v1/chat/completions", json=asked(n=3), headers=retry))
    await eventually(lambda: session._completions[1].num_readers)
    gate.set()
    choices = (await again).json()["choices"]
    assert [choice["message"]["content"] for choice in choices] == ["a", "b b b", "c"]
    assert len(scene.author.samples) == 3
