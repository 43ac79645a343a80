"""The chat format of a model family by the `renderers` library, which writes and reads
conversations in tokens, without the tokenizer's template.

The library's bridge appends what follows a completion to its own tokens. If it cannot, that is an
error: a completion is never rendered again.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, get_args

from configs.rollout_schema import TaskConfig
from host.pictures import MARK
from rollout_pool.episodes.chat import LONGEST_TEXT_KEPT, TEXTS_KEPT, ChatFormat
from rollout_pool.episodes.conversation import (
    Completion,
    Message,
    ToolCall,
    ToolSpec,
    TrainableChat,
)
from rollout_pool.episodes.template import (
    MARKED_TOOL,
    NO_ARGS,
    QUESTION,
    ChatTemplate,
    as_template_message,
    as_template_tool,
    call_id,
)
from rollout_pool.episodes.thoughts import END_OF_THINK, THINK, divide, join_thoughts
from rollout_pool.episodes.tokenizer import PlainWords, TextTokens, Tokenizer
from rollout_pool.episodes.tool_calls import SHOWN, BadCall, as_call
from tensors.pictures import PictureProcessor

AUTO = "auto"


def chat_format(
    tokenizer: Tokenizer, task: TaskConfig, pictures: PictureProcessor | None = None
) -> TrainableChat:
    """The format of a run's conversations; `pictures`: that of a model which takes some. Raises
    ValueError naming task.renderer."""
    if task.renderer is not None:
        return RendererFormat(tokenizer, task.renderer, task.template_args)
    return ChatFormat(
        tokenizer,
        chat_template=task.chat_template,
        tool_parser=task.tool_parser,
        pictures=pictures,
        template_args=task.template_args,
    )


def check_template_args(tokenizer: Tokenizer, task: TaskConfig) -> None:
    """Raises ValueError for an argument in task.template_args which changes nothing in what the
    template or the renderer writes: most templates ignore a name that they do not know."""

    def written(args: Mapping[str, Any]) -> list[object]:
        if task.renderer is None:
            write: Callable[..., object] = ChatTemplate(tokenizer, args).opening
        else:
            write = RendererFormat(tokenizer, task.renderer, args).first_prompt
        return [_or_error(write, *one) for one in itertools.product(_TRIED, ((), (MARKED_TOOL,)))]

    whole, bare = written(task.template_args), written({})
    for name, value in task.template_args.items():
        others = {one: task.template_args[one] for one in {*task.template_args} - {name}}
        # Of two that do the same, each changes something alone.
        if written(others) == whole and written({name: value}) == bare:
            raise ValueError(
                f"task.template_args.{name}={value!r}: changes nothing in what "
                f"{task.renderer or 'the chat template'} writes: it is no argument there, or this "
                "is its value anyway; correct it, or leave it out"
            )


_THOUGHT = Message(role="assistant", content=join_thoughts("Hm.", "Yes."))
_TRIED = (
    (QUESTION,),
    (Message(role="system", content="Be brief."), QUESTION),
    (QUESTION, _THOUGHT, QUESTION),
    (Message(role="user", content=f"{MARK}{MARK}", pictures=("a", "b")),),
)
"""Conversations that show what an argument does."""


def _or_error(write: Callable[..., object], *conversation: object) -> object:
    """Returns what `write` makes of a conversation, or why it refuses it."""
    try:
        return write(*conversation)
    except ValueError as error:
        return str(error)


class RendererFormat:
    """A `TrainableChat` by a renderer, for families whose calls no parser of ours reads; ChatFormat
    serves all other models by their templates. Settings: task.renderer, task.template_args.

    Thoughts are the beginning of a completion's content, between <think> and </think> in every
    family; those of earlier turns keep their tokens. As with a template, only the model ends a
    turn.
    """

    def __init__(
        self, tokenizer: Tokenizer, setting: str, args: Mapping[str, Any] = NO_ARGS
    ) -> None:
        self._tokenizer = tokenizer
        self._args = args
        self._setting = f"task.renderer={setting!r}"
        self._name, self._renderer = self._make_renderer(setting)
        self._ends = frozenset(self._renderer.get_stop_token_ids())
        self._num_calls = itertools.count()
        self._plain_words = PlainWords(tokenizer)
        self._known_opening = lru_cache(maxsize=TEXTS_KEPT)(self._render_opening)

    def _make_renderer(self, name: str) -> tuple[str, Any]:
        # Takes two seconds, which only those who use it should wait for.
        from renderers import RendererConfig, create_renderer
        from renderers.base import MODEL_RENDERER_MAP

        union, _ = get_args(RendererConfig)
        kinds = {kind.model_fields["name"].default: kind for kind in get_args(union)}
        # The default one has no bridge, a custom one needs code of the user's.
        for unfit in (AUTO, "default", "custom"):
            del kinds[unfit]
        names = f"the names are {', '.join(sorted(kinds))}"
        model = getattr(self._tokenizer, "name_or_path", "")
        if name == AUTO:
            if model not in MODEL_RENDERER_MAP:
                raise ValueError(
                    f"{self._setting}: model.path={model!r} is no name on the hub that the library "
                    f"knows; set the renderer of the model's family ({names}), or null for a model "
                    "that is built from scratch"
                )
            name = MODEL_RENDERER_MAP[model]
        if name not in kinds:
            raise ValueError(f"{self._setting}: there is no such renderer; {names}")
        known = sorted({*kinds[name].model_fields} - {"name", "thinking_retention"})
        for one in self._args:
            if one not in known:
                raise ValueError(
                    f"task.template_args.{one}: the renderer {name} has no such argument; it has "
                    f"{', '.join(known) or 'none'}"
                )
        try:
            # Turns before the last question keep their thoughts, as they keep all tokens.
            config = kinds[name](thinking_retention="all", **self._args)
        except ValueError as error:
            raise ValueError(f"task.template_args={dict(self._args)!r}: {error}") from error
        try:
            return name, create_renderer(self._tokenizer, config)
        except Exception as error:  # an assertion on a token, or what a family's own library raises
            raise ValueError(
                f"{self._setting}: the renderer {name} does not fit the tokenizer of "
                f"model.path={model!r} ({error}); {names}"
            ) from error

    # Tokens of a conversation ---------------------------------------------------------------------

    def first_prompt(
        self, messages: Sequence[Message], tools: Sequence[ToolSpec] = ()
    ) -> list[int]:
        """See ChatFormat. Like the other methods, raises ValueError naming task.renderer."""
        text = json.dumps([self._messages(messages), self._tools(tools)])
        if len(text) > LONGEST_TEXT_KEPT:
            return list(self._render_opening(text))
        return list(self._known_opening(text))

    def _render_opening(self, text: str) -> tuple[int, ...]:
        messages, tools = json.loads(text)
        return tuple(self._render(messages, tools, opens_turn=True).token_ids)

    def next_prompt(
        self,
        prompt: Sequence[int],
        completion: Sequence[int],
        messages: Sequence[Message],
        tools: Sequence[ToolSpec] = (),
    ) -> list[int]:
        """See ChatFormat. Raises ValueError for a completion that nothing can be appended to, as
        one that the model ended inside its thoughts."""
        known = [*prompt, *completion]
        roles = ", ".join(message.role for message in messages)
        try:
            bridged = self._renderer.bridge_to_next_turn(
                list(prompt), list(completion), self._messages(messages), tools=self._tools(tools)
            )
        except Exception as error:
            raise ValueError(f"{self._setting}: the renderer refuses {roles}: {error}") from error
        if bridged is None or bridged.token_ids[: len(known)] != known:
            raise ValueError(
                f"{self._setting}: {roles} cannot follow a completion of {len(completion)} "
                "tokens that the renderer would have to change, as one that the model ended inside "
                "its thoughts; task.renderer=null uses the tokenizer's template, which appends to "
                "any"
            )
        return list(bridged.token_ids)

    def demonstration(self, message: Message, tools: Sequence[ToolSpec] = ()) -> list[int]:
        """See ChatFormat."""
        assert message.role == "assistant"
        shown = self._tools(tools)
        opening = self._render(self._messages([QUESTION]), shown, opens_turn=True).token_ids
        whole = self._until_end([QUESTION, message], shown)
        if whole[-1] not in self._ends:
            # Some families end a completion by opening the next turn.
            results = [
                Message(role="tool", content="", tool_call_id=call.call_id, name=call.name)
                for call in message.tool_calls
            ]
            nexts = results or [QUESTION]
            whole.append(self._until_end([QUESTION, message, *nexts], shown)[-1])
        pairs = enumerate(zip(opening, whole, strict=False))
        shared = next((at for at, (left, right) in pairs if left != right), len(opening))
        if shared == len(opening):
            return whole[shared:]
        # The prompt opens thoughts: as another token, or where the completion has none.
        begun, written = (self._tokenizer.decode(one[shared:]) for one in (opening, whole))
        if written.startswith(begun):
            written = written[len(begun) :]
        elif THINK in begun and END_OF_THINK not in written:
            written = END_OF_THINK + written
        return TextTokens(self._tokenizer).continuation(written)

    def _until_end(self, messages: Sequence[Message], tools: list[Any] | None) -> list[int]:
        """A conversation's tokens up to the last that the model writes of the second message."""
        rendered = self._render(self._messages(messages), tools)
        marks = zip(rendered.message_indices, rendered.sampled_mask, strict=True)
        end = max(at for at, mark in enumerate(marks, start=1) if mark == (1, True))
        return list(rendered.token_ids[:end])

    # Completions ----------------------------------------------------------------------------------

    def opens_thoughts(self, prompt: Sequence[int], grammar: str) -> bool:
        return False  # `parse` writes their mark itself

    def parse(
        self,
        output_ids: Sequence[int],
        finish_reason: str,
        prompt: Sequence[int] = (),
        tools: Sequence[ToolSpec] = (),
    ) -> Completion:
        """See ChatFormat. Without `tools` the types of arguments are guessed in some families, and
        without `prompt` thoughts that it opened are not seen. Call ids are the model's own, if it
        writes some."""
        text = self._tokenizer.decode(list(output_ids), skip_special_tokens=True)
        calls: list[ToolCall] = []
        bad_call = None
        try:
            parsed = self._renderer.parse_response(
                list(output_ids), tools=self._tools(tools), prompt_ids=list(prompt)
            )
            content, attempts = _with_thoughts(parsed), parsed.tool_calls
        except Exception as error:  # its text can be anything
            content, attempts = text, []
            bad_call = f"the answer can't be parsed ({error}): {text[:SHOWN]!r}"
        for attempt in attempts:
            try:
                calls.append(self._call(attempt))
            except BadCall as error:
                bad_call = bad_call or str(error)
        has_calls = bool(calls) or bad_call is not None
        return Completion(
            text=text if has_calls else content,
            content=content,
            tool_calls=tuple(calls),
            bad_call=bad_call,
            finish_reason=finish_reason,
            num_tokens=len(output_ids),
        )

    def _call(self, attempt: Any) -> ToolCall:
        """Raises BadCall. Whether there is such a tool is for the environment to say."""
        if attempt.status not in ("ok", "unknown_tool"):
            raise BadCall(f"{attempt.status.replace('_', ' ')}: {attempt.raw[:SHOWN]!r}")
        name, arguments = as_call({"name": attempt.name, "arguments": attempt.arguments})
        own_id = attempt.id or call_id(next(self._num_calls))
        return ToolCall(call_id=own_id, name=name, arguments=arguments)

    # Messages for the library ---------------------------------------------------------------------

    def _render(
        self, messages: list[dict[str, Any]], tools: list[Any] | None, *, opens_turn: bool = False
    ) -> Any:
        try:
            return self._renderer.render(messages, tools=tools, add_generation_prompt=opens_turn)
        except Exception as error:
            roles = ", ".join(one["role"] for one in messages)
            raise ValueError(
                f"{self._setting}: the renderer refuses a conversation of {roles}: {error}"
            ) from error

    def _messages(self, messages: Sequence[Message]) -> list[dict[str, Any]]:
        if any(message.pictures for message in messages):
            raise ValueError(
                f"{self._setting}: renderers write no pictures, and a message has one; set it to "
                "null, so that the model's own template writes them"
            )
        written = [self._message(message) for message in messages]
        if self._name.startswith("kimi"):
            _name_calls(written)
        return written

    def _message(self, message: Message) -> dict[str, Any]:
        written = as_template_message(message)
        if message.role != "assistant":
            return {key: self._plain_words.within(value) for key, value in written.items()}
        thoughts, said = divide(message.content)
        if said != message.content:
            written |= {"content": said, "reasoning_content": thoughts}
        return written

    def _tools(self, tools: Sequence[ToolSpec]) -> list[Any] | None:
        return [self._plain_words.within(as_template_tool(tool)) for tool in tools] or None


def _with_thoughts(parsed: Any) -> str:
    """The library's parsed completion as one text."""
    content: str = parsed.content.strip()
    thoughts = (parsed.reasoning_content or "").strip()
    if parsed.reasoning_complete is False:
        return f"{THINK}\n{thoughts}"
    return join_thoughts(thoughts, content).rstrip()


def _name_calls(messages: Sequence[dict[str, Any]]) -> None:
    """Replaces ids that are not Kimi's, functions.NAME:NUMBER, in which alone it writes a name."""
    num_results = 0
    for message in messages:
        for number, call in enumerate(message.get("tool_calls", [])):
            call["id"] = _kimi_id(call["id"], call["function"]["name"], number)
        if message["role"] == "tool":
            name = message.get("name", "tool")
            message["tool_call_id"] = _kimi_id(message.get("tool_call_id", ""), name, num_results)
            num_results += 1
        else:
            num_results = 0


def _kimi_id(call_id: str, name: str, number: int) -> str:
    return call_id if call_id.startswith("functions.") else f"functions.{name}:{number}"
