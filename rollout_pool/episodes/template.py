"""Renders conversations as text with a tokenizer's chat template, and checks that it writes them.

A template leaves out what it does not know, such as the messages of tools, and raises no error. So
the first time that a conversation has a new shape, one of the same shape is rendered first, in
which each text is a mark:

    system       mark0of      must all be found in what the template writes; if one is missing,
    user         mark1of      the template cannot be used for such conversations
    tool         mark2of
"""

from __future__ import annotations

import inspect
import itertools
import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from types import MappingProxyType
from typing import Any

from jinja2 import TemplateError

from host.pictures import MARK
from rollout_pool.episodes.conversation import Message, ToolCall, ToolSpec
from rollout_pool.episodes.tokenizer import PlainWords, Tokenizer

STAND_IN = "-a-completion-stands-here-"
"""Stands for the model's text while what follows it is rendered."""
QUESTION = Message(role="user", content="?")
"""Templates require a question before a completion."""
SHAPES_KEPT = 256
"""Shapes of conversations that have passed the check."""

Shape = tuple[tuple[str, bool, int], ...]
"""For each message its role, whether it has a text, and its number of tool calls."""
Marks = dict[str, str]
"""Each mark with what it stands for."""

TOOL_MARKS = dict.fromkeys(("markname", "marktext", "markkey"), "the description of a tool")
MARKED_TOOL = ToolSpec(
    name="markname",
    description="marktext",
    parameters={
        "type": "object",
        "properties": {"markkey": {"type": "string", "description": "A text."}},
        "required": ["markkey"],
    },
)
NO_ARGS: Mapping[str, Any] = MappingProxyType({})
TOOL_RESULT: Shape = (("tool", True, 0),)


