"""One group of a worker, from its credit to its end: pushed, or its credit and prompt given back.

    generating ──► whole ──► pushed        `GroupRun.work`: may be cancelled at any moment
        │            └─────► filtered: its rewards are all equal
        └─► failed, cancelled              `GroupRunner.settle`: always follows

    failed    ──► its prompt runs again, until it has failed too often
              ├─► external: its prompt runs again, and the failure does not count against it
              └─► its environment's process died: its prompt runs again, at last alone (loop.py)
    cancelled ──► too old: its prompt runs again as that of a stale group
              ├─► external and idle, while others wait for a credit: its prompt runs again
              └─► stopped with the run

In each case the credit is free afterwards, and the source of its episodes knows how it ended.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import asdict, dataclass, field, replace
from itertools import compress
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from opentelemetry.trace import set_span_in_context

from buffer.replay_buffer import ReplayBuffer
from buffer.results import PushResult
from buffer.run_state import RunState
from buffer.types import (
    ADVANTAGE_COLUMN,
    CANDIDATES_COLUMN,
    ROUTES_COLUMN,
    TEMPERATURE_COLUMN,
    PromptRef,
    Rerun,
    SamplingParams,
    Trajectory,
    TrajectoryGroup,
    digest_of,
)
from configs.rollout_schema import RolloutConfig
from rollout_pool.cancelling import end_tasks
from rollout_pool.episodes.conversation import Message
from rollout_pool.episodes.episode import Branch, Episode, EpisodeFailed, EpisodeRequest
from rollout_pool.rewards.types import Score, Scorer
from rollout_pool.sampling.group_samples import GroupSamples
from rollout_pool.sampling.kept_tokens import GroupTokens
from rollout_pool.sampling.sample import SampleFailed
from rollout_pool.sampling.tracing import open_span
from rollout_pool.tasks.source import EpisodeSource, GroupEnd
from rollout_pool.tasks.task import Prompt
from rollout_pool.tasks.verifiers.process import EnvironmentDied
from rollout_pool.worker.counters import Counters, length_bucket
from rollout_pool.worker.record import RolloutLog
from rollout_pool.worker.variance import Curriculum, VarianceFilter, Verdict

log = logging.getLogger(__name__)

MAX_FAILURES_IN_A_ROW = 16
"""After so many failed groups in a row the worker ends with the error."""


@dataclass(kw_only=True, slots=True, eq=False)
class GroupRun:
    """A group in flight and its progress."""

    group_id: str
    ref: PromptRef
    prompt: Prompt
    episode_source: EpisodeSource
    samples: GroupSamples
    tokens: GroupTokens | None = None
    """The tokens that the buffer keeps of it, as long as `samples.keeper` is set."""
    work: asyncio.Task[None] | None = None
    """Generates and pushes the group; may be cancelled."""
    group: TrajectoryGroup | None = None
    verdict: Verdict = Verdict.keep
    pushed: PushResult | None = None
    """The buffer's reply to its push."""
    stopped_for: GroupEnd | None = None
    """Why it was cancelled although the run goes on: too_old or idle."""
    num_unscored: int = 0
    """Number of episodes with an unscored reward part."""
    num_left_open: int = 0
    """Number of episodes that are left out because a part of their reward did not judge them."""
    num_turns: int = 0
    """Turns of its ended episodes."""
    ended: set[str] = field(default_factory=set)
    """The sessions of its ended episodes."""
    pictures: dict[str, bytes] = field(default_factory=dict)
    """Pictures of its scored episodes, by digest."""
    messages: dict[int, tuple[Message, ...]] = field(default_factory=dict)
    """Conversations of its scored episodes, by their places."""
    scored_at: list[float] = field(default_factory=list)
    """When its episodes got their rewards."""
    given_up_because: str | None = field(default=None, init=False)
    """The first reason."""

    def give_up(self, why: str) -> None:
        """The group will not be finished; the source of its episodes gets the first reason."""
        if self.given_up_because is None:
            self.given_up_because = why
            self.episode_source.give_up(why)

    def how_ended(self, *, is_done: bool) -> tuple[GroupEnd, str | None]:
        """Once it is settled: how it ended, and the reason if it is not in the buffer."""
        assert self.work is not None
        if not is_done:
            was_stopped = GroupEnd.stopped if self.work.cancelled() else GroupEnd.given_up
            return self.stopped_for or was_stopped, self.given_up_because
        if self.verdict is Verdict.leave_out:
            return GroupEnd.filtered, "its rewards are all equal (rollout.filter_zero_variance)"
        if self.pushed is PushResult.stale:
            return GroupEnd.dropped, "its oldest token was too old for every later step"
        if self.pushed is PushResult.abandoned_lineage:
            return GroupEnd.dropped, "a rollback discarded the weights that sampled it"
        return GroupEnd.pushed, None


