"""Runs one episode: the environment and the model take turns until one of them is done.

    reset ──► first prompt ──► sample ──► parse ──► step ──► next prompt ──┐
                                 ▲   interrupted: wait, go on              │
                                 └──────────── no, another turn ◄──────────┘
                                               yes ──► done, max_turns, length, timeouts, env_error

A failing environment ends its own episode and nothing else. What was sampled before is kept and
scored.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import partial
from typing import TypeVar

from configs.choices import OnLongPrompt, Thoughts
from configs.rollout_schema import RolloutConfig, TaskConfig
from rollout_pool.cancelling import contained
from rollout_pool.episodes.conversation import Chat, Completion, Message, ToolSpec, with_files
from rollout_pool.episodes.environment import Env, Observation, SingleTurn, Step
from rollout_pool.episodes.episode import (
    HEEDS_INTERRUPT_S,
    MAX_REWARD,
    ROLE,
    Branch,
    Episode,
    EpisodeClock,
    EpisodeFailed,
    EpisodeRequest,
    add_turn,
    constraint_of,
)
from rollout_pool.episodes.thoughts import THINK, without_thoughts
from rollout_pool.sampling.sample import Completer, Sample

log = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(eq=False)
class EpisodeRunner:
    """Settings: task.max_turns, max_turn_tokens, stop, grammar, min_turn_tokens, thoughts,
    turn_timeout_s and episode_timeout_s; rollout.max_prompt_tokens, max_response_tokens and
    on_long_prompt."""

    _completer: Completer
    _chat: Chat
    _task: TaskConfig
    _rollout: RolloutConfig
    _: KW_ONLY
    heeds_interrupt_s: float = HEEDS_INTERRUPT_S

    async def run(self, env: Env, request: EpisodeRequest) -> Episode:
        """The finished episode; `env` is closed in any case.

        Raises SampleFailed if a sample failed, TimeoutError if no engine was available,
        EpisodeFailed if it ended before a token was sampled, and ValueError if its first prompt is
        longer than `max_prompt_tokens` and on_long_prompt is refuse.
        """
        progress = _Progress(
            env=env, request=request, clock=EpisodeClock(self._task.episode_timeout_s)
        )
        try:
            progress.end = await self._take_turns(progress)
        except _Over as over:
            progress.end, progress.error = over.end, over.error
        finally:
            await self._close(env)
        return progress.episode()

    async def _take_turns(self, progress: _Progress) -> str:
        """Returns why the episode ended."""
        observation: Observation | None = await self._bounded(progress, "reset", progress.env.reset)
        while observation is not None:
            turn = self._next_turn(progress, observation)
            if len(turn.prompt) >= turn.talk.limit:
                return "length"
            completion = await self._sample_turn(progress, turn)
            observation = await self._bounded(
                progress, "step", partial(self._step, progress, completion)
            )
            if observation is not None and progress.num_turns >= self._task.max_turns:
                return "max_turns"
        return "done"

    # The prompt of a turn -----------------------------------------------------------------------

    def _next_turn(self, progress: _Progress, observation: Observation) -> _Turn:
        try:
            turn = self._written(progress, observation)
        except Exception as error:  # text that the chat template or the tokenizer refuses
            raise _Over("env_error", f"observation: {error}") from error
        if not turn.talk.limit:
            length, most = len(turn.prompt), self._rollout.longest_trajectory
            if not progress.num_turns or not length:  # a later role's may quote a long answer
                self._check_length(progress, length)
            turn.talk.limit = min(length + self._rollout.max_response_tokens, most)
        return turn

    def _written(self, progress: _Progress, observation: Observation) -> _Turn:
        messages, talk = with_files(observation.messages), progress.talk_of(observation)
        if not talk.messages or observation.replaces_history:  # it opens a branch
            prompt = self._chat.first_prompt(messages, observation.tools or talk.tools)
            return _Turn(talk=talk, prompt=prompt, messages=messages, shown=messages)
        whole, read = [*talk.messages, *messages], [*talk.shown, *messages]
        if self._task.thoughts is Thoughts.stripped and (shown := without_thoughts(read)) != read:
            prompt = self._chat.first_prompt(shown, talk.tools)
            return _Turn(talk=talk, prompt=prompt, messages=whole, shown=shown)
        prompt = self._chat.next_prompt(talk.prompt, talk.output_ids, messages, talk.tools)
        return _Turn(talk=talk, prompt=prompt, messages=whole, shown=read)

    def _check_length(self, progress: _Progress, length: int) -> None:
        most = self._rollout.max_prompt_tokens
        if 0 < length <= most:
            return
        if length > most and self._rollout.on_long_prompt is OnLongPrompt.refuse:
            raise ValueError(
                f"rollout.max_prompt_tokens={most}: the first prompt of episode "
                f"{progress.request.session} has {length} tokens; raise the limit, or set "
                "rollout.on_long_prompt=skip"
            )
        what = f"{length} tokens, max_prompt_tokens is {most}" if length else "no token"
        raise EpisodeFailed(f"{progress.request.session}: its first prompt has {what}")

    # The model's part -----------------------------------------------------------------------------

    async def _sample_turn(self, progress: _Progress, turn: _Turn) -> Completion:
        """Samples the model's next completion and adds it to the episode."""
        request, num_left = progress.request, turn.talk.limit - len(turn.prompt)
        max_tokens = min(num_left, self._task.max_turn_tokens or num_left)
        sample = request.new_sample(
            progress.num_turns,
            turn.prompt,
            max_tokens,
            stop=self._task.stop,
            constraint=constraint_of(self._task),
            branches=progress.branches,
            pictures=[file for message in turn.messages for file in message.files],
            role=turn.talk.role,
        )
        try:
            has_ended = await self._complete(progress, sample)
        finally:
            request.samples.end(sample)
        if not has_ended and not sample.output_ids:
            raise _Over("episode_timeout")
        assert sample.finish_reason is not None
        completion = self._chat.parse(
            sample.output_ids, sample.finish_reason, sample.prompt, turn.talk.tools
        )
        opens = self._chat.opens_thoughts(sample.prompt, self._task.grammar or "")
        progress.note_completion(turn, sample, completion, mark=THINK if opens else "")
        if not has_ended:
            raise _Over("episode_timeout")
        return completion

    async def _complete(self, progress: _Progress, sample: Sample) -> bool:
        """Returns whether the sample ended within the episode's time; if not, it keeps its tokens,
        and the rest is never requested.

        At the timeout the sample is interrupted, not cancelled, so that its tokens and their
        versions are exact.
        """
        loop, heeds = asyncio.get_running_loop(), asyncio.timeout(None)

        def ring() -> None:
            heeds.reschedule(loop.time() + self.heeds_interrupt_s)
            self._completer.interrupt(sample)

        try:
            async with heeds:
                with progress.clock.alarm(ring):
                    has_ended = await progress.request.complete(
                        sample, self._completer, progress.clock
                    )
        except TimeoutError:
            if not heeds.expired():
                raise
            sample.finish_reason = "length"
            raise _Over("episode_timeout") from None
        if not has_ended:
            sample.finish_reason = "length"
        return has_ended

    # The environment's part -----------------------------------------------------------------------

    @staticmethod
    async def _step(progress: _Progress, completion: Completion) -> Observation | None:
        step = await progress.env.step(completion)
        progress.note_step(step)
        return step.observation

    async def _bounded(self, progress: _Progress, what: str, call: Callable[[], Awaitable[T]]) -> T:
        """Ends the episode if this call of the environment's code raises or takes too long."""
        if type(progress.env) is SingleTurn:  # it does neither
            return await call()
        turn_s, left_s = self._task.turn_timeout_s, progress.clock.left_s
        scope = asyncio.timeout(min(turn_s, left_s))
        try:
            async with scope:
                with contained("the environment"), progress.request.samples.timing("environment"):
                    return await call()
        except Exception as error:
            if scope.expired():
                raise _Over("turn_timeout" if turn_s < left_s else "episode_timeout") from None
            log.info("%s: the environment failed", progress.request.session, exc_info=True)
            raise _Over("env_error", f"{what}: {type(error).__name__}: {error}") from error

    async def _close(self, env: Env) -> None:
        if type(env).close is Env.close:
            return
        try:
            async with asyncio.timeout(self._task.turn_timeout_s):
                with contained("the environment"):
                    await env.close()
        except Exception:  # the episode is over: this cannot harm it
            log.warning("an environment did not close", exc_info=True)


