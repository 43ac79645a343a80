"""POST /v1/chat/completions: the request and its response."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from buffer.types import SamplingParams
from rollout_pool.endpoint.answers import Answer
from rollout_pool.endpoint.errors import refuse
from rollout_pool.endpoint.room import check_characters, check_parts
from rollout_pool.endpoint.schema import (
    SHARED,
    Delivery,
    Fields,
    calls_json,
    check_shared,
    message_json,
    read_delivery,
    read_messages,
    read_tools,
)
from rollout_pool.endpoint.sessions import Session
from rollout_pool.endpoint.stream import ContentStream, TextStream, about, logprob_entries, usage
from rollout_pool.episodes.env import Message, ToolCall, ToolSpec

_FIELDS = (
    *SHARED,
    "messages",
    "tools",
    "tool_choice",
    "parallel_tool_calls",
    "top_logprobs",
    "max_completion_tokens",
    "response_format",
    "modalities",
)


@dataclass(kw_only=True, slots=True, frozen=True)
class ChatRequest:
    """One parsed request."""

    messages: tuple[Message, ...]
    tools: tuple[ToolSpec, ...]
    may_call: bool
    """If False, tool calls in the text are left as text."""
    max_tokens: int | None
    delivery: Delivery


def read_chat(fields: Fields, model: str, sampling: SamplingParams) -> ChatRequest:
    """Raises ApiError naming the field that can't be served."""
    fields.only(*_FIELDS)
    check_shared(fields, model, sampling)
    fields.must_be(
        "response_format", [{"type": "text"}], "constrained output is not available; use text"
    )
    fields.must_be("modalities", [["text"]], "the model only writes text")
    fields.must_be("tool_choice", ["auto", "none"], "tool calls cannot be forced")
    fields.must_be("parallel_tool_calls", [True], "the model chooses how many tools it calls")
    fields.must_be("top_logprobs", [0], "only the log-probability of the token itself is recorded")
    tools = read_tools(fields)
    limits = [
        limit
        for key in ("max_completion_tokens", "max_tokens")
        if (limit := fields.optional_count(key, at_least=1)) is not None
    ]
    return ChatRequest(
        messages=read_messages(fields),
        tools=tools,
        may_call=bool(tools) and fields.raw("tool_choice") != "none",
        max_tokens=min(limits, default=None),
        delivery=read_delivery(fields, wants_logprobs=fields.flag("logprobs", False)),
    )


class ChatTurn:
    """Turns an answer into the API's response."""

    kind = "chat.completion"
    prefix = "chatcmpl"

    def __init__(self, session: Session, request: ChatRequest) -> None:
        self.session = session
        self.delivery = request.delivery
        self._request = request
        self._streamed = ""
        """Content that was streamed."""
        tokenizer, parser = session.serving.tokenizer, session.serving.task.tool_parser
        self._texts: TextStream | ContentStream = (
            ContentStream(tokenizer, parser) if request.may_call else TextStream(tokenizer)
        )

    def render(self) -> list[int]:
        request = self._request
        check_parts(self.session, _num_parts(request), "messages")
        check_characters(self.session, _num_characters(request), "messages")
        try:
            return self.session.conversations.render(request.messages, request.tools)
        except ValueError as error:  # the template may refuse a conversation
            raise refuse("messages", str(error)) from error

    def begin(self, prompt: list[int], fingerprint: bytes) -> Answer:
        return self.session.begin(prompt, self._request.max_tokens, fingerprint)

    def deliver(self, answer: Answer) -> Message:
        """The message of `answer`, which becomes a turn of the session."""
        message, request = self._message(answer), self._request
        if self.session.deliver(answer, (*request.messages, message)):
            self._note(answer, message)
        return message

    def _note(self, answer: Answer, message: Message) -> None:
        """Lets a later conversation that includes `message` reuse the answer's tokens."""
        request, tokens = self._request, [*answer.sample.prompt, *answer.sample.output_ids]
        self.session.conversations.note(request.messages, request.tools, message, tokens)

    def _message(self, answer: Answer) -> Message:
        sample = answer.sample
        assert sample.finish_reason is not None
        completion = self.session.serving.chat.parse(sample.output_ids, sample.finish_reason)
        if not self._request.may_call or not completion.tool_calls:
            return Message(role="assistant", content=completion.text)
        calls = tuple(
            dataclasses.replace(call, call_id=f"call_{sample.sample_id}.{place}")
            for place, call in enumerate(completion.tool_calls)
        )
        return Message(role="assistant", content=completion.content, tool_calls=calls)

    def result(self, answer: Answer) -> dict[str, Any]:
        """The whole response."""
        message = self.deliver(answer)
        choice = {
            "index": 0,
            "message": message_json(message),
            "logprobs": self._logprobs(answer, 0),
            "finish_reason": _finish_reason(answer, message),
        }
        return {**about(self, answer), "choices": [choice], "usage": usage(answer)}

    # Streamed -------------------------------------------------------------------------------------

    def opening(self) -> list[dict[str, Any]]:
        return [_choice({"role": "assistant", "content": ""})]

    def piece(self, answer: Answer, start: int) -> list[dict[str, Any]]:
        """Choices of chunks; tokens before `start` have been sent."""
        content = self._texts.feed(answer.sample.output_ids, is_end=False)
        self._streamed += content
        logprobs = self._logprobs(answer, start)
        if not content and not logprobs:
            return []
        return [_choice({"content": content}, logprobs)]

    def ending(self, answer: Answer, start: int) -> list[dict[str, Any]]:
        message = self.deliver(answer)
        choices = []
        rest = self._texts.feed(answer.sample.output_ids, is_end=True)
        if isinstance(self._texts, ContentStream):
            rest += self._texts.rest(message.content)
        if self._streamed + rest != message.content:
            # Invalid UTF-8 can decode differently in pieces.
            self._note(answer, dataclasses.replace(message, content=self._streamed + rest))
        if rest:
            choices.append(_choice({"content": rest}))
        for index, call in enumerate(calls_json(message.tool_calls)):
            choices.append(_choice({"tool_calls": [{"index": index, **call}]}))
        reason = _finish_reason(answer, message)
        return [*choices, _choice({}, self._logprobs(answer, start), reason)]

    def _logprobs(self, answer: Answer, start: int) -> dict[str, Any] | None:
        if not self.delivery.wants_logprobs or start >= len(answer.sample.output_ids):
            return None
        entries = logprob_entries(answer.sample, self.session.serving.tokenizer, start)
        return {"content": entries, "refusal": None}


def _calls(request: ChatRequest) -> list[ToolCall]:
    return [call for message in request.messages for call in message.tool_calls]


def _num_parts(request: ChatRequest) -> int:
    return len(request.messages) + len(_calls(request)) + len(request.tools)


def _num_characters(request: ChatRequest) -> int:
    """Of all text that a template can render, without its own marks."""
    texts = [
        *(text for m in request.messages for text in (m.content, m.name, m.tool_call_id) if text),
        *(text for c in _calls(request) for text in (c.name, c.call_id, str(c.arguments))),
        *(text for t in request.tools for text in (t.name, t.description, str(t.parameters))),
    ]
    return sum(map(len, texts))


def _choice(
    delta: dict[str, Any], logprobs: dict[str, Any] | None = None, finish_reason: str | None = None
) -> dict[str, Any]:
    return {"index": 0, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}


def _finish_reason(answer: Answer, message: Message) -> str | None:
    is_call = bool(message.tool_calls) and answer.sample.finish_reason == "stop"
    return "tool_calls" if is_call else answer.sample.finish_reason
