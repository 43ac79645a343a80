"""POST /v1/chat/completions, /messages and /responses: a conversation that the model continues."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from configs.choices import ToolParser
from rollout_pool.endpoint.constraints import read_form
from rollout_pool.endpoint.errors import ApiError, refuse
from rollout_pool.endpoint.messages import (
    BlockStream,
    CountRequest,
    MessagesRequest,
    blocks_of,
    read_blocks,
    read_tools,
)
from rollout_pool.endpoint.pending_completion import PendingCompletion
from rollout_pool.endpoint.responses import (
    Item,
    ItemStream,
    MessageItem,
    ResponsesRequest,
    read_items,
)
from rollout_pool.endpoint.schema import ChatRequest, message_json, only, read_messages, shown
from rollout_pool.endpoint.sessions import Session
from rollout_pool.endpoint.stream import (
    ContentStream,
    TextStream,
    Turn,
    event_of,
    logprob_entries,
    rest_of,
    usage,
)
from rollout_pool.episodes.conversation import Message, ToolSpec
from rollout_pool.episodes.thoughts import END_OF_THINK, THINK, ThoughtStream
from rollout_pool.episodes.tool_calls import CLOSE
from rollout_pool.sampling.stop import before_stop


class ChatTurn(Turn):
    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"
    prefix = "chatcmpl"
    is_asked = True
    """False if its tokens are only counted."""

    def __init__(
        self,
        session: Session,
        request: ChatRequest,
        messages: tuple[Message, ...] = (),
        tools: Sequence[ToolSpec] = (),
    ) -> None:
        """`messages` and `tools`, if `request` has none."""
        super().__init__(session, request)
        only("modalities", request.modalities or ["text"], ["text"], "the model only writes text")
        why = "only the log-probability of the token itself is recorded"
        only("top_logprobs", request.top_logprobs, 0, why)
        self._wants_logprobs = request.logprobs
        self._messages = messages or read_messages(request.messages)
        self._tools = tools or [tool.spec(f"tools[{i}]") for i, tool in enumerate(request.tools)]
        task = session.serving.task
        self._parser = task.tool_parser if task.renderer is None else None
        form = read_form(request, self._tools, self._parser, session.serving.tokenizer)
        self.constrain(request, form)
        self._may_call = bool(self._tools) and request.tool_choice != "none"
        """If False, tool calls in the text are left as text."""
        limits = (request.max_completion_tokens, request.max_tokens)
        self.max_tokens = min((limit for limit in limits if limit is not None), default=None)
        self._thoughts: ThoughtStream | None = None
        """Made with the first text of the completion that it writes."""

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
        size = sum(map(len, texts))
        self.session.check_size("messages", size, num_parts, is_asked=self.is_asked)
        try:
            return self.session.conversations.render(self._messages, self._tools)
        except ValueError as error:  # the template may refuse a conversation
            raise refuse("messages", str(error)) from error

    def _deliver(self, completion: PendingCompletion) -> Message:
        """The message of `completion`, which becomes a turn of the session."""
        message = self._message(completion)
        before = self.session.conversations.as_said(self._messages, self._tools)
        if self.session.deliver(completion, (*before, message)):
            self._note(completion, message)
        return message

    def _note(self, completion: PendingCompletion, message: Message) -> None:
        """Lets a later conversation that includes `message` reuse the sampled tokens."""
        sample, said = completion.sample, message.content
        if self._begins_in_thoughts(completion) and not message.content.lstrip().startswith(THINK):
            # As a client's thoughts and content are joined.
            message = dataclasses.replace(message, content=THINK + message.content)
        self.session.conversations.note(
            (*self._messages, message), self._tools, sample.prompt, sample.output_ids, said
        )

    def _begins_in_thoughts(self, completion: PendingCompletion) -> bool:
        form = self.constraint.grammar if self.constraint is not None else ""
        return self.session.serving.chat.opens_thoughts(completion.sample.prompt, form)

    def _divide(self, completion: PendingCompletion, text: str, *, is_end: bool) -> tuple[str, str]:
        """Thoughts and content in the next `text` of the completion."""
        if self._thoughts is None:
            self._thoughts = ThoughtStream(are_open=self._begins_in_thoughts(completion))
        return self._thoughts.feed(text, is_end=is_end)

    def _message(self, completion: PendingCompletion) -> Message:
        sample = completion.sample
        assert sample.finish_reason is not None
        parsed = self.session.serving.chat.parse(
            sample.output_ids, sample.finish_reason, sample.prompt, self._tools
        )
        thinks = self._begins_in_thoughts(completion) and END_OF_THINK not in parsed.text
        if not self._may_call or not parsed.tool_calls or thinks:
            return Message(role="assistant", content=before_stop(parsed.text, self.stop))
        calls = tuple(
            dataclasses.replace(call, call_id=f"call_{sample.sample_id}.{place}")
            for place, call in enumerate(parsed.tool_calls)
        )
        content = before_stop(parsed.content, self.stop)
        return Message(role="assistant", content=content, tool_calls=calls)

    def whole(self, completion: PendingCompletion) -> dict[str, Any]:
        message = self._deliver(completion)
        thoughts, content = self._divide(completion, message.content, is_end=True)
        return {
            "index": self.index,
            "message": message_json(dataclasses.replace(message, content=content), thoughts),
            "logprobs": self._logprobs(completion, 0),
            "finish_reason": _finish_reason(completion, message),
        }

    def opening(self, completion: PendingCompletion) -> list[dict[str, Any]]:
        return [self._choice({"role": "assistant", "content": ""})]

    def piece(self, completion: PendingCompletion, start: int) -> list[dict[str, Any]]:
        said = self._new_text(completion)
        logprobs = self._logprobs(completion, start)
        if not any(said) and not logprobs:
            return []
        return [self._choice(_delta(*said), logprobs)]

    def ending(self, completion: PendingCompletion, start: int) -> list[dict[str, Any]]:
        message, *said = self._rest(completion)
        choices = [self._choice(_delta(*said))] if any(said) else []
        for index, call in enumerate(message_json(message, "").get("tool_calls", ())):
            choices.append(self._choice({"tool_calls": [{"index": index, **call}]}))
        reason = _finish_reason(completion, message)
        return [*choices, self._choice({}, self._logprobs(completion, start), reason)]

    def _new_text(self, completion: PendingCompletion) -> tuple[str, str]:
        """Thoughts and content that have arrived."""
        return self._divide(completion, self.feed(completion, is_end=False), is_end=False)

    def _rest(self, completion: PendingCompletion) -> tuple[Message, str, str]:
        """The delivered message, and its thoughts and content that have not been streamed."""
        message = self._deliver(completion)
        rest = self.feed(completion, is_end=True)
        if isinstance(self.texts, ContentStream):
            unsent = rest_of(message.content, self.streamed)
            self.streamed += unsent
            rest += unsent
        if self.streamed != message.content:
            # Invalid UTF-8 can decode differently in pieces.
            self._note(completion, dataclasses.replace(message, content=self.streamed))
        return message, *self._divide(completion, rest, is_end=True)

    def _logprobs(self, completion: PendingCompletion, start: int) -> dict[str, Any] | None:
        if not self._wants_logprobs or start >= completion.sample.num_ready:
            return None
        entries = logprob_entries(completion.sample, self.session.serving.tokenizer, start)
        return {"content": entries, "refusal": None}

    def _choice(
        self,
        delta: dict[str, Any],
        logprobs: dict[str, Any] | None = None,
        finish_reason: str | None = None,
    ) -> dict[str, Any]:
        body = {"index": self.index, "delta": delta, "logprobs": logprobs}
        return {**body, "finish_reason": finish_reason}


class MessagesTurn(ChatTurn):
    """The same in Anthropic's API. A choice is an event of its stream."""

    prefix = "msg"

    def __init__(self, session: Session, request: CountRequest) -> None:
        messages, tools = tuple(read_blocks(request)), tuple(read_tools(request.tools))
        super().__init__(session, request.as_chat(), messages, tools)
        self._blocks = BlockStream()
        self.is_asked = isinstance(request, MessagesRequest)

    def result(self, completions: Sequence[PendingCompletion]) -> dict[str, Any]:
        [completion] = completions
        message = self._deliver(completion)
        said = self._divide(completion, message.content, is_end=True)
        return {
            **self._head(completion),
            "content": blocks_of(*said, message.tool_calls),
            **self._stop_reason(completion, message),
        }

    def event(self, completions: Sequence[PendingCompletion], *choices: dict[str, Any]) -> bytes:
        [event] = choices
        return event_of(event, event["type"])

    def closing(self, completions: Sequence[PendingCompletion]) -> Iterator[bytes]:
        return iter(())  # the last choice says that it is the last

    def error_event(self, error: ApiError, request_id: str) -> bytes:
        return event_of(error.anthropic_body(request_id), "error")

    def opening(self, completion: PendingCompletion) -> list[dict[str, Any]]:
        head = {**self._head(completion), "content": [], "stop_reason": None, "stop_sequence": None}
        return [{"type": "message_start", "message": head}]

    def piece(self, completion: PendingCompletion, start: int) -> list[dict[str, Any]]:
        return list(self._blocks.grow(*self._new_text(completion)))

    def ending(self, completion: PendingCompletion, start: int) -> list[dict[str, Any]]:
        message, *said = self._rest(completion)
        events = [*self._blocks.grow(*said), *self._blocks.close()]
        for call in message.tool_calls:
            events += self._blocks.call(call)
        head, stop = self._head(completion), self._stop_reason(completion, message)
        known = {name: head[name] for name in ("usage", "leash")}
        events.append({"type": "message_delta", "delta": stop, **known})
        return [*events, {"type": "message_stop"}]

    def _head(self, completion: PendingCompletion) -> dict[str, Any]:
        about, counts = self.about([completion], ""), usage([completion])
        known = {name: about[name] for name in ("id", "model", "leash")}
        given, written = counts["prompt_tokens"], counts["completion_tokens"]
        known["usage"] = {"input_tokens": given, "output_tokens": written}
        return {**known, "type": "message", "role": "assistant"}

    def _stop_reason(self, completion: PendingCompletion, message: Message) -> dict[str, Any]:
        sample, reason, text = completion.sample, "end_turn", None
        if sample.finish_reason == "length":
            reason = "max_tokens"
        elif message.tool_calls:
            reason = "tool_use"
        elif sample.ends_at is not None:
            said = self.session.serving.tokenizer.decode(sample.output_ids)
            reason = "stop_sequence"
            text = min((one for one in self.stop if one in said), key=said.find, default=None)
        return {"stop_reason": reason, "stop_sequence": text}


