"""Sessions: each is one episode, in which an agent or a program elsewhere talks to the model.

open ──► requests, one after the other or several at once ──► closed (why)
          each answer that was delivered is a turn              no request is served any more
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import math
import secrets
import time
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from configs.rollout_schema import RolloutConfig, TaskConfig
from rollout_pool.cancelling import end_tasks
from rollout_pool.endpoint.answers import RETRY_GRACE_S, Answer
from rollout_pool.endpoint.errors import ApiError
from rollout_pool.endpoint.history import Conversations, Texts
from rollout_pool.episodes.chat import ChatFormat
from rollout_pool.episodes.env import Message
from rollout_pool.episodes.episode import Branches, Episode
from rollout_pool.episodes.request import (
    HEEDS_INTERRUPT_S,
    EpisodeClock,
    EpisodeFailed,
    EpisodeRequest,
)
from rollout_pool.episodes.tokenizer import Tokenizer
from rollout_pool.sampling.sample import Completer, Interrupted, Sample, SampleFailed

log = logging.getLogger(__name__)

RETRY_WINDOW_S = 120.0
"""As long an answer that has ended is kept for a client that asks for it again."""
KEEP_ALIVE_S = 15.0
"""A stream without tokens says so at least this often, lest something on the way ends it."""
MODEL_NAME = "policy"
"""In requests and answers, whatever the model's folder is called."""
NUM_REMEMBERED = 10_000
"""Closed sessions that are remembered: a request with their key learns what happened."""


class SessionLost(EpisodeFailed):
    """An episode that cannot be scored: it has no answer, or its program is gone."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Outcome:
    """The reward of an episode, from the program that played it."""

    reward: float
    parts: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, value in (("reward", self.reward), *self.parts.items()):
            if not math.isfinite(value):
                raise ValueError(f"{name}={value}: a reward must be a finite number")


@dataclass(kw_only=True, slots=True, frozen=True)
class Serving:
    """The parts and settings that all sessions of an endpoint share."""

    completer: Completer
    chat: ChatFormat
    tokenizer: Tokenizer
    task: TaskConfig
    rollout: RolloutConfig
    model: str = MODEL_NAME
    grace_s: float = RETRY_GRACE_S
    """As long an answer whose client went away waits for it to come back."""
    keep_alive_s: float = KEEP_ALIVE_S

    @property
    def max_tokens(self) -> int:
        """Limit of a conversation, prompts and answers together."""
        return self.rollout.max_prompt_tokens + self.rollout.max_response_tokens


class Session:
    """One episode under way. All of it happens in the endpoint's event loop."""

    def __init__(self, key: str, request: EpisodeRequest, serving: Serving) -> None:
        self.session_id = request.session
        self.key = key
        self.request = request
        self.serving = serving
        self.conversations = Conversations(serving.chat)
        self.texts = Texts()
        self.messages: tuple[Message, ...] = ()
        """The conversation that was answered last."""
        self.clock = EpisodeClock(serving.task.episode_timeout_s)
        """Stands still while any of its samples waits for a place or may not go on."""
        self.num_turns = 0
        self.is_full = False
        """Whether a request found no room."""
        self.failure: SampleFailed | TimeoutError | None = None
        """Why an answer could not be had; the engines' fault, not the agent's."""
        self.outcome: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        """Set when the reward is posted."""
        self.over_because: str | None = None
        """Set when it is closed."""
        self._branches = Branches()
        self._answers: list[Answer] = []
        self._is_cut = False
        """Whether its time is over."""
        self._num_begun = 0
        self._num_active = 0
        self._last_active = time.monotonic()

    # Requests -------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def activity(self) -> Iterator[None]:
        """While a request is served: the session is not idle."""
        self._num_active += 1
        try:
            yield
        finally:
            self._num_active -= 1
            self._last_active = time.monotonic()

    async def wait_idle(self, timeout_s: float) -> None:
        """Returns once nothing has been asked for `timeout_s`."""
        while True:
            since = time.monotonic() if self._num_active else self._last_active
            left_s = since + timeout_s - time.monotonic()
            if left_s <= 0:
                return
            await asyncio.sleep(left_s)

    async def wait_end(self, *ends: asyncio.Future[Any]) -> bool:
        """Returns once one of `ends` is done, or nothing has been asked for
        rollout.openai.session_timeout_s, or the episode's time is over; whether it was the last."""
        is_late = asyncio.Event()
        late = asyncio.create_task(is_late.wait())
        idle = asyncio.create_task(self.wait_idle(self.serving.rollout.openai.session_timeout_s))
        try:
            with self.clock.alarm(is_late.set):
                await asyncio.wait([*ends, idle, late], return_when=asyncio.FIRST_COMPLETED)
        finally:
            await end_tasks([idle, late])
        return is_late.is_set()

    def again(self, fingerprint: bytes) -> Answer | None:
        """The answer to the same request that came before; of several the one that is most likely
        missed. None if there is none that is of use."""
        now = time.monotonic()
        known, self._answers = self._answers, []
        for answer in known:
            if answer.ended_at is None or now - answer.ended_at < RETRY_WINDOW_S:
                self._answers.append(answer)
            elif answer.has_failed:
                self.request.on_end(answer.sample)
        same = [
            answer
            for answer in self._answers
            if answer.fingerprint == fingerprint and not answer.has_failed
        ]
        return min(same, key=lambda one: (one.is_delivered, one.num_readers), default=None)

    def begin(self, prompt: list[int], max_tokens: int | None, fingerprint: bytes) -> Answer:
        """Let the model answer with at most `max_tokens`. Raises ApiError if there is no room."""
        if self._is_cut:
            why = f"session {self.session_id} is over: its time is up"
            raise ApiError(410, why, code="session_over", should_retry=False)
        room = self.serving.max_tokens - len(prompt)
        if room < 1:
            self.is_full = True
            raise ApiError(
                400,
                f"This model's maximum context length is {self.serving.max_tokens} tokens "
                "(rollout.max_prompt_tokens + rollout.max_response_tokens). The conversation has "
                f"{len(prompt)}, so there is no room for an answer",
                param="messages",
                code="context_length_exceeded",
            )
        limits = (room, max_tokens, self.serving.task.max_turn_tokens)
        max_new_tokens = min(limit for limit in limits if limit is not None)
        sample = self.request.new_sample(self._num_begun, prompt, max_new_tokens, self.clock)
        self._num_begun += 1
        answer = Answer(
            sample, self._complete, fingerprint=fingerprint, grace_s=self.serving.grace_s
        )
        self._answers.append(answer)
        return answer

    def deliver(self, answer: Answer, messages: tuple[Message, ...]) -> bool:
        """The client gets `answer`, so it is a turn; `messages` are the conversation that it ends.
        False if it was one already."""
        if answer.is_delivered:
            return False
        sample = answer.sample
        assert sample.finish_reason is not None, sample.sample_id
        answer.delivered.set()
        self._branches.add_turn(
            sample.prompt,
            sample.output_ids,
            sample.logprobs,
            sample.version_spans,
            sample.finish_reason,
        )
        self.request.on_end(sample)
        self.messages = messages
        self.num_turns += 1
        return True

    async def _complete(self, sample: Sample) -> None:
        try:
            has_ended = await self.request.complete(
                sample, self.serving.completer, self.clock, is_over=lambda: self._is_cut
            )
        except (SampleFailed, TimeoutError) as error:
            self.failure = error
            raise
        if has_ended:
            return
        if not sample.output_ids:
            raise Interrupted(sample.sample_id)
        sample.finish_reason = "length"

    # The end --------------------------------------------------------------------------------------

    def episode(self, *, end: str, outcome: Outcome | None, error: str | None = None) -> Episode:
        """The answers delivered so far. Raises SessionLost if there are none."""
        if self.num_turns == 0:
            why = f": {error}" if error else ""
            raise SessionLost(f"session {self.session_id} never asked the model anything{why}")
        return Episode(
            branches=self._branches.finish(),
            messages=self.messages,
            end=end,
            num_turns=self.num_turns,
            env_reward=None if outcome is None else outcome.reward,
            env_parts={} if outcome is None else outcome.parts,
            error=error,
        )

    async def cut_short(self) -> None:
        """The session's time is over. Answers that a client waits for end where they are and
        are delivered; there are no new ones."""
        self._is_cut = True
        awaited = [answer for answer in self._answers if answer.is_running and answer.num_readers]
        for answer in awaited:
            self.serving.completer.interrupt(answer.sample)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(HEEDS_INTERRUPT_S):
                for answer in awaited:
                    await answer.wait()
                    if not answer.has_failed:
                        await answer.delivered.wait()

    async def stop_answers(self) -> None:
        """Ends the answers that are still being written."""
        await end_tasks(answer.task for answer in self._answers)
        for answer in self._answers:
            if answer.is_delivered:
                continue
            if not answer.has_failed:
                answer.drop()
            self.request.on_end(answer.sample)


