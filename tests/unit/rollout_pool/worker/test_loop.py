"""The worker's loop with a real Redis server and a fake completer."""

from __future__ import annotations

import asyncio
import time
from collections import Counter

import pytest

from buffer.errors import BufferFullError
from buffer.redis.connection import connect
from buffer.replay_buffer import ReplayBuffer
from buffer.results import NewGroup
from buffer.run_state import RunState
from buffer.types import PromptRef, Rerun
from configs.choices import OnLongPrompt, TailPolicy, TaskKind
from configs.rollout_schema import MixedTask, PoolsConfig, RolloutConfig, TaskConfig
from configs.schema import BufferConfig
from rollout_pool.episodes.environment import SingleTurn
from rollout_pool.episodes.episode import EpisodeFailed
from rollout_pool.episodes.runner import EpisodeRunner
from rollout_pool.rewards.types import Score
from rollout_pool.sampling.sample import SampleFailed
from rollout_pool.tasks.env_episodes import EnvEpisodes
from rollout_pool.tasks.registry import build_task, epoch_of
from rollout_pool.tasks.source import EpisodeSource
from rollout_pool.tasks.task import Prompt, TaskStream
from rollout_pool.tasks.verifiers.process import EnvironmentDied
from rollout_pool.worker import loop, stragglers
from rollout_pool.worker.counters import Counters
from rollout_pool.worker.group_run import MAX_FAILURES_IN_A_ROW, GroupFailed
from rollout_pool.worker.loop import RolloutWorker
from rollout_pool.worker.prompt_filter import PromptFilter
from tests.support.rollout import FakeCompleter, place_of, plain_chat, rollout_spec, until

GROUPS_PER_STEP = 2
TASK = TaskConfig()


class Numbers:
    """Prompt 7 asks "7", or "77" if it is `long`."""

    name = "numbers"
    long = -1

    def example(self, index):
        text = str(index) * (2 if index == self.long else 1)
        return Prompt(index=index, is_held_out=False, text=text)

    def eval_prompts(self):
        return []

    def is_held_out(self, prompt):
        return False

    def environment(self, prompt):
        return SingleTurn(prompt.text)


class SlowBuffer:
    """The run's buffer; before a verb in `before` it waits, and after one in `after`."""

    def __init__(self, buffer):
        self._buffer = buffer
        self.before: dict[str, asyncio.Event] = {}
        self.after: dict[str, asyncio.Event] = {}
        self.waiting: list[str] = []

    def __getattr__(self, name):
        verb = getattr(self._buffer, name)
        if name not in self.before and name not in self.after:
            return verb

        async def slow(*args, **kwargs):
            if name in self.before:
                self.waiting.append(name)
                await self.before[name].wait()
            result = await verb(*args, **kwargs)
            if name in self.after:
                self.waiting.append(name)
                await self.after[name].wait()
            return result

        return slow


class External(EpisodeSource):
    """An external group: `source` runs it, unless it fails."""

    is_external = True

    def __init__(self, source, fails=False):
        self._source = source
        self._fails = fails
        self.given_up = []
        self.prompts = []

    async def run(self, prompt, request):
        self.prompts.append(prompt.index)
        if self._fails:
            raise EpisodeFailed("its program went away")
        return await self._source.run(prompt, request)

    def give_up(self, why):
        self.given_up.append(why)


class Waiting:
    """Groups that external programs wait for."""

    def __init__(self):
        self.groups = []
        self.is_closed = False

    def take(self):
        return self.groups.pop(0) if self.groups else None

    def close(self):
        self.is_closed = True


class Scorer:
    def __init__(self) -> None:
        self.failures: dict[str, str] = {}

    async def score(self, prompt, episode):
        return Score(reward=float(episode.answer), failures=self.failures)

    async def score_group(self, prompt, episodes, scores):
        return scores


@pytest.fixture
async def state(redis_url, run_name):
    state = RunState(await connect(redis_url), run_name)
    yield state
    await state.close()


@pytest.fixture
def completer():
    """Each answer is "0" and the episode's place in the group; `held` samples wait for `go`, and
    `failing` ones fail."""

    def answer(sample):
        if completer.failing(sample):
            sample.num_failures += 1
            return SampleFailed("the engine is out of order")
        return completer.said(sample)

    completer = FakeCompleter(answer)
    completer.said = lambda sample: f"0{place_of(sample)}"
    completer.failing = completer.held = lambda sample: False
    completer.go = asyncio.Event()
    completer.hold = lambda sample: completer.go if completer.held(sample) else None
    return completer


@pytest.fixture
def scorer():
    return Scorer()


@pytest.fixture
async def make_worker(completer, scorer, state, redis_url, run_name, buffer_factory, tmp_path):
    """Opens the run's buffer, and a worker on it. Called again it is the restarted worker. `run`
    starts it too."""
    tasks = []

    async def make(
        max_staleness=1,
        wait_timeout_s=300.0,
        log=None,
        external=None,
        stop_again_s=10.0,
        task_config=TASK,
        **settings,
    ):
        buffer = SlowBuffer(await buffer_factory(GROUPS_PER_STEP, max_staleness=max_staleness))
        await state.record_commits({"engine-0": completer.version})
        settings = {"max_prompt_tokens": 16, **settings}
        config = RolloutConfig(group_size=2, max_response_tokens=8, **settings)
        spec = rollout_spec(
            config=config,
            task=task_config,
            buffer=BufferConfig(wait_timeout_s=wait_timeout_s),
            redis_url=redis_url,
            run=run_name,
            run_dir=str(tmp_path),
        )
        task = build_task(task_config) if task_config.tasks else Numbers()
        chat = plain_chat()
        position = (await state.task_positions()).get(0, 0)
        make.source = EnvEpisodes(EpisodeRunner(completer, chat, TASK, config), task.environment)
        worker = RolloutWorker(
            index=0,
            spec=spec,
            task=task,
            stream=TaskStream(task, 0, 1, position),
            prompt_filter=PromptFilter(chat, TASK, config),
            scorer=scorer,
            episode_source=make.source,
            external_groups=external,
            evaluator=None,
            buffer=buffer,
            state=state,
            services=[asyncio.get_running_loop().create_future()],
            counters=Counters(state),
            completer=completer,
            wait_room=make.room,
            group_log=log,
            stop_again_s=stop_again_s,
        )
        return worker, buffer

    async def start(worker):
        task = asyncio.create_task(worker.run())
        tasks.append((worker, task))
        return task

    async def run(**settings):
        worker, buffer = await make(**settings)
        return worker, buffer, await start(worker)

    make.start, make.run, make.room = start, run, room_for(1)
    yield make
    for worker, task in tasks:
        worker.stop()
        await asyncio.wait([task], timeout=60)


