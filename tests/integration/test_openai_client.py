"""The official clients and LangChain against the endpoint and a real SGLang server."""

from __future__ import annotations

import asyncio
import copy
import functools
import itertools
import json
from collections import Counter

import httpx2
import msgspec
import pytest
import pytest_asyncio
import torch
from anthropic import AsyncAnthropic
from langchain.agents import create_agent
from langchain_core.utils.function_calling import convert_to_openai_tool
from langchain_openai import ChatOpenAI

from buffer.types import SamplingParams
from configs.choices import ToolParser
from configs.rollout_schema import OpenAIConfig, RolloutConfig, TaskConfig
from controller.start.warm_start import imitate
from host.user_code import load_callable
from rollout_pool.endpoint.agents import AgentRunner
from rollout_pool.endpoint.app import Endpoint
from rollout_pool.endpoint.schema import FunctionTool
from rollout_pool.endpoint.sessions import Serving
from rollout_pool.episodes.chat import ChatFormat
from rollout_pool.episodes.conversation import Message, ToolCall
from rollout_pool.episodes.episode import EpisodeRequest
from rollout_pool.sampling.grammars import Grammars
from rollout_pool.sampling.router import Router
from rollout_pool.sampling.sampler import Sampler
from rollout_pool.tasks.agent import load_agent
from rollout_pool.tasks.task import Prompt
from tests.support.endpoint_scene import WEATHER, said_in
from tests.support.openai_page import langchain_example
from tests.support.rollout import RecordingSamples
from tests.support.sglang_model import worst_difference
from trainer_pool.model.scratch import byte_tokenizer

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="session")]

PROMPT = Prompt(index=0, is_held_out=False, text="How warm is it?")
TURN_TOKENS = 112


class Policy:
    """A random model behind a server, a sampler and an endpoint."""

    def __init__(self, server, model):
        self.server, self.model = server, model

    async def open(self):
        self.client = self.server.client(stream_interval=4)
        self.router = Router([self.client], 60.0, max_running_requests=32)
        await self.publish()
        tokenizer = byte_tokenizer()
        self.chat = ChatFormat(tokenizer, chat_template=True, tool_parser=ToolParser.hermes)
        self.grammars = Grammars(tokenizer, len(tokenizer), [tokenizer.eos_token_id])
        sampler = Sampler(
            self.router, max_retries=1, decode=tokenizer.decode, grammars=self.grammars
        )
        serving = Serving(
            completer=sampler,
            grammars=self.grammars,
            chat=self.chat,
            tokenizer=tokenizer,
            model="policy",
            task=TaskConfig(chat_template=True, max_turn_tokens=TURN_TOKENS),
            rollout=RolloutConfig(
                max_prompt_tokens=400,
                max_response_tokens=500,
                openai=OpenAIConfig(sampling_overrides=True),
            ),
        )
        self.endpoint = Endpoint(serving, host="127.0.0.1")
        await self.endpoint.start()

    async def publish(self, model=None):
        """The same weights, or those of `model`, under the next number."""
        await self.server.publish(model or self.model)
        self.router.follow({self.client.name: self.server.newest}, self.server.newest, 9)

    async def close(self):
        await self.endpoint.close()
        await self.client.close()
        await self.grammars.close()


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def policy(servers, models):
    policy = Policy(servers[1], models["a"])
    await policy.open()
    yield policy
    await policy.close()


@pytest_asyncio.fixture(loop_scope="session")
async def play(policy):
    """Runs one episode of an agent: the episode, and its samples as the engine gave them."""
    numbers = itertools.count()

    async def play(agent, prompt=PROMPT, **truncation):
        group = RecordingSamples()
        ask = EpisodeRequest(
            session=f"group-{next(numbers)}.0",
            sampling=SamplingParams(temperature=0.8, **truncation),
            samples=group,
        )
        async with asyncio.timeout(180):
            endpoint = policy.endpoint
            runner = AgentRunner(agent, endpoint.sessions, endpoint.url)
            return await runner.run(prompt, ask), group.begun

    return play


