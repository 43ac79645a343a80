"""Converts conversations to tokens, and the model's tokens to answers.

    first()   [ system, user, opening of an answer ]
    model     [ .................................. | answer ]        its own tokens, kept
    follow()  [ .................................. | answer | end of turn, user, opening ]

Text that the model wrote is never tokenized again: the tokenizer might choose other tokens, and a
policy must be trained on those it sampled. So what follows an answer is rendered after a stand-in
for it, and only that part is used. What a template does to earlier turns, such as removing their
thoughts, has no effect.

With a template only the model can end or begin a turn: text of a user, a system, an environment or
a tool never becomes a special token, even if it spells one (see `PlainWords`). An assistant's
message is used as it is.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from functools import cached_property, lru_cache
from typing import Any, Protocol

from jinja2 import TemplateError

from configs.choices import ToolParser
from rollout_pool.episodes.env import Completion, Message, ToolCall, ToolSpec
from rollout_pool.episodes.tokenizer import PlainWords, Tokenizer
from rollout_pool.episodes.tool_calls import parse_tool_calls

STAND_IN = "-an-answer-stands-here-"
"""Stands for the model's text while what follows it is rendered."""
TEXTS_KEPT = 64
"""The episodes of a group begin with the same text, which is tokenized once."""
LONGEST_TEXT_KEPT = 256 * 1024
"""In characters."""

QUESTION = Message(role="user", content="?")
"""Templates require a question before an answer."""


class Chat(Protocol):
    """The part of ChatFormat that runs an episode."""

    def first(self, messages: Sequence[Message], tools: Sequence[ToolSpec] = ()) -> list[int]: ...
    def follow(
        self,
        prompt: Sequence[int],
        answer: Sequence[int],
        messages: Sequence[Message],
        tools: Sequence[ToolSpec] = (),
    ) -> list[int]: ...
    def parse(
        self,
        output_ids: Sequence[int],
        finish_reason: str,
        prompt: Sequence[int] = (),
        tools: Sequence[ToolSpec] = (),
    ) -> Completion: ...


