"""Sends a completion to the client, as one JSON object or as server-sent events.

The client may disconnect at any moment. That ends the sending here; `PendingCompletion.reading`
decides what becomes of the completion.
"""

from __future__ import annotations

import asyncio
import copy
import json
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Any, Self

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from configs.choices import ToolParser
from rollout_pool.cancelling import unless_gone
from rollout_pool.endpoint.constraints import FORM_FIELDS, read_constraint
from rollout_pool.endpoint.errors import ApiError, refuse
from rollout_pool.endpoint.pending_completion import PendingCompletion
from rollout_pool.endpoint.schema import ModelRequest, check_shared, read_sampling
from rollout_pool.endpoint.sessions import Session
from rollout_pool.episodes.episode import constraint_of
from rollout_pool.episodes.tokenizer import Tokenizer
from rollout_pool.episodes.tool_calls import OPEN, PYTHON_TAG
from rollout_pool.sampling.grammars import ConstraintFailed
from rollout_pool.sampling.sample import Constraint, Priority, Sample, SampleFailed
from rollout_pool.sampling.stop import first_stop, safe_length

BROKEN = "\ufffd"
"""Stands in decoded text for bytes that are no character, or only a part of one."""


async def ended(completion: PendingCompletion, session: Session) -> None:
    """Waits until `completion` has ended. Raises ApiError if it failed."""
    await completion.wait()
    error = None if completion.task.cancelled() else completion.task.exception()
    if completion.task.cancelled() or completion.is_dropped:
        why = "its client disconnected for too long"
        if session.over_because is not None:
            why = f"session {session.session_id} is over: {session.over_because}"
        raise ApiError(
            410, f"this completion was given up: {why}", code="session_over", should_retry=False
        )
    if isinstance(error, ConstraintFailed):
        raise ApiError(
            400, f"the completion can't go on in its form: {error}", should_retry=False
        ) from error
    if isinstance(error, SampleFailed | TimeoutError):
        # The sampler has already retried as often as the settings allow.
        raise ApiError(
            503, f"no engine gave a completion: {error}", code="sample_failed", should_retry=False
        ) from error
    if error is not None:
        raise error


class EventStream(StreamingResponse, ABC):
    """A response of server-sent events."""

    media_type = "text/event-stream"

    def __init__(self) -> None:
        super().__init__(self.events(), headers={"cache-control": "no-cache"})

    @abstractmethod
    def events(self) -> AsyncGenerator[bytes]: ...


def event_of(body: Mapping[str, Any], name: str = "") -> bytes:
    named = f"event: {name}\n" if name else ""
    return f"{named}data: {json.dumps(body)}\n\n".encode()


class Stream(EventStream):
    """The completions of one request as server-sent events."""

    def __init__(self, turn: Turn, completions: Sequence[PendingCompletion]) -> None:
        super().__init__()
        self._turn = turn
        self._completions = completions
        self._news = asyncio.Event()
        self._request_id = ""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._request_id = scope["state"]["request_id"]
        with self._turn.session.activity():
            await unless_gone(receive, self._send(send))

    async def _send(self, send: Send) -> None:
        async with AsyncExitStack() as reading:
            for completion in self._completions:
                await reading.enter_async_context(completion.reading())
                completion.news.add(self._news)
                reading.callback(completion.news.discard, self._news)
            await self.stream_response(send)

    async def events(self) -> AsyncGenerator[bytes]:
        turn = self._turn
        running = dict(enumerate(zip(turn.each(), self._completions, strict=True)))
        sent = dict.fromkeys(running, 0)
        for writer, completion in running.values():
            for choice in writer.opening(completion):
                yield turn.event(self._completions, choice)
        while running:
            self._news.clear()
            for index, (writer, completion) in list(running.items()):
                if not completion.is_running:
                    try:
                        await ended(completion, turn.session)
                    except ApiError as error:
                        yield turn.error_event(error, self._request_id)
                        return
                    choices = writer.ending(completion, sent[index])
                    del running[index]
                elif completion.sample.num_ready > sent[index]:
                    choices = writer.piece(completion, sent[index])
                    sent[index] = completion.sample.num_ready
                else:
                    continue
                for choice in choices:
                    yield turn.event(self._completions, choice)
            if running and not await is_set_within(self._news, turn.session.serving.keep_alive_s):
                yield b": the model has nothing new yet\n\n"
        for event in turn.closing(self._completions):
            yield event


async def is_set_within(event: asyncio.Event, timeout_s: float) -> bool:
    """Waits for it; False after `timeout_s`."""
    try:
        async with asyncio.timeout(timeout_s):
            return await event.wait()
    except TimeoutError:
        return False