async def converse(session, prompt, before_turn=None):
    """Three turns with a tool. A random model calls none, so whatever it says counts as a call."""
    client, num_chunks = session.client(), 0
    messages = [{"role": "user", "content": prompt.text}]
    for turn in range(3):
        if before_turn is not None:
            await before_turn(turn)
        stream = await client.chat.completions.create(
            model=session.model,
            messages=messages,
            tools=[WEATHER],
            stream=True,
            stream_options={"include_usage": True},
        )
        text, _, _, chunks = await said_in(stream)
        num_chunks += sum(bool(chunk.choices) for chunk in chunks)
        assert 0 < chunks[-1].usage.completion_tokens <= TURN_TOKENS
        messages.append({"role": "assistant", "content": text})
        messages.append({"role": "tool", "tool_call_id": "weather-1", "content": "21 °C"})
    return float(num_chunks)


def check_recorded(episode, samples, num_turns):
    """One branch of exactly the tokens and log-probabilities that the engine gave."""
    [branch] = episode.branches
    assert episode.num_turns == len(samples) == num_turns
    own = [place for place, is_own in enumerate(branch.loss_mask) if is_own]
    assert [branch.tokens[place] for place in own] == [t for s in samples for t in s.output_ids]
    assert [branch.logprobs[place] for place in own] == [lp for s in samples for lp in s.logprobs]
    assert branch.tokens == samples[-1].prompt + samples[-1].output_ids
    spans = [(span.version, span.start, span.end) for span in branch.version_spans]
    assert spans == [
        (span.version, len(sample.prompt) + span.start, len(sample.prompt) + span.end)
        for sample in samples
        for span in sample.version_spans
    ]
    covered = {place for _, start, end in spans for place in range(start, end)}
    assert covered == set(own)


async def test_streamed_conversation_with_tools_is_recorded_token_by_token(policy, play):
    async def commit(turn):
        if turn == 2:
            await policy.publish()

    async def agent(session, prompt):
        return await converse(session, prompt, commit), {"turns": 3}

    first = policy.server.newest
    episode, samples = await play(agent)
    assert episode.end == "done" and episode.env_parts == {"turns": 3.0}, episode.error
    check_recorded(episode, samples, 3)
    assert episode.env_reward > 3 * 3  # tokens were streamed, not told at the end
    versions = [span.version for sample in samples for span in sample.version_spans]
    assert versions == [first, first, first + 1]
    # The engine itself, asked for the whole conversation at once, would have said the same.
    assert worst_difference(policy.model, samples, 0.8) < 1e-4


async def test_many_conversations_at_once_do_not_mix(policy, play):
    played = await asyncio.gather(*(play(converse) for _ in range(8)))
    for episode, samples in played:
        assert episode.end == "done", episode.error
        check_recorded(episode, samples, 3)
    assert worst_difference(policy.model, [s for _, samples in played for s in samples], 0.8) < 1e-4


async def test_several_answers_that_end_at_a_text_are_recorded_as_they_were_sampled(policy, play):
    """A random model says any letter soon: each ends an answer at another place."""

    async def agent(session, prompt):
        client, messages = session.client(), [{"role": "user", "content": prompt.text}]
        for stop in (list("aeiou"), list("dhnrst?")):
            answer = await client.chat.completions.create(
                model=session.model, messages=messages, n=3, stop=stop
            )
            texts = [choice.message.content for choice in answer.choices]
            stream = await client.chat.completions.create(
                model=session.model, messages=messages, n=2, stop=stop, stream=True
            )
            streamed, *_ = await said_in(stream)  # of both answers
            assert not any(one in text for one in stop for text in [*texts, streamed])
            messages = [*messages, {"role": "assistant", "content": texts[1]}]
            messages.append({"role": "user", "content": "Go on."})
        return 1.0

    episode, samples = await play(agent)
    assert episode.end == "done", episode.error
    assert len(samples) == episode.num_turns == 10
    # One answer to the first prompt goes on; all others are branches of their own, unless the model
    # says the same twice, as nothing: then an answer to the second prompt may go on with either.
    shortest = min(len(one.prompt) for one in samples)
    first = Counter(tuple(one.output_ids) for one in samples if len(one.prompt) == shortest)
    assert first.total() == 5 and 10 - max(first.values()) <= len(episode.branches) <= 9
    ended = [sample for sample in samples if sample.ends_at is not None]
    assert ended and all(len(one.output_ids) == one.ends_at for one in ended)
    assert all(sample.finish_reason == "stop" for sample in ended)
    for sample in samples:
        assert sum(s.end - s.start for s in sample.version_spans) == len(sample.output_ids)
    assert worst_difference(policy.model, samples, 0.8) < 1e-4