class ChatTemplate:
    """All methods raise ValueError naming task.chat_template if there is no template, or it refuses
    the messages or leaves out a part of them.

    `tools`: those of the conversation, which some templates need to write calls and results too.
    """

    def __init__(self, tokenizer: Tokenizer, args: Mapping[str, Any] = NO_ARGS) -> None:
        """`args`: task.template_args. Raises ValueError for one that has a value in every call."""
        self._tokenizer = tokenizer
        self._args = args
        for name in args:
            if name in ("messages", *inspect.signature(tokenizer.apply_chat_template).parameters):
                raise ValueError(
                    f"task.template_args.{name}: has its value from the run in every call of a "
                    "template; leave it out"
                )
        self._plain_words = PlainWords(tokenizer)
        self._check_opening = lru_cache(SHAPES_KEPT)(self._check_opening_anew)
        self._check_demonstration = lru_cache(SHAPES_KEPT)(self._check_demonstration_anew)
        self._way_behind = lru_cache(SHAPES_KEPT)(self._find_way_behind)
        self._joins_arguments = lru_cache(self._find_joins_arguments)

    # Parts of a conversation ----------------------------------------------------------------------

    def opening(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> str:
        """A conversation up to where the model's next completion begins.

        One with tools also has to be able to go on with their results.
        """
        self._check_opening(_shape(messages), bool(tools))
        return self._rendered(messages, tools, opens_turn=True)

    def behind_completion(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> str:
        """The text between a completion and the next one; the tools are not shown again."""
        after_call, with_tools = self._way_behind(_shape(messages), bool(tools))
        return self._behind(messages, tools if with_tools else (), after_call=after_call)

    def end_of_turn(self, *, has_tools: bool) -> str:
        """The text that the template writes after a final completion."""
        completion = Message(role="assistant", content=STAND_IN)
        return _behind_stand_in(self._rendered([QUESTION, completion], _marked_tools(has_tools)))

    def demonstration(self, message: Message, tools: Sequence[ToolSpec]) -> str:
        """An assistant's message as the model should write it, and the end of its turn."""
        self._check_demonstration(_shape([message]), bool(tools))
        return self._demonstration(message, tools)

    # Ways to render them --------------------------------------------------------------------------

    def _demonstration(self, message: Message, tools: Sequence[ToolSpec]) -> str:
        opening = self._rendered([QUESTION], tools, opens_turn=True)
        whole = self._rendered([QUESTION, message], tools)
        if whole.startswith(opening):
            return whole[len(opening) :]
        return message.content + self.end_of_turn(has_tools=bool(tools))

    def _behind(
        self, messages: Sequence[Message], tools: Sequence[ToolSpec], *, after_call: bool
    ) -> str:
        if after_call:
            return self._behind_call(messages, tools)
        completion = Message(role="assistant", content=STAND_IN)
        rendered = self._rendered([QUESTION, completion, *messages], tools, opens_turn=True)
        return _behind_stand_in(rendered)

    def _behind_call(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> str:
        """For templates that write a tool's message only after a call.

        They write the call in their own format, which leaves no stand-in to find: take what the
        conversation has beyond the one that ends with the call.
        """
        calls = tuple(
            ToolCall(
                call_id=message.tool_call_id or call_id(0),
                name=message.name or "tool",
                arguments={},
            )
            for message in messages
            if message.role == "tool"
        )
        opening = [QUESTION, Message(role="assistant", content="", tool_calls=calls)]
        until_call = self._rendered(opening, tools)
        whole = self._rendered([*opening, *messages], tools, opens_turn=True)
        if not whole.startswith(until_call):
            raise ValueError(
                "task.chat_template=true: the tokenizer's template rewrites a tool call when its "
                "result follows, so the answer cannot be appended; use another template, or "
                "task.chat_template=false"
            )
        return self.end_of_turn(has_tools=bool(tools)) + whole[len(until_call) :]

    # Checks ---------------------------------------------------------------------------------------

    def _check_opening_anew(self, shape: Shape, has_tools: bool) -> None:
        # Some templates leave out the text beside a call. The model's own has been kept as tokens.
        bare = tuple((role, not num_calls, num_calls) for role, _, num_calls in shape)
        messages, marks = _marked(bare)
        text = self._rendered(messages, _marked_tools(has_tools), opens_turn=True)
        _check_marks(text, messages, {**marks, **(TOOL_MARKS if has_tools else {})})
        if has_tools:
            self._way_behind(TOOL_RESULT, True)

    def _check_demonstration_anew(self, shape: Shape, has_tools: bool) -> None:
        [message], marks = _marked(shape)
        _check_marks(self._demonstration(message, _marked_tools(has_tools)), [message], marks)

    def _find_way_behind(self, shape: Shape, has_tools: bool) -> tuple[bool, bool]:
        """How to render messages that follow a completion: whether after a call, and whether with
        the tools, so that none is left out and, if possible, the tools are not shown again."""
        messages, marks = _marked(shape)
        is_result = any(message.role == "tool" for message in messages)
        ways = itertools.product((False, True)[: 1 + is_result], (True, False)[not has_tools :])
        shows_again, failure = None, None
        for after_call, with_tools in ways:
            try:
                tools = _marked_tools(with_tools)
                text = self._behind(messages, tools, after_call=after_call)
                _check_marks(text, messages, marks)
            except ValueError as error:
                failure = error
                continue
            if MARKED_TOOL.description not in text:
                return after_call, with_tools
            shows_again = shows_again or (after_call, with_tools)
        if shows_again is not None:
            return shows_again
        assert failure is not None
        raise failure

    def _find_joins_arguments(self, has_tools: bool) -> bool:
        """Returns whether the template writes a call's arguments as they are: JSON text is right
        then, and a mapping would be refused or be written as Python does."""
        [call], _ = _marked((("assistant", False, 1),))
        [arguments] = [dict(one.arguments) for one in call.tool_calls]
        messages = [as_template_message(message) for message in (QUESTION, call)]
        tools = [as_template_tool(tool) for tool in _marked_tools(has_tools)]
        try:
            return str(arguments) in self._apply(messages, tools, opens_turn=False)
        except TypeError:
            return True
        except Exception:  # for another reason, which rendering a call will report
            return False

    # The template ---------------------------------------------------------------------------------

    def _rendered(
        self, messages: Sequence[Message], tools: Sequence[ToolSpec], *, opens_turn: bool = False
    ) -> str:
        shown = [self._plain_words.within(as_template_tool(tool)) for tool in tools]
        written = [self._template_message(message, bool(tools)) for message in messages]
        try:
            return self._apply(written, shown, opens_turn=opens_turn)
        except ValueError as error:
            raise ValueError(
                f"task.chat_template=true: the tokenizer has no chat template or a broken one "
                f"({error}); use a model that has one, or task.chat_template=false"
            ) from error
        except Exception as error:  # a template can raise anything
            what = f"{error}" if isinstance(error, TemplateError) else f"{error!r}"
            raise ValueError(
                f"task.chat_template=true: the tokenizer's template refuses a conversation of "
                f"{_roles(messages)}: {what}; use another template, or task.chat_template=false"
            ) from error

    def _apply(self, messages: list[dict[str, Any]], tools: list[Any], *, opens_turn: bool) -> str:
        return self._tokenizer.apply_chat_template(
            messages,
            tools=tools or None,
            add_generation_prompt=opens_turn,
            tokenize=False,
            **self._args,
        )

    def _template_message(self, message: Message, has_tools: bool) -> dict[str, Any]:
        written = as_template_message(message)
        if message.role != "assistant":
            return {key: self._plain_words.within(value) for key, value in written.items()}
        if message.tool_calls and self._joins_arguments(has_tools):
            join_arguments(written)
        return written


def _behind_stand_in(rendered: str) -> str:
    _, stand_in, behind = rendered.rpartition(STAND_IN)
    if not stand_in:
        raise ValueError(
            "task.chat_template=true: the tokenizer's template drops an assistant's text "
            "from the conversation; use another template, or task.chat_template=false"
        )
    return behind


# Marks --------------------------------------------------------------------------------------------


def _shape(messages: Sequence[Message]) -> Shape:
    return tuple((one.role, bool(one.content), len(one.tool_calls)) for one in messages)


def _marked(shape: Shape) -> tuple[list[Message], Marks]:
    """Messages of that shape whose texts are marks."""
    messages, marks, calls = [], Marks(), list[ToolCall]()

    def mark(what: str) -> str:
        made = f"mark{len(marks)}of"
        marks[made] = what
        return made

    for role, has_text, num_calls in shape:
        what = "the result of a tool" if role == "tool" else f"the {role}'s text"
        text = mark(what) if has_text or not num_calls else ""
        made = []
        for _ in range(num_calls):
            name, key, value = (mark("a tool call") for _ in range(3))
            made.append(ToolCall(call_id=call_id(len(marks)), name=name, arguments={key: value}))
        calls += made
        # Results come in the order of their calls.
        call = None
        if role == "tool":
            unknown = ToolCall(call_id=call_id(len(marks)), name="tool", arguments={})
            call = calls.pop(0) if calls else unknown
        messages.append(
            Message(
                role=role,
                content=text,
                tool_calls=tuple(made),
                tool_call_id=call.call_id if call else None,
                name=call.name if call else None,
            )
        )
    return messages, marks


def call_id(number: int) -> str:
    """Nine letters and digits, as Mistral's templates require."""
    return f"c{number:08d}"


def _marked_tools(has_tools: bool) -> tuple[ToolSpec, ...]:
    return (MARKED_TOOL,) if has_tools else ()


def _check_marks(text: str, messages: Sequence[Message], marks: Marks) -> None:
    for mark, what in marks.items():
        number = text.count(mark)
        # A tool's result, and the parts of a call, may be repeated.
        if number == 0 or (number > 1 and what.endswith("'s text")):
            fault = f"writes {what} {number} times" if number else f"leaves out {what}"
            raise ValueError(
                f"task.chat_template=true: the tokenizer's template {fault} in a conversation of "
                f"{_roles(messages)}; correct it (chat_template.jinja in the model's folder), use "
                "another model, or set task.renderer"
            )


def _roles(messages: Sequence[Message]) -> str:
    return ", ".join(message.role for message in messages)


# The formats that templates take ------------------------------------------------------------------


def as_template_message(message: Message) -> dict[str, Any]:
    """In the format of Hugging Face chat templates."""
    written: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.pictures:
        written["content"] = _with_pictures(message)
    if message.tool_calls:
        written["tool_calls"] = [
            {
                "id": call.call_id,
                "type": "function",
                "function": {"name": call.name, "arguments": dict(call.arguments)},
            }
            for call in message.tool_calls
        ]
    if message.tool_call_id is not None:
        written["tool_call_id"] = message.tool_call_id
    if message.name is not None:
        written["name"] = message.name
    return written


def _with_pictures(message: Message) -> list[dict[str, str]]:
    """The parts of its content. Raises ValueError unless it has a mark for each picture."""
    first, *rest = message.content.split(MARK)
    if len(rest) != len(message.pictures):
        raise ValueError(
            f"a message of the {message.role} with {len(message.pictures)} pictures has "
            f"{len(rest)} marks (U+FFFC) where they are shown; give it one for each"
        )
    texts = [[{"type": "text", "text": text}] if text else [] for text in (first, *rest)]
    parts = texts[0]
    for text in texts[1:]:
        parts += [{"type": "image"}, *text]
    return parts


def join_arguments(written: dict[str, Any]) -> None:
    """Replaces the arguments of a message's calls by JSON text, as in OpenAI's requests."""
    for call in written.get("tool_calls", []):
        call["function"]["arguments"] = json.dumps(call["function"]["arguments"])


def as_openai_message(message: Message) -> dict[str, Any]:
    """In the format of OpenAI's requests, where arguments are text."""
    written = as_template_message(message)
    join_arguments(written)
    return written


def as_template_tool(tool: ToolSpec) -> Mapping[str, Any]:
    """In the format of OpenAI's function tools."""
    return {
        "type": "function",
        "function": {
            "name": tool.name,
            "description": tool.description,
            "parameters": dict(tool.parameters),
        },
    }
