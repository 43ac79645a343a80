"""Sessions: each is one episode, in which an agent or an external program calls the model.

open ──► requests, one after the other or several at once ──► closed (why)
          each completion that was delivered is a turn              no request is served any more
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import itertools
import json
import logging
import secrets
import time
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from buffer.types import SamplingParams
from configs.choices import Thoughts
from configs.rollout_schema import RolloutConfig, TaskConfig
from rollout_pool.cancelling import end_tasks
from rollout_pool.endpoint.errors import ApiError
from rollout_pool.endpoint.pending_completion import RETRY_GRACE_S, PendingCompletion
from rollout_pool.episodes.conversation import Chat, Message, ToolSpec
from rollout_pool.episodes.episode import (
    HEEDS_INTERRUPT_S,
    MAX_REWARD,
    Branch,
    Episode,
    EpisodeClock,
    EpisodeFailed,
    EpisodeRequest,
    add_turn,
)
from rollout_pool.episodes.thoughts import divide, without_thoughts
from rollout_pool.episodes.tokenizer import Tokenizer
from rollout_pool.sampling.grammars import ConstraintFailed, Grammars
from rollout_pool.sampling.sample import Completer, Constraint, Sample, SampleFailed

log = logging.getLogger(__name__)

RETRY_WINDOW_S = 120.0
"""How long a finished completion is kept for a retry."""
KEEP_ALIVE_S = 15.0
"""Longest silence of a stream: proxies close idle connections."""
MODEL_NAME = "policy"
"""In requests and responses, whatever the model's folder is called."""
CHARACTERS_PER_TOKEN = 16
"""No tokenizer averages as many over a whole text, however long its longest tokens are."""
NUM_REMEMBERED = 10_000
"""Closed sessions that are remembered, so that late requests get the reason."""
MAX_READ_AT_ONCE = 4
"""Bodies of one session that may be on their way at a time. Further ones wait, unread: who sends
them slowly must not take the room of the other sessions."""
RETRY_AFTER_S = 1
"""When a session with too many requests in progress may ask again."""