# The Responses API -------------------------------------------------------------------------------


async def converse_in_items(session, prompt):
    """The same conversation in the Responses API, with a way of going on at each turn."""
    client, num_deltas = session.client(), 0
    tool = {"type": "function", **WEATHER["function"]}
    asked = {"model": session.model, "tools": [tool], "instructions": "Be brief."}
    items = [{"role": "user", "content": prompt.text}]
    for turn in range(3):
        if turn == 1:
            answer = await client.responses.create(**asked, input=items)
        else:
            stream = await client.responses.create(**asked, input=items, stream=True)
            async for event in stream:
                num_deltas += event.type.endswith("delta")
            answer = event.response
        assert 0 < answer.usage.output_tokens <= TURN_TOKENS
        assert answer.status in ("completed", "incomplete")
        assert answer.leash["session"] == session.session_id
        result = {"type": "function_call_output", "call_id": "weather-1", "output": "21 °C"}
        if turn == 0:
            items = [*items, *(item.model_dump() for item in answer.output), result]
        else:
            asked["previous_response_id"], items = answer.id, [result]
    return float(num_deltas)


async def test_responses_are_recorded_token_by_token_and_rescore(policy, play):
    played = await asyncio.gather(*(play(converse_in_items) for _ in range(4)))
    for episode, samples in played:
        assert episode.end == "done", episode.error
        check_recorded(episode, samples, 3)
        assert episode.env_reward > 2  # tokens were streamed, not sent whole at the end
    assert worst_difference(policy.model, [s for _, own in played for s in own], 0.8) < 1e-4


# Anthropic's client -------------------------------------------------------------------------------


async def converse_in_blocks(session, prompt):
    """The same conversation in Anthropic's API, with a way of answering at each turn."""
    client = AsyncAnthropic(
        base_url=session.anthropic_url,
        api_key=session.api_key,
        timeout=None,
        max_retries=0,
        http_client=httpx2.AsyncClient(trust_env=False, verify=False, timeout=None),
    )
    tool = {
        "name": "weather",
        "description": "Tells the weather.",
        "input_schema": WEATHER["function"]["parameters"],
    }
    asked = {"model": session.model, "tools": [tool], "system": "Be brief."}
    messages, num_events = [{"role": "user", "content": prompt.text}], 0
    for turn in range(3):
        counted = await client.messages.count_tokens(**asked, messages=messages)
        if turn == 1:
            answer = await client.messages.create(**asked, messages=messages, max_tokens=1000)
        else:
            api = client.messages if turn else client.beta.messages
            async with api.stream(**asked, messages=messages, max_tokens=1000) as stream:
                num_events += len([event async for event in stream])
                answer = await stream.get_final_message()
        assert answer.usage.input_tokens == counted.input_tokens
        assert 0 < answer.usage.output_tokens <= TURN_TOKENS
        reasons = {"end_turn", "max_tokens", "tool_use"}
        assert answer.stop_reason in reasons and answer.leash["session"] == session.session_id
        messages.append(answer.model_dump(include={"role", "content"}))
        result = {"type": "tool_result", "tool_use_id": "weather-1", "content": "21 °C"}
        messages.append({"role": "user", "content": [result]})
    await client.close()
    return float(num_events)