def room_for(num_groups):
    async def wait_room(num_samples):
        return num_groups

    return wait_room


async def fill(make_worker, **settings):
    """The buffer that a worker has filled and then left, and the worker's report."""
    worker, buffer, running = await make_worker.run(**settings)
    await until(ready(buffer, 2 * GROUPS_PER_STEP))
    worker.stop()
    return buffer, await running


async def counters_at_end(worker, running, state):
    worker.stop()
    await running
    return await state.counters()


def ready(buffer, number):
    async def has_so_many():
        return (await buffer.stats()).ready == number

    return has_so_many


async def consume(buffer, step, num_groups=GROUPS_PER_STEP, version=0):
    lease = await buffer.lease(
        step=step, version=version, num_groups=num_groups, share=0, num_shares=1, timeout_s=60
    )
    assert await buffer.consume(lease, lease.group_ids) == num_groups
    return lease


async def test_prompts_of_a_mixture_carry_their_tasks_and_the_curriculum_passes_over_what_is_solved(
    make_worker, state, completer
):
    def listed(letter):
        rows = [{"question": letter * n, "answer": "0"} for n in range(1, 5)]
        return MixedTask(kind=TaskKind.questions, params={"questions": rows}, eval_size=1)

    task_config = TaskConfig(
        kind=TaskKind.mixture, tasks={"solved": listed("s"), "open": listed("o")}, curriculum=0.05
    )
    completer.said = lambda sample: "1" if chr(sample.prompt[0]) == "s" else f"{place_of(sample)}"
    worker, buffer, running = await make_worker.run(task_config=task_config)
    trained = Counter()
    for step in range(40):
        lease = await consume(buffer, step)
        trained.update(group.prompt.task for group in lease.groups)
    counters = await counters_at_end(worker, running, state)
    assert trained["open"] > 2 * trained["solved"] > 0
    assert counters["passed_over:solved"] > 10 and "passed_over:open" not in counters
    for task in ("open", "solved"):
        groups = counters[f"scored_groups:{task}"]
        all_equal = counters.get(f"zero_variance:{task}", 0)
        assert all_equal == (groups if task == "solved" else 0)
        assert counters[f"mean_rewards:{task}"] == groups * (1 if task == "solved" else 0.5)


async def test_epochs_go_on_after_a_restart_and_with_pools_no_prompt_is_lost_or_comes_twice(
    make_worker, state, completer
):
    rows = [{"question": "q" * n, "answer": "0"} for n in range(1, 6)]
    few = MixedTask(kind=TaskKind.questions, params={"questions": rows}, eval_size=1)
    task_config = TaskConfig(kind=TaskKind.mixture, tasks={"few": few}, pools=PoolsConfig(easy=0))
    completer.said = lambda sample: "1" if len(sample.prompt) < 3 else f"{place_of(sample)}"
    trained = []
    for steps in (range(8), range(8, 16)):  # the second worker is the first one, restarted
        worker, buffer, running = await make_worker.run(task_config=task_config)
        for step in steps:
            lease = await consume(buffer, step)
            trained += [group.prompt.index for group in lease.groups]
        counters = await counters_at_end(worker, running, state)
    begun = [*trained, *(one.index for one in (await buffer.task_progress(16)).untrained)]
    assert len(begun) == len({*begun})
    assert counters["passed_over:easy"] > 0
    assert (await state.task_positions())[0] <= len(begun) + counters["passed_over:easy"]
    task = build_task(task_config)
    # A group that was stopped before it knew of its credit has not begun its epoch.
    assert max(trained) // 4 < counters["epochs_begun:0/few"] <= max(begun) // 4 + 1
    assert epoch_of(task, max(begun))[1] == max(begun) // 4 + 1


async def test_group_takes_no_credit_before_there_is_room_for_its_samples(make_worker):
    room, asked = asyncio.Event(), []

    async def wait_room(num_samples):
        asked.append(num_samples)
        if len(asked) > 1:
            await room.wait()
        return 1

    make_worker.room = wait_room
    _, buffer, _ = await make_worker.run()
    await until(ready(buffer, 1))
    await until(lambda: asked == [2, 2])  # as many samples as a group has
    stats = await buffer.stats()
    assert (stats.ready, stats.running) == (1, 0)
    room.set()
    await until(ready(buffer, 2 * GROUPS_PER_STEP))


