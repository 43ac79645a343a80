"""The clock of an episode is paused while it waits for a slot at an engine."""

from __future__ import annotations

import asyncio

from buffer.types import SamplingParams
from configs.rollout_schema import RolloutConfig, TaskConfig
from rollout_pool.episodes.environment import SingleTurn
from rollout_pool.episodes.episode import EpisodeClock, EpisodeFailed, EpisodeRequest
from rollout_pool.episodes.runner import EpisodeRunner
from rollout_pool.sampling.group_samples import Activity
from rollout_pool.sampling.router import Router
from rollout_pool.sampling.sampler import Sampler
from tests.support.rollout import EOS, plain_chat, until, write


class SlowEngine:
    """Takes `seconds` over a sample; "stop" ends it without a token."""

    name = "engine-0"

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.num_asked = 0
        self._stops: dict[str, asyncio.Event] = {}

    def note_version(self, version):
        return

    async def generate_tokens(self, sample, request_id, on_arrival=None):
        self.num_asked += 1
        stop = self._stops[request_id] = asyncio.Event()
        try:
            async with asyncio.timeout(self.seconds):
                await stop.wait()
                return
        except TimeoutError:
            pass
        write(sample, [EOS], version=0)
        sample.finish_reason = "stop"
        on_arrival()

    def stop(self, request_id):
        self._stops[request_id].set()


def make_runner(engine: SlowEngine, timeout_s: float) -> EpisodeRunner:
    """With a single place for all of its samples."""
    router = Router([engine], wait_timeout_s=300.0, max_running_requests=1)
    router.follow({"engine-0": 0}, 0, 0)
    chat = plain_chat()
    task = TaskConfig(episode_timeout_s=timeout_s)
    return EpisodeRunner(Sampler(router, max_retries=1), chat, task, RolloutConfig())


async def play_all(runner: EpisodeRunner, number: int):
    asks = [EpisodeRequest(session=f"s{i}", sampling=SamplingParams()) for i in range(number)]
    playing = (runner.run(SingleTurn("?"), ask) for ask in asks)
    async with asyncio.timeout(3600):
        return await asyncio.gather(*playing, return_exceptions=True)


async def test_episodes_that_wait_for_the_only_slot_do_not_time_out(advance_clock) -> None:
    engine = SlowEngine(60.0)
    playing = asyncio.create_task(play_all(make_runner(engine, timeout_s=120.0), 12))
    for number in range(12):
        await until(lambda number=number: engine.num_asked > number)
        advance_clock(60.0)
    episodes = await playing
    assert [getattr(episode, "end", episode) for episode in episodes] == ["done"] * 12
    assert engine.num_asked == 12


async def test_sample_that_takes_too_long_at_its_engine_times_out_after_a_wait() -> None:
    episodes = await play_all(make_runner(SlowEngine(60.0), timeout_s=0.2), 3)
    for episode in episodes:
        assert isinstance(episode, EpisodeFailed) and "episode_timeout" in str(episode)


async def test_clock_rings_once_its_own_time_is_over(advance_clock) -> None:
    clock, rung = EpisodeClock(100.0), []
    with clock.alarm(lambda: rung.append(1)):
        with clock.paused():
            with clock.paused():  # two wait at once
                advance_clock(300.0)
                await asyncio.sleep(0.01)
            advance_clock(100.0)
            await asyncio.sleep(0.01)
            assert 40.0 < clock.left_s <= 100.0
        advance_clock(40.0)
        await asyncio.sleep(0.01)
        assert not rung and 0.0 < clock.left_s <= 60.0
        advance_clock(60.0)
        await asyncio.sleep(0.01)
        assert rung == [1]
        advance_clock(100.0)
        await asyncio.sleep(0.01)
    assert rung == [1] and clock.left_s == 0


async def test_clock_without_an_alarm_does_not_ring() -> None:
    clock, rung = EpisodeClock(0.05), []
    with clock.alarm(lambda: rung.append(1)):
        pass
    await asyncio.sleep(0.1)
    assert not rung and clock.left_s == 0
    with clock.alarm(lambda: rung.append(1)):
        await asyncio.sleep(0.05)
    assert rung == [1]


def test_group_idles_only_while_open_sessions_have_no_request():
    activity = Activity()
    assert activity.idle_s == 0  # no session is open
    activity.note(sessions=2)
    assert activity.idle_s > 0
    activity.note(requests=1)
    activity.note(requests=1)
    activity.note(requests=-1)
    assert activity.idle_s == 0  # the other request
    activity.note(requests=-1)
    activity.note(sessions=-1)
    assert activity.idle_s > 0
    activity.note(sessions=-1)
    assert activity.idle_s == 0  # scored and pushed meanwhile