class ChatFormat:
    """Settings: task.chat_template, task.tool_parser.

    Without the template texts are concatenated as they are, and tools are not shown.
    """

    def __init__(
        self, tokenizer: Tokenizer, *, chat_template: bool, tool_parser: ToolParser
    ) -> None:
        self._tokenizer = tokenizer
        self._chat_template = chat_template
        self._tool_parser = tool_parser
        self._known_special: dict[int, bool] = {}
        self._num_calls = itertools.count()
        self._known_opening = lru_cache(maxsize=TEXTS_KEPT)(self._encode_opening)

    # Tokens of a conversation ---------------------------------------------------------------------

    def first(self, messages: Sequence[Message], tools: Sequence[ToolSpec] = ()) -> list[int]:
        """A conversation up to where the model's next answer begins.

        Like the other methods, raises ValueError naming task.chat_template if there is no template
        or it refuses the messages.
        """
        if not self._chat_template:
            return list(self._opening("".join(message.content for message in messages)))
        return list(self._opening(self._rendered(messages, tools, opens_answer=True)))

    def follow(
        self,
        prompt: Sequence[int],
        answer: Sequence[int],
        messages: Sequence[Message],
        tools: Sequence[ToolSpec] = (),
    ) -> list[int]:
        """`prompt` and the model's `answer` to it, extended by `messages`. `tools`: those that the
        conversation opened with; not shown again.

        A truncated answer gets the template's end of turn; one that the model ended itself, with
        any special token, is not ended twice.
        """
        tokens = [*prompt, *answer]
        if not self._chat_template:
            text = "".join(message.content for message in messages)
            return [*tokens, *self._encode(text)]
        appended = self._encode(self._after_answer(messages))
        end = self._end_tokens
        if self._is_special(tokens[-1]) and end and appended[: len(end)] == end:
            return [*tokens, *appended[len(end) :]]
        # Some models end an answer by opening the next turn: GLM writes the user's mark.
        return [*tokens, *appended[appended[:1] == [tokens[-1]] :]]

    def answer(self, message: Message) -> list[int]:
        """An assistant's message as the model should write it, with the token that ends it."""
        assert message.role == "assistant"
        if not self._chat_template:
            return [*self._encode(message.content), *self._eos()]
        opening = self._rendered([QUESTION], opens_answer=True)
        whole = self._rendered([QUESTION, message])
        if whole.startswith(opening):
            written = whole[len(opening) :]
        else:
            written = message.content + self._end_of_turn
        tokens = self._encode(written)
        ends = [place for place, token in enumerate(tokens) if self._is_special(token)]
        return tokens[: ends[-1] + 1] if ends else [*tokens, *self._eos()]

    # Answers --------------------------------------------------------------------------------------

    def parse(
        self,
        output_ids: Sequence[int],
        finish_reason: str,
        prompt: Sequence[int] = (),
        tools: Sequence[ToolSpec] = (),
    ) -> Completion:
        """The parsed answer to `prompt` with its calls of `tools`. Never raises.

        Call ids have nine letters and digits, as Mistral's templates require, and are unique within
        this object.
        """
        said = list(output_ids)
        if said and self._is_special(said[-1]):
            said.pop()
        # Keep special tokens: some tokenizers have them around calls.
        parsed = parse_tool_calls(self._tool_parser, self._tokenizer.decode(said))
        text = self._tokenizer.decode(said, skip_special_tokens=True)
        has_calls = bool(parsed.calls) or parsed.bad_call is not None
        return Completion(
            text=text,
            content=parsed.content if has_calls else text,
            tool_calls=tuple(
                ToolCall(call_id=f"c{next(self._num_calls):08d}", name=name, arguments=arguments)
                for name, arguments in parsed.calls
            ),
            bad_call=parsed.bad_call,
            finish_reason=finish_reason,
            num_tokens=len(output_ids),
        )

    # What follows an answer -----------------------------------------------------------------------

    def _after_answer(self, messages: Sequence[Message]) -> str:
        """The text between an answer and the next one."""
        answer = Message(role="assistant", content=STAND_IN)
        try:
            rendered = self._render([QUESTION, answer, *messages], opens_answer=True)
        except TemplateError:
            return self._after_call(messages)
        return self._behind_stand_in(rendered)

    def _after_call(self, messages: Sequence[Message]) -> str:
        """The same for templates that accept a tool's message only after a call.

        They write the call in their own format, which leaves no stand-in to find: take what the
        conversation has beyond the one that ends with the call.
        """
        calls = tuple(
            ToolCall(
                call_id=message.tool_call_id or "c00000000",
                name=message.name or "tool",
                arguments={},
            )
            for message in messages
            if message.role == "tool"
        )
        opening = [QUESTION, Message(role="assistant", content="", tool_calls=calls)]
        until_call = self._rendered(opening)
        whole = self._rendered([*opening, *messages], opens_answer=True)
        if not whole.startswith(until_call):
            raise ValueError(
                "task.chat_template=true: the tokenizer's template rewrites a tool call when its "
                "result follows, so the answer cannot be appended; use another template, or "
                "task.chat_template=false"
            )
        return self._end_of_turn + whole[len(until_call) :]

    @cached_property
    def _end_of_turn(self) -> str:
        """What the template writes after a final answer."""
        answer = Message(role="assistant", content=STAND_IN)
        return self._behind_stand_in(self._rendered([QUESTION, answer]))

    @cached_property
    def _end_tokens(self) -> list[int]:
        """Its tokens up to the special token, which a model that ends its turn has written
        already. Empty if there is none."""
        tokens = self._encode(self._end_of_turn)
        for place, token in enumerate(tokens):
            if self._is_special(token):
                return tokens[: place + 1]
            if self._tokenizer.decode([token]).strip():
                break
        return []

    def _behind_stand_in(self, rendered: str) -> str:
        _, stand_in, behind = rendered.rpartition(STAND_IN)
        if not stand_in:
            raise ValueError(
                "task.chat_template=true: the tokenizer's template drops an assistant's text "
                "from the conversation; use another template, or task.chat_template=false"
            )
        return behind

    # Template and tokenizer -----------------------------------------------------------------------

    def _rendered(
        self,
        messages: Sequence[Message],
        tools: Sequence[ToolSpec] = (),
        *,
        opens_answer: bool = False,
    ) -> str:
        try:
            return self._render(messages, tools, opens_answer=opens_answer)
        except TemplateError as error:
            roles = ", ".join(message.role for message in messages)
            raise ValueError(
                f"task.chat_template=true: the tokenizer's template refuses a conversation of "
                f"{roles}: {error}; use another template, or task.chat_template=false"
            ) from error

    def _render(
        self,
        messages: Sequence[Message],
        tools: Sequence[ToolSpec] = (),
        *,
        opens_answer: bool = False,
    ) -> str:
        try:
            return self._tokenizer.apply_chat_template(
                [self._template_message(message) for message in messages],
                tools=[self._plain_words.within(as_template_tool(tool)) for tool in tools] or None,
                add_generation_prompt=opens_answer,
                tokenize=False,
            )
        except ValueError as error:
            raise ValueError(
                f"task.chat_template=true: the tokenizer has no chat template or a broken one "
                f"({error}); use a model that has one, or task.chat_template=false"
            ) from error

    @cached_property
    def _plain_words(self) -> PlainWords:
        return PlainWords(self._tokenizer)

    def _template_message(self, message: Message) -> dict[str, Any]:
        written = as_template_message(message)
        if message.role != "assistant":
            written = {key: self._plain_words.within(value) for key, value in written.items()}
        return written

    def _opening(self, text: str) -> tuple[int, ...]:
        if len(text) > LONGEST_TEXT_KEPT:
            return self._encode_opening(text)
        return self._known_opening(text)

    def _encode_opening(self, text: str) -> tuple[int, ...]:
        # A template writes its own leading tokens.
        add_special_tokens = not self._chat_template
        return tuple(self._tokenizer.encode(text, add_special_tokens=add_special_tokens))

    def _encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def _is_special(self, token: int) -> bool:
        """Whether a turn may end with `token`: models use different special tokens."""
        known = self._known_special.get(token)
        if known is None:
            decode = self._tokenizer.decode
            is_skipped = decode([token]) != "" and decode([token], skip_special_tokens=True) == ""
            known = token == self._tokenizer.eos_token_id or is_skipped
            self._known_special[token] = known
        return known

    def _eos(self) -> list[int]:
        eos = self._tokenizer.eos_token_id
        return [] if eos is None else [eos]


def as_template_message(message: Message) -> dict[str, Any]:
    """In the format of Hugging Face chat templates."""
    written: dict[str, Any] = {"role": message.role, "content": message.content}
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