async def test_worker_fills_the_buffer_up_to_its_credits_only(make_worker, state, completer):
    written = []

    class Log:
        async def write(self, group, prompt_text, messages):
            said = [[one.role for one in messages[place]] for place in (0, 1)]
            assert said == 2 * [["user", "assistant"]]
            written.append((group.group_id, prompt_text))

    worker, buffer, running = await make_worker.run(log=Log())
    await until(ready(buffer, 2 * GROUPS_PER_STEP))
    await asyncio.sleep(0.3)
    stats = await buffer.stats()
    assert (stats.pushed, stats.ready, stats.running) == (4, 4, 0)
    lease = await consume(buffer, 0)
    assert {t.reward for group in lease.groups for t in group.trajectories} == {0.0, 1.0}
    assert {group.prompt.index for group in lease.groups} < {0, 1, 2, 3}  # whichever ended first
    await until(ready(buffer, 2 * GROUPS_PER_STEP))
    worker.stop()
    report = await running
    assert (report.num_groups, report.num_failed, report.num_too_old) == (6, 0, 0)
    counters = await state.counters()
    assert counters["tokens_generated"] == 6 * 2 * 3
    assert counters["completed:<=256"] == 6 and counters["episodes_ended:stop"] == 12
    assert counters["turns"] == counters["branches"] == 12
    assert "tokens_wasted" not in counters
    assert (await state.waits())[("rollout", "trainer")] > 0.2
    assert (await state.task_positions())[0] == 6
    assert (await buffer.stats()).is_conserved
    assert sorted(text for _, text in written) == ["0", "1", "2", "3", "4", "5"]


async def test_groups_that_the_trainer_waits_for_are_stopped_once_it_no_longer_does(
    make_worker, completer
):
    completer.held = lambda sample: True
    worker, buffer, running = await make_worker.run(max_staleness=0)
    await until(lambda: len(completer.asked) == 2 * GROUPS_PER_STEP)
    await buffer.change_settings({"on_stale": "wait"})
    await buffer.announce_version(1)
    await asyncio.sleep(0.3)  # an absence has no event
    assert completer.cancelled == []
    await buffer.change_settings({"on_stale": "drop"})
    await buffer.announce_version(2)
    await until(lambda: len(completer.cancelled) == 2 * GROUPS_PER_STEP)
    worker.stop()
    assert (await running).num_too_old == GROUPS_PER_STEP


async def test_groups_that_became_too_old_are_stopped_and_run_again(make_worker, state, completer):
    completer.held = lambda sample: True
    external = Waiting()
    worker, buffer = await make_worker(max_staleness=0, external=external)
    played = [External(make_worker.source) for _ in range(GROUPS_PER_STEP)]
    external.groups = list(played)
    running = await make_worker.start(worker)
    await until(lambda: len(completer.asked) == 2 * GROUPS_PER_STEP)
    completer.held = lambda sample: False
    completer.version = 1
    await buffer.announce_version(1)
    await asyncio.sleep(0.3)
    assert len(completer.asked) == 2 * GROUPS_PER_STEP  # the engine is still at version 0
    await state.record_commits({"engine-0": 1})
    await until(ready(buffer, GROUPS_PER_STEP))
    stats = await buffer.stats()
    assert stats.abandoned_by_reason == {"too_old": 2} and stats.requeued == 2
    for group in played:
        [why] = group.given_up
        assert "version 0, which at version 1 is too old" in why
    assert len(completer.cancelled) == 2 * GROUPS_PER_STEP
    assert sorted(completer.prompts) == ["0"] * 4 + ["1"] * 4
    worker.stop()
    assert (await running).num_too_old == 2
    counters = await state.counters()
    assert counters["given_up:<=256"] == 2 and counters["tokens_wasted"] == 4
    lease = await buffer.lease(step=0, version=1, num_groups=2, share=0, num_shares=1, timeout_s=60)
    assert {group.prompt.attempt for group in lease.groups} == {1}


async def test_group_that_can_still_be_trained_is_not_stopped(make_worker, completer):
    completer.held = lambda sample: True
    worker, buffer, running = await make_worker.run(max_staleness=1)
    await until(lambda: len(completer.asked) == 4 * GROUPS_PER_STEP)
    await buffer.announce_version(1)
    await asyncio.sleep(0.3)
    assert not completer.cancelled
    worker.stop()
    await running
    stats = await buffer.stats()
    assert stats.abandoned_by_reason == {"stopped": 4} and stats.running == 0


async def test_failed_prompt_runs_again_until_it_is_quarantined(make_worker, completer, state):
    """Prompt 0 fails once, prompt 1 always."""
    failed = []

    def fails(sample):
        text = chr(sample.prompt[0])
        is_bad = text == "1" or (text == "0" and "0" not in failed)
        failed.extend([text] if is_bad else [])
        return is_bad

    completer.failing = fails
    buffer, report = await fill(make_worker, max_group_failures=3)
    assert report.num_failed == 4
    stats = await buffer.stats()
    assert stats.abandoned_by_reason == {"failed": 4} and stats.rerun == 3
    (poisonous,) = await buffer.quarantined_prompts()
    assert (poisonous.index, poisonous.reason, poisonous.times) == (1, "failed", 3)
    counters = await state.counters()
    assert counters["prompts_quarantined"] == 1
    assert counters["samples_retried"] == len(failed)
    lease = await consume(buffer, 0, num_groups=4)
    assert sorted(group.prompt.index for group in lease.groups) == [0, 2, 3, 4]
    assert {len(group.trajectories) for group in lease.groups} == {2}


async def test_engine_that_fails_every_group_ends_the_worker(make_worker, completer):
    completer.failing = lambda sample: True
    worker, _ = await make_worker()
    with pytest.raises(GroupFailed, match="out of order"):
        async with asyncio.timeout(60):
            await worker.run()


async def test_groups_that_fail_with_one_process_are_one_failure_in_a_row(make_worker):
    worker, buffer = await make_worker()
    run, failed, death = make_worker.source.run, [], EpisodeFailed("its process ended")

    async def die(prompt, request):
        if len(failed) == 2 * MAX_FAILURES_IN_A_ROW:
            return await run(prompt, request)
        failed.append(prompt.index)
        raise death

    make_worker.source.run = die
    running = await make_worker.start(worker)
    await until(ready(buffer, 4))
    worker.stop()
    assert (await running).num_failed >= MAX_FAILURES_IN_A_ROW