class Turn(ABC):
    """One request to one of the three endpoints, and how its response is written.

    Constructed from the request; raises ApiError naming a field that can't be served.
    """

    kind: str
    """The API's name for the response."""
    chunk_kind: str
    """The same for a chunk of a stream."""
    prefix: str
    """Prefix of its id."""
    max_tokens: int | None
    role = ""
    """The role of its episode that it is of, by the key of the request."""
    texts: TextStream | ContentStream
    """The stream of the completion that it writes; set by `each`."""

    def __init__(self, session: Session, request: ModelRequest) -> None:
        check_shared(request, session.serving.model)
        self.sampling = read_sampling(
            request,
            session.request.sampling,
            may_override=session.serving.rollout.openai.sampling_overrides,
            is_trained=session.request.priority is Priority.rollout,
        )
        self.session = session
        self.is_streamed = request.stream
        options = request.stream_options
        self.wants_usage = options is not None and bool(options.include_usage)
        self.n = request.n
        stop = session.serving.task.stop if request.stop is None else request.stop
        self.stop = (stop,) if isinstance(stop, str) else tuple(stop)
        self.constraint: Constraint | None = None
        self._form_field = ""
        """The request's field that asks for it."""
        self.index = 0
        """Place of the completion that it writes, among the n of the request."""
        self.streamed = ""
        self._held = ""
        """Text that may be the beginning of one that ends the completion."""

    def constrain(self, request: ModelRequest, grammar: str) -> None:
        """Takes the form that the request, and else the run, wants. Raises ApiError."""
        serving, episode = self.session.serving, self.session.request
        usual = constraint_of(serving.task)
        wanted = read_constraint(
            request, grammar, usual, serving.num_embeddings, serving.max_tokens
        )
        if wanted == Constraint():
            return
        asked = next((name for name in FORM_FIELDS if getattr(request, name, None)), "")
        is_trained = episode.priority is Priority.rollout
        if wanted != usual and is_trained and not episode.sampling.is_truncated:
            raise refuse(
                asked,
                "needs rollout.sampling.top_k, which this run has not set: tokens are trained on "
                "under the distribution that they were drawn from, so the ids that the form left "
                "travel with each, and need a bound; set it (as 50), or let the reward judge",
            )
        self.constraint = wanted
        self._form_field = asked or "response_format"

    async def check_form(self) -> None:
        """Raises ApiError for a form that can't be compiled or has no first token."""
        if self.constraint is not None:
            try:
                await self.session.serving.grammars.check(self.constraint)
            except ConstraintFailed as error:
                problem = f"no completion can have this form: {error}"
                raise refuse(self._form_field, problem) from error

    def each(self) -> Iterator[Self]:
        """One for each of the request's completions, to write them side by side."""
        for index in range(self.n):
            turn = copy.copy(self)
            turn.index, turn.texts = index, turn.new_texts()
            yield turn

    @abstractmethod
    def new_texts(self) -> TextStream | ContentStream: ...

    @abstractmethod
    def render(self) -> list[int]:
        """The prompt's tokens. Raises ApiError. May be called in a thread."""

    @abstractmethod
    def whole(self, completion: PendingCompletion) -> dict[str, Any]:
        """The choice of a response in one piece; marks the completion as delivered."""

    def opening(self, completion: PendingCompletion) -> list[dict[str, Any]]:
        """Choices of a stream's first chunks."""
        return []

    @abstractmethod
    def piece(self, completion: PendingCompletion, start: int) -> list[dict[str, Any]]:
        """Choices of the next chunks; tokens before `start` have been sent."""

    @abstractmethod
    def ending(self, completion: PendingCompletion, start: int) -> list[dict[str, Any]]:
        """Choices of the last chunks; marks the completion as delivered."""

    def begin(self, prompt: list[int], fingerprints: Sequence[bytes]) -> list[PendingCompletion]:
        """Starts completions to a rendered `prompt`. Raises ApiError."""
        return self.session.begin(
            prompt,
            self.max_tokens,
            fingerprints,
            sampling=self.sampling,
            stop=self.stop,
            constraint=self.constraint,
            role=self.role,
        )

    def feed(self, completion: PendingCompletion, *, is_end: bool) -> str:
        """The text of the tokens that arrived since the last call, up to one of `stop`."""
        sample = completion.sample
        text = self._held + self.texts.feed(sample.output_ids[: sample.num_ready], is_end=is_end)
        if self.stop:
            end = safe_length(text, self.stop)
            # A content stream leaves white space out: its rest comes from the parsed completion.
            is_exact = isinstance(self.texts, TextStream)
            is_last = is_end and is_exact and first_stop(text, self.stop) is None
            text, self._held = (text, "") if is_last else (text[:end], text[end:])
        self.streamed += text
        return text

    def result(self, completions: Sequence[PendingCompletion]) -> dict[str, Any]:
        """The response in one piece."""
        choices = [
            turn.whole(completion)
            for turn, completion in zip(self.each(), completions, strict=True)
        ]
        return {
            **self.about(completions, self.kind),
            "choices": choices,
            "usage": usage(completions),
        }

    def event(self, completions: Sequence[PendingCompletion], *choices: dict[str, Any]) -> bytes:
        """The event of a stream with these choices; without any, that of its usage."""
        # Usage, if requested, is null in all chunks but the last.
        counts = {"usage": None if choices else usage(completions)} if self.wants_usage else {}
        body = self.about(completions, self.chunk_kind)
        return event_of({**body, "choices": choices, **counts})

    def closing(self, completions: Sequence[PendingCompletion]) -> Iterator[bytes]:
        """A stream's events behind those of its choices."""
        if self.wants_usage:
            yield self.event(completions)
        yield b"data: [DONE]\n\n"

    def error_event(self, error: ApiError, request_id: str) -> bytes:
        return event_of(error.body(request_id))

    def about(self, completions: Sequence[PendingCompletion], kind: str) -> dict[str, Any]:
        """Fields that all responses share; `leash` holds what OpenAI's API has no field for."""
        versions = [span.version for one in completions for span in one.sample.version_spans]
        return {
            "id": f"{self.prefix}-{completions[0].sample.sample_id}",
            "object": kind,
            "created": completions[0].created,
            "model": self.session.serving.model,
            "leash": {
                "session": self.session.session_id,
                "version_min": min(versions, default=None),
                "version_max": max(versions, default=None),
            },
        }


