"""An episode: how it is sampled, its clock, and at its end its tokens and its conversation.

    turn 1   [prompt | completion]                                      branch 0
    turn 2   [prompt | completion | observation | completion]           extends it
    turn 3   [summary | completion]                                     begins branch 1

An episode is one branch as long as each turn's prompt extends the previous tokens; an edited or
summarised history begins a new branch. A token counts as the model's own only in the branch in
which it was sampled, so none is trained twice.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from opentelemetry.context import Context

from buffer.types import SamplingParams, VersionSpan
from configs.rollout_schema import TaskConfig
from rollout_pool.episodes.conversation import Message
from rollout_pool.sampling.group_samples import GroupSamples
from rollout_pool.sampling.sample import (
    Completer,
    Constraint,
    Interrupted,
    Priority,
    Routes,
    Sample,
)

HEEDS_INTERRUPT_S = 10.0
"""Time that an interrupted sample has to stop when its episode times out; then it is cancelled, and
its tokens are lost."""


class EpisodeClock:
    """An episode's timeout, paused while anything waits. Used in one event loop.

        launch      waits for a place     at an engine      must not go on      at an engine   step
        ──►         ░░░░░░░░░░░░░░░░░░    ▓▓▓▓▓▓▓▓▓▓▓▓▓▓    ░░░░░░░░░░░░░░░     ▓▓▓▓▓▓▓▓▓▓▓    ▓▓▓▓

    An episode must not time out because it waits for a busy engine.
    """

    def __init__(self, seconds: float) -> None:
        self.is_over = False
        """An alarm rang, or the episode was cut short: interrupted samples do not go on."""
        self._left_s = seconds
        """Time that was left when the clock last resumed or paused."""
        self._since = time.monotonic()
        self._num_holds = 0
        self._ring: Callable[[], None] | None = None
        self._timer: asyncio.TimerHandle | None = None

    @property
    def left_s(self) -> float:
        gone_s = 0.0 if self._num_holds else time.monotonic() - self._since
        return max(0.0, self._left_s - gone_s)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Stops the clock while something waits in the block; it resumes when nothing waits."""
        self._left_s = self.left_s
        self._num_holds += 1
        try:
            yield
        finally:
            self._num_holds -= 1
            if not self._num_holds:
                self._since = time.monotonic()
            self._set_timer()

    @contextmanager
    def alarm(self, ring: Callable[[], None]) -> Iterator[None]:
        """Calls `ring` once if the time runs out inside the block. One alarm at a time."""
        assert self._ring is None
        self._ring = ring
        self._set_timer()
        try:
            yield
        finally:
            self._ring = None
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None

    def _set_timer(self) -> None:
        # One that is set stays while the clock is paused: it rings too early, and is set again.
        if self._ring is not None and not self._num_holds and self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self.left_s, self._look)

    def _look(self) -> None:
        self._timer = None
        if self._num_holds or self._ring is None or self.left_s:
            return self._set_timer()
        self.is_over = True
        ring, self._ring = self._ring, None
        ring()


class EpisodeFailed(RuntimeError):
    """An episode that cannot be scored, and so not trained; the message says why."""


def constraint_of(task: TaskConfig) -> Constraint:
    """Returns the constraint of every completion of the task."""
    return Constraint(grammar=task.grammar or "", min_tokens=task.min_turn_tokens)