async def test_prompts_beside_one_that_ends_their_environment_are_not_quarantined(make_worker):
    worker, buffer = await make_worker()
    run, all_run = make_worker.source.run, asyncio.Event()
    running, companies, deaths = Counter(), {}, []

    async def run_beside_prompt_1(prompt, request):
        nonlocal all_run
        running[prompt.index] += 1
        try:
            if len(deaths) < 2:  # all of the first four prompts run, and fail
                if running.total() == 4 * 2:
                    deaths.append(EnvironmentDied("its process ended"))
                    all_run.set()
                    all_run = asyncio.Event()
                else:
                    await all_run.wait()
                raise deaths[-1]
            companies.setdefault(prompt.index, set()).update(+running)
            if prompt.index == 1:
                raise EnvironmentDied("its process ended again")
            return await run(prompt, request)
        finally:
            running[prompt.index] -= 1

    make_worker.source.run = run_beside_prompt_1
    ended = await make_worker.start(worker)
    await until(ready(buffer, 4))
    worker.stop()
    await ended
    assert [companies[index] for index in range(4)] == [{0}, {1}, {2}, {3}]
    (poisonous,) = await buffer.quarantined_prompts()
    assert (poisonous.index, poisonous.reason) == (1, "failed")
    assert (await buffer.stats()).abandoned_by_reason == {"environment_died": 8, "failed": 1}
    lease = await consume(buffer, 0, num_groups=4)
    assert sorted(group.prompt.index for group in lease.groups) == [0, 2, 3, 4]


# The end of a group -------------------------------------------------------------------------------


@pytest.mark.parametrize("ending", ["publish", "stop"])
async def test_failed_group_always_gives_its_credit_back(make_worker, completer, ending):
    worker, buffer = await make_worker(max_staleness=0)
    completer.held = lambda sample: True
    # The other sample of the group has a token, so that the group can be too old.
    completer.failing = lambda sample: sample.prompt == [ord("0")] and place_of(sample) == 0
    buffer.before["fail"] = asyncio.Event()
    running = await make_worker.start(worker)
    await until(lambda: "fail" in buffer.waiting and len(completer.asked) >= 4)
    completer.failing = lambda sample: False
    if ending == "publish":
        completer.version = 1
        await buffer.announce_version(1)
    else:
        worker.stop()
    await asyncio.sleep(0.2)
    buffer.before["fail"].set()
    if ending == "publish":

        async def has_failed():
            return (await buffer.stats()).rerun == 1

        await until(has_failed)
        worker.stop()
    await running
    stats = await buffer.stats()
    num_stopped = stats.abandoned_by_reason.get("stopped", 0)
    assert num_stopped == (ending == "stop")  # its prompt runs again in a resumed run
    num_rerun = stats.rerun - num_stopped
    assert (stats.running, num_rerun, stats.abandoned_by_reason["failed"]) == (0, 1, 1)


async def test_prompts_of_groups_whose_push_fails_run_again(make_worker, state):
    worker, buffer = await make_worker()
    await buffer.change_settings({"capacity_groups": 2, "on_full": "error"})
    with pytest.raises(BufferFullError, match="no room for group"):
        await (await make_worker.start(worker))
    stats = await buffer.stats()
    num_begun = (await state.task_positions())[0]
    assert (stats.ready, stats.running) == (2, 0) and num_begun > 2
    assert stats.retries_waiting == num_begun - 2  # for the run when it is resumed


async def test_worker_that_ends_while_it_admits_groups_gives_credits_and_prompts_back(make_worker):
    make_worker.room = room_for(3)
    worker, buffer = await make_worker()
    buffer.after, buffer.before = {"admit_groups": asyncio.Event()}, {"abandon": asyncio.Event()}
    running = await make_worker.start(worker)
    await until(lambda: "admit_groups" in buffer.waiting)
    assert (await buffer.stats()).running == 3
    worker.stop()
    await asyncio.sleep(1.2)  # its loops are cancelled again and again
    buffer.before["abandon"].set()
    await running
    stats = await buffer.stats()
    assert (stats.running, stats.retries_waiting) == (0, 3)
    buffer, _ = await fill(make_worker)
    lease = await consume(buffer, 0, num_groups=4)
    assert sorted(group.prompt.index for group in lease.groups) == [0, 1, 2, 3]


@pytest.mark.parametrize(("room", "places", "num_calls"), [(1, 9, 4), (3, 9, 2), (9, 2, 1)])
async def test_groups_that_have_room_and_places_get_their_credits_in_one_call(
    make_worker, completer, room, places, num_calls
):
    completer.held = lambda sample: True
    make_worker.room = room_for(room)
    worker, buffer = await make_worker(max_groups_in_flight=places)
    buffer.before["admit_groups"] = asyncio.Event()
    buffer.before["admit_groups"].set()
    running = await make_worker.start(worker)
    await until(lambda: len(completer.asked) == 2 * min(4, places))
    assert num_calls <= len(buffer.waiting) <= num_calls + 1  # the last waits for a credit
    completer.held = lambda sample: False
    completer.go.set()
    await until(ready(buffer, 4))
    worker.stop()
    await running
    lease = await consume(buffer, 0, num_groups=4)
    orders = {int(group.group_id.split("-")[1]): group.prompt.index for group in lease.groups}
    assert orders == {0: 0, 1: 1, 2: 2, 3: 3}


async def test_groups_that_start_slowly_take_the_room_that_they_will_need(make_worker, monkeypatch):
    make_worker.room = room_for(3)
    worker, buffer = await make_worker(max_staleness=5)
    admit, calls, environment = ReplayBuffer.admit_groups, [], asyncio.Event()
    episodes = worker.episode_source.run

    async def noted(self, groups, *others):
        calls.append(len(groups))
        return await admit(self, groups, *others)

    async def slow(*request):
        await environment.wait()
        return await episodes(*request)

    monkeypatch.setattr(ReplayBuffer, "admit_groups", noted)
    monkeypatch.setattr(worker.episode_source, "run", slow)
    await make_worker.start(worker)
    await until(lambda: len(calls) > 3)
    assert calls[:4] == [3, 1, 1, 1]
    environment.set()
    await until(ready(buffer, 12))


