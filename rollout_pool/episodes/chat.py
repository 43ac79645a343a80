"""Converts conversations to tokens, and the model's tokens to messages.

    first_prompt()  [ system, user, opening of a completion ]
    model           [ ..................................... | completion ]    its own tokens, kept
    next_prompt()   [ ..................................... | completion | end of turn, user, ... ]

Text that the model wrote is never tokenized again: the tokenizer might choose other tokens, and a
policy must be trained on those it sampled. So the text after a completion is rendered after a
stand-in for it, and only that part is used. What a template does to earlier turns, such as removing
their thoughts, has no effect.

With a template only the model can end or begin a turn: text of a user, a system, an environment or
a tool never becomes a special token, even if it spells one (see `PlainWords`). An assistant's
message is used as it is.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from configs.choices import ToolParser
from rollout_pool.episodes.conversation import Completion, Message, ToolCall, ToolSpec, with_files
from rollout_pool.episodes.template import NO_ARGS, ChatTemplate, call_id
from rollout_pool.episodes.thoughts import END_OF_THINK, THINK
from rollout_pool.episodes.tokenizer import TextTokens, Tokenizer
from rollout_pool.episodes.tool_calls import parse_tool_calls
from tensors.pictures import FAMILIES, PictureProcessor

log = logging.getLogger(__name__)

TEXTS_KEPT = 64
"""The episodes of a group begin with the same text, which is tokenized once."""
LONGEST_TEXT_KEPT = 256 * 1024
"""In characters."""
PROMPT_END = 16
"""Tokens of a prompt's end, where a template may open thoughts."""