class _Over(Exception):
    """The episode ends here."""

    def __init__(self, end: str, error: str | None = None) -> None:
        super().__init__(end)
        self.end = end
        self.error = error


@dataclass(kw_only=True, slots=True)
class _Talk:
    """The conversation of one role."""

    role: str
    tools: tuple[ToolSpec, ...]
    limit: int = 0
    """Most tokens of a branch: the first prompt and all that may follow it."""
    prompt: list[int] = field(default_factory=list)
    output_ids: list[int] = field(default_factory=list)
    """All tokens of the current branch: those before its last completion, and the completion's."""
    messages: list[Message] = field(default_factory=list)
    shown: list[Message] = field(default_factory=list)
    """See _Turn; thoughts that the prompt opened have their mark."""


@dataclass(kw_only=True, slots=True)
class _Turn:
    """One turn: what the model has to complete."""

    talk: _Talk
    prompt: list[int]
    """All tokens before the completion."""
    messages: list[Message]
    """The whole conversation so far."""
    shown: list[Message]
    """The same as `prompt` has it: without the thoughts that task.thoughts leaves out."""


@dataclass(kw_only=True, slots=True)
class _Progress:
    env: Env
    request: EpisodeRequest
    clock: EpisodeClock
    branches: list[Branch] = field(default_factory=list)
    talks: dict[str, _Talk] = field(default_factory=dict)
    """By role, who answers last."""
    num_turns: int = 0
    env_reward: float | None = None
    env_parts: dict[str, float] = field(default_factory=dict)
    rewards: dict[str, float | None] = field(default_factory=dict)
    advantages: dict[str, float] = field(default_factory=dict)
    end: str = ""
    error: str | None = None

    def talk_of(self, observation: Observation) -> _Talk:
        """The conversation of its role, which answers last from now on. Raises ValueError."""
        last = next(reversed(self.talks.values()), _Talk(role="", tools=()))
        role = last.role if observation.role is None else observation.role
        if role and not ROLE.fullmatch(role):
            raise ValueError(f"role={role!r:.100}: must have the form {ROLE.pattern}")
        new = _Talk(role=role, tools=observation.tools or last.tools)
        self.talks[role] = self.talks.pop(role, new)
        return self.talks[role]

    def note_completion(
        self, turn: _Turn, sample: Sample, completion: Completion, *, mark: str
    ) -> None:
        """`mark`: of thoughts that the prompt opened."""
        add_turn(self.branches, sample)
        turn.talk.prompt, turn.talk.output_ids = sample.prompt, sample.output_ids
        message = Message(
            role="assistant", content=completion.content, tool_calls=completion.tool_calls
        )
        turn.talk.messages = [*turn.messages, message]
        read = replace(message, content=mark + message.content) if mark else message
        turn.talk.shown = [*turn.shown, read]
        self.num_turns += 1

    def note_step(self, step: Step) -> None:
        """Raises TypeError or ValueError for an invalid step of the user's."""
        info = {str(name): _finite(value, name) for name, value in step.info.items()}
        if step.reward is not None:
            reward = _finite(step.reward, "reward")
            self.env_reward = _finite((self.env_reward or 0.0) + reward, "reward")
        self.env_parts.update(info)
        for role, own in step.rewards.items():
            before = self.rewards.get(role, 0.0)
            both = None if own is None or before is None else before + own
            self.rewards[role] = both if both is None else _finite(both, f"rewards.{role}")
        for role, own in step.advantages.items():
            self.advantages[role] = _finite(own, f"advantages.{role}")

    def episode(self) -> Episode:
        if not self.branches:
            why = f"{self.end}: {self.error}" if self.error else self.end
            raise EpisodeFailed(
                f"{self.request.session}: it ended before a token was sampled: {why}"
            )
        messages = [talk.messages for talk in self.talks.values() if talk.messages][-1]
        return Episode(
            branches=self.branches,
            # The branches have the files; those who score get the messages, often in a process.
            messages=tuple(replace(one, files=()) if one.files else one for one in messages),
            end=self.end,
            num_turns=self.num_turns,
            env_reward=self.env_reward,
            env_parts=self.env_parts,
            rewards=self.rewards,
            advantages=self.advantages,
            error=self.error,
        )


def _finite(value: float, name: str) -> float:
    number = float(value)
    if not abs(number) < MAX_REWARD:
        raise ValueError(f"the environment's {name} is {number}; it must be finite, below 1e30")
    return number