async def test_group_that_got_no_prompt_leaves_the_others_their_own(make_worker, monkeypatch):
    make_worker.room = room_for(3)
    worker, buffer = await make_worker(max_staleness=2)
    admit, calls = ReplayBuffer.admit_groups, []

    async def without_the_first(self, groups, *others):
        calls.append(groups)
        first, *rest = await admit(self, groups, *others)
        return [first._replace(prompt=None), *rest] if len(calls) == 1 else [first, *rest]

    monkeypatch.setattr(ReplayBuffer, "admit_groups", without_the_first)
    running = await make_worker.start(worker)
    await until(ready(buffer, 5))
    worker.stop()
    await running
    lease = await consume(buffer, 0, num_groups=5)
    assert sorted(group.prompt.index for group in lease.groups) == [0, 1, 2, 3, 4]


async def test_prompt_that_runs_again_and_is_refused_leaves_its_credit_to_the_next(
    make_worker, state
):
    make_worker.room = room_for(3)
    worker, buffer = await make_worker(
        max_staleness=0, max_prompt_tokens=1, on_long_prompt=OnLongPrompt.skip
    )
    refs = [PromptRef(task="numbers", index=index) for index in (77, 5)]  # two tokens and one
    groups = [NewGroup(f"9-{ref.index}", ref) for ref in refs]
    for one in await buffer.admit_groups(groups, 60, worker=9):
        await buffer.abandon(one.group_id, "stopped", Rerun.always)
    running = await make_worker.start(worker)
    await until(ready(buffer, 2))
    worker.stop()
    await running
    lease = await consume(buffer, 0)
    assert sorted(group.prompt.index for group in lease.groups) == [0, 5]
    assert (await buffer.stats()).retries_waiting == 0
    assert (await state.task_positions())[0] == 1


async def test_group_stopped_before_its_push_is_counted_as_stopped(make_worker, state, completer):
    worker, buffer = await make_worker()
    buffer.before["push"] = asyncio.Event()
    running = await make_worker.start(worker)
    await until(lambda: buffer.waiting.count("push") == 4)
    worker.stop()
    assert (await running).num_groups == 0
    counters = await state.counters()
    assert counters["groups_stopped"] == 4
    assert counters["tokens_stopped"] == counters["tokens_generated"] == 4 * 2 * 3
    assert not {"completed:<=256", "given_up:<=256", "tokens_wasted"} & counters.keys()
    stats = await buffer.stats()
    assert (stats.running, stats.ready, stats.abandoned_by_reason) == (0, 0, {"stopped": 4})
    assert stats.retries_waiting == 4  # for the run when it is resumed


async def test_worker_that_drains_starts_nothing_and_ends_with_its_last_group(
    make_worker, state, completer
):
    completer.held = lambda sample: True
    worker, buffer, running = await make_worker.run(max_groups_in_flight=1)
    await until(lambda: len(completer.asked) == 2)
    draining = asyncio.create_task(worker.drain(300))
    completer.go.set()
    report = await running
    await draining
    assert report.num_groups == 1  # though three credits are free
    stats = await buffer.stats()
    assert (stats.running, stats.ready, stats.retries_waiting) == (0, 1, 0)
    assert "groups_stopped" not in await state.counters()


async def test_groups_that_outlast_a_drain_run_again_and_no_death_counts(make_worker, completer):
    completer.held = lambda sample: place_of(sample) == 1
    worker, buffer, running = await make_worker.run()
    await until(lambda: len(completer.asked) == 4 * 2)
    await worker.drain(0.05)
    assert (await running).num_groups == 0
    stats = await buffer.stats()
    assert (stats.running, stats.ready, stats.retries_waiting) == (0, 0, 4)
    assert await buffer.reclaim(0) == 0
    refs = []
    for n in range(4):
        refs.append((await buffer.admit(f"1-{n}", 60)).prompt)
    assert [ref.reruns for ref in refs] == [0] * 4 and not any(ref.is_suspect for ref in refs)


async def test_worker_without_groups_drains_at_once(make_worker):
    worker, buffer = await make_worker()
    buffer.before["admit_groups"] = asyncio.Event()
    running = await make_worker.start(worker)
    await until(lambda: buffer.waiting == ["admit_groups"])
    async with asyncio.timeout(60):
        await worker.drain(60)
        assert (await running).num_groups == 0
    assert (await buffer.stats()).running == 0


async def test_group_stopped_after_its_push_is_complete(make_worker, state):
    worker, buffer = await make_worker()
    buffer.after["push"] = asyncio.Event()
    running = await make_worker.start(worker)
    await until(ready(buffer, 4))
    worker.stop()
    assert (await running).num_groups == 4
    counters = await state.counters()
    assert counters["completed:<=256"] == 4 and counters["episodes_ended:stop"] == 8
    assert "tokens_wasted" not in counters and "given_up:<=256" not in counters


async def test_group_that_ignores_its_cancellation_is_cancelled_again(make_worker, completer):
    completer.held, completer.is_deaf = lambda sample: True, True
    worker, buffer, running = await make_worker.run(stop_again_s=0.2)
    await until(lambda: len(completer.asked) == 8)
    worker.stop()
    async with asyncio.timeout(60):
        await running
    assert (await buffer.stats()).running == 0


# External groups ---------------------------------------------------------------------------------


async def test_external_group_waits_for_a_credit_like_any_other_and_is_not_in_the_median(
    make_worker, completer
):
    external = Waiting()
    worker, buffer, running = await make_worker.run(external=external)
    await until(ready(buffer, 4))
    group = External(make_worker.source)
    external.groups.append(group)
    await asyncio.sleep(0.2)
    assert external.groups == [group]  # no credit, no group; its program may still leave
    await consume(buffer, 0)
    await until(ready(buffer, 4))
    worker.stop()
    assert (await running).num_groups == 6
    assert group.prompts == [4, 4] and external.is_closed
    assert len(worker._durations) == 5


