"""Remembers the tokens of a session's conversations, so that later requests extend them exactly.

    request 1   [system, user]                          rendered whole            ─► answer a
    request 2   [system, user, a, tool]                 tokens of 1 and a, + tool ─► answer b
    request 3   [system, user, a, tool, b, user]        tokens of 2 and b, + user ─► answer c
    request 4   [system, summary]                       rendered whole: a branch  ─► answer d

Clients send text. Tokenizing the model's text again need not give the tokens that it sampled, and
then the log-probabilities would not match. So messages that a session has already answered keep
their original tokens, and only new text is tokenized.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence

from rollout_pool.episodes.chat import ChatFormat
from rollout_pool.episodes.env import Message, ToolSpec


class Conversations:
    """The conversations of one session, each ending with an answer of the model."""

    def __init__(self, chat: ChatFormat) -> None:
        self._chat = chat
        self._tokens: dict[bytes, list[int]] = {}
        """Digest of messages up to an answer -> all tokens up to its end."""

    def render(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> list[int]:
        """The prompt's tokens. They extend those of the longest known conversation that `messages`
        continue; without one, or if the new messages include an assistant's, all are rendered."""
        for place, digest in reversed(list(enumerate(_digests(messages, tools), start=1))):
            known, new = self._tokens.get(digest), messages[place:]
            if known is not None and new and all(m.role != "assistant" for m in new):
                return self._chat.follow(known, new)
        return self._chat.first(messages, tools)

    def note(
        self,
        messages: Sequence[Message],
        tools: Sequence[ToolSpec],
        answer: Message,
        tokens: list[int],
    ) -> None:
        """`answer` followed `messages`; `tokens` are those of both."""
        *_, digest = _digests((*messages, answer), tools)
        self._tokens[digest] = tokens


class Texts:
    """The same for plain text: each prompt with its answer, and the tokens of both."""

    def __init__(self) -> None:
        self._tokens: dict[str, list[int]] = {}

    def known_start(self, text: str) -> tuple[str, list[int]]:
        """The longest known prefix of `text`, and its tokens."""
        start = max(
            # A copy: this may run in a thread while another answer is noted.
            (known for known in list(self._tokens) if text.startswith(known)),
            key=len,
            default="",
        )
        return start, self._tokens.get(start, [])

    def note(self, text: str, tokens: list[int]) -> None:
        self._tokens[text] = tokens


def _digests(messages: Sequence[Message], tools: Sequence[ToolSpec]) -> Iterator[bytes]:
    """After each message, the digest of everything so far."""
    known = [[tool.name, tool.description, dict(tool.parameters)] for tool in tools]
    digest = hashlib.blake2b(json.dumps(known, sort_keys=True).encode(), digest_size=16)
    for message in messages:
        digest.update(json.dumps(_normal_form(message), sort_keys=True).encode())
        yield digest.digest()


def _normal_form(message: Message) -> list[object]:
    """Equal for messages that say the same.

    Leaves out call ids, which some frameworks replace, and white space around and in the model's
    own words, which frameworks strip.
    """
    is_own = message.role == "assistant"
    content = "".join(message.content.split()) if is_own else message.content
    calls = [[call.name, dict(call.arguments)] for call in message.tool_calls]
    return [message.role, content, calls]