def usage(completions: Sequence[PendingCompletion]) -> dict[str, Any]:
    given = len(completions[0].sample.prompt)
    written = sum(len(completion.sample.output_ids) for completion in completions)
    return {"prompt_tokens": given, "completion_tokens": written, "total_tokens": given + written}


def logprob_entries(sample: Sample, tokenizer: Tokenizer, start: int) -> list[dict[str, Any]]:
    """Log-probabilities of the tokens from `start` on, including the one that ends them."""
    entries = []
    ready = slice(start, sample.num_ready)
    for token, logprob in zip(sample.output_ids[ready], sample.logprobs[ready], strict=True):
        text = tokenizer.decode([token])
        is_whole = BROKEN not in text
        entries.append(
            {
                "token": text,
                "logprob": logprob,
                "bytes": list(text.encode()) if is_whole else None,
                "top_logprobs": [],
            }
        )
    return entries


_MARKERS = {ToolParser.hermes: OPEN, ToolParser.llama3_json: PYTHON_TAG}
MAX_BROKEN_TOKENS = 8
"""A character has at most four bytes, so text incomplete for longer stays invalid."""


class TextStream:
    """Decodes a growing list of tokens in pieces whose concatenation is the whole text.

    A token can hold part of a character, and its text can depend on the token before. So a piece is
    the difference of two decoded ranges with the same start; incomplete characters are held back.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._start = 0
        """Start of the decoded range; its text up to `_sent` has been sent."""
        self._sent = 0

    def feed(self, tokens: list[int], *, is_end: bool) -> str:
        """The new text, given all `tokens` so far."""
        if len(tokens) <= self._sent:
            return ""
        before = self._decode(tokens[self._start : self._sent])
        text = self._decode(tokens[self._start :])
        waits = text.endswith(BROKEN) and len(tokens) - self._sent < MAX_BROKEN_TOKENS
        if waits and not is_end:
            return ""
        self._start, self._sent = self._sent, len(tokens)
        return text[len(before) :]

    def _decode(self, tokens: list[int]) -> str:
        return self._tokenizer.decode(tokens, skip_special_tokens=True)


def rest_of(content: str, streamed: str) -> str:
    """The part of `content`, as parsed at the end, that a ContentStream has not sent."""
    if not content.startswith(streamed):
        content = content.lstrip()
    return content[len(streamed) :] if content.startswith(streamed) else ""


class ContentStream:
    """The same up to the first tool call. White space is held back until text follows, since
    around calls it is no content. Without a `parser` (task.renderer) nothing is content before the
    whole completion is parsed."""

    def __init__(self, tokenizer: Tokenizer, parser: ToolParser | None) -> None:
        self.sent = ""
        self._tokenizer = tokenizer
        self._texts = TextStream(tokenizer)
        self._parser = parser
        self._marker = "" if parser is None else _MARKERS[parser]
        self._text = ""
        self._num_seen = 0
        self._is_over = parser is None

    def feed(self, tokens: list[int], *, is_end: bool) -> str:
        """The new content, given all `tokens` so far."""
        if self._is_over:
            return ""
        end = self._marker_token(tokens)
        self._text += self._texts.feed(tokens[:end], is_end=is_end or self._is_over)
        text = self._text.lstrip()
        out = text[: self._safe_length(text)].rstrip()[len(self.sent) :]
        self.sent += out
        return out

    def _marker_token(self, tokens: list[int]) -> int:
        """Index of a token that opens a call by itself (the text omits it if it is special); else
        the number of tokens."""
        for place in range(self._num_seen, len(tokens)):
            if self._tokenizer.decode([tokens[place]]) == self._marker:
                self._is_over = True
                return place
        self._num_seen = len(tokens)
        return len(tokens)

    def _safe_length(self, text: str) -> int:
        if self._parser is ToolParser.llama3_json and text.startswith("{"):
            return 0
        return safe_length(text, [self._marker])