@dataclass(kw_only=True, slots=True)
class EpisodeRequest:
    """How to sample an episode."""

    session: str
    """Unique in the run; the ids of its samples begin with it."""
    sampling: SamplingParams
    samples: GroupSamples = field(default_factory=GroupSamples)
    """Its group's, at which the episode's samples begin, wait and end."""
    group_size: int = 0
    """Episodes of its group; 0 if it has none."""
    priority: Priority = Priority.rollout
    min_version: int = 0
    engine: str | None = None
    span_context: Context | None = None
    """See Sample.span_context: an external program's samples begin in other tasks."""

    def new_sample(
        self,
        number: int,
        prompt: list[int],
        max_new_tokens: int,
        *,
        sampling: SamplingParams | None = None,
        stop: Sequence[str] = (),
        constraint: Constraint | None = None,
        branches: Sequence[Branch] = (),
        pictures: Sequence[bytes] = (),
        role: str = "",
    ) -> Sample:
        """Begins the episode's sample `number`. `sampling`: None is the episode's. `branches`: what
        the episode has so far. `pictures`: those of `prompt`."""
        extended = _extended(branches, prompt, tuple(pictures), role)
        sample = Sample(
            sample_id=f"{self.session}.{number}",
            prompt=prompt,
            sampling=sampling or self.sampling,
            max_new_tokens=max_new_tokens,
            pictures=tuple(pictures),
            stop=tuple(stop),
            constraint=None if constraint == Constraint() else constraint,
            session=self.session,
            role=role,
            group=self.samples.group,
            priority=self.priority,
            min_version=self.min_version,
            engine=self.engine,
            span_context=self.span_context,
            # The last token of a turn is processed in the next one. Experts of a turn that brought
            # none are not asked for later: newer weights would have chosen them.
            first_route=len(extended.tokens) - 1 if extended else 0,
        )
        self.samples.begin(sample)
        return sample

    async def complete(self, sample: Sample, completer: Completer, clock: EpisodeClock) -> bool:
        """Completes `sample`; after each interruption it waits until its group is released, while
        the clock is paused.

        False if it was interrupted when the episode's time was over: it keeps its tokens, and the
        rest is never requested. Otherwise raises what the completer raises.
        """
        while sample.finish_reason is None:  # else a worker before this one sampled its end
            try:
                await completer.complete(sample, clock)
                break
            except Interrupted:
                if clock.is_over:
                    return False
            with clock.paused():
                await self.samples.wait_released(sample)
        return True


MAX_REWARD = 1e30
"""The squares of larger ones, or their advantages in float32, would be infinite."""
MAX_PARTS = 100
"""Named parts of a reward that a program or a service gives; each becomes a metric."""
MAX_PART_CHARS = 200
ROLE = re.compile(r"[A-Za-z0-9_-]{1,32}")
"""The form of a role's name."""


@dataclass(kw_only=True, slots=True, eq=False)
class Branch:
    """One token sequence: a prompt, and turns that each extend it.

    All lists but the spans have the same length T; positions count from the first prompt token.
    """

    tokens: list[int] = field(default_factory=list)
    loss_mask: list[int] = field(default_factory=list)
    """1 where the model wrote the token."""
    logprobs: list[float] = field(default_factory=list)
    """0 elsewhere."""
    candidates: list[Sequence[int]] = field(default_factory=list)
    """`Sample.candidates` of the model's tokens; empty elsewhere, and without truncated sampling.
    """
    version_spans: list[VersionSpan] = field(default_factory=list)
    prompt_length: int
    finish_reason: str
    """Why its last turn ended."""
    role: str = ""
    """See Observation.role."""
    temperatures: list[float] = field(default_factory=list)
    """Temperature of each of the model's tokens, 1 elsewhere; empty: all at the group's."""
    routes: list[Routes] = field(default_factory=list)
    """Experts of its tokens; see Sample.routes."""
    pictures: tuple[bytes, ...] = ()
    """See Sample.pictures."""


