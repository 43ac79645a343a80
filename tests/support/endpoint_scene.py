"""An endpoint with a fake model that answers as a test wants, in unusual tokens."""

from __future__ import annotations

import asyncio
import itertools
import json
from array import array
from contextlib import asynccontextmanager

import httpx
from openai import AsyncOpenAI

from buffer.types import SamplingParams, VersionSpan
from configs.rollout_schema import OpenAIConfig, RolloutConfig, TaskConfig
from rollout_pool.endpoint.app import Endpoint
from rollout_pool.endpoint.sessions import Serving
from rollout_pool.episodes.episode import EpisodeRequest
from rollout_pool.episodes.renderer import chat_format
from rollout_pool.sampling.grammars import Grammars
from rollout_pool.sampling.sample import Interrupted
from rollout_pool.sampling.stop import find_stop
from tests.support.rollout import merging_tokenizer
from trainer_pool.model.scratch import byte_tokenizer

MODEL = "policy"
ADMIN_KEY = "the-admin-key"
END = "<|im_end|>"
CHATML = r"""
{%- if tools -%}
{{ '<|im_start|>system\nTools:' }}
{%- for tool in tools -%}{{ '\n' + (tool | tojson) }}{%- endfor -%}
{{ '<|im_end|>\n' }}
{%- endif -%}
{%- for message in messages -%}
{%- if message.role == 'tool' -%}
{{ '<|im_start|>user\n<tool_response>\n' + message.content + '\n</tool_response><|im_end|>\n' }}
{%- else -%}
{{ '<|im_start|>' + message.role + '\n' + message.content }}
{%- for call in message.tool_calls -%}
{{ '\n<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- (call.function.arguments | tojson) + '}\n</tool_call>' }}
{%- endfor -%}
{{ '<|im_end|>\n' }}
{%- endif -%}
{%- endfor -%}
{{ '<|im_start|>assistant\n' if add_generation_prompt }}
"""
HELLO = [{"role": "user", "content": "hello"}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Tells the weather.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}


MERGES = [("l", "l"), ("h", "e"), ("he", "ll"), ("a", "t"), ("i", "n"), ("t", "o"), ("to", "o")]
SPECIALS = ["<|endoftext|>", "<|im_start|>", END, "<|python_tag|>"]
TOKENIZER = merging_tokenizer(MERGES, SPECIALS, CHATML, eos_token=END)
[END_TOKEN] = TOKENIZER.encode(END, add_special_tokens=False)


def spell(text):
    """One token a byte: not how the tokenizer itself would write it, as models do at times."""
    return list(byte_tokenizer().encode(text))


def call(name, **arguments):
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


SAYS = [
    "<think>\nhm, hello\n</think>\n\nI'll look. "
    + call("weather", city="Zürich")
    + call("weather"),
    "<think>\nso\n</think>\n\n" + call("weather", city="Bern"),
    "It is warm in all of them: 21 °C 🌞, hell too.",
]
"""Answers to three turns: with thoughts and two calls, with a call, with neither."""


