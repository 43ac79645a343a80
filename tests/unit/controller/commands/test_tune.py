"""`leash tune` on a run's Redis."""

from __future__ import annotations

import asyncio
import os
import pwd
import re
import shlex
import socket
from dataclasses import replace
from threading import Event
from typing import Any

import pytest
from ray.exceptions import RaySystemError

from buffer.redis.client import BufferConnectionError
from buffer.redis.connection import connect
from buffer.run_state import STREAM_START, MetricsEntry, RunState
from configs.load import load_config
from configs.run_files import Scalar
from configs.schema import BufferConfig
from controller.buffer_access import BufferAddress
from controller.commands import tune as tune_module
from controller.commands.tune import Autotuner
from controller.main import EXIT_BAD_INPUT
from controller.metrics.history import TUNED, MetricsLog, Record, change_words
from controller.run_dir import RunDir
from controller.start.plan import FLOAT32_DIFF
from controller.watch.autotune import ENGINES, Move
from controller.watch.run_view import RunView
from tests.support.buffer.groups import make_group
from tests.support.controller.buffers import Command, opened
from tests.support.controller.records import STATS, step_record


@pytest.fixture
def open_run(live_run: RunDir, redis_url: str) -> RunDir:
    """One whose buffer is open, as that of a launch."""

    async def open_it() -> None:
        async with opened(redis_url, live_run.name, 4):
            pass

    asyncio.run(open_it())
    return live_run


def test_settings_change_together_and_later_ones_are_checked_against_them(
    open_run: RunDir, leash: Command
) -> None:
    told = leash("tune", "rollout.tail=postpone", "rollout.oversampling=1.5")
    assert told.splitlines() == [
        f"{open_run.name}: rollout.tail continue_across_versions -> postpone",
        f"{open_run.name}: rollout.oversampling 1.0 -> 1.5",
    ]
    # With the tail policy of the launch nothing would be stopped, and this would be refused.
    told = leash("tune", "rollout.keep_partial=false", "buffer.max_staleness=3")
    assert "rollout.keep_partial True -> False" in told and "max_staleness 2 -> 3" in told
    error = leash("tune", "rollout.tail=continue_across_versions", exit_code=EXIT_BAD_INPUT)
    assert "rollout.keep_partial=False: rollout.tail=continue_across_versions stops no" in error
    told = leash("tune", "trainer.min_groups_per_step=4", "trainer.batch_timeout_s=1")
    assert "trainer.min_groups_per_step null -> 4" in told and "_s 60.0 -> 1.0" in told
    assert "_step 4 -> null" in leash("tune", "trainer.min_groups_per_step=null")
    told = leash("tune", "rollout.tail=interrupt_and_resume")
    assert "rollout.tail postpone -> interrupt_and_resume" in told


def test_change_is_recorded_with_who_made_it(open_run: RunDir, leash: Command) -> None:
    leash("tune", "buffer.max_staleness=3", "rollout.oversampling=1.5")

    async def recorded() -> list[MetricsEntry]:
        state = RunState(await connect(str(open_run.read_redis_url())), open_run.name)
        entries = await state.read_metrics(STREAM_START, block_s=0)
        await state.close()
        return entries

    first, second = asyncio.run(recorded())
    assert first.kind == second.kind == "tuned"
    who = f"{pwd.getpwuid(os.getuid()).pw_name}@{socket.gethostname()}"
    change = {"setting": "buffer.max_staleness", "before": "2", "after": "3", "who": who}
    assert first.record == change and second.record["setting"] == "rollout.oversampling"


