"""The training phase with trainer ranks that die, hang, stop or cannot export."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Future
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any, cast

import pytest
from ray.exceptions import RayActorError, RayTaskError
from rich.console import Console

from buffer.connect import Buffer
from buffer.run_state import RunState
from configs.checks import with_live
from configs.choices import OnStall
from configs.rollout_schema import EvalSet, RolloutConfig
from configs.schema import Config, StallConfig
from controller import training
from controller.buffer_access import BufferAddress
from controller.metrics.history import read_metrics
from controller.report.panel import Panel
from controller.run_dir import RunDir
from controller.signals import Stopped, StopRequest
from controller.training import Pools, Training
from controller.watch import stall_watch
from controller.watch.run_view import RunView
from controller.watch.stalls import Stall
from controller.watch.supervise import RunFailed
from rollout_pool.pool import RolloutPool
from rollout_pool.types import EvalReport
from tests.support.buffer.groups import make_group
from tests.support.controller.records import step_record, write_checkpoint
from trainer_pool.pool import TrainerPool
from trainer_pool.state.checkpoint import Best, CheckpointStore
from trainer_pool.types import Restored, TrainReport

REPORT = TrainReport(num_steps=8, version=9, was_stopped=False)
OpenRun = tuple[BufferAddress, Buffer, RunState]
Train = Callable[..., Awaitable[tuple[list[Path], str]]]


class Result(Future[Any]):
    """A result of another process, which some other thread or nobody sets."""

    def future(self) -> Future[Any]:
        return self


def done(result: Any) -> Result:
    found = Result()
    if isinstance(result, Exception):
        found.set_exception(result)
    else:
        found.set_result(result)
    return found


class Ranks:
    """A trainer of one rank that has this result, or has died, and lives until it is closed."""

    def __init__(self, result: TrainReport | None = None) -> None:
        self.training = done(RayActorError() if result is None else result)
        self.death = Result() if result else done(RayActorError())
        self.opened, self.exported = done(("127.0.0.1", 1)), done(None)
        self.while_closing: Callable[[], None] = lambda: None
        self.again: Callable[[Path], Ranks]

    def deaths(self) -> dict[str, Result]:
        return {"trainer-0": self.death}

    def pids(self) -> dict[str, Result]:
        return {"trainer-0": Result()}

    def train(self) -> dict[str, Result]:
        return {"trainer-0": self.training}

    def close(self, timeout_s: float) -> None:
        self.while_closing()

    def open_rendezvous(self) -> dict[str, Result]:
        return {"trainer-0": self.opened}

    def start(self, *_: Any) -> dict[str, Result]:
        return {"trainer-0": done(Restored(step=9, from_memory=True))}

    def connect(self) -> dict[str, Result]:
        return {}

    def export(self) -> dict[str, Result]:
        return {"trainer-0": self.exported}

    publish_initial = publish_last = stop = connect


class IdleEngine:
    """A rollout pool in which nothing happens."""

    engine_names, worker_names = ("engine-0",), ()

    def given_up(self, engine: str) -> Result:
        return Result()

    lost = noticed = given_up

    def run(self) -> dict[str, Result]:
        return {}

    stop = deaths = receivers_given_up = run

    def draining_nodes(self) -> frozenset[str]:
        return frozenset()

    def count_places(self) -> int:
        return 0

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError("there is no engine")


@pytest.fixture
def train(ended_run: RunDir, config: Config, open_run: OpenRun) -> Train:
    """Trains with these ranks, one after the other: the checkpoints from which later ones went on,
    and what was said."""

    async def run(
        *ranks: Ranks,
        config: Config = config,
        engine: IdleEngine | None = None,
        is_attached: bool = False,
    ) -> tuple[list[Path], str]:
        resumed_from = list[Path]()

        def new_trainer(folder: Path) -> Ranks:
            resumed_from.append(folder)
            return ranks[len(resumed_from)]

        for one in ranks:
            one.again = new_trainer
        pools = Pools(
            trainer=cast("TrainerPool", ranks[0]),
            rollout=cast("RolloutPool", engine or IdleEngine()),
        )
        said = StringIO()
        phase = Training(
            config=config,
            run_dir=ended_run,
            pools=pools,
            address=open_run[0],
            server=None,
            ray_processes={},
            panel=Panel(enabled=False, console=Console(file=said, width=200)),
            stop=StopRequest(),
            resumed_step=None if is_attached else 6,
            is_attached=is_attached,
        )
        if is_attached:
            phase.stop.set()
        await phase.run()
        return resumed_from, said.getvalue()

    return run


async def test_restarted_ranks_go_on_from_a_checkpoint_that_the_old_ones_completed_at_their_end(
    ended_run: RunDir, train: Train
) -> None:
    store = CheckpointStore(ended_run.path / "checkpoints")
    latest = store.latest()
    assert latest is not None

    def complete_another() -> None:
        store.begin(7)  # and its groups are acknowledged: the one before does not contain them
        store.commit(replace(latest[1], step=7))

    first = Ranks()
    first.while_closing = complete_another
    resumed_from, said = await train(first, Ranks(REPORT))
    assert resumed_from == [ended_run.path / "checkpoints" / "step-000007"]
    assert "trainer-0 died: the ranks start again" in said
    assert "the ranks go on from step 9 (memory), after" in said
    (resumed, again) = read_metrics(ended_run.metrics, "resumed")[-2:]
    assert (resumed.values["source"], again.values["source"]) == ("disk", "memory")
    assert (resumed.count("step"), again.count("step")) == (6, 9)


async def test_ranks_start_again_if_one_hangs_and_if_one_dies_as_it_starts_again(
    train: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training, "ANSWER_S", 0.1)
    monkeypatch.setattr(training, "DEATH_GRACE_S", 0.1)
    hanging, dying = Ranks(), Ranks()
    hanging.death = Result()  # its process is stopped: the other ranks fail in a collective
    dying.opened = done(RayActorError())
    resumed_from, said = await train(hanging, dying, Ranks(REPORT))
    assert len(resumed_from) == 2
    assert "trainer-0 does not answer within 0.1 s: the ranks start again" in said
    assert "trainer-0 died: the ranks start again" in said


async def test_rank_that_hangs_is_given_up_after_a_multiple_of_its_usual_step(
    train: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = set[float]()

    async def note(_: object, limit_s: Callable[[], float]) -> float:
        limits.add(limit_s())
        return await asyncio.get_running_loop().create_future()

    monkeypatch.setattr(training, "wait_silent", note)
    for usual_s, expected_s in ((None, 600.0), (1.0, 150.0), (20.0, 200.0), (100.0, 600.0)):
        monkeypatch.setattr(RunView, "usual_step_s", usual_s)
        await train(Ranks(REPORT))
        assert limits == {expected_s}
        limits.clear()


async def test_rank_that_hangs_alone_starts_again(
    train: Train, config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training, "ANSWER_S", 0.01)
    monkeypatch.setattr(training, "DEATH_GRACE_S", 0.1)
    hanging = Ranks(REPORT)
    hanging.training, answers = (
        Result(),
        [done(17), done(RayActorError()), Result(), Result(), Result()],
    )
    hanging.training.set_running_or_notify_cancel()
    monkeypatch.setattr(hanging, "pids", lambda: {"trainer-0": answers.pop(0)})
    config = replace(config, trainer=replace(config.trainer, timeout_s=0.5))
    resumed_from, said = await train(hanging, Ranks(REPORT), config=config)
    assert len(resumed_from) == 1 and answers == []
    assert "trainer-0 does not answer within 0.01 s: the ranks start again" in said


@pytest.mark.parametrize("part", ["trainer", "engine-0"])
async def test_part_that_stalls_starts_again_if_that_is_the_policy(
    train: Train, config: Config, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    monkeypatch.setattr(training, "DEATH_GRACE_S", 0.1)
    monkeypatch.setattr(stall_watch, "LOOK_S", 0.01)
    stall = Stall(part=part, since=0.0, usual_s=1.0, words="they wait", advice="look")
    lost, ranks = list[str](), Ranks(REPORT)

    def restart(_: IdleEngine, name: str) -> None:
        lost.append(name)
        ranks.training.set_result(REPORT)

    monkeypatch.setattr(stall_watch, "find_stall", lambda *_: None if lost else stall)
    monkeypatch.setattr(IdleEngine, "restart", restart, raising=False)
    monkeypatch.setattr(ranks, "pids", lambda: {"trainer-0": done(17)})
    ranks.while_closing = lambda: lost.append("ranks")
    ranks.training = Result()
    ranks.training.set_running_or_notify_cancel()
    run = replace(config.run, stall=StallConfig(policy=OnStall.restart))
    resumed_from, said = await train(ranks, Ranks(REPORT), config=replace(config, run=run))
    assert "No " in said and "they wait. Look." in said
    if part == "trainer":
        assert "they wait: the ranks start again" in said
        assert len(resumed_from) == 1 and lost == ["ranks"]
    else:
        assert "engine-0 starts again" in said and lost == ["engine-0"]


async def test_ranks_that_cannot_be_made_again_end_the_run_with_the_cause(
    ended_run: RunDir, train: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training, "ANSWER_S", 0.1)
    monkeypatch.setattr(training, "DEATH_GRACE_S", 0.1)
    hanging, missing = Ranks(), Ranks()
    hanging.death = Result()  # its watch is cancelled

    def no_room() -> dict[str, Result]:
        raise RuntimeError("no room for the ranks")

    monkeypatch.setattr(missing, "deaths", no_room)
    with pytest.raises(RuntimeError, match="no room for the ranks"):
        await train(hanging, missing)
    assert ended_run.read_record().error == "no room for the ranks"


async def test_watch_that_fails_ends_the_run_as_a_death_does(
    ended_run: RunDir, config: Config, train: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: IdleEngine) -> dict[str, Result]:
        raise RuntimeError("the watch is lost")

    monkeypatch.setattr(IdleEngine, "receivers_given_up", fail)
    ranks = Ranks(REPORT)
    ranks.training = Result()
    ranks.training.set_running_or_notify_cancel()
    config = replace(config, cluster=replace(config.cluster, stop_timeout_s=0.1))
    with pytest.raises(RuntimeError, match="the watch is lost"):
        await train(ranks, config=config)
    assert ended_run.read_record().error == "the watch is lost"


async def test_failed_evaluation_is_told_by_the_first_line_of_its_error(
    ended_run: RunDir, train: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = RayTaskError("evaluate", "", RuntimeError("9 of 64 prompts got no answer"))
    ended = "worker-0", done(error)
    monkeypatch.setattr(IdleEngine, "evaluate", lambda *_, **__: ended, raising=False)
    _, said = await train(Ranks(REPORT))
    (failed,) = read_metrics(ended_run.metrics, "eval_failed")
    assert failed.count("version") == REPORT.version
    why = str(failed.values["why"])
    assert why.startswith("worker-0 failed: RuntimeError: 9 of 64 prompts") and "\n" not in why
    assert why in said


async def test_failed_export_costs_the_final_model_and_not_the_run(
    ended_run: RunDir, train: Train
) -> None:
    ranks = Ranks(REPORT)
    ranks.exported = done(RayTaskError("export", "", OSError(28, "No space left on device")))
    _, said = await train(ranks)
    assert "no final_model: a trainer rank failed: OSError: [Errno 28] No space left" in said
    assert f"`make export RUN=a DIR={ended_run.path.parent}` writes the model of the last" in said
    kinds = [r.values.get("phase", r.kind) for r in read_metrics(ended_run.metrics)]
    # The last evaluation, which fails here for lack of an engine, comes before.
    assert kinds.index("eval_failed") < kinds.index("saving the model")


REPORT_OF_LAST = EvalReport(
    version_min=9, version_max=9, accuracy=0.75, score_mean=0.5, num_prompts=8, seconds=1.0
)


@pytest.mark.parametrize("metric", ["accuracy", "pass_at_1", "accuracy/hard"])
async def test_checkpoint_of_the_best_evaluation_is_named(
    ended_run: RunDir,
    config: Config,
    open_run: OpenRun,
    train: Train,
    monkeypatch: pytest.MonkeyPatch,
    metric: str,
) -> None:
    def evaluate(*_: Any) -> tuple[str, Result]:
        early = replace(REPORT_OF_LAST, version_min=4)
        report = replace(early, of_sets={"hard": REPORT_OF_LAST}, failed_sets={"far": "it is away"})
        return "worker-0", done(report if "/" in metric else REPORT_OF_LAST)

    monkeypatch.setattr(IdleEngine, "evaluate", evaluate, raising=False)
    trainer = replace(config.trainer, keep_best=metric, checkpoint_every=20)
    sets = {"hard": EvalSet()} if "/" in metric else {}
    config = replace(config, trainer=trainer, task=replace(config.task, eval_sets=sets))
    step = {**step_record(7, 1000.0).values, "version": 8}
    await open_run[2].append_metrics(step, "step")
    store = CheckpointStore(ended_run.path / "checkpoints")
    found = list[Best | None]()

    async def write() -> None:
        found.append(store.best())
        write_checkpoint(ended_run, 8, 9)
        await open_run[2].append_metrics({"step": 8}, "checkpoint")

    ranks = Ranks(REPORT)
    loop, written = asyncio.get_running_loop(), Result()
    monkeypatch.setattr(
        written, "future", lambda: asyncio.run_coroutine_threadsafe(write(), loop), raising=False
    )
    ranks.exported = written
    _, said = await train(ranks, config=config)
    assert found == [None], "it was evaluated before it was written"
    expected = Best(step=8, metric=metric, value=0.75)
    assert store.best() == (expected if metric != "pass_at_1" else None)
    told = "the evaluation of the set far failed: it is away"
    assert (told in said) == (metric == "accuracy/hard")
    (store.folder / "best").write_text("{")
    await open_run[2].append_metrics(step, "step")
    _, said = await train(Ranks(REPORT), config=config)
    words = f"the checkpoint of step 8, with {metric} 0.75, is not kept as the best"
    assert (words in said) == (metric != "pass_at_1")


async def test_program_evaluates_due_checkpoints_and_the_last_one_and_its_failure_ends_nothing(
    ended_run: RunDir,
    config: Config,
    open_run: OpenRun,
    train: Train,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    command = ["python", "{model}", "{out}"]
    own = replace(config.rollout.eval, command=command, command_every=7, command_timeout_s=0.001)
    config = replace(
        config,
        rollout=replace(config.rollout, eval=own),
        trainer=replace(config.trainer, checkpoint_every=7),
    )

    async def write() -> TrainReport:
        for step in (7, 8):
            await open_run[2].append_metrics({"step": step}, "checkpoint")
        return REPORT

    ranks, loop = Ranks(REPORT), asyncio.get_running_loop()
    ranks.training = Result()
    monkeypatch.setattr(
        ranks.training,
        "future",
        lambda: asyncio.run_coroutine_threadsafe(write(), loop),
        raising=False,
    )
    _, said = await train(ranks, config=config)
    records = read_metrics(ended_run.metrics, "eval_command")
    assert [(one.count("step"), one.values["result"]) for one in records] == [
        (7, "failed"),
        (8, "failed"),
    ]
    for step in (7, 8):
        assert f"has not evaluated step {step}: rollout.eval.command_timeout_s=0.001 is" in said


async def test_evaluations_are_due_by_the_live_setting(
    config: Config, open_run: OpenRun, train: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, buffer, state = open_run
    ranks, asked = Ranks(REPORT), list[int]()
    ranks.training = Result()

    def evaluate(_: IdleEngine, version: int, *__: Any, **___: Any) -> tuple[str, Result]:
        asked.append(version)
        if version == 8:
            ranks.training.set_result(REPORT)
        return "worker-0", done(REPORT_OF_LAST)

    monkeypatch.setattr(IdleEngine, "evaluate", evaluate, raising=False)
    unpinned = replace(config.rollout.eval, pinned=False)
    config = replace(config, rollout=replace(config.rollout, eval=unpinned))
    config = replace(config, trainer=replace(config.trainer, num_steps=20))
    assert 8 % config.rollout.eval_every
    await buffer.change_settings({"eval_every": "4"})
    followed = asyncio.Event()

    def follow(rollout: RolloutConfig, texts: Mapping[str, str]) -> RolloutConfig:
        followed.set()
        return with_live(rollout, texts)

    monkeypatch.setattr("controller.training.with_live", follow)
    running = asyncio.ensure_future(train(ranks, config=config))
    await asyncio.wait_for(followed.wait(), 60)
    while await state.phase() != "training":
        await asyncio.sleep(0.01)
    for step in (6, 7):
        await state.append_metrics(dict(step_record(step, 1000.0).values), "step")
    await running
    assert asked == [8, REPORT.version]


async def test_ranks_that_an_earlier_controller_had_asked_to_stop_do_not_finish_a_run(
    ended_run: RunDir, train: Train
) -> None:
    with pytest.raises(Stopped):
        await train(Ranks(replace(REPORT, was_stopped=True)))
    ended_run.note_error("engine-0 died")  # that one was killed while it ended a run that failed
    with pytest.raises(RuntimeError, match="engine-0 died"):
        await train(Ranks(replace(REPORT, was_stopped=True)))


async def test_run_that_is_stopped_while_a_controller_attaches_saves_its_model(
    train: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks, asked = Ranks(REPORT), list[str]()
    monkeypatch.setattr(ranks, "stop", lambda: asked.append("stop"))
    monkeypatch.setattr(ranks, "export", lambda: asked.append("export") or {})
    with pytest.raises(Stopped):
        await train(ranks, is_attached=True)
    assert asked == ["stop", "export"]


async def test_group_that_a_worker_pushes_before_it_ends_is_in_the_final_numbers(
    ended_run: RunDir, train: Train, open_run: OpenRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training, "FINAL_SAMPLE_S", 60.0)

    async def push() -> None:
        await asyncio.sleep(0.5)
        await open_run[1].push(make_group("last"))

    class Busy(IdleEngine):
        def stop(self) -> dict[str, Result]:
            pushing, ended = asyncio.create_task(push()), Result()
            pushing.add_done_callback(lambda _: ended.set_result(None))
            return {"worker-0": ended}

    ended_run.note_error(None)
    with pytest.raises(Stopped):
        await train(Ranks(replace(REPORT, was_stopped=True)), engine=Busy())
    assert read_metrics(ended_run.metrics, "buffer")[-1].count("ready") == 1


async def test_run_ends_when_an_engine_computes_another_policy(
    config: Config, open_run: OpenRun, train: Train
) -> None:
    ranks = Ranks(REPORT)
    ranks.training = Result()
    ranks.training.set_running_or_notify_cancel()  # they do not end, whoever is cancelled
    config = replace(config, cluster=replace(config.cluster, stop_timeout_s=0.1))
    found = {"engine": "engine-0", "version": 1, "mean": 3.0}
    for more in ({}, {"error": "engine-0 has other weights"}):
        await open_run[2].append_metrics({**found, **more}, "agreement")
    with pytest.raises(RunFailed, match="engine-0 has other weights"):
        await train(ranks, config=config)
