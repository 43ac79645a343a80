"""Groups that external programs request and run.

program                        endpoint                         worker
POST /groups ─────────────────► ExternalGroup                    credit, prompt
                                     ─── take() ───────────────► GroupRun
             ◄─ n sessions ──── opened ◄─ run(prompt, request) ─ n times
requests, POST /sessions/ID/reward ─► outcome ─► Episode ──► score, push
GET /groups/ID ──────────────► status ◄─ ended(end, why) ───────┘

A program that stays connected (GroupStream) is missed at once when it dies.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import AsyncGenerator, Mapping
from typing import Any

from starlette.types import Receive, Scope, Send

from rollout_pool.cancelling import unless_gone
from rollout_pool.endpoint.errors import ApiError
from rollout_pool.endpoint.sessions import NUM_REMEMBERED, Session, SessionLost, Sessions
from rollout_pool.endpoint.stream import EventStream, event_of, is_set_within
from rollout_pool.episodes.episode import Episode, EpisodeRequest
from rollout_pool.episodes.template import as_openai_message
from rollout_pool.tasks.source import EpisodeSource, GroupEnd
from rollout_pool.tasks.task import Prompt

MAX_WAITING = 1024
"""Most requests for groups that may wait; further ones are refused."""
RETRY_AFTER_S = 10
"""When a program whose request for a group was refused may ask again."""


class ExternalGroup(EpisodeSource):
    """A group that an external program requested. The worker that takes it calls `run` for each
    of its n episodes."""

    is_external = True

    def __init__(self, sessions: Sessions, groups: ExternalGroups) -> None:
        self._sessions = sessions
        self._groups = groups
        self._group_size = sessions.serving.rollout.group_size
        self._members: list[Session] = []
        self._prompt: Prompt | None = None
        self._withdrawn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._why: str | None = None
        """Why it was given up."""
        self._num_rewarded = 0
        self.group_id = ""
        """Known once a worker has taken it."""
        self.end: GroupEnd | None = None
        self.has_ended = asyncio.Event()
        self.opened: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done when all its sessions are open."""

    @property
    def is_withdrawn(self) -> bool:
        return self._withdrawn.done()

    def give_up(self, why: str) -> None:
        """The group will not be finished: its sessions are closed for this reason, of several the
        first."""
        self._why = self._why or why
        if not self.opened.done():
            self.opened.set_exception(self._no_group())
            self.opened.exception()  # mark as retrieved: the program may have disconnected

    def withdraw(self) -> None:
        """The program disconnected: the worker skips the group, or gives it up unless all its
        rewards are posted."""
        if not self.is_withdrawn:
            self._withdrawn.set_result(None)

    async def run(self, prompt: Prompt, request: EpisodeRequest) -> Episode:
        """One of its episodes; returns when its reward is posted.

        Raises SessionLost if that does not happen within `rollout.openai.session_timeout_s` after
        the last request and `task.episode_timeout_s` in all, and SampleFailed or TimeoutError if
        the engines failed.
        """
        session = self._sessions.open(request)
        is_rewarded = False
        try:
            self._prompt = prompt
            self._group_size = request.group_size or self._group_size
            self._members.append(session)
            self.group_id = session.session_id.rpartition(".")[0]
            self._groups.note_start(self)
            if len(self._members) == self._group_size and not self.opened.done():
                self.opened.set_result(None)
            await self._wait_outcome(session)
            is_rewarded = True
            return session.episode(
                end="length" if session.is_full else "done", outcome=session.outcome.result()
            )
        except Exception as error:
            self.give_up(str(error))
            raise
        finally:
            because = f": {self._why}" if self._why else ""
            why = "its reward was posted" if is_rewarded else f"its group was given up{because}"
            await self._sessions.close(session, why)

    async def _wait_outcome(self, session: Session) -> None:
        is_late = await session.wait_end(session.outcome, self._withdrawn)
        if session.outcome.done():
            return
        if session.failure is not None:
            raise session.failure
        if self.is_withdrawn:
            raise SessionLost(f"{session.session_id}: the program that requested the group left")
        serving = self._sessions.serving
        if is_late:
            limit_s = serving.task.episode_timeout_s
            raise SessionLost(
                f"session {session.session_id} took longer than {limit_s:g} s "
                "(task.episode_timeout_s), and no reward was posted"
            )
        timeout_s = serving.rollout.openai.session_timeout_s
        raise SessionLost(
            f"no request came in session {session.session_id} for {timeout_s:g} s "
            "(rollout.openai.session_timeout_s), and no reward was posted"
        )

    def describe(self, url: str) -> dict[str, Any]:
        """The response to the program: the prompt, and how to reach each session."""
        if self.end is not None:
            raise self._no_group()
        assert self._prompt is not None
        opened = self._prompt.opening(self._sessions.serving.task.system_prompt)
        return {
            "group_id": self.group_id,
            "prompt": {
                "index": self._prompt.index,
                "text": self._prompt.text,
                "messages": list(map(as_openai_message, opened)),
            },
            "sessions": [
                {"id": session.session_id, **session.address(url)} for session in self._members
            ],
        }

    def _no_group(self) -> ApiError:
        return ApiError(503, f"there is no group: {self._why}", code="no_group", should_retry=False)

    # The end --------------------------------------------------------------------------------------

    def ended(self, end: GroupEnd, why: str | None) -> None:
        self._num_rewarded = self._count_rewarded()
        self.end, self._why = end, why
        self._members.clear()  # with all their tokens
        self._prompt = None
        self._groups.note_end(self)
        self.has_ended.set()

    def status(self) -> dict[str, Any]:
        """The response to the program that asks where its group stands."""
        num_rewarded = self._count_rewarded()
        if self.end is not None:
            state = self.end.value
        elif self._why is not None:
            state = GroupEnd.given_up.value
        else:
            state = "scoring" if num_rewarded == self._group_size else "open"
        return {
            "group_id": self.group_id,
            "state": state,
            "reason": self._why,
            "num_sessions": self._group_size,
            "num_rewarded": num_rewarded,
        }

    async def state_in_buffer(self) -> str | None:
        """Its state there; None if it was not pushed, or is forgotten."""
        look_up = self._sessions.serving.group_state
        if self.end is not GroupEnd.pushed or look_up is None:
            return None
        return await look_up(self.group_id)

    def _count_rewarded(self) -> int:
        if self.end is not None:
            return self._num_rewarded
        return sum(session.outcome.done() for session in self._members)