class SessionLost(EpisodeFailed):
    """An episode that cannot be scored: it has no completion, or its program disconnected."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Outcome:
    """The reward of an episode, from the program that ran it."""

    reward: float | None
    parts: Mapping[str, float] = field(default_factory=dict)
    rewards: Mapping[str, float | None] = field(default_factory=dict)
    """See Step, also for the advantages."""
    advantages: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        of_roles = (*self.rewards.items(), *self.advantages.items())
        for name, value in (("reward", self.reward), *self.parts.items(), *of_roles):
            if value is not None and not abs(value) < MAX_REWARD:
                raise ValueError(f"{name}={value}: a reward must be a finite number, below 1e30")


@dataclass(kw_only=True, slots=True, frozen=True)
class Serving:
    """The parts and settings that all sessions of an endpoint share."""

    completer: Completer
    chat: Chat
    tokenizer: Tokenizer
    task: TaskConfig
    rollout: RolloutConfig
    grammars: Grammars
    model: str = MODEL_NAME
    grace_s: float = RETRY_GRACE_S
    """How long a completion whose client disconnected waits for a retry."""
    keep_alive_s: float = KEEP_ALIVE_S
    count: Callable[[str], None] = lambda name: None
    """Counts a request that a limit refused."""
    group_state: Callable[[str], Awaitable[str | None]] | None = None
    """See ReplayBuffer.group_state."""
    vocab_size: int | None = None
    """Tokens that the model has embeddings for; None: as many as its tokenizer has."""

    @property
    def num_embeddings(self) -> int:
        return len(self.tokenizer) if self.vocab_size is None else self.vocab_size

    @property
    def max_tokens(self) -> int:
        """Limit of a conversation: prompts and completions together."""
        return self.rollout.longest_trajectory


class Session:
    """One episode in progress. Used in the endpoint's event loop only."""

    def __init__(self, key: str, request: EpisodeRequest, serving: Serving) -> None:
        self.session_id = request.session
        self.key = key
        self.request = request
        self.serving = serving
        self.conversations = Conversations(serving.chat, serving.task.thoughts)
        self.texts = Texts()
        self.responses: dict[str, tuple[Message, ...]] = {}
        """Conversations that the Responses API may continue, by the id of their last answer."""
        self.messages: tuple[Message, ...] = ()
        """The conversation that the model completed last."""
        self.clock = EpisodeClock(serving.task.episode_timeout_s)
        """Paused while any of its samples waits for a slot or may not go on."""
        self.num_turns = 0
        self.is_full = False
        """A request was too long for the remaining context, or the session reached a limit."""
        self.failure: SampleFailed | TimeoutError | None = None
        """Why sampling failed; the engines' fault, not the agent's."""
        self.outcome: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        """Set when the reward is posted."""
        self.reading = asyncio.Semaphore(MAX_READ_AT_ONCE)
        """Held while a request's body is read."""
        self.over_because: str | None = None
        """Set when it is closed."""
        self._branches: list[Branch] = []
        self._completions: list[PendingCompletion] = []
        self._refused: deque[bytes] = deque(maxlen=NUM_REMEMBERED)
        """Fingerprints of requests that max_requests refused and that have not been retried."""
        self._num_begun = 0
        self._num_old_tokens = 0
        """Tokens of completions that are too old for a retry."""
        self._num_active = 0
        self._last_active = time.monotonic()

    def address(self, url: str) -> dict[str, str]:
        """How a client reaches the model through the endpoint at `url`."""
        return {
            "api_key": self.key,
            "base_url": f"{url}/v1",
            "keyed_url": f"{url}/sessions/{self.key}/v1",
            "anthropic_url": url,
            "model": self.serving.model,
        }

    # Requests -------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def activity(self) -> Iterator[None]:
        """Marks the session as active while a request is served."""
        self._num_active += 1
        self.request.samples.activity.note(requests=1)
        try:
            yield
        finally:
            self._num_active -= 1
            self.request.samples.activity.note(requests=-1)
            self._last_active = time.monotonic()

    async def wait_idle(self, timeout_s: float) -> None:
        """Returns once there was no request for `timeout_s`."""
        while True:
            since = time.monotonic() if self._num_active else self._last_active
            left_s = since + timeout_s - time.monotonic()
            if left_s <= 0:
                return
            await asyncio.sleep(left_s)

    async def wait_end(self, *ends: asyncio.Future[Any]) -> bool:
        """Returns once one of `ends` is done, there was no request for
        rollout.openai.session_timeout_s, or the episode timed out; True in the last case."""
        late: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        idle = asyncio.create_task(self.wait_idle(self.serving.rollout.openai.session_timeout_s))
        try:
            with self.clock.alarm(lambda: late.set_result(None)):
                await asyncio.wait([*ends, idle, late], return_when=asyncio.FIRST_COMPLETED)
        finally:
            await end_tasks([idle])
        return late.done()

    def check_requests(self, fingerprint: Callable[[], bytes]) -> None:
        """Raises ApiError if as many requests are in progress as may be."""
        most = self.serving.rollout.openai.max_requests
        if self._num_active < most:
            return
        self._refused.append(fingerprint())
        self.serving.count("requests_refused:in_progress")
        raise ApiError(
            429,
            f"session {self.session_id} has {self._num_active} requests in progress "
            f"(rollout.openai.max_requests={most})",
            code="rate_limit_exceeded",
            should_retry=True,
            retry_after_s=RETRY_AFTER_S,
        )

    def was_refused(self, fingerprint: bytes) -> bool:
        """Returns whether the first attempt of this retry got 429. It then has none to join: a
        completion with the same fingerprint belongs to another request."""
        with contextlib.suppress(ValueError):
            self._refused.remove(fingerprint)
            return True
        return False

    def _check_spent(self, num_more: int) -> None:
        """Raises ApiError if the session may not have `num_more` completions, or has had all its
        tokens."""
        limits = self.serving.rollout.openai
        num_tokens = self._num_old_tokens + sum(len(a.sample.output_ids) for a in self._completions)
        for what, spent, more, most, setting in (
            ("answers", self._num_begun, num_more, limits.max_answers, "max_answers"),
            ("tokens", num_tokens, 1, limits.max_session_tokens, "max_session_tokens"),
        ):
            if spent + more <= most:
                continue
            self.is_full |= spent >= most
            self.serving.count(f"requests_refused:{what}")
            raise ApiError(
                400,
                f"session {self.session_id} has had {spent} {what} of the model, and may have "
                f"{most} (rollout.openai.{setting}); end it with its reward",
                code="session_limit_reached",
                should_retry=False,
            )

    def again(self, fingerprint: bytes) -> PendingCompletion | None:
        """The completion that a retry of this request wants, of several the one most likely missed;
        None if there is none."""
        now = time.monotonic()
        known, self._completions = self._completions, []
        # All completions of one request stay as long as any of them.
        wanted = {
            completion.fingerprint[:-1]
            for completion in known
            if completion.ended_at is None
            or now - completion.ended_at < RETRY_WINDOW_S
            or completion.num_readers
        }
        for completion in known:
            if completion.fingerprint[:-1] in wanted:
                self._completions.append(completion)
            else:
                self._num_old_tokens += len(completion.sample.output_ids)
                self._give_up(completion)
        same = [
            completion
            for completion in self._completions
            if completion.fingerprint == fingerprint and not completion.has_failed
        ]
        return min(same, key=lambda one: (one.is_delivered, one.num_readers), default=None)

    def begin(
        self,
        prompt: list[int],
        max_tokens: int | None,
        fingerprints: Sequence[bytes],
        *,
        sampling: SamplingParams,
        stop: Sequence[str],
        constraint: Constraint | None,
        role: str = "",
    ) -> list[PendingCompletion]:
        """Starts completions of at most `max_tokens`, each to the first text of `stop`; all or
        none. `fingerprints`: that of their request, each with its index as the last byte.

        Raises ApiError if the prompt is too long, or the session has had what it may.
        """
        if self.clock.is_over:
            why = f"session {self.session_id} is over: its time is up"
            raise ApiError(410, why, code="session_over", should_retry=False)
        self._check_spent(len(fingerprints))
        room = self.serving.max_tokens - len(prompt)
        if room < 1:
            self.is_full = True
            raise self._no_room("messages", f"{len(prompt)}, so there is no room for a completion")
        limits = (room, max_tokens, self.serving.task.max_turn_tokens)
        max_new_tokens = min(limit for limit in limits if limit is not None)
        begun = []
        for fingerprint in fingerprints:
            sample = self.request.new_sample(
                self._num_begun,
                prompt,
                max_new_tokens,
                sampling=sampling,
                stop=stop,
                constraint=constraint,
                branches=self._branches,
                role=role,
            )
            self._num_begun += 1
            begun.append(
                PendingCompletion(
                    sample, self._complete, fingerprint=fingerprint, grace_s=self.serving.grace_s
                )
            )
        self._completions += begun
        return begun

    def check_size(
        self, param: str, num_characters: int, num_parts: int = 0, *, is_asked: bool = True
    ) -> None:
        """Raises ApiError for a conversation that is too long however it is tokenized. Each of its
        parts (messages, calls, tools) takes at least a token. `is_asked`: not only counted."""
        most, words = self.serving.max_tokens, ""
        if num_parts > most:
            words = f"{num_parts} messages, tool calls and tools"
        elif num_characters > CHARACTERS_PER_TOKEN * most:
            words = f"{num_characters} characters, more than {CHARACTERS_PER_TOKEN} per token"
        if words:
            self.is_full |= is_asked
            raise self._no_room(param, words)

    def _no_room(self, param: str, words: str) -> ApiError:
        return ApiError(
            400,
            f"This model's maximum context length is {self.serving.max_tokens} tokens "
            "(rollout.max_prompt_tokens + rollout.max_response_tokens). The conversation has "
            + words,
            param=param,
            code="context_length_exceeded",
        )

    def deliver(self, completion: PendingCompletion, messages: tuple[Message, ...]) -> bool:
        """Makes `completion` a turn, since a client receives it; `messages` end with it.

        One without a token, cut at the episode's timeout, is none. False if it was delivered
        already."""
        if completion.is_delivered:
            return False
        completion.delivered.set()
        self.request.samples.end(completion.sample)
        if completion.sample.output_ids:
            add_turn(self._branches, completion.sample)
            self.messages = messages
            self.num_turns += 1
        return True

    async def _complete(self, sample: Sample) -> None:
        try:
            has_ended = await self.request.complete(sample, self.serving.completer, self.clock)
        except ConstraintFailed:
            raise  # the agent asked for what can't be
        except (SampleFailed, TimeoutError) as error:
            self.failure = error
            raise
        if not has_ended:
            sample.finish_reason = "length"

    # The end --------------------------------------------------------------------------------------

    def episode(self, *, end: str, outcome: Outcome | None, error: str | None = None) -> Episode:
        """The completions delivered so far. Raises SessionLost if there are none."""
        if self.num_turns == 0:
            why = f": {error}" if error else ""
            raise SessionLost(f"session {self.session_id} got no token of the model{why}")
        return Episode(
            branches=self._branches,
            messages=self.messages,
            end=end,
            num_turns=self.num_turns,
            env_reward=None if outcome is None else outcome.reward,
            env_parts={} if outcome is None else outcome.parts,
            rewards={} if outcome is None else outcome.rewards,
            advantages={} if outcome is None else outcome.advantages,
            error=error,
        )

    async def cut_short(self) -> None:
        """Ends the session at its time limit: completions that a client waits for are cut and
        delivered, new requests are refused."""
        self.clock.is_over = True
        awaited = [
            completion
            for completion in self._completions
            if completion.is_running and completion.num_readers
        ]
        for completion in awaited:
            self.serving.completer.interrupt(completion.sample)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(HEEDS_INTERRUPT_S):
                for completion in awaited:
                    await completion.wait()
                    if not completion.has_failed:
                        await completion.delivered.wait()

    async def stop_completions(self) -> None:
        await end_tasks(completion.task for completion in self._completions)
        for completion in self._completions:
            self._give_up(completion)

    def _give_up(self, completion: PendingCompletion) -> None:
        """No client will receive it, unless one has."""
        if completion.is_delivered:
            return
        if not completion.has_failed:
            completion.drop()
        self.request.samples.end(completion.sample)