class ChatFormat:
    """Settings: task.chat_template, task.template_args, task.tool_parser.

    Without the template texts are concatenated as they are, and there can be no tools.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        chat_template: bool,
        tool_parser: ToolParser,
        pictures: PictureProcessor | None = None,
        template_args: Mapping[str, Any] = NO_ARGS,
    ) -> None:
        """`pictures`: that of a model which takes some."""
        self._tokenizer = tokenizer
        self._pictures = pictures
        self._chat_template = chat_template
        self._tool_parser = tool_parser
        added = tokenizer.added_tokens_decoder
        self._special = {*self._eos(), *(token for token, one in added.items() if one.special)}
        """A turn may end with any of them: models use different ones."""
        self._ends_in_mark = lru_cache(maxsize=TEXTS_KEPT)(self._decodes_to_mark)
        self._num_calls = itertools.count()
        self._known_opening = lru_cache(maxsize=TEXTS_KEPT)(self._encode_opening)
        self._text = TextTokens(tokenizer)
        self._template = ChatTemplate(tokenizer, template_args)
        self._end_tokens = lru_cache(self._find_end_tokens)

    # Tokens of a conversation ---------------------------------------------------------------------

    def first_prompt(
        self, messages: Sequence[Message], tools: Sequence[ToolSpec] = ()
    ) -> list[int]:
        """A conversation up to where the model's next completion begins.

        Like the other methods, raises ValueError naming task.chat_template if there is no template,
        or it refuses the messages or leaves out a part of them.
        """
        if self._chat_template:
            opened = list(self._opening(self._template.opening(messages, tools)))
            return self._with_places(opened, messages)
        self._with_places([], messages)
        if tools:
            _warn_of_hidden(", ".join(tool.name for tool in tools))
        return list(self._opening("".join(message.content for message in messages)))

    def next_prompt(
        self,
        prompt: Sequence[int],
        completion: Sequence[int],
        messages: Sequence[Message],
        tools: Sequence[ToolSpec] = (),
    ) -> list[int]:
        """`prompt` and the model's `completion`, extended by `messages`. `tools`: those that the
        conversation opened with; not shown again.

        A truncated one gets the template's end of turn; one that the model ended itself, with
        any special token, is not ended twice.
        """
        tokens = [*prompt, *completion]
        if not self._chat_template:
            self._with_places([], messages)
            text = "".join(message.content for message in messages)
            return [*tokens, *self._text.continuation(text)]
        appended = self._text.continuation(self._template.behind_completion(messages, tools))
        appended = self._with_places(appended, messages)
        end = self._end_tokens(bool(tools))
        if tokens[-1] in self._special and end and appended[: len(end)] == end:
            return [*tokens, *appended[len(end) :]]
        # Some models end a completion by opening the next turn: GLM writes the user's mark.
        return [*tokens, *appended[appended[:1] == [tokens[-1]] :]]

    def demonstration(self, message: Message, tools: Sequence[ToolSpec] = ()) -> list[int]:
        """An assistant's message as the model should write it, with the token that ends it.
        `tools`: those of the conversation."""
        assert message.role == "assistant"
        if not self._chat_template:
            if message.tool_calls:
                raise ValueError(
                    "task.chat_template=false: without a template no tool call can be written, and "
                    f"there is one of {', '.join(call.name for call in message.tool_calls)}; set "
                    "task.chat_template=true"
                )
            return [*self._text.continuation(message.content), *self._eos()]
        tokens = self._text.continuation(self._template.demonstration(message, tools))
        ends = [place for place, token in enumerate(tokens) if token in self._special]
        return tokens[: ends[-1] + 1] if ends else [*tokens, *self._eos()]

    # Completions ----------------------------------------------------------------------------------

    def opens_thoughts(self, prompt: Sequence[int], grammar: str) -> bool:
        """Returns whether the text of a completion begins within thoughts. Those whose end is a
        special token, which text leaves out, can't be told apart. A `grammar` that does not name
        their end has no room for them."""
        if grammar and "/think>" not in grammar:  # in a regular expression its slash is escaped
            return False
        return self._ends_in_mark(tuple(prompt[-PROMPT_END:]))

    def parse(
        self,
        output_ids: Sequence[int],
        finish_reason: str,
        prompt: Sequence[int] = (),
        tools: Sequence[ToolSpec] = (),
    ) -> Completion:
        """Parses a completion of `prompt`, with its calls of `tools`. Never raises.

        Call ids have nine letters and digits, as Mistral's templates require, and are unique within
        this object.
        """
        said = list(output_ids)
        if said and said[-1] in self._special:
            said.pop()
        # Keep special tokens: some tokenizers have them around calls.
        text = self._tokenizer.decode(said)
        parsed = parse_tool_calls(self._tool_parser, text)
        if not self._special.isdisjoint(said):
            text = self._tokenizer.decode(said, skip_special_tokens=True)
        has_calls = bool(parsed.calls) or parsed.bad_call is not None
        return Completion(
            text=text,
            content=parsed.content if has_calls else text,
            tool_calls=tuple(
                ToolCall(call_id=call_id(next(self._num_calls)), name=name, arguments=arguments)
                for name, arguments in parsed.calls
            ),
            bad_call=parsed.bad_call,
            finish_reason=finish_reason,
            num_tokens=len(output_ids),
        )

    # Template and tokenizer -----------------------------------------------------------------------

    def _find_end_tokens(self, has_tools: bool) -> list[int]:
        """The tokens of the template's end of turn up to the special one, which a model that ends
        its turn has written already. Empty if there is none."""
        tokens = self._text.continuation(self._template.end_of_turn(has_tools=has_tools))
        for place, token in enumerate(tokens):
            if token in self._special:
                return tokens[: place + 1]
            if self._tokenizer.decode([token]).strip():
                break
        return []

    def _with_places(self, tokens: list[int], messages: Sequence[Message]) -> list[int]:
        """`tokens` of these messages, with as many places for each picture as it has tokens."""
        if not any(message.pictures for message in messages):
            return tokens
        if self._pictures is None:
            raise ValueError(
                "a message has a picture, and the model takes none; set model.path to one that "
                f"does ({', '.join(sorted(FAMILIES))}), or leave pictures out of the task"
            )
        if not self._chat_template:
            raise ValueError(
                "task.chat_template=false: only a chat template knows where a picture stands; set "
                "task.chat_template=true"
            )
        read = (one if one.files else with_files([one])[0] for one in messages)
        return self._pictures.expanded(tokens, [file for one in read for file in one.files])

    def _opening(self, text: str) -> tuple[int, ...]:
        if len(text) > LONGEST_TEXT_KEPT:
            return self._encode_opening(text)
        return self._known_opening(text)

    def _encode_opening(self, text: str) -> tuple[int, ...]:
        if self._chat_template:  # it writes its own leading tokens
            return tuple(self._tokenizer.encode(text, add_special_tokens=False))
        return tuple(self._text.opening(text))

    def _decodes_to_mark(self, end: Sequence[int]) -> bool:
        added = self._tokenizer.added_tokens_decoder.values()
        is_text = not any(one.special and one.content == END_OF_THINK for one in added)
        return is_text and self._tokenizer.decode(end).rstrip().endswith(THINK)

    def _eos(self) -> list[int]:
        eos = self._tokenizer.eos_token_id
        return [] if eos is None else [eos]


@lru_cache(maxsize=64)  # once for each set of tools
def _warn_of_hidden(names: str) -> None:
    log.warning(
        "task.chat_template=false: without a template the model is not shown its tools (%s), and "
        "knows of them only what its prompt says; set task.chat_template=true",
        names,
    )