async def test_prompt_of_failed_external_group_reruns_without_blame(make_worker, completer, state):
    external = Waiting()
    worker, buffer = await make_worker(external=external, max_group_failures=1)
    external.groups = [External(make_worker.source, fails=True) for _ in range(3)]
    gone = list(external.groups)
    running = await make_worker.start(worker)
    await until(ready(buffer, 4))
    worker.stop()
    assert (await running).num_failed == 0
    stats = await buffer.stats()
    assert stats.abandoned_by_reason == {"outside": 3}
    assert (stats.rerun, stats.retries_waiting, stats.prompts_quarantined) == (3, 0, 0)
    lease = await consume(buffer, 0, num_groups=4)
    assert sorted(group.prompt.index for group in lease.groups) == [0, 1, 2, 3]
    assert {group.prompt.attempt for group in lease.groups} == {0}
    assert all(group.given_up == ["its program went away"] for group in gone)


async def test_missing_credit_within_the_limit_is_an_error(make_worker):
    worker, _ = await make_worker(wait_timeout_s=0.5)
    with pytest.raises(TimeoutError, match="no room for group"):
        async with asyncio.timeout(60):
            await worker.run()


# Restart -----------------------------------------------------------------------------------------


async def test_restarted_worker_runs_its_prompts_again_and_continues_its_stream(
    make_worker, completer, state
):
    completer.held = lambda sample: True
    _, buffer = await make_worker()
    for serial in range(3):  # left by the worker before the restart
        await buffer.admit(f"0-{serial}-dead", 60)
        prompt = PromptRef(task="numbers", index=serial)
        await buffer.begin(f"0-{serial}-dead", prompt, 0, serial + 1)
    completer.held = lambda sample: False
    buffer, _ = await fill(make_worker)
    lease = await consume(buffer, 0, num_groups=4)
    assert sorted(group.prompt.index for group in lease.groups) == [0, 1, 2, 3]
    stats = await buffer.stats()
    assert stats.abandoned_by_reason == {"worker_died": 3} and stats.rerun == 3
    assert (await state.task_positions())[0] == 4


async def test_samples_begin_with_tokens_that_a_dead_worker_sampled(make_worker, completer, state):
    completer.held = lambda sample: place_of(sample) == 1 and sample.prompt == [ord("0")]
    worker, buffer = await make_worker(keep_every_tokens=1)
    running = await make_worker.start(worker)
    await until(ready(buffer, 3))
    prompt = PromptRef(task="numbers", index=0)
    (group_id,) = {one.group_id for one in worker._runs.values() if one.ref == prompt}
    await until(lambda: buffer.kept_tokens(group_id, prompt))  # the first token of the one held
    completer.version, num_asked = 1, len(completer.asked)
    completer.held = lambda sample: False
    buffer.before["admit_groups"] = asyncio.Event()  # it has no more say
    await buffer.reclaim(0)
    worker.stop()
    await running

    other, buffer, running = await make_worker.run(keep_every_tokens=1)
    await until(ready(buffer, 4))
    (again,) = [one for one in completer.asked[num_asked:] if one.prompt == [ord("0")]]
    assert place_of(again) == 1, "the other had ended, and is not sampled again"
    lease = await consume(buffer, 0, num_groups=4)
    (group,) = [group for group in lease.groups if group.prompt.index == 0]
    assert [dict(one.tokens_by_version) for one in group.trajectories] == [{0: 3}, {0: 1, 1: 2}]
    assert [one.reward for one in group.trajectories] == [0, 1]
    other.stop()
    await running
    counters = await state.counters()
    assert counters["tokens_restored"] == 3 + 1


@pytest.mark.parametrize(("keep_every", "num_kept"), [(1024, 1), (0, 0)])
async def test_worker_that_stops_keeps_what_it_has_unless_the_setting_forbids_it(
    make_worker, completer, state, keep_every, num_kept
):
    completer.held = lambda sample: True
    worker, buffer, running = await make_worker.run(keep_every_tokens=keep_every)
    await until(lambda: len(completer.asked) == 4 * GROUPS_PER_STEP)
    worker.stop()
    await running
    completer.held = lambda sample: False
    completer.version = 1
    buffer, _ = await fill(make_worker, keep_every_tokens=keep_every)
    lease = await consume(buffer, 0, num_groups=4)
    by_version = {0: 2, 1: 4} if num_kept else {1: 6}
    assert all(group.tokens_by_version == by_version for group in lease.groups)
    counters = await state.counters()
    assert counters.get("tokens_restored", 0) == 8 * num_kept
    assert counters["tokens_generated"] == 8 * (4 - num_kept)


async def test_prompt_with_which_two_workers_died_runs_alone(make_worker, completer):
    gates = {text: asyncio.Event() for text in ("0", "1", "7")}
    completer.hold = lambda sample: gates.get("".join(map(chr, sample.prompt)))
    worker, buffer = await make_worker(max_groups_in_flight=2)
    worker.spec.buffer.lease_timeout_s = 0.3
    renewed = []
    renew = buffer.renew_credits
    buffer.renew_credits = lambda ids: (renewed.append(list(ids)), renew(ids))[1]
    running = await make_worker.start(worker)
    await until(lambda: {*completer.prompts} == {"0", "1"})
    await buffer.admit("9-9-dead", 60)
    await buffer.begin("9-9-dead", PromptRef(task="numbers", index=7, reruns=2), 9, 1)
    await buffer.abandon("9-9-dead", "stopped", Rerun.always)
    gates["0"].set()
    await until(ready(buffer, 1))
    renewed.clear()
    await until(lambda: any(len(ids) == 2 for ids in renewed))  # the waiting group's, too
    assert {*completer.prompts} == {"0", "1"}, "it waits for the other group"
    assert (await buffer.stats()).running == 2
    gates["1"].set()
    await until(lambda: "7" in completer.prompts)
    await until(ready(buffer, 2))
    assert {*completer.prompts} == {"0", "1", "7"}, "no other starts beside it"
    gates["7"].set()
    await until(ready(buffer, 4))
    worker.stop()
    await running
    stats = await buffer.stats()
    assert stats.prompts_quarantined == 0