async def test_anthropics_client_is_recorded_token_by_token_and_rescores(policy, play):
    played = await asyncio.gather(*(play(converse_in_blocks) for _ in range(4)))
    for episode, samples in played:
        assert episode.end == "done", episode.error
        check_recorded(episode, samples, 3)
        assert episode.env_reward > 2 * 6  # tokens were streamed, not told at the end
    assert worst_difference(policy.model, [s for _, own in played for s in own], 0.8) < 1e-4


# Answers of a form --------------------------------------------------------------------------------

REPORT = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Oslo", "Rome"]},
        "degrees": {"type": "integer", "minimum": -20, "maximum": 40},
        "clear": {"type": "boolean"},
    },
    "required": ["city", "degrees", "clear"],
    "additionalProperties": False,
}
JSON_REPORT = {"type": "json_schema", "json_schema": {"name": "report", "schema": REPORT}}
NAMED = {"type": "function", "function": {"name": "weather"}}


def check_report(text):
    report = json.loads(text)
    assert set(report) == {"city", "degrees", "clear"} and report["city"] in ("Oslo", "Rome")
    assert -20 <= report["degrees"] <= 40 and isinstance(report["clear"], bool)


async def report_weather(session, prompt):
    """Asks a random model, which would never say any of this by itself."""
    client, messages = session.client(), [{"role": "user", "content": prompt.text}]
    tools = [{**WEATHER, "function": {**WEATHER["function"], "parameters": REPORT}}]
    ask = functools.partial(client.chat.completions.create, model=session.model, messages=messages)
    answer = await ask(response_format=JSON_REPORT, n=3)
    for choice in answer.choices:
        check_report(choice.message.content)
        assert choice.finish_reason == "stop"
    hot = await ask(response_format=JSON_REPORT, stream=True, temperature=1.5)
    check_report((await said_in(hot))[0])
    for forced in ("required", NAMED):
        answer = await ask(tools=tools, tool_choice=forced, parallel_tool_calls=False)
        [choice] = answer.choices
        [call] = choice.message.tool_calls
        check_report(call.function.arguments)
        assert choice.finish_reason == "tool_calls" and call.function.name == "weather"
    any_tool = {"tool_choice": "required", "parallel_tool_calls": False}
    _, [call], *_ = await said_in(await ask(tools=tools, **any_tool, stream=True))
    check_report(call["arguments"])
    form = {"type": "grammar", "grammar": 'start: ("yes" | "no") "!"'}
    answer = await client.completions.create(
        model=session.model, prompt="Is it?", extra_body={"response_format": form}
    )
    assert answer.choices[0].text in ("yes!", "no!")
    answer = await ask(max_tokens=30, extra_body={"ignore_eos": True}, logit_bias={"101": -100})
    assert answer.usage.completion_tokens == 30 and "e" not in answer.choices[0].message.content
    return 1.0


async def test_answers_of_a_form_rescore_among_the_tokens_that_the_form_left(policy, play):
    """Weights change meanwhile, so that answers are interrupted in the middle of their forms."""
    publishing = asyncio.create_task(publish_often(policy, 5))
    played = await asyncio.gather(*(play(report_weather, top_k=20) for _ in range(4)))
    await publishing
    samples = [sample for _, own in played for sample in own]
    for episode, own in played:
        assert episode.end == "done", episode.error
        assert len(own) == episode.num_turns == 9
        for branch in episode.branches:
            widths = [len(ids) for ids in branch.candidates]
            assert [width > 0 for width in widths] == [own > 0 for own in branch.loss_mask]
            assert max(widths) <= 20
    hot = [sample for sample in samples if sample.sampling.temperature == 1.5]
    usual = [sample for sample in samples if sample.sampling.temperature == 0.8]
    assert len(hot) == len(played) and len(hot) + len(usual) == len(samples)
    assert worst_difference(policy.model, hot, 1.5) < 1e-4
    assert worst_difference(policy.model, usual, 0.8) < 1e-4
    assert all(
        sum(s.end - s.start for s in one.version_spans) == len(one.output_ids) for one in samples
    )