@pytest.fixture
def overtaken(open_run: RunDir, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Changes that others make after the next command has read the settings."""
    by_others, check = list[str](), tune_module._checked

    def checked(*args: Any) -> Any:
        now, by_others[:] = list(by_others), []
        for one in now:
            tune_module.tune(open_run, [one])
        return check(*args)

    monkeypatch.setattr(tune_module, "_checked", checked)
    return by_others


def test_change_that_came_in_between_is_shown_as_what_was_replaced(
    open_run: RunDir, leash: Command, overtaken: list[str]
) -> None:
    overtaken[:] = ["buffer.max_staleness=3", "rollout.tail=postpone"]
    printed = leash("tune", "buffer.max_staleness=4", "rollout.oversampling=2").splitlines()
    assert [line.partition(": ")[2] for line in printed] == [
        "buffer.max_staleness 2 -> 3",
        "rollout.tail continue_across_versions -> postpone",
        "buffer.max_staleness 3 -> 4",
        "rollout.oversampling 1.0 -> 2.0",
    ]


def test_change_with_which_another_is_no_longer_legal_lets_it_be_refused(
    leash: Command, overtaken: list[str]
) -> None:
    leash("tune", "rollout.tail=postpone")
    overtaken[:] = ["rollout.tail=continue_across_versions"]
    error = leash("tune", "rollout.keep_partial=false", exit_code=EXIT_BAD_INPUT)
    assert "rollout.keep_partial=False: rollout.tail=continue_across_versions stops no" in error


def test_suggestion_of_tune_without_a_setting_can_be_pasted(
    open_run: RunDir, leash: Command
) -> None:
    error = leash("tune", exit_code=EXIT_BAD_INPUT)
    (command,) = re.findall(r"as (make tune .*?)\. What", error)
    target, words = shlex.split(command)[1:]
    assert target == "tune" and words.startswith("ARGS=")
    overrides = words.removeprefix("ARGS=").split()
    assert load_config(overrides) != load_config([])
    assert leash("tune", *overrides).count(" -> ") == len(overrides)


@pytest.mark.parametrize(
    ("override", "reason"),
    [
        ("buffer.on_stale=mask_tokens", "choose among requeue, drop and wait"),
        ("buffer.capacity_groups=3", "would never fit"),
        ("buffer.selector=shortest", "the groups that the buffer holds are stored by it"),
        ("trainer.groups_per_step=2", "read it once, when they start"),
        (
            "rollout.tale=postpone",
            "rollout.tale: there is no such setting; did you mean rollout.tail?",
        ),
        ("weight_sync=in_place", "weight_sync: there is no such setting"),
        ("rollout.oversampling=0.5", "must be at least 1"),
        ("rollout.tail=hurry", "expected one of continue_across_versions"),
        ("buffer.max_staleness=-1", "must be 0 to"),
    ],
)
def test_refused_settings_change_nothing_and_say_why(
    open_run: RunDir, leash: Command, override: str, reason: str
) -> None:
    error = leash("tune", "rollout.oversampling=2", override, exit_code=EXIT_BAD_INPUT)
    assert override.partition("=")[0] in error and reason in error
    assert "rollout.oversampling 1.0 -> 3.0" in leash("tune", "rollout.oversampling=3")


def test_values_that_the_rules_of_the_run_forbid_are_refused(
    open_run: RunDir, leash: Command
) -> None:
    assert "on_stale requeue -> wait" in leash("tune", "buffer.on_stale=wait")
    error = leash("tune", "buffer.capacity_groups=20", exit_code=EXIT_BAD_INPUT)
    assert "buffer.capacity_groups=20: with buffer.on_stale=wait the trainer would wait" in error
    error = leash("tune", "rollout.tail=postpone", exit_code=EXIT_BAD_INPUT)
    assert "with buffer.on_stale=wait the trainer waits" in error


def test_limits_and_a_pause_are_set_and_lifted(open_run: RunDir, leash: Command) -> None:
    told = leash("tune", "buffer.capacity_groups=90", "buffer.paused=true")
    assert "capacity_groups null -> 90" in told and "paused False -> True" in told
    assert "capacity_groups 90 -> null" in leash("tune", "buffer.capacity_groups=null")
    leash("tune", "trainer.learning_rate=3e-6", "rollout.eval_every=7", "rollout.group_size=4")
    told = leash("tune", "trainer.learning_rate=2e-6", "rollout.sampling.temperature=1.1")
    assert "learning_rate 3e-06 -> 2e-06" in told and "temperature 0.5 -> 1.1" in told


def test_temperature_at_which_the_trainer_would_end_the_run_is_refused(
    open_run: RunDir, leash: Command
) -> None:
    error = leash("tune", "rollout.sampling.temperature=0.25", exit_code=EXIT_BAD_INPUT)
    assert "rollout.sampling.temperature=0.25: it multiplies by what rounding lets" in error
    # In float32 on a CPU the bound is the same at any temperature.
    with MetricsLog(open_run.metrics) as log:
        log.append("step", {"step": 1, "version": 0, "logprob_diff_bound": FLOAT32_DIFF})
    assert "0.5 -> 0.25" in leash("tune", "rollout.sampling.temperature=0.25")


def test_capacity_in_bytes_that_groups_may_exceed_is_refused(
    live_run: RunDir, leash: Command, redis_url: str
) -> None:
    config = load_config(["buffer.shards=2", "trainer.groups_per_step=4"])
    live_run.write_config(config)

    async def push(*ids: str) -> int:
        async with opened(redis_url, live_run.name, 4, shards=2) as buffer:
            for group_id in ids:
                await buffer.push(make_group(group_id))
            return (await buffer.stats()).bytes

    asyncio.run(push())
    error = leash("tune", "buffer.capacity_bytes=1000000", exit_code=EXIT_BAD_INPUT)
    assert "the buffer holds no group now by which to judge it" in error
    size = asyncio.run(push("a"))
    # Enough for an update, but too little for a large group in either shard.
    error = leash("tune", f"buffer.capacity_bytes={7 * size}", exit_code=EXIT_BAD_INPUT)
    assert f"would not fit; set at least {8 * size}, or null" in error
    leash("tune", f"buffer.capacity_bytes={8 * size}")
    larger = f"rollout.group_size={2 * config.rollout.group_size}"
    error = leash("tune", larger, exit_code=EXIT_BAD_INPUT)
    assert f"capacity_bytes={8 * size}: the groups of one update, or a large one" in error
    leash("tune", larger, "buffer.capacity_bytes=null")


def test_staleness_that_the_algorithm_does_not_correct_is_refused(
    open_run: RunDir, leash: Command
) -> None:
    leash("tune", "buffer.max_staleness=0")
    config = load_config(["buffer.max_staleness=0", "algorithm.correction=[]"])
    open_run.write_config(config)
    assert "batch_timeout_s 60.0 -> 1.0" in leash("tune", "trainer.batch_timeout_s=1")
    error = leash("tune", "buffer.max_staleness=1", exit_code=EXIT_BAD_INPUT)
    assert "algorithm.loss=ppo would treat tokens of older versions as the trained one's" in error


def test_run_that_is_over_is_not_tuned(open_run: RunDir, leash: Command) -> None:
    assert "name a setting" in leash("tune", exit_code=EXIT_BAD_INPUT)
    open_run.write_record(replace(open_run.read_record(), state="finished", process_started=0.0))
    error = leash("tune", "rollout.tail=postpone", exit_code=EXIT_BAD_INPUT)
    assert "is not running, so there is nothing to tune" in error


def test_run_that_is_starting_is_not_tuned_yet(run_dir: RunDir, leash: Command) -> None:
    error = leash("tune", "rollout.tail=postpone", exit_code=EXIT_BAD_INPUT)
    assert "is starting; its Redis is not up yet: try again soon" in error


@pytest.fixture
def lazy_trainer(open_run: RunDir) -> RunView:
    """A run whose trainer has never waited, with buffer.max_staleness=2."""
    config = load_config(["buffer.autotune={steps: 5}", "rollout.num_engines=2"])
    open_run.write_config(config)
    view = RunView(run=open_run.name, config=config, started=0.0)
    view.phase, view.stats = "training", STATS
    for step in range(12):
        view.apply(step_record(step, 1.0 + step, lease_wait_s=0.0, ess=0.9))
    return view


def look_twice(
    open_run: RunDir, url: str, view: RunView, said: list[str] | None = None, num_free: int = 0
) -> list[MetricsEntry]:
    """The changes that autotune has recorded then."""
    settings = load_config(["buffer.autotune={steps: 5}"]).buffer
    address = BufferAddress(url=url, run=open_run.name, settings=settings)
    tuner = Autotuner(
        address,
        open_run,
        say=pytest.fail if said is None else said.append,
        count_places=lambda: num_free,
    )

    async def look() -> list[MetricsEntry]:
        await tuner.look(view)
        await tuner.look(view)  # before the history has the change
        state = RunState(await connect(url), open_run.name)
        entries = await state.read_metrics(STREAM_START, block_s=0)
        await state.close()
        return entries

    return asyncio.run(look())


def test_autotune_makes_its_change_once_and_records_why(
    open_run: RunDir, redis_url: str, lazy_trainer: RunView
) -> None:
    (entry,) = look_twice(open_run, redis_url, lazy_trainer)
    assert entry.kind == TUNED and entry.record["ess"] == pytest.approx(0.9)
    words = change_words(Record(t=0.0, kind=TUNED, values=entry.record))
    assert words.startswith("buffer.max_staleness 2 -> 1, by autotune: the trainer waited 0% for")


def short_of_engines(open_run: RunDir) -> RunView:
    settings = "{steps: 5, max_engines: 4, max_staleness: 2}"
    config = load_config([f"buffer.autotune={settings}", "rollout.num_engines=2"])
    open_run.write_config(config)
    view = RunView(run=open_run.name, config=config, started=0.0)
    view.phase, view.stats = "training", replace(STATS, running=48, ready=0, leased=0)
    for t in range(1, 13):
        view.apply(step_record(t - 1, float(t), lease_wait_s=0.6, ess=0.9))
        view.waits.add(float(t), {("trainer", "rollout"): 0.6 * t})
    return view


@pytest.mark.parametrize(("num_free", "after"), [(0, None), (1, "3"), (5, "4")])
def test_autotune_adds_engines_where_there_are_places(
    open_run: RunDir, redis_url: str, num_free: int, after: str | None
) -> None:
    said = list[str]()
    entries = look_twice(open_run, redis_url, short_of_engines(open_run), said, num_free)
    assert [entry.record["after"] for entry in entries] == [after] * bool(num_free)
    no_place = "buffer.autotune: Ray has no free place for rollout.num_engines=4; add a machine"
    assert [words.startswith(no_place) for words in said] == [True] * (not num_free)


def test_autotune_says_once_that_no_engine_has_a_place_and_again_after_there_was_one(
    open_run: RunDir, redis_url: str, lazy_trainer: RunView, monkeypatch: pytest.MonkeyPatch
) -> None:
    more = Move(setting=ENGINES, before=2, after=3, said={"why": "requests queue"})

    async def change(*_: Any) -> list[dict[str, Scalar]]:
        return []

    monkeypatch.setattr(tune_module, "find_move", lambda *given: more if given[2:] != (0,) else "")
    monkeypatch.setattr(tune_module, "change", change)
    said, places, heard = list[str](), [0, 0, 1, 0], list[int]()
    address = BufferAddress(url=redis_url, run=open_run.name, settings=BufferConfig())
    tuner = Autotuner(address, open_run, say=said.append, count_places=iter(places).__next__)

    async def look() -> None:
        for _ in places:
            await tuner.look(lazy_trainer)
            lazy_trainer.now += 60.0  # it is not asked more often
            heard.append(len(said))

    asyncio.run(look())
    assert heard == [1, 1, 1, 2]


@pytest.mark.parametrize("ray", ["no room", "error", "no answer"])
def test_autotune_asks_ray_again_later_and_does_not_wait_for_it(
    open_run: RunDir, redis_url: str, ray: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tune_module, "ANSWER_S", 0.1)
    view, asked, said, is_over = short_of_engines(open_run), list[float](), list[str](), Event()
    ended = list[bool]()

    def count_places() -> int:
        asked.append(view.now)
        if len(asked) > 1:
            return 1
        if ray == "error":
            raise RaySystemError("GCS is away")
        ended.append(ray == "no room" or is_over.wait(60))
        return 0

    settings = load_config(["buffer.autotune={steps: 5}"]).buffer
    address = BufferAddress(url=redis_url, run=open_run.name, settings=settings)
    tuner = Autotuner(address, open_run, said.append, count_places)

    async def look_on() -> None:
        for _ in range(80):
            await tuner.look(view)
            assert len(asked) > 1 or not tuner._num_expected, "its silence is no answer"
            view.now += 0.5

    asyncio.run(look_on())
    assert ended == [True] * (ray == "no room"), "nothing waits until Ray answers, nor does the end"
    is_over.set()
    assert asked == [12.0, 42.0], "and once it has given one, the change is made"
    assert len(said) == (ray == "no room"), "only Ray's own answer is a reason to speak"


def test_autotune_leaves_what_a_person_has_set_meanwhile(
    open_run: RunDir, redis_url: str, lazy_trainer: RunView, leash: Command
) -> None:
    leash("tune", "buffer.max_staleness=4")
    (entry,) = look_twice(open_run, redis_url, lazy_trainer)
    assert entry.record["after"] == "4" and entry.record["who"] != "autotune"


def test_autotune_makes_its_change_once_redis_is_back(
    open_run: RunDir, redis_url: str, lazy_trainer: RunView, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_away, really = [True], tune_module.change

    async def change(*args: Any) -> list[dict[str, Scalar]]:
        if is_away and is_away.pop():
            raise BufferConnectionError("Redis is away")
        return await really(*args)

    monkeypatch.setattr(tune_module, "change", change)
    (entry,) = look_twice(open_run, redis_url, lazy_trainer)
    assert entry.record["after"] == "1"


def test_autotune_records_a_change_that_broke_off_before_its_record(
    open_run: RunDir, redis_url: str, lazy_trainer: RunView, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_away, really = [True], RunState.append_metrics

    async def append(self: RunState, record: dict[str, Scalar], kind: str) -> None:
        if is_away and is_away.pop():
            raise BufferConnectionError("Redis is away")
        await really(self, record, kind)

    monkeypatch.setattr(RunState, "append_metrics", append)
    (entry,) = look_twice(open_run, redis_url, lazy_trainer)
    assert (entry.record["before"], entry.record["after"]) == ("2", "1")


def test_bounds_of_autotune_must_be_possible_in_the_run() -> None:
    with pytest.raises(ValueError, match=r"min_staleness=3: at most buffer\.autotune\."):
        load_config(["buffer.autotune={min_staleness: 3, max_staleness: 2}"])
    with pytest.raises(ValueError, match=r"autotune\.min_staleness=0: .*trainer\.publish_every=2"):
        load_config(["trainer.publish_every=2", "buffer.autotune={min_staleness: 0}"])