class ExternalGroups(Protocol):
    """Groups that external programs have requested, at the endpoint (endpoint/groups.py)."""

    def take(self) -> EpisodeSource | None:
        """The longest-waiting one that is still wanted; None if there is none."""
        ...

    def close(self) -> None:
        """Refuses the waiting requests and all later ones."""
        ...


@dataclass(kw_only=True, eq=False)
class GroupRunner:
    """Generates the groups of one worker, pushes them, and settles the credits and prompts of those
    that ended, any number concurrently.

        run.work = asyncio.create_task(runner.generate_and_push(run))
        await asyncio.wait([run.work])   # it has ended, failed or been cancelled
        await runner.settle(run)
    """

    config: RolloutConfig
    scorer: Scorer
    buffer: ReplayBuffer
    state: RunState
    counters: Counters
    group_log: RolloutLog | None
    curriculum: Curriculum | None = None
    num_groups: int = field(default=0, init=False)
    """Groups pushed."""
    num_failed: int = field(default=0, init=False)
    num_too_old: int = field(default=0, init=False)
    _failures_in_a_row: int = field(default=0, init=False)
    _cause: BaseException | None = field(default=None, init=False)
    """Cause of the last failure."""

    def __post_init__(self) -> None:
        self._filter: VarianceFilter | None = None
        self.use(self.config, is_new_filter=True)

    def use(self, config: RolloutConfig, *, is_new_filter: bool) -> None:
        """From now on, groups begin as these settings say, and are left out as they say."""
        self._sampling = SamplingParams(**asdict(config.sampling))
        self._group_size = config.group_size
        if is_new_filter:
            ratio = config.max_filtered_ratio
            self._filter = VarianceFilter(ratio) if config.filter_zero_variance else None

    async def generate_and_push(self, run: GroupRun) -> None:
        """Generates the group and pushes it, unless the filter leaves it out.

        May be cancelled at any moment; `settle` must follow in any case.
        """
        group = run.group = await generate_group(run, self.scorer, self._sampling, self._group_size)
        self._failures_in_a_row = 0
        # Rewards with an unscored part, which counts as 0, may be equal because of the scorer.
        teaches = bool(run.num_unscored) or group.teaches
        if not run.num_unscored:
            self._note_rewards(run.prompt, group, teaches=teaches)
        if self._filter is not None:
            run.verdict = self._filter.judge(teaches=teaches)
        if run.verdict is not Verdict.leave_out:
            with run.samples.timing("push", self._group_size):
                run.pushed = await self.state.retry_while_run_moves(lambda: self.buffer.push(group))

    def _note_rewards(self, prompt: Prompt, group: TrajectoryGroup, *, teaches: bool) -> None:
        task, rewards = group.prompt.task, group.rewards_by_player.values()
        mean = sum(rewards) / len(rewards)
        self.counters.add(f"scored_groups:{task}")
        self.counters.add(f"mean_rewards:{task}", mean)
        self.counters.add(f"zero_variance:{task}", not teaches)
        if self.curriculum is not None:
            self.curriculum.note(prompt, mean, teaches=teaches)

    async def keep_tokens(self, run: GroupRun) -> None:
        """Keeps what the group's samples have gained in the buffer (sampling/kept_tokens.py)."""
        if (tokens := run.tokens) is None or run.samples.keeper is None:
            return
        async with tokens.keeping:
            new = tokens.take_new()
            if new and not await self.buffer.keep_tokens(
                run.group_id, run.samples.spent.oldest_version, new
            ):
                run.samples.keeper = None  # it has ended, or lost its credit to another worker

    async def settle(self, run: GroupRun) -> bool:
        """Settles the credit and the prompt of an ended group; returns whether it is complete.

        Must not be cancelled: a credit that is not given back is missing until it expires. Raises
        errors that must end the worker.
        """
        assert run.work is not None and run.work.done()
        is_done = False
        try:
            is_done = await self._settle_outcome(run)
        finally:
            if not is_done:
                run.give_up("its group was given up")
            self._count(run, is_done=is_done, was_stopped=run.work.cancelled())
            self._report_end(run, is_done=is_done)
        return is_done

    def _report_end(self, run: GroupRun, *, is_done: bool) -> None:
        end, why = run.how_ended(is_done=is_done)
        run.episode_source.ended(end, why)
        if run.episode_source.is_external:
            self.counters.add(f"external_ended:{end.value}")
            if end is not GroupEnd.pushed:
                index = run.ref.index
                log.info("group %s of prompt %d: %s: %s", run.group_id, index, end.value, why)

    def _count(self, run: GroupRun, *, is_done: bool, was_stopped: bool) -> None:
        count, samples, spent = self.counters.add, run.samples, run.samples.spent
        num_restored = 0 if run.tokens is None else run.tokens.num_restored
        count("tokens_generated", spent.num_tokens + spent.num_wasted - num_restored)
        count("tokens_restored", num_restored)
        count("samples_resumed", samples.num_resumed)
        count("tokens_wasted", spent.num_wasted)
        count("samples_retried", spent.num_failures)
        count("logprobs_refused", spent.num_refused)
        count("rewards_failed", run.num_unscored)
        count("episodes_left_out", run.num_left_open)
        samples.seconds["environment"] += samples.activity.alone_s
        for what, seconds in samples.seconds.items():
            count(f"episode_s:{what}", seconds)
        if was_stopped and not is_done and run.stopped_for is None:  # by the end of the run
            count("groups_stopped")
            count("tokens_stopped", spent.num_tokens)
            return
        # Those of a group that failed were not cut off for their length.
        is_measured = is_done or run.stopped_for is GroupEnd.too_old
        if is_measured and not (num_restored or samples.is_external or run.ref.attempt):
            self.counters.add_answers(spent.answers, run.ended)
        what, bucket = "completed" if is_done else "given_up", length_bucket(spent.longest)
        count(f"{what}:{bucket}")
        count(f"{what}_s:{bucket}", time.monotonic() - run.samples.started)
        if not is_done:
            count("tokens_wasted", spent.num_tokens)
            return
        assert run.group is not None
        ends = {one.episode: one.finish_reason for one in run.group.trajectories}
        for end in ends.values():
            count(f"episodes_ended:{end}")
        count("turns", run.num_turns)
        count("branches", len(run.group.trajectories))
        count("players", len(run.group.rewards_by_player))

    async def _settle_outcome(self, run: GroupRun) -> bool:
        assert run.work is not None
        if run.work.cancelled():
            return await self._settle_cancelled(run)
        error = run.work.exception()
        if error is None:
            await self._settle_whole(run)
            return True
        if isinstance(error, GroupFailed):
            await self._settle_failed(run, error)
            return False
        # The push failed, or there is a bug. In either case the credit is free, and the prompt,
        # which the stream has passed, is for the run when it is resumed.
        await self.buffer.abandon(run.group_id, "failed", Rerun.always, run.ref)
        raise error

    async def _settle_whole(self, run: GroupRun) -> None:
        assert run.group is not None
        if run.verdict is Verdict.leave_out:
            await self.buffer.abandon(run.group_id, "zero_variance")
            self.counters.add("groups_filtered")
            self.counters.add("tokens_filtered", run.samples.spent.num_tokens)
            return
        if run.verdict is Verdict.keep_all_equal:
            self.counters.add("zero_variance_kept")
        self.num_groups += 1
        if self.group_log is not None:
            await self.group_log.write(run.group, run.prompt.text, run.messages)

    async def _settle_failed(self, run: GroupRun, error: GroupFailed) -> None:
        log.warning("%s", error)
        if run.episode_source.is_external:  # the external program may be at fault, not the prompt
            await self.buffer.abandon(run.group_id, "outside", Rerun.always, run.ref)
            return
        self.num_failed += 1
        has_died = isinstance(error.__cause__, EnvironmentDied)
        if has_died and not run.ref.is_suspect:
            # Any group that ran beside it may be at fault: the death counts like a worker's.
            ref = replace(run.ref, reruns=run.ref.reruns + 1)
            await self.buffer.abandon(run.group_id, "environment_died", Rerun.always, ref)
        else:
            most = 1 if has_died else self.config.max_group_failures
            failure = await self.buffer.fail(run.group_id, run.ref, most)
            if failure is not None and failure.is_quarantined:
                self.counters.add("prompts_quarantined")
                times = failure.num_failures
                log.warning("prompt %d is quarantined (failures: %d)", run.ref.index, times)
        # One process of an environment that dies fails any number of groups.
        self._failures_in_a_row += error.__cause__ is None or error.__cause__ is not self._cause
        self._cause = error.__cause__
        if self._failures_in_a_row >= MAX_FAILURES_IN_A_ROW:
            raise error

    async def _settle_cancelled(self, run: GroupRun) -> bool:
        """Returns whether the group is in the buffer nevertheless."""
        end = run.stopped_for or GroupEnd.stopped
        if end is GroupEnd.stopped:  # a resumed run takes the prompt again, with the tokens it has
            await self.keep_tokens(run)
        rerun = Rerun.as_stale if end is GroupEnd.too_old else Rerun.always
        was_running = await self.buffer.abandon(run.group_id, end.value, rerun, run.ref)
        if run.group is not None and not was_running:  # its push had completed
            await self._settle_whole(run)
            return True
        self.num_too_old += end is GroupEnd.too_old
        return False


