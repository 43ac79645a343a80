"""POST /v1/chat/completions: the request and its response."""

from __future__ import annotations

import dataclasses
from typing import Any

from rollout_pool.endpoint.answers import Answer
from rollout_pool.endpoint.errors import refuse
from rollout_pool.endpoint.forms import read_form
from rollout_pool.endpoint.schema import Fields, calls_json, message_json, read_messages, read_tool
from rollout_pool.endpoint.sessions import Session
from rollout_pool.endpoint.stream import (
    ContentStream,
    TextStream,
    Turn,
    logprob_entries,
    rest_of,
)
from rollout_pool.episodes.env import Message
from rollout_pool.sampling.stop import before_stop

_FIELDS = (
    "messages",
    "tools",
    "tool_choice",
    "parallel_tool_calls",
    "top_logprobs",
    "max_completion_tokens",
    "response_format",
    "modalities",
)


class ChatTurn(Turn):
    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"
    prefix = "chatcmpl"

    def __init__(self, session: Session, fields: Fields) -> None:
        super().__init__(session, fields, *_FIELDS)
        fields.must_be("modalities", [["text"]], "the model only writes text")
        fields.must_be(
            "top_logprobs", [0], "only the log-probability of the token itself is recorded"
        )
        self._wants_logprobs = fields.flag("logprobs", False)
        self._messages = read_messages(fields)
        self._tools = tuple(read_tool(one) for one in fields.objects("tools"))
        task = session.serving.task
        self._parser = task.tool_parser if task.renderer is None else None
        form = read_form(fields, self._tools, self._parser, session.serving.tokenizer)
        self.constrain(fields, form)
        self._may_call = bool(self._tools) and fields.raw("tool_choice") != "none"
        """If False, tool calls in the text are left as text."""
        limits = [
            limit
            for key in ("max_completion_tokens", "max_tokens")
            if (limit := fields.optional_count(key, at_least=1)) is not None
        ]
        self.max_tokens = min(limits, default=None)

    def new_texts(self) -> TextStream | ContentStream:
        tokenizer = self.session.serving.tokenizer
        if not self._may_call and self._parser is not None:
            return TextStream(tokenizer)
        return ContentStream(tokenizer, self._parser)

    def render(self) -> list[int]:
        calls = [call for message in self._messages for call in message.tool_calls]
        # All text that a template can render, without its own marks.
        texts = [
            *(t for m in self._messages for t in (m.content, m.name, m.tool_call_id) if t),
            *(t for c in calls for t in (c.name, c.call_id, str(c.arguments))),
            *(t for tool in self._tools for t in (tool.name, tool.description)),
            *(str(tool.parameters) for tool in self._tools),
        ]
        num_parts = len(self._messages) + len(calls) + len(self._tools)
        self.session.check_size("messages", sum(map(len, texts)), num_parts)
        try:
            return self.session.conversations.render(self._messages, self._tools)
        except ValueError as error:  # the template may refuse a conversation
            raise refuse("messages", str(error)) from error

    def _deliver(self, answer: Answer) -> Message:
        """The message of `answer`, which becomes a turn of the session."""
        message = self._message(answer)
        if self.session.deliver(answer, (*self._messages, message)):
            self._note(answer, message)
        return message

    def _note(self, answer: Answer, message: Message) -> None:
        """Lets a later conversation that includes `message` reuse the answer's tokens."""
        sample = answer.sample
        self.session.conversations.note(
            (*self._messages, message), self._tools, sample.prompt, sample.output_ids
        )

    def _message(self, answer: Answer) -> Message:
        sample = answer.sample
        assert sample.finish_reason is not None
        completion = self.session.serving.chat.parse(
            sample.output_ids, sample.finish_reason, sample.prompt, self._tools
        )
        if not self._may_call or not completion.tool_calls:
            return Message(role="assistant", content=before_stop(completion.text, self.stop))
        calls = tuple(
            dataclasses.replace(call, call_id=f"call_{sample.sample_id}.{place}")
            for place, call in enumerate(completion.tool_calls)
        )
        content = before_stop(completion.content, self.stop)
        return Message(role="assistant", content=content, tool_calls=calls)

    def whole(self, answer: Answer) -> dict[str, Any]:
        message = self._deliver(answer)
        return {
            "index": self.index,
            "message": message_json(message),
            "logprobs": self._logprobs(answer, 0),
            "finish_reason": _finish_reason(answer, message),
        }

    def opening(self) -> list[dict[str, Any]]:
        return [self._choice({"role": "assistant", "content": ""})]

    def piece(self, answer: Answer, start: int) -> list[dict[str, Any]]:
        content = self.feed(answer, is_end=False)
        logprobs = self._logprobs(answer, start)
        if not content and not logprobs:
            return []
        return [self._choice({"content": content}, logprobs)]

    def ending(self, answer: Answer, start: int) -> list[dict[str, Any]]:
        message = self._deliver(answer)
        choices = []
        rest = self.feed(answer, is_end=True)
        if isinstance(self.texts, ContentStream):
            unsent = rest_of(message.content, self.streamed)
            self.streamed += unsent
            rest += unsent
        if self.streamed != message.content:
            # Invalid UTF-8 can decode differently in pieces.
            self._note(answer, dataclasses.replace(message, content=self.streamed))
        if rest:
            choices.append(self._choice({"content": rest}))
        for index, call in enumerate(calls_json(message.tool_calls)):
            choices.append(self._choice({"tool_calls": [{"index": index, **call}]}))
        reason = _finish_reason(answer, message)
        return [*choices, self._choice({}, self._logprobs(answer, start), reason)]

    def _logprobs(self, answer: Answer, start: int) -> dict[str, Any] | None:
        if not self._wants_logprobs or start >= answer.sample.num_ready:
            return None
        entries = logprob_entries(answer.sample, self.session.serving.tokenizer, start)
        return {"content": entries, "refusal": None}

    def _choice(
        self,
        delta: dict[str, Any],
        logprobs: dict[str, Any] | None = None,
        finish_reason: str | None = None,
    ) -> dict[str, Any]:
        body = {"index": self.index, "delta": delta, "logprobs": logprobs}
        return {**body, "finish_reason": finish_reason}


def _finish_reason(answer: Answer, message: Message) -> str | None:
    is_call = bool(message.tool_calls) and answer.sample.finish_reason == "stop"
    return "tool_calls" if is_call else answer.sample.finish_reason