@dataclass(kw_only=True, slots=True, frozen=True)
class Closed:
    """The part of a closed session that is remembered."""

    session_id: str
    why: str
    outcome: Outcome | None


class SessionOver(ApiError):
    """The session of the request is closed."""

    def __init__(self, closed: Closed) -> None:
        message = f"session {closed.session_id} is over: {closed.why}"
        super().__init__(410, message, code="session_over", should_retry=False)
        self.closed = closed


class Sessions:
    """The sessions of one endpoint, by their keys."""

    def __init__(self, serving: Serving) -> None:
        self.serving = serving
        self._open: dict[bytes, Session] = {}
        self._closed: OrderedDict[bytes, Closed] = OrderedDict()

    def __len__(self) -> int:
        return len(self._open)

    def open(self, request: EpisodeRequest) -> Session:
        key = f"sk-leash-{secrets.token_urlsafe(24)}"
        request = replace(request, session=f"{request.session}-{secrets.token_hex(3)}")
        session = self._open[_digest(key)] = Session(key, request, self.serving)
        request.samples.activity.note(sessions=1)
        return session

    def find(self, key: str) -> Session:
        """The session with this key, of any role. Raises ApiError, 401 or 410."""
        digest = _digest(key.partition(".")[0])
        if (session := self._open.get(digest)) is not None:
            return session
        if (closed := self._closed.get(digest)) is not None:
            raise SessionOver(closed)
        raise ApiError(401, "there is no session with this key", code="invalid_api_key")

    def find_by_id(self, session_id: str) -> Session:
        """Raises ApiError, 404 or 410."""
        for session in self._open.values():
            if session.session_id == session_id:
                return session
        for closed in self._closed.values():
            if closed.session_id == session_id:
                raise SessionOver(closed)
        raise ApiError(404, f"there is no session {session_id!r}", code="no_such_session")

    async def close(self, session: Session, why: str) -> None:
        """Serves no further request; those in progress are refused with `why`."""
        digest = _digest(session.key)
        if self._open.pop(digest, None) is None:
            return
        session.over_because = why
        session.request.samples.activity.note(sessions=-1)
        outcome = session.outcome.result() if session.outcome.done() else None
        self._closed[digest] = Closed(session_id=session.session_id, why=why, outcome=outcome)
        while len(self._closed) > NUM_REMEMBERED:
            self._closed.popitem(last=False)
        await session.stop_completions()

    async def close_all(self, why: str) -> None:
        await asyncio.gather(*(self.close(one, why) for one in list(self._open.values())))