async def test_death_of_a_worker_at_which_a_suspect_waits_is_not_its_fault(make_worker, completer):
    gates = {"0": asyncio.Event(), "7": asyncio.Event()}
    completer.hold = lambda sample: gates.get("".join(map(chr, sample.prompt)))
    worker, buffer = await make_worker(max_groups_in_flight=2)
    suspect = PromptRef(task="numbers", index=7, reruns=2)
    await buffer.admit("9-9-dead", 60)
    await buffer.begin("9-9-dead", suspect, 9, 1)
    running = await make_worker.start(worker)
    await until(lambda: "0" in completer.prompts)
    await buffer.abandon("9-9-dead", "stopped", Rerun.always)
    await until(lambda: worker._waiting is not None)
    await buffer.reclaim(worker.index)  # as the worker that replaces it does
    assert (await buffer.stats()).prompts_quarantined == 0
    gates["0"].set()
    gates["7"].set()
    worker.stop()
    await running


# Tail ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keep_partial", "tokens_by_version", "num_wasted"),
    [(True, {0: 2, 1: 4}, None), (False, {1: 6}, 8)],
)
async def test_interrupted_groups_end_with_tokens_of_the_next_version_and_keep_earlier_ones_or_not(
    make_worker, completer, state, keep_partial, tokens_by_version, num_wasted
):
    completer.held = lambda sample: True
    worker, buffer, running = await make_worker.run(
        tail=TailPolicy.interrupt_and_resume, keep_partial=keep_partial
    )
    await until(lambda: len(completer.asked) == 4 * GROUPS_PER_STEP)
    completer.held = lambda sample: False
    completer.version = 1
    await buffer.announce_version(1)
    await asyncio.sleep(0.2)
    assert (await buffer.stats()).ready == 0  # they wait for the engine
    await state.record_commits({"engine-0": 1})
    await until(ready(buffer, 2 * GROUPS_PER_STEP))
    counters = await counters_at_end(worker, running, state)
    assert counters["samples_interrupted"] == counters["samples_resumed"] == 8
    assert counters.get("tokens_wasted") == num_wasted
    assert counters["tokens_generated"] == 8 * 3 + (num_wasted or 0)
    lease = await buffer.lease(step=0, version=1, num_groups=4, share=0, num_shares=1, timeout_s=60)
    for group in lease.groups:
        assert group.tokens_by_version == tokens_by_version


@pytest.mark.parametrize(("keep_partial", "num_wasted"), [(True, None), (False, 2)])
async def test_postponed_group_is_finished_with_its_earlier_tokens_or_from_its_prompt(
    make_worker, completer, state, monkeypatch, keep_partial, num_wasted
):
    monkeypatch.setattr(stragglers, "SLOW_FACTOR", 15.0)  # so slow only the held one becomes
    completer.held = lambda sample: sample.prompt == [ord("0")]
    completer.pause_s = 0.2
    worker, buffer = await make_worker(
        max_staleness=3, tail=TailPolicy.postpone, max_postponements=1, keep_partial=keep_partial
    )
    running = await make_worker.start(worker)

    step = 0
    async with asyncio.timeout(60):
        while not (await state.counters()).get("groups_postponed"):
            if (await buffer.stats()).ready > 4:  # a batch stays there, and others run
                await consume(buffer, step, num_groups=1)
                step += 1
            await asyncio.sleep(0.02)
    await until(ready(buffer, 7))  # it is alone: there is no group to give way to
    await asyncio.sleep(1.0)
    completer.go.set()
    await until(ready(buffer, 8))
    counters = await counters_at_end(worker, running, state)
    assert counters["groups_postponed"] == 1
    assert counters["samples_resumed"] == counters["samples_interrupted"] == 2
    assert counters.get("tokens_wasted") == num_wasted


async def test_live_policy_takes_over_the_groups_in_flight_and_the_next_releases_what_waits(
    make_worker, completer, state
):
    completer.held = lambda sample: sample.prompt == [ord("0")]
    worker, buffer, running = await make_worker.run(max_staleness=60)
    await until(ready(buffer, 61 * GROUPS_PER_STEP - 1))
    completer.held = lambda sample: False
    await buffer.change_settings({"tail": "interrupt_and_resume"})
    version = 0
    while not (await state.counters()).get("samples_interrupted"):
        version += 1  # until one comes after the change
        await buffer.announce_version(version)
        await asyncio.sleep(0.1)
    await asyncio.sleep(1.2)  # as long as counts may take
    assert "samples_resumed" not in await state.counters()  # they wait for the engine
    await buffer.change_settings({"tail": "continue_across_versions"})
    await until(ready(buffer, 61 * GROUPS_PER_STEP))
    counters = await counters_at_end(worker, running, state)
    assert counters["samples_interrupted"] == counters["samples_resumed"] == 2


# Dynamic sampling ---------------------------------------------------------------------------------


async def test_groups_without_variance_are_left_out_and_others_run(make_worker, completer, state):
    completer.said = lambda sample: (
        "00" if int(chr(sample.prompt[0])) % 2 else f"0{place_of(sample)}"
    )
    buffer, _ = await fill(make_worker, filter_zero_variance=True)
    lease = await consume(buffer, 0, num_groups=4)
    assert sorted(group.prompt.index for group in lease.groups) == [0, 2, 4, 6]
    stats = await buffer.stats()
    assert stats.abandoned_by_reason == {"zero_variance": 3} and stats.requeued == stats.rerun == 0
    counters = await state.counters()
    assert counters["groups_filtered"] == 3 and counters["tokens_filtered"] == 3 * 2 * 3