class Author:
    """A Completer. Says the next of `says`, token by token; stops before each token in `gates`."""

    def __init__(self):
        self.says = itertools.repeat("hello")
        """Texts, lists of tokens (said without an end), or exceptions to be raised."""
        self.gates: dict[int, asyncio.Event] = {}
        """Number of a token -> what must happen before it is written."""
        self.silent: set[int] = set()
        """Places in `samples` of those that write no token before they are interrupted."""
        self.version = 7
        self.piece = 3
        """Tokens that arrive together."""
        self.places: asyncio.Semaphore | None = None
        """Slots; other answers wait."""
        self.num_placed = 0
        """Answers that have had a slot."""
        self.pause_s = 0.0
        """Time before an answer's first token."""
        self.samples = []
        self.ended = []
        """Samples whose end was reached, with the tokens that were written."""
        self.cancelled = []
        self._plans = {}
        self._interrupted = set()

    @property
    def written(self):
        """The tokens of each sample that ended."""
        return [tokens for _, tokens in self.ended]

    async def complete(self, sample, clock=None):
        if sample not in self._plans:
            self.samples.append(sample)
            said = next(self.says)
            if isinstance(said, BaseException):
                raise said
            self._plans[sample] = [*spell(said), END_TOKEN] if isinstance(said, str) else said
        try:
            async with self._place(clock):
                self.num_placed += 1
                await asyncio.sleep(self.pause_s)
                await self._write(sample, self._plans[sample][: sample.max_new_tokens])
        except asyncio.CancelledError:
            self.cancelled.append(sample)
            raise

    @asynccontextmanager
    async def _place(self, clock):
        if self.places is None:
            yield
            return
        with clock.paused():
            await self.places.acquire()
        try:
            yield
        finally:
            self.places.release()

    async def _write(self, sample, tokens):
        if self.samples.index(sample) in self.silent:
            await self._wait(sample, asyncio.Event())
        while (place := len(sample.output_ids)) < len(tokens):
            if place in self.gates:
                await self._wait(sample, self.gates[place])
            upto = min([place + self.piece, len(tokens), *(g for g in self.gates if g > place)])
            for token in tokens[place:upto]:
                sample.output_ids.append(token)
                sample.logprobs.append(-len(sample.output_ids) / 100)
                if sample.has_candidates:
                    sample.candidates.append(array("i", [token]))
            self._stamp(sample, place, upto)
            if sample.stop and sample.ends_at is None:
                sample.ends_at = find_stop(sample.output_ids, place, sample.stop, TOKENIZER.decode)
            if sample.ends_at is not None:
                sample.on_tokens(sample)  # more than are part of it, as from an engine
                sample.end_at_stop()
                self.ended.append((sample, list(sample.output_ids)))
                return
            if upto == len(tokens):
                sample.finish_reason = "stop" if tokens[-1] == END_TOKEN else "length"
                self.ended.append((sample, list(tokens)))
            sample.on_tokens(sample)
            await asyncio.sleep(0)

    def _stamp(self, sample, start, end):
        spans = sample.version_spans
        if spans and spans[-1].version == self.version:
            start = spans.pop().start
        spans.append(VersionSpan(version=self.version, start=start, end=end))

    async def _wait(self, sample, gate):
        while not gate.is_set():
            if sample in self._interrupted:
                self._interrupted.discard(sample)
                raise Interrupted(sample.sample_id)
            await asyncio.sleep(0.005)

    def interrupt(self, sample):
        self._interrupted.add(sample)


class Scene:
    """An endpoint that listens, its author, and clients of it."""

    def __init__(
        self,
        *,
        task=None,
        rollout=None,
        sampling=None,
        grace_s=0.3,
        keep_alive_s=15.0,
        vocab_size=None,
        count=lambda name: None,
        group_state=None,
        tokenizer=TOKENIZER,
        **settings,
    ):
        """`tokenizer`: has END_TOKEN and the bytes where TOKENIZER has them. `settings`: of the
        Endpoint."""
        self.author = Author()
        self.task = task or TaskConfig(chat_template=True, episode_timeout_s=60.0)
        self.rollout = rollout or RolloutConfig(
            group_size=2,
            max_prompt_tokens=2000,
            max_response_tokens=2000,
            openai=OpenAIConfig(session_timeout_s=60.0),
        )
        self.sampling = sampling or SamplingParams()
        self.grammars = Grammars(tokenizer, vocab_size or len(tokenizer), [tokenizer.eos_token_id])
        serving = Serving(
            completer=self.author,
            chat=chat_format(tokenizer, self.task),
            tokenizer=tokenizer,
            task=self.task,
            rollout=self.rollout,
            grammars=self.grammars,
            grace_s=grace_s,
            keep_alive_s=keep_alive_s,
            vocab_size=vocab_size,
            count=count,
            group_state=group_state,
        )
        self.endpoint = Endpoint(serving, host="127.0.0.1", admin_key=ADMIN_KEY, **settings)
        self.sessions = self.endpoint.sessions
        self._names = itertools.count()
        self._clients, self._http = [], []

    async def open(self):
        await self.endpoint.start()

    async def close(self):
        for client in self._clients:
            await client.close()
        for client in self._http:
            await client.aclose()
        await self.endpoint.close()
        await self.grammars.close()

    def ask(self, **settings):
        name = f"group-{next(self._names)}.0"
        return EpisodeRequest(session=name, sampling=self.sampling, **settings)

    def session(self, **settings):
        return self.sessions.open(self.ask(**settings))

    def client(self, session, **settings):
        settings = {"max_retries": 0, "timeout": 60.0, **settings}
        return self.client_of(session.key, f"{self.endpoint.url}/v1", **settings)

    def client_of(self, key, url, **settings):
        http = settings.pop("http_client", None) or httpx.AsyncClient(
            trust_env=False, transport=httpx.AsyncHTTPTransport(verify=False)
        )
        client = AsyncOpenAI(base_url=url, api_key=key, http_client=http, **settings)
        self._clients.append(client)
        return client

    def anthropic(self, session, **settings):
        """A client of Anthropic's API."""
        from anthropic import AsyncAnthropic
        from httpx2 import AsyncClient

        settings = {"max_retries": 0, "timeout": 60.0, "api_key": session.key, **settings}
        http = AsyncClient(trust_env=False, verify=False)
        client = AsyncAnthropic(base_url=self.endpoint.url, http_client=http, **settings)
        self._clients.append(client)
        return client

    async def say_hello(self, member):
        """A request of an external program in a session of its group."""
        client = self.client_of(member["api_key"], member["base_url"], max_retries=0)
        return await client.chat.completions.create(model=member["model"], messages=HELLO)

    async def post_reward(self, member, key=None, **outcome):
        path = f"/sessions/{member['id']}/reward"
        return await self.http(key or member["api_key"]).post(path, json=outcome)

    def http(self, key=None):
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        client = httpx.AsyncClient(
            base_url=self.endpoint.url,
            headers=headers,
            timeout=60.0,
            trust_env=False,
            transport=httpx.AsyncHTTPTransport(verify=False),
        )
        self._http.append(client)
        return client