class GroupFailed(RuntimeError):
    """An episode failed, and with it its group; the message says why."""


async def generate_group(
    run: GroupRun, scorer: Scorer, sampling: SamplingParams, group_size: int
) -> TrajectoryGroup:
    """Generates a group of `group_size` episodes, each scored as soon as it ends, and then together
    by the rewards that compare them.

        source ──┬─ episode 3 ended ─► scorer ─┐
                 ├─ episode 0 ended ─► scorer ─┼─► when all n are there: scorer ─► group
                 └─ ...                        ┘

    A group has all its n episodes but those that no reward judges, or it fails with GroupFailed.
    `run` is kept up to date. A cancellation ends the episodes and their scoring first.
    """
    # All start in the same turn of the event loop, so that their requests share one call.
    members = [
        asyncio.create_task(_member(run, place, scorer, sampling, group_size))
        for place in range(group_size)
    ]
    try:
        ended = await asyncio.gather(*members)
        now = time.monotonic()
        run.samples.seconds["siblings"] += sum(now - since for since in run.scored_at)
        episodes, scores = [one for one, _ in ended], [score for _, score in ended]
        with run.samples.timing("rewards", group_size):
            scores = [*await scorer.score_group(run.prompt, episodes, scores)]
        trajectories = [
            one
            for place, (episode, score) in enumerate(zip(episodes, scores, strict=True))
            for one in _trajectories(run, place, episode, score, sampling)
        ]
        if any(one.is_finished for one in trajectories):
            # One that was broken off before its environment gave any has nothing to teach.
            trajectories = [one if one.is_finished else _finished(one, 0.0) for one in trajectories]
    except (SampleFailed, EpisodeFailed, GroupFailed) as error:
        run.give_up(str(error))
        if isinstance(error, GroupFailed):
            raise
        raise GroupFailed(f"group {run.group_id} of prompt {run.ref.index}: {error}") from error
    finally:
        await end_tasks(members)
    if run.num_left_open == group_size:
        raise GroupFailed(
            f"group {run.group_id} of prompt {run.ref.index}: a reward function returned None for "
            "each of its episodes; give prompts whose answers can be judged"
        )
    return TrajectoryGroup(
        group_id=run.group_id,
        prompt=run.ref,
        trajectories=tuple(trajectories),
        sampling=sampling,
        pictures=run.pictures,
    )