def _digest(key: str) -> bytes:
    """Keys are looked up by digest, so that the lookup time reveals nothing about them."""
    return hashlib.sha256(key.encode()).digest()


class Conversations:
    """The conversations of one session, each ending with a completion of the model.

        request 1   [system, user]                   rendered whole             -> completion a
        request 2   [system, user, a, tool]          tokens of 1 and a, + tool  -> completion b
        request 3   [system, user, a, tool, b, user] tokens of 2 and b, + user  -> completion c
        request 4   [system, summary]                rendered whole: a branch   -> completion d

    Clients send text. Tokenizing the model's text again need not give the tokens that it sampled,
    and then the log-probabilities would not match. So messages that a session has already completed
    keep their original tokens, and only new text is tokenized. Messages that a client sends back
    without their thoughts are the same messages; whether the model still reads these thoughts is
    for task.thoughts to say.
    """

    def __init__(self, chat: Chat, thoughts: Thoughts) -> None:
        self._chat = chat
        self._thoughts = thoughts
        self._tokens: dict[bytes, tuple[list[int], list[int]]] = {}
        """Digest of messages up to a completion -> the tokens before it, and its own."""
        self._said: dict[bytes, str] = {}
        """The same digest -> the text that was sampled."""
        self._with_thoughts: dict[bytes, bytes] = {}
        """Digest of messages whose last one lacks its thoughts -> the digest with them."""

    def render(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> list[int]:
        """The prompt's tokens. They extend those of the longest known conversation that `messages`
        continue; without one, or if the new messages include an assistant's, all are rendered. So
        they are for a question behind thoughts that task.thoughts=stripped leaves out."""
        strips = self._thoughts is Thoughts.stripped
        for place, (digest, has_thoughts) in reversed(
            list(enumerate(self._links(messages, tools)))
        ):
            known, new = self._tokens.get(digest), messages[place:]
            roles = {message.role for message in new}
            if known is None or not new or "assistant" in roles:
                continue
            if not (strips and has_thoughts and "user" in roles):
                return self._chat.next_prompt(*known, new, tools)
        return self._chat.first_prompt(without_thoughts(messages) if strips else messages, tools)

    def note(
        self,
        messages: Sequence[Message],
        tools: Sequence[ToolSpec],
        prompt: list[int],
        completion: list[int],
        said: str,
    ) -> None:
        """`completion` has the tokens of the last of `messages`, whose text was sampled as `said`;
        `prompt` those before it."""
        *_, (before, _) = self._links(messages[:-1], tools)
        bare, digest = _next_digests(before, messages[-1])
        self._tokens[digest] = prompt, completion
        self._with_thoughts[bare], self._said[digest] = digest, said

    def as_said(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> Iterator[Message]:
        """`messages` with the model's own words as they were sampled, also if a client leaves
        thoughts out: so rewards get them."""
        links = itertools.islice(self._links(messages, tools), 1, None)
        for message, (digest, _) in zip(messages, links, strict=True):
            yield replace(message, content=self._said.get(digest, message.content))

    def _links(
        self, messages: Sequence[Message], tools: Sequence[ToolSpec]
    ) -> Iterator[tuple[bytes, bool]]:
        """Before the messages and after each: the digest of everything so far, and whether the
        model had thoughts since the last question."""
        known = [[tool.name, tool.description, dict(tool.parameters)] for tool in tools]
        digest, has_thoughts = _digest_of(b"", known), False
        yield digest, has_thoughts
        for message in messages:
            bare, sent = _next_digests(digest, message)
            digest = sent if sent in self._tokens else self._with_thoughts.get(sent, sent)
            has_thoughts = message.role != "user" and (has_thoughts or digest != bare)
            yield digest, has_thoughts


class Texts:
    """The same for plain text: each prompt with its completion, and the tokens of both."""

    def __init__(self) -> None:
        self._tokens: dict[str, list[int]] = {}

    def known_start(self, text: str) -> tuple[str, list[int]]:
        """The longest known prefix of `text`, and its tokens."""
        start = max(
            # A copy: this may run in a thread while another completion is noted.
            (known for known in list(self._tokens) if text.startswith(known)),
            key=len,
            default="",
        )
        return start, self._tokens.get(start, [])

    def note(self, text: str, tokens: list[int]) -> None:
        self._tokens[text] = tokens


def _next_digests(before: bytes, message: Message) -> tuple[bytes, bytes]:
    """Without the message's thoughts and with them. Equal for conversations that say the same.

    Leaves out call ids, which some frameworks replace, and white space around and in the model's
    own words, which frameworks strip. Numbers are those of JavaScript, where 1.0 is 1.
    """
    thoughts, content = "", message.content
    if message.role == "assistant":
        thoughts, content = ("".join(one.split()) for one in divide(content))
    said = json.dumps([[call.name, dict(call.arguments)] for call in message.tool_calls])
    calls = json.loads(said, parse_int=_number, parse_float=_number)
    bare = _digest_of(before, [message.role, content, calls])
    return bare, _digest_of(bare, thoughts) if thoughts else bare


def _number(text: str) -> float:
    number = float(text)
    return int(number) if number.is_integer() and abs(number) <= 2**53 else number


def _digest_of(before: bytes, value: object) -> bytes:
    text = json.dumps(value, sort_keys=True).encode()
    return hashlib.blake2b(before + text, digest_size=16).digest()