@dataclass(kw_only=True, slots=True, frozen=True)
class Closed:
    """A session that is over, as far as it is remembered."""

    session_id: str
    why: str
    outcome: Outcome | None


class SessionOver(ApiError):
    """A request came too late."""

    def __init__(self, closed: Closed) -> None:
        message = f"session {closed.session_id} is over: {closed.why}"
        super().__init__(410, message, code="session_over", should_retry=False)
        self.session_id = closed.session_id
        self.outcome = closed.outcome


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
        session_id = f"{request.session}-{secrets.token_hex(3)}"
        request = replace(request, session=session_id)
        session = self._open[_digest(key)] = Session(key, request, self.serving)
        return session

    def find(self, key: str) -> Session:
        """The session that `key` opens. Raises ApiError, 401 or 410."""
        digest = _digest(key)
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
        """No request is served any more; those under way are answered with `why`."""
        digest = _digest(session.key)
        if self._open.pop(digest, None) is None:
            return
        session.over_because = why
        outcome = session.outcome.result() if session.outcome.done() else None
        self._closed[digest] = Closed(session_id=session.session_id, why=why, outcome=outcome)
        while len(self._closed) > NUM_REMEMBERED:
            self._closed.popitem(last=False)
        await session.stop_answers()

    async def close_all(self, why: str) -> None:
        await asyncio.gather(*(self.close(one, why) for one in list(self._open.values())))


def _digest(key: str) -> bytes:
    """Keys are looked up by it, so that the time it takes says nothing of other keys."""
    return hashlib.sha256(key.encode()).digest()