class GroupStream(EventStream):
    """A group as server-sent events: itself, comments, and how it ended. Its program is taken for
    dead when it disconnects: its sessions are closed, and the group is given up."""

    def __init__(self, group: ExternalGroup, about: Mapping[str, Any], keep_alive_s: float) -> None:
        super().__init__()
        self._group = group
        self._about = about
        self._keep_alive_s = keep_alive_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await unless_gone(receive, self.stream_response(send))
        finally:
            self._group.withdraw()  # without effect once all its rewards are posted

    async def events(self) -> AsyncGenerator[bytes]:
        yield event_of(self._about)
        while not await is_set_within(self._group.has_ended, self._keep_alive_s):
            yield b": the group is open\n\n"
        yield event_of(self._group.status())


class ExternalGroups:
    """The groups that external programs request, and how the last ones ended."""

    def __init__(self, sessions: Sessions) -> None:
        self._sessions = sessions
        self._waiting: deque[ExternalGroup] = deque()
        """No worker has taken them yet."""
        self._running: set[ExternalGroup] = set()
        self._known: OrderedDict[str, ExternalGroup] = OrderedDict()
        self._max_groups = sessions.serving.rollout.openai.max_groups
        self._is_closed = False
        self.none_because = ""
        """Why an external program gets no group in this run, if it doesn't."""

    def request(self) -> ExternalGroup:
        """Raises ApiError if there will be none, or too many wait already."""
        if self.none_because:
            raise ApiError(409, self.none_because, code="no_groups", should_retry=False)
        if len(self._waiting) >= MAX_WAITING:
            self._waiting = deque(group for group in self._waiting if not group.is_withdrawn)
        if len(self._waiting) >= MAX_WAITING:
            why = f"{MAX_WAITING} requests for groups are already waiting"
            self._sessions.serving.count("requests_refused:groups")
            raise ApiError(
                429, why, code="too_many_groups", should_retry=True, retry_after_s=RETRY_AFTER_S
            )
        group = ExternalGroup(self._sessions, self)
        self._waiting.append(group)
        if self._is_closed:
            self.close()
        return group

    def take(self) -> ExternalGroup | None:
        """The longest-waiting one that is still wanted; None if there is none, or if as many are
        in progress as may be. The worker must have a credit and a prompt for it."""
        while self._waiting and not self._is_full:
            group = self._waiting.popleft()
            if not group.is_withdrawn:
                self._running.add(group)
                return group
        return None

    def find(self, group_id: str) -> ExternalGroup | None:
        """One in progress, or of the last that ended."""
        return self._known.get(group_id)

    def note_start(self, group: ExternalGroup) -> None:
        self._known[group.group_id] = group

    def note_end(self, group: ExternalGroup) -> None:
        self._running.discard(group)
        if len(self._known) > NUM_REMEMBERED:
            ended = (one.group_id for one in self._known.values() if one.end is not None)
            self._known.pop(next(ended, ""), None)

    @property
    def waits_for(self) -> str:
        """The reason why a request for a group waits."""
        if self._is_full:
            most = self._max_groups
            return f"{most} are in progress at this worker (rollout.openai.max_groups={most})"
        return "the trainer has not yet taken the earlier ones"

    @property
    def _is_full(self) -> bool:
        return len(self._running) >= self._max_groups

    def end_all(self, why: str) -> None:
        """The worker has ended; what it has not ended yet never will."""
        for group in list(self._running):
            group.give_up(why)
            group.ended(GroupEnd.stopped, why)

    def close(self) -> None:
        """Refuses the waiting requests and all later ones."""
        self._is_closed = True
        while self._waiting:
            self._waiting.popleft().give_up("the run is ending")