async def _member(
    run: GroupRun, place: int, scorer: Scorer, sampling: SamplingParams, group_size: int
) -> tuple[Episode, Score]:
    with open_span("episode") as span:
        span.set_attributes({"group": run.group_id, "episode": place, "prompt": run.ref.index})
        request = EpisodeRequest(
            session=f"{run.group_id}.{place}",
            sampling=sampling,
            samples=run.samples,
            group_size=group_size,
            span_context=set_span_in_context(span) if span.is_recording() else None,
        )
        episode = await run.episode_source.run(run.prompt, request)
        span.set_attributes({"turns": episode.num_turns, "end": episode.end})
    run.num_turns += episode.num_turns
    run.ended.add(request.session)
    with run.samples.timing("rewards"):
        score = await scorer.score(run.prompt, episode)
    run.scored_at.append(time.monotonic())
    _check_scored(run, place, score)
    return episode, score


def _check_scored(run: GroupRun, place: int, score: Score) -> None:
    if score.left_open is None or score.is_unscored:
        run.num_unscored += bool(score.failures)
    if score.is_unscored:
        raise GroupFailed(
            f"group {run.group_id} of prompt {run.ref.index}: episode {place} could not "
            f"be scored: {score.reasons}"
        )


def _trajectories(
    run: GroupRun, place: int, episode: Episode, score: Score, sampling: SamplingParams
) -> list[Trajectory]:
    """Returns those of an ended episode: none if no reward judges it."""
    if score.is_unscored:  # by a reward of the whole group
        _check_scored(run, place, score)
    if score.left_open is not None:
        run.num_left_open += 1
        return []
    number = place - run.num_left_open  # the buffer's have no gaps
    if not any(branch.role for branch in episode.branches):  # else there are several
        run.messages[number] = episode.messages
    made = make_trajectories(episode, score, number, sampling.temperature)
    shown = {digest for one in made for digest in one.pictures}
    every = {digest_of(p): p for branch in episode.branches for p in branch.pictures}
    run.pictures.update((digest, every[digest]) for digest in shown)
    return made