async def publish_often(policy, number):
    for _ in range(number):
        await policy.publish()


# LangChain ----------------------------------------------------------------------------------------

SUM = Prompt(index=0, is_held_out=False, text="3 + 4 =")
CALL = ToolCall(call_id="c00000001", name="add", arguments={"a": 3, "b": 4})


def rescored(model, branch, temperature):
    """Largest difference between the recorded log-probabilities of the model's tokens and those
    that Hugging Face gives them in the whole sequence."""
    tokens = torch.tensor([branch.tokens])
    with torch.no_grad():
        logits = model(tokens).logits[0, :-1] / temperature
    logprobs = logits.log_softmax(-1).gather(1, tokens[0, 1:, None])[:, 0]
    is_own = torch.tensor(branch.loss_mask[1:], dtype=torch.bool)
    return (logprobs - torch.tensor(branch.logprobs[1:]))[is_own].abs().max().item()


def learn(model, tokens, loss_mask):
    """Trains until it says exactly this more often than not."""
    labels = tokens.masked_fill(loss_mask == 0, -100)[None]
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, betas=(0.9, 0.95))
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # more would wait for each other at every step of so small a model
    for _ in range(300):
        loss = model(tokens[None], labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if loss < 5e-3:
            break
    torch.set_num_threads(num_threads)


@pytest_asyncio.fixture(loop_scope="session")
async def page_agent(tmp_path):
    """The agent of docs/openai.md, and its tool."""
    place = langchain_example(tmp_path).task.agent
    add = load_callable(place.replace(":solve", ":add"), "task.agent")
    return load_agent(place), add


@pytest_asyncio.fixture(loop_scope="session")
async def taught(policy, play, page_agent):
    """A policy that has learnt by heart how the agent of the page adds 3 and 4."""
    agent, add = page_agent
    first, _ = await play(agent, SUM)
    tool = msgspec.convert(convert_to_openai_tool(add), FunctionTool).spec("tool")
    conversation = [
        *first.messages[:2],
        Message(role="assistant", content="", tool_calls=(CALL,)),
        Message(role="tool", content="7", tool_call_id=CALL.call_id, name=CALL.name),
        Message(role="assistant", content="7"),
    ]
    example = imitate(policy.chat, conversation, [tool])
    model = copy.deepcopy(policy.model)
    learn(model, torch.from_numpy(example.tokens).long(), torch.from_numpy(example.loss_mask))
    await policy.publish(model)
    yield model
    await policy.publish()


async def test_langchain_agent_of_the_page_calls_its_tool_and_its_tokens_rescore(
    play, page_agent, taught
):
    agent, _ = page_agent
    played = await asyncio.gather(*(play(agent, SUM) for _ in range(8)))
    with_call = 0
    for episode, samples in played:
        assert episode.end == "done", episode.error
        # The conversation was sent again for each answer, and is one sequence nevertheless.
        check_recorded(episode, samples, episode.num_turns)
        assert rescored(taught, episode.branches[0], 0.8) < 1e-3
        results = [m.content for m in episode.messages if m.role == "tool"]
        with_call += results == ["7"] and episode.env_parts == {"calls": 1.0}
    assert with_call > 0


async def test_langchain_sends_back_streamed_garbage_that_is_recognised(policy, play, page_agent):
    _, add = page_agent

    async def agent(session, prompt):
        client = session.client()
        model = ChatOpenAI(
            model=session.model, async_client=client.chat.completions, streaming=True
        )
        graph = create_agent(model, tools=[add])
        messages = [("user", prompt.text)]
        for _ in range(3):
            state = await graph.ainvoke({"messages": messages})
            messages = [*state["messages"], ("user", "And?")]
        return 1.0

    for episode, samples in await asyncio.gather(*(play(agent) for _ in range(4))):
        assert episode.end == "done", episode.error
        check_recorded(episode, samples, 3)
        assert rescored(policy.model, episode.branches[0], 0.8) < 1e-3