async def eventually(holds, timeout_s=60.0):
    """Waits for `holds()`, such as for effects of a client's disconnect."""
    async with asyncio.timeout(timeout_s):
        while not holds():
            await asyncio.sleep(0.005)


async def chat(client, messages, **more):
    """An answer of the official client, or its stream."""
    return await client.chat.completions.create(model=MODEL, messages=messages, **more)


async def said_in(stream):
    """Text, tool calls and the last chunk's finish reason of a streamed answer, and all chunks."""
    text, calls, reason, chunks = "", {}, None, []
    async for chunk in stream:
        chunks.append(chunk)
        for choice in chunk.choices:
            text += choice.delta.content or ""
            reason = choice.finish_reason or reason
            for one in choice.delta.tool_calls or []:
                known = calls.setdefault(one.index, {"arguments": ""})
                known["id"] = one.id or known["id"]
                known["name"] = one.function.name or known["name"]
                known["arguments"] += one.function.arguments or ""
    return text, [calls[i] for i in sorted(calls)], reason, chunks


def check_branch(branch, turns):
    """`turns`: the tokens that the author wrote, in order; exactly they are the model's own."""
    own = [t for t, mask in zip(branch.tokens, branch.loss_mask, strict=True) if mask]
    assert own == [token for tokens in turns for token in tokens]
    logprobs = [lp for lp, mask in zip(branch.logprobs, branch.loss_mask, strict=True) if mask]
    assert logprobs == [-(i + 1) / 100 for tokens in turns for i in range(len(tokens))]
    covered = {place for span in branch.version_spans for place in range(span.start, span.end)}
    assert covered == {place for place, mask in enumerate(branch.loss_mask) if mask}


def check_session(session, *turns):
    """Checks and returns the branches of its episode; `turns` are of one after the other."""
    branches = session.episode(end="done", outcome=None).branches
    for branch, own in zip(branches, turns, strict=True):
        check_branch(branch, own)
    return branches


async def events_of(http, path, asked):
    """The events of a stream, each with the type that names it."""
    async with http.stream("POST", path, json=asked) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = [line async for line in answer.aiter_lines() if line]
    names = [line.removeprefix("event: ") for line in lines[::2]]
    events = [json.loads(line.removeprefix("data: ")) for line in lines[1::2]]
    assert names == [event["type"] for event in events]
    return events