def make_trajectories(
    episode: Episode, score: Score, place: int, temperature: float
) -> list[Trajectory]:
    """One trajectory per branch of the group's episode `place`; all have the episode's reward, or
    that of their role. `temperature`: the group's.

    If the whole episode was cut short, that is their finish reason.
    """
    columns = score.columns or tuple({} for _ in episode.branches)
    made = [
        Trajectory(
            tokens=np.asarray(branch.tokens, np.int32),
            loss_mask=np.asarray(branch.loss_mask, np.uint8),
            rollout_logprobs=np.asarray(branch.logprobs, np.float32),
            version_spans=tuple(branch.version_spans),
            prompt_length=branch.prompt_length,
            reward=own.reward,
            finish_reason=branch.finish_reason if episode.end == "done" else episode.end,
            reward_parts=dict(own.parts),
            episode=place,
            role=branch.role,
            columns={
                **of_branch,
                **_candidates(branch),
                **_temperatures(branch, temperature),
                **_routes(branch),
            },
            pictures=tuple(map(digest_of, branch.pictures)),
        )
        for branch, of_branch in zip(episode.branches, columns, strict=True)
        for own in [score.by_role.get(branch.role) if score.by_role else score]
        if own is not None
    ]
    given = episode.advantages
    return [_finished(one, given[one.role]) if one.role in given else one for one in made]


def _finished(trajectory: Trajectory, advantage: float) -> Trajectory:
    column = np.full(trajectory.num_tokens, advantage, np.float32)
    return replace(trajectory, columns={**trajectory.columns, ADVANTAGE_COLUMN: column})


def _temperatures(branch: Branch, usual: float) -> dict[str, NDArray[np.float32]]:
    """The column of its temperatures; none if all of the model's tokens have the usual one."""
    if {*compress(branch.temperatures, branch.loss_mask)} <= {usual}:
        return {}
    column = np.asarray(branch.temperatures, np.float32)
    is_own = np.asarray(branch.loss_mask, np.bool_)
    if (column[is_own] == np.float32(usual)).all():
        return {}
    return {TEMPERATURE_COLUMN: column}


def _candidates(branch: Branch) -> dict[str, NDArray[np.int32]]:
    """The column of its candidates, as wide as the largest set; none without truncated sampling."""
    width = max(map(len, branch.candidates))
    if not width:
        return {}
    column = np.full((len(branch.candidates), width), -1, np.int32)
    for row, ids in zip(column, branch.candidates, strict=True):
        row[: len(ids)] = ids
    return {CANDIDATES_COLUMN: column}


def _routes(branch: Branch) -> dict[str, NDArray[np.generic]]:
    """The column of its experts; none where engines return none."""
    if not branch.routes:
        return {}
    # The widest type: a number above 255 may occur in a part only.
    kind = np.result_type(*(routes.experts for routes in branch.routes))
    column = np.zeros((len(branch.tokens), branch.routes[0].experts.shape[1]), kind)
    for start, experts in branch.routes:
        column[start : start + len(experts)] = experts
    return {ROUTES_COLUMN: column}