@dataclass(kw_only=True, slots=True, eq=False)
class Episode:
    """A finished episode."""

    branches: list[Branch]
    """One, or several where the history was rewritten; each has a sampled token."""
    messages: tuple[Message, ...]
    """The whole conversation at the end of the last branch."""
    end: str
    """"done", "max_turns", "length" (no room for another turn), "turn_timeout", "episode_timeout",
    "env_error"."""
    num_turns: int
    env_reward: float | None = None
    """Sum of the environment's rewards; None if it gave none, or some by role."""
    env_parts: Mapping[str, float] = field(default_factory=dict)
    rewards: Mapping[str, float | None] = field(default_factory=dict)
    """The same by role; None for one that cannot be judged."""
    advantages: Mapping[str, float] = field(default_factory=dict)
    """Finished ones, by role."""
    error: str | None = None
    """The message of what the environment raised."""

    def __post_init__(self) -> None:
        """Raises EpisodeFailed for rewards or advantages that do not fit its roles."""
        given = {k: v for k in ("rewards", "advantages") if (v := getattr(self, k))}
        if len(given) > 1 or (self.rewards and self.env_reward is not None):
            what = "rewards and advantages" if len(given) > 1 else "reward and rewards"
            raise EpisodeFailed(f"its environment gave {what}; give one of them")
        for what, by_role in given.items():
            roles = sorted({branch.role for branch in self.branches})
            unknown, missing = sorted(by_role.keys() - {*roles}), {*roles} - by_role.keys()
            if (unknown or missing) and self.end == "done":  # else one may not have come to answer
                raise EpisodeFailed(
                    f"{what}={dict(by_role)!r:.200}: the roles that answered are {roles}; name "
                    "each of them, as the observations that asked it do, and no others"
                )

    @property
    def lacks_rewards(self) -> bool:
        """It was broken off before its environment gave one of its roles a reward."""
        is_broken_off = self.end != "done" and not self.rewards
        return is_broken_off and any(branch.role for branch in self.branches)

    @property
    def answer(self) -> str:
        """The model's last message."""
        mine = [message for message in self.messages if message.role == "assistant"]
        return mine[-1].content if mine else ""

    @property
    def num_tokens(self) -> int:
        """Number of tokens that the model wrote, each of which is in one branch."""
        return sum(sum(branch.loss_mask) for branch in self.branches)


def check_parts(names: Collection[str]) -> None:
    """Raises ValueError for names of parts that are too many, too long, or no Unicode text."""
    if len(names) > MAX_PARTS:
        raise ValueError(f"a reward has at most {MAX_PARTS} parts, not {len(names)}")
    for name in names:
        if len(name) > MAX_PART_CHARS or not name.isprintable():  # a lone surrogate is not
            raise ValueError(
                f"{name[:MAX_PART_CHARS]!a}: the name of a part has at most {MAX_PART_CHARS} "
                "characters, all of them printable"
            )


def add_turn(branches: list[Branch], sample: Sample) -> None:
    """Adds the completion of an ended sample, which has a token, to the branches of an episode.

    It extends the longest branch that the sample's prompt extends, or begins a new one.
    """
    prompt, length = sample.prompt, len(sample.output_ids)
    assert length > 0 and len(sample.logprobs) == length and sample.finish_reason is not None
    assert len(sample.candidates) == length * sample.has_candidates
    assert sum(span.end - span.start for span in sample.version_spans) == length
    branch = _extended(branches, prompt, sample.pictures, sample.role)
    if branch is None:
        branch = Branch(
            prompt_length=len(prompt), finish_reason=sample.finish_reason, role=sample.role
        )
        branches.append(branch)
    given = prompt[len(branch.tokens) :]
    branch.tokens += [*given, *sample.output_ids]
    branch.loss_mask += [0] * len(given) + [1] * length
    branch.logprobs += [0.0] * len(given) + sample.logprobs
    branch.candidates += [()] * len(given)
    branch.candidates += sample.candidates or [()] * length
    branch.temperatures += [1.0] * len(given) + [sample.sampling.temperature] * length
    branch.version_spans += [
        VersionSpan(
            version=span.version, start=len(prompt) + span.start, end=len(prompt) + span.end
        )
        for span in sample.version_spans
    ]
    branch.routes += sample.routes
    branch.pictures = sample.pictures  # all so far
    branch.finish_reason = sample.finish_reason


def _extended(
    branches: Sequence[Branch], prompt: list[int], pictures: tuple[bytes, ...], role: str
) -> Branch | None:
    """The longest branch of `role` that this prompt extends."""
    extended = [
        branch
        for branch in branches
        if branch.role == role
        and prompt[: len(branch.tokens)] == branch.tokens
        and pictures[: len(branch.pictures)] == branch.pictures  # the tokens tell only their sizes
    ]
    return max(extended, key=lambda branch: len(branch.tokens), default=None)