class ResponsesTurn(ChatTurn):
    """The same in the Responses API. A choice is an event of its stream."""

    prefix = "resp"

    def __init__(self, session: Session, request: ResponsesRequest) -> None:
        last, items = request.previous_response_id, request.input
        if (earlier := session.responses.get(last) if last else ()) is None:
            problem = f"this session stored no answer {shown(last)}; send its items instead"
            raise refuse("previous_response_id", problem, code="previous_response_not_found")
        if isinstance(items, str):
            items = [MessageItem(role="user", content=items)]
        self._said = (*earlier, *read_items(items, earlier))
        if self._said[-1].role == "assistant":
            problem = "the last item is the model's own; end with another one"
            raise refuse(f"input[{len(items) - 1}]", problem)
        system = [Message(role="system", content=text)] if (text := request.instructions) else []
        super().__init__(session, request.as_chat(), (*system, *self._said))
        if self._may_call and request.tool_choice == "auto" and not request.parallel_tool_calls:
            why = "without a forced call it needs task.tool_parser=hermes; leave it out"
            only("parallel_tool_calls", self._parser is ToolParser.hermes, True, why)
            self.stop = (*self.stop, CLOSE)  # so the first call is the last
        self._request = request
        self._numbers = itertools.count()
        self._items: ItemStream
        """The answer's, once that is written."""

    def result(self, completions: Sequence[PendingCompletion]) -> dict[str, Any]:
        [writer], [completion] = self.each(), completions
        writer.opening(completion)
        return dict(writer.ending(completion, 0)[-1]["response"])

    def event(self, completions: Sequence[PendingCompletion], *choices: dict[str, Any]) -> bytes:
        [event] = choices
        return event_of({**event, "sequence_number": next(self._numbers)}, event["type"])

    def closing(self, completions: Sequence[PendingCompletion]) -> Iterator[bytes]:
        return iter(())  # the last choice says that it is the last

    def opening(self, completion: PendingCompletion) -> list[dict[str, Any]]:
        self._items = ItemStream(completion.sample.sample_id, self._request.tools)
        body, names = self._body(completion, "in_progress"), ("created", "in_progress")
        return [{"type": f"response.{name}", "response": body} for name in names]

    def piece(self, completion: PendingCompletion, start: int) -> list[dict[str, Any]]:
        return list(self._items.grow(*self._new_text(completion)))

    def ending(self, completion: PendingCompletion, start: int) -> list[dict[str, Any]]:
        message, *said = self._rest(completion)
        status = "incomplete" if completion.sample.finish_reason == "length" else "completed"
        items = self._items
        events = [*items.grow(*said), *items.close(status)]
        for call in message.tool_calls:
            events += items.call(call)
        if not items.done:  # so that a client can send it back
            events += [*items.open("message"), *items.close(status)]
        body = self._body(completion, status)
        if self._request.store:
            # As a client would send it back, so it is recognised in the same way.
            own = read_items(msgspec.convert(items.done, list[Item]))
            self.session.responses[body["id"]] = (*self._said, *own)
        return [*events, {"type": f"response.{status}", "response": body}]

    def _body(self, completion: PendingCompletion, status: str) -> dict[str, Any]:
        about, counts = self.about([completion], "response"), usage([completion])
        asked = msgspec.to_builtins(msgspec.structs.replace(self._request, input=""))
        used = {
            "input_tokens": counts["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": counts["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": counts["total_tokens"],
        }
        return {
            **{name: value for name, value in asked.items() if name != "input"},
            **about,
            "created_at": about["created"],
            "status": status,
            "incomplete_details": {"incomplete": {"reason": "max_output_tokens"}}.get(status),
            "output": list(self._items.done),
            "usage": None if status == "in_progress" else used,
        }


def _delta(thoughts: str, content: str) -> dict[str, Any]:
    shown = {"reasoning_content": thoughts} if thoughts else {}
    return {**shown, "content": content} if content or not thoughts else shown


def _finish_reason(completion: PendingCompletion, message: Message) -> str | None:
    is_call = bool(message.tool_calls) and completion.sample.finish_reason == "stop"
    return "tool_calls" if is_call else completion.sample.finish_reason