async def test_filter_that_is_set_during_the_run_works_from_then_on(make_worker, completer, state):
    completer.said = lambda sample: "00"
    worker, buffer, running = await make_worker.run()
    await until(ready(buffer, 2 * GROUPS_PER_STEP))
    assert "groups_filtered" not in await state.counters()
    await buffer.change_settings({"filter_zero_variance": "True", "max_filtered_ratio": "2.0"})
    await until(lambda: worker._group_runner._filter is not None)
    await consume(buffer, 0)
    await until(ready(buffer, 2 * GROUPS_PER_STEP))
    counters = await counters_at_end(worker, running, state)
    assert counters["groups_filtered"] == 2 * 2 and counters["zero_variance_kept"] == 2


async def test_size_temperature_and_number_of_groups_change_for_those_that_begin(
    make_worker, completer, state
):
    completer.held = lambda sample: True
    worker, buffer, running = await make_worker.run(max_groups_in_flight=1)
    await until(lambda: len(completer.asked) == 2)
    await buffer.change_settings(
        {"group_size": "3", "temperature": "0.5", "max_groups_in_flight": "2"}
    )
    await until(lambda: len(completer.asked) == 2 + 3)
    completer.held = lambda sample: False
    completer.go.set()
    await until(ready(buffer, 2 * GROUPS_PER_STEP))
    lease = await consume(buffer, 0)
    sizes = {(len(g.trajectories), g.sampling.temperature) for g in lease.groups[1:]}
    first = lease.groups[0]
    assert (len(first.trajectories), first.sampling.temperature) == (2, 1.0)
    assert sizes == {(3, 0.5)}
    worker.stop()
    await running


async def test_paused_run_admits_nothing_and_its_pause_is_no_wait(make_worker, state):
    worker, buffer = await make_worker()
    await buffer.change_settings({"paused": "True"})
    running = await make_worker.start(worker)
    await until(lambda: worker._admission is not None)
    await asyncio.sleep(0.3)  # an absence has no event
    assert (await buffer.stats()).running == 0 and not running.done()
    ended = time.monotonic()
    await buffer.change_settings({"paused": "False"})
    await until(ready(buffer, 2 * GROUPS_PER_STEP))
    waited_s = (await state.waits()).get(("rollout", "trainer"), 0.0)
    assert waited_s <= time.monotonic() - ended
    worker.stop()
    await running


async def test_idle_external_group_keeps_its_credit_while_the_run_is_paused(
    make_worker, monkeypatch
):
    monkeypatch.setattr(loop, "IDLE_CHECK_INTERVAL_S", 0.01)
    external, looks = Waiting(), []
    worker, buffer = await make_worker(external=external, max_groups_in_flight=1)
    external.groups = [group := External(make_worker.source)]
    group.run = lambda prompt, request: asyncio.Event().wait()
    running = await make_worker.start(worker)
    await until(lambda: worker._runs)

    def idle_for(_):
        looks.append(None)
        return [run for run in worker._runs.values() if run.stopped_for is None]

    await buffer.change_settings({"paused": "True"})
    monkeypatch.setattr(worker, "_idle_for", idle_for)
    await until(lambda: len(looks) > 5)
    assert group.given_up == []
    await buffer.change_settings({"paused": "False"})
    await until(lambda: group.given_up)
    worker.stop()
    await running


async def test_first_groups_of_a_restarted_worker_have_the_live_settings(
    make_worker, completer, state, monkeypatch
):
    worker, buffer = await make_worker(max_staleness=0)
    completer.held = lambda sample: True
    await buffer.change_settings({"group_size": "3", "filter_zero_variance": "True"})
    # It never hears of a later change.
    monkeypatch.setattr(state, "wait_settings_changed", lambda *_: asyncio.Event().wait())
    running = await make_worker.start(worker)
    await until(lambda: len(completer.asked) == 3 * GROUPS_PER_STEP)
    assert worker._group_runner._filter is not None
    worker.stop()
    await running


async def test_setting_that_cannot_be_read_ends_the_worker_and_is_named(make_worker):
    _, buffer, running = await make_worker.run()
    await buffer.change_settings({"tail": "hurry"})
    with pytest.raises(ValueError, match=r"rollout\.tail='hurry'"):
        await asyncio.wait_for(running, 60)


async def test_rewards_of_a_broken_scorer_leave_no_group_out(make_worker, completer, scorer, state):
    completer.said = lambda sample: "00"
    scorer.failures = {"judge": "no answer"}
    await fill(make_worker, filter_zero_variance=True)
    counters = await state.counters()
    assert counters["rewards_failed"] == 8 and "groups_filtered" not in counters


async def test_worker_ends_where_every_prompt_is_too_long(make_worker, state, monkeypatch):
    monkeypatch.setattr(loop, "MAX_SKIPPED", 5)

    def example(_, index):
        return Prompt(index=index, is_held_out=False, text="77")

    monkeypatch.setattr(Numbers, "example", example)
    long = {"max_prompt_tokens": 1, "on_long_prompt": OnLongPrompt.skip}
    _, _, running = await make_worker.run(**long)
    with pytest.raises(ValueError, match="max_prompt_tokens=1: 5 prompts in a row are longer"):
        await asyncio.wait_for(running, 60)
    assert (await state.counters())["prompts_skipped"] == 5


async def test_too_long_prompts_are_skipped(make_worker, completer, state, monkeypatch):
    monkeypatch.setattr(Numbers, "long", 2)
    _, report = await fill(make_worker, max_prompt_tokens=1, on_long_prompt=OnLongPrompt.skip)
    assert set(completer.prompts) == {"0", "1", "3", "4"}
    assert report.num_skipped == (await state.counters())["prompts_skipped"] == 1
