"""What `make resume` accepts, and what a run that goes on makes of its history."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any, cast

import psutil
import pytest
from ray.exceptions import RayActorError, RayTaskError
from rich.console import Console

from buffer.connect import connect_buffer
from buffer.redis.client import BufferConnectionError
from buffer.run_state import RunState
from buffer.types import PromptRef
from configs.load import ConfigError, load_config, read_config, to_yaml
from configs.schema import BufferConfig, Config
from controller import training as training_module
from controller.buffer_access import BufferAddress, opened
from controller.commands.export import _checkpoint as checkpoint_of
from controller.metrics.records import ATTACHED, RESUMED, MetricsLog, Record, read_metrics
from controller.recorder import Recorder
from controller.report.panel import Panel, render
from controller.report.result import summarize
from controller.report.state import RunView
from controller.run import launch, resume
from controller.run_dir import RunDir, RunDirError
from controller.signals import Stopped, StopRequest
from controller.start.resume import FIXED, find_resumption
from controller.training import Pools, Training
from rollout_pool.pool import RolloutPool
from rollout_pool.tasks.registry import build_task, data_of
from tests.support.controller.records import buffer_record, eval_record, record_all, step_record
from tests.support.repository import ROOT
from trainer_pool.pool import TrainerPool
from trainer_pool.state.checkpoint import CheckpointStore, TrainState, read_state
from trainer_pool.types import Restored, TrainReport


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return load_config([f"run.dir={tmp_path}", "trainer.num_steps=8"])


@pytest.fixture
def run_dir(tmp_path: Path, config: Config) -> RunDir:
    """A run that ended after its sixth step."""
    run_dir = RunDir.create(str(tmp_path), "a", "quickstart")
    (run_dir.path / "config.yaml").write_text(to_yaml(config))
    store = CheckpointStore(run_dir.path / "checkpoints")
    store.begin(6)
    store.commit(
        TrainState(
            step=6,
            version=9,
            num_updates=3,
            lineage="one",
            consumed_group_ids=(),
            task_positions={0: 30},
            untrained_prompts=(PromptRef(task="reverse", index=28),),
        )
    )
    record_all(run_dir, [step_record(step, 1000.0 + step, 0.0) for step in range(7)])
    run_dir.end("stopped")
    return run_dir


def test_resumption_is_the_last_checkpoint_with_the_settings_of_the_run(
    run_dir: RunDir, config: Config
) -> None:
    found = find_resumption(run_dir, [])
    assert found.checkpoint == run_dir.path / "checkpoints" / "step-000006"
    assert found.state == read_state(found.checkpoint) and found.state.step == 6
    assert found.newest_version == 7  # of a step after the checkpoint
    assert found.config == config and not found.overridden
    found = find_resumption(run_dir, ["buffer.max_staleness=5", "trainer.num_ranks=4"])
    assert found.config.buffer.max_staleness == 5 and found.config.trainer.ranks == 4
    assert found.overridden == {"buffer.max_staleness", "trainer.num_ranks"}


@pytest.mark.parametrize(
    ("override", "reason"),
    [
        ("run.seed=7", FIXED["run.seed"]),
        ("experiment=gsm8k", "change single ones in ARGS"),
        ("trainer.num_steps=5", "trainer.num_steps=5: the run has done 6 steps; give the number"),
        ("model.scratch.hidden_size=256", FIXED["model"]),
        ("task.name=gcd", FIXED["task"]),
        ("rollout.num_workers=9", FIXED["rollout.num_workers"]),
        ("buffer.shards=2", FIXED["buffer.shards"]),
        ("buffer.selector=freshest", FIXED["buffer.selector"]),
        ("weight_sync=delta", "set its settings one by one"),
        ("buffer.max_stalenes=1", "did you mean buffer.max_staleness"),
        ("trainer.num_ranks=none", "expected an integer"),
    ],
)
def test_illegal_change_is_refused_with_the_reason(
    run_dir: RunDir, override: str, reason: str
) -> None:
    with pytest.raises(ConfigError, match=reason):
        find_resumption(run_dir, [override])


def test_relative_path_in_the_arguments_of_a_resume_is_one_of_the_current_folder(
    run_dir: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = read_config(run_dir.path / "config.yaml", ["task.eval_path=held-out.jsonl"])
    assert config.task.eval_path == str(tmp_path / "held-out.jsonl")


def test_page_lists_what_a_run_keeps() -> None:
    page = (ROOT / "docs" / "operations.md").read_text()
    kept = r"\*\*Settings that a run keeps\*\*.*?: (.*?)\. Anything\s+else"
    (names,) = re.findall(kept, page, re.DOTALL)
    assert set(re.findall(r"`([a-z_.]+)`", names)) == set(FIXED)


def test_reference_that_the_run_did_not_keep_is_refused(run_dir: RunDir) -> None:
    with pytest.raises(ConfigError, match=r"algorithm\.kl\.weight=0\.1: the run began without"):
        find_resumption(run_dir, ["algorithm.kl.weight=0.1"])
    given = ["algorithm.kl.weight=0.1", "algorithm.kl.reference=/a/model"]
    assert find_resumption(run_dir, given).config.algorithm.kl.weight == 0.1
    (run_dir.path / "reference_model").mkdir()
    assert find_resumption(run_dir, given[:1]).config.algorithm.kl.weight == 0.1


def test_run_without_a_checkpoint_or_with_all_steps_done_is_refused(run_dir: RunDir) -> None:
    with pytest.raises(ConfigError, match=r"trainer\.num_steps"):
        find_resumption(run_dir, ["trainer.num_steps=0"])
    run_dir.end("finished")
    assert find_resumption(run_dir, []).state.step == 6  # it was made to train more
    with pytest.raises(RunDirError, match=r'finished its 6 steps; ARGS="trainer.num_steps=12"'):
        find_resumption(run_dir, ["trainer.num_steps=6"])
    (run_dir.path / "checkpoints" / "latest").unlink()
    with pytest.raises(RunDirError, match="before its first checkpoint"):
        find_resumption(run_dir, [])
    assert run_dir.resume_command is None


def test_export_takes_the_checkpoint_that_a_resume_goes_on_from(run_dir: RunDir) -> None:
    folder = run_dir.path / "checkpoints"
    for name in ("step-000009", "step-000006.bak"):  # undone by a restart; a user's copy
        (folder / name).mkdir()
    assert checkpoint_of(run_dir, None) == folder / "step-000006"
    assert checkpoint_of(run_dir, 9) == folder / "step-000009"
    with pytest.raises(RunDirError, match=r"STEP=7: a has no checkpoint of it; there are 6, 9"):
        checkpoint_of(run_dir, 7)
    (folder / "latest").unlink()
    with pytest.raises(RunDirError, match="no checkpoint yet"):
        checkpoint_of(run_dir, None)


def test_run_is_reopened_by_one_process_when_it_has_ended(run_dir: RunDir) -> None:
    started = run_dir.read_record().started
    assert run_dir.resume_command == f"make resume RUN=a DIR={run_dir.path.parent}"
    run_dir.write_record(replace(run_dir.read_record(), pid=1))
    run_dir.reopen(lambda: None)
    record = run_dir.read_record()
    assert (record.pid, record.started, record.state) == (psutil.Process().pid, started, "running")
    assert record.ended is None and record.is_running
    with pytest.raises(RunDirError, match=r"controller is process .* `make stop RUN=a DIR=/.*`"):
        run_dir.reopen(lambda: None)


def test_run_whose_controller_is_lost_with_its_machine_can_be_reopened_by_hand(
    run_dir: RunDir,
) -> None:
    path = run_dir.path / "run.json"
    ended = run_dir.read_record()
    run_dir.make_temporary()
    run_dir.write_record(replace(ended, state="running", host="a-lost-machine"))
    with pytest.raises(RunDirError, match=f'on a-lost-machine; .* for "running" in {path}'):
        run_dir.reopen(lambda: None)
    path.write_text(path.read_text().replace('"running"', '"failed"'))
    run_dir.reopen(lambda: None)
    assert run_dir.read_record().is_running and run_dir.read_record().is_here
    run_dir.make_temporary()
    run_dir.remove_temporary()


def test_resume_goes_on_from_a_checkpoint_that_the_run_completed_while_it_ended(
    run_dir: RunDir,
) -> None:
    store = CheckpointStore(run_dir.path / "checkpoints")
    before = find_resumption(run_dir, [])
    store.begin(7)  # the run was ending as the resume began
    store.commit(replace(before.state, step=7))
    found = run_dir.reopen(lambda: find_resumption(run_dir, []))
    assert found.state.step == 7 and run_dir.read_record().is_running


def test_resume_leaves_a_run_as_it_is_that_has_finished_meanwhile(run_dir: RunDir) -> None:
    store = CheckpointStore(run_dir.path / "checkpoints")
    store.begin(8)
    store.commit(replace(find_resumption(run_dir, []).state, step=8))
    run_dir.end("finished")
    before = run_dir.read_record()
    with pytest.raises(RunDirError, match="it has finished its 8 steps"):
        resume(run_dir, [], StopRequest(), lambda folder: None)
    with pytest.raises(RunDirError, match="it has finished its 8 steps"):
        run_dir.reopen(lambda: find_resumption(run_dir, []))
    assert run_dir.read_record() == before


def test_changed_settings_are_kept_once_redis_has_them_too(run_dir: RunDir, config: Config) -> None:
    config.buffer.url = "redis://user:secret@127.0.0.1:1/0"
    (run_dir.path / "config.yaml").write_text(to_yaml(config))
    with pytest.raises(ValueError, match="does not keep its password"):
        resume(run_dir, ["buffer.max_staleness=5"], StopRequest(), lambda folder: None)
    assert run_dir.read_record().state == "failed"
    run_dir.write_record(replace(run_dir.read_record(), state="failed"))
    (run_dir.path / "password").write_text("secret")
    password = [f"buffer.password_file={run_dir.path / 'password'}"]
    with pytest.raises(BufferConnectionError, match=r"127\.0\.0\.1:1"):  # it is asked
        resume(run_dir, password, StopRequest(), lambda folder: None)
    again = find_resumption(run_dir, [])  # it would not replace the setting in Redis
    assert again.config.buffer.max_staleness == config.buffer.max_staleness


async def open_run(url: str, run: str) -> None:
    buffer = await connect_buffer(url, run, BufferConfig())
    await buffer.open(BufferConfig(max_staleness=7), groups_per_step=4)
    await buffer.close()


def test_launch_refuses_a_redis_with_settings_of_a_run_that_has_pushed_nothing(
    config: Config, redis_url: str, run_name: str
) -> None:
    asyncio.run(open_run(redis_url, run_name))  # and lives, or has failed: its settings would hold
    config.run.name, config.buffer.url = run_name, redis_url
    config.cluster.host, config.cluster.ray_address = (
        "127.0.0.1",
        "127.0.0.1:1",
    )  # to get no further
    with pytest.raises(ValueError, match="already holds a run of this name"):
        launch(config, StopRequest(), lambda folder: None)


def resumed_record(step: int, t: float) -> Record:
    return Record(t=t, kind=RESUMED, values={"step": step, "away_s": 990.0})


def test_steps_after_the_checkpoint_and_the_time_in_between_do_not_count(
    run_dir: RunDir, config: Config
) -> None:
    before = [step_record(step, 1000.0 + step, reward=0.0) for step in range(8)]
    after = [step_record(step, 2000.0 + step, reward=1.0) for step in range(6, 8)]
    run_dir.metrics.unlink()
    records = [eval_record(0, 999.0, 0.1), *before, resumed_record(6, 2000.0), *after]
    record_all(run_dir, [*records, buffer_record(2008.0)])
    read = read_metrics(run_dir.metrics)
    steps = [record for record in read if record.kind == "step"]
    assert [step.count("step") for step in steps] == list(range(1, 9))
    assert [step.number("reward_mean") for step in steps] == [0.0] * 6 + [1.0] * 2
    result = summarize(run="a", config=config, records=read, wall_s=1009.0)
    assert result.steps == 8
    assert result.wall_s == pytest.approx(1009.0 - 990.0)
    assert result.train_s < 20
    view = RunView(run="a", num_steps=8, started=999.0)
    for record in records:
        view.apply(record)
    assert view.step == 8 and len(view.steps) == 8
    assert view.seconds_per_step == pytest.approx(1.0)


async def test_history_of_a_run_that_goes_on_is_read_from_where_it_was_recorded(
    redis_url: str, run_name: str, tmp_path: Path
) -> None:
    path, steps = tmp_path / "metrics.jsonl", list[Record]()
    state = await RunState.connect(redis_url, run_name, BufferConfig())
    buffer = await connect_buffer(redis_url, run_name, BufferConfig())
    await buffer.open(BufferConfig(), groups_per_step=4)

    def recorder(log: MetricsLog, history: list[Record]) -> tuple[Recorder, RunView]:
        view = RunView(run=run_name, num_steps=8, started=0.0)
        panel = Panel(enabled=False, console=Console(file=StringIO()))
        return Recorder(buffer, state, log, panel.show, view, steps.append, history), view

    with MetricsLog(path) as log:
        first, _ = recorder(log, [])
        await state.append_metrics(step_record(0, 1.0).values, "step")
        await first.drain_metrics(block_s=1.0)
        first.record("phase", {"phase": "training"})
    await state.append_metrics(step_record(1, 2.0).values, "step")  # nobody records it
    with MetricsLog(path) as log:
        second, view = recorder(log, read_metrics(path))
        assert view.step == 1 and view.phase == "training"
        await second.resume(1)
        assert view.step == 1
        await state.append_metrics(step_record(1, 3.0).values, "step")
        await second.drain_metrics(block_s=1.0)
    with MetricsLog(path) as log:
        third, view = recorder(log, read_metrics(path))
        await third.attach()
        third.record("phase", {"phase": "training"})
    await buffer.close()
    await state.close()
    assert view.step == 2 and len(steps) == 3
    (attached,) = read_metrics(path, ATTACHED)
    assert 0 <= attached.number("away_s") < 60
    (resumed,) = read_metrics(path, RESUMED)
    assert 0 <= resumed.number("away_s") < 60
    kinds = [(record.kind, record.count("step")) for record in read_metrics(path)]
    goes_on = [(ATTACHED, 0), ("phase", 0)]
    assert kinds == [("step", 1), ("phase", 0), (RESUMED, 1), ("step", 2), *goes_on]
    ids = [record.id for record in read_metrics(path, "step")]
    assert ids == sorted(ids) and all(ids)


async def test_engines_and_receivers_of_a_run_that_has_ended_are_forgotten(
    redis_url: str, run_name: str
) -> None:
    state = await RunState.connect(redis_url, run_name, BufferConfig())
    buffer = await connect_buffer(redis_url, run_name, BufferConfig())
    await buffer.open(BufferConfig(max_staleness=3), groups_per_step=4)
    await state.record_commits({"engine-0": 5, "engine-1": 5})
    await state.drain_engine("engine-1")
    await state.register_receiver("receiver-0", "http://127.0.0.1:1")
    await state.record_staged("receiver-0", 5)
    await state.forget_fleet()
    assert await state.engine_versions() == {} == await state.receivers()
    assert await state.staged_versions() == {}
    assert (await buffer.stats()).engines_gone
    changed = BufferConfig(max_staleness=7, capacity_groups=90)
    await buffer.open(changed, 4, replaced={"max_staleness"})
    stats = await buffer.stats()
    assert (stats.max_staleness, stats.max_staleness_largest) == (7, 7)
    assert await buffer.setting("groups_per_step") == 4
    await buffer.close()
    await state.close()


def test_checkpoint_that_fails_is_told_until_one_succeeds() -> None:
    view = RunView(run="a", num_steps=8, started=0.0)
    values = {"step": 4, "bytes": 0, "write_s": 0.1}
    failed = {**values, "error": "trainer-1: [Errno 28] No space left on device"}
    view.apply(Record(t=1.0, kind="checkpoint", values=failed))
    text = "\n".join(str(segment.text) for segment in Console(width=200).render(render(view, 200)))
    assert "There is no checkpoint of step 4, which does not stop the run: trainer-1" in text
    view.apply(Record(t=2.0, kind="checkpoint", values=values))
    assert view.checkpoint_failure is None


REPORT = TrainReport(num_steps=8, version=9, was_stopped=False, seconds=1.0)


class Result(Future[Any]):
    """A result of another process, which some other thread or nobody sets."""

    def future(self) -> Future[Any]:
        return self


class Ranks:
    """A trainer of one rank that lives until it is closed."""

    def __init__(self, result: TrainReport | None = None, while_closing: Any = None) -> None:
        self.training, self.death, self.opened = Result(), Result(), Result()
        self.exported = Result()
        self.exported.set_result(None)
        if result is None:
            self.training.set_exception(RayActorError())
            self.death.set_exception(RayActorError())
        else:
            self.training.set_result(result)
        self._while_closing = while_closing

    def deaths(self) -> dict[str, Result]:
        return {"trainer-0": self.death}

    def pids(self) -> dict[str, Result]:
        return {"trainer-0": Result()}

    def train(self) -> dict[str, Result]:
        return {"trainer-0": self.training}

    def close(self, timeout_s: float) -> None:
        self._while_closing()

    def open_rendezvous(self) -> dict[str, Result]:
        if not self.opened.done():
            self.opened.set_result(("127.0.0.1", 1))
        return {"trainer-0": self.opened}

    def start(self, *_: Any) -> dict[str, Result]:
        started = Result()
        started.set_result(Restored(step=9, from_memory=True))
        return {"trainer-0": started}

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

    stop = worker_deaths = receivers_given_up = run

    def draining_nodes(self) -> frozenset[str]:
        return frozenset()

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError("there is no engine")


async def test_restarted_ranks_go_on_from_a_checkpoint_that_the_old_ones_completed_at_their_end(
    run_dir: RunDir, config: Config, redis_url: str, run_name: str
) -> None:
    store = CheckpointStore(run_dir.path / "checkpoints")
    latest = store.latest()
    assert latest is not None

    def complete_another() -> None:
        store.begin(7)  # and its groups are acknowledged: the one before does not contain them
        store.commit(replace(latest[1], step=7))

    address = BufferAddress(url=redis_url, run=run_name, settings=config.buffer)
    first = Ranks(while_closing=complete_another)
    resumed_from, said = await _train(run_dir, config, address, [first, Ranks(REPORT)])
    assert resumed_from == [run_dir.path / "checkpoints" / "step-000007"]
    assert "trainer-0 died: the ranks start again" in said
    assert "the ranks go on from step 9 (memory), after" in said
    (resumed, again) = read_metrics(run_dir.metrics, "resumed")[-2:]
    assert (resumed.values["source"], again.values["source"]) == ("disk", "memory")
    assert (resumed.count("step"), again.count("step")) == (6, 9)


async def test_ranks_start_again_if_one_hangs_and_if_one_dies_as_it_starts_again(
    run_dir: RunDir,
    config: Config,
    redis_url: str,
    run_name: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(training_module, "ANSWER_S", 0.1)
    monkeypatch.setattr(training_module, "DEATH_GRACE_S", 0.1)
    hanging, dying = Ranks(while_closing=lambda: None), Ranks(while_closing=lambda: None)
    hanging.death = Result()  # its process is stopped: the other ranks fail in a collective
    dying.opened.set_exception(RayActorError())
    address = BufferAddress(url=redis_url, run=run_name, settings=config.buffer)
    resumed_from, said = await _train(run_dir, config, address, [hanging, dying, Ranks(REPORT)])
    assert len(resumed_from) == 2
    assert "trainer-0 does not answer within 0.1 s: the ranks start again" in said
    assert "trainer-0 died: the ranks start again" in said


async def test_failed_export_costs_the_final_model_and_not_the_run(
    run_dir: RunDir, config: Config, redis_url: str, run_name: str
) -> None:
    address = BufferAddress(url=redis_url, run=run_name, settings=config.buffer)
    ranks = Ranks(REPORT)
    ranks.exported = Result()
    ranks.exported.set_exception(RayTaskError("export", "", OSError(28, "No space left on device")))
    _, said = await _train(run_dir, config, address, [ranks])
    assert "no final_model: a trainer rank failed: OSError: [Errno 28] No space left" in said
    assert f"`make export RUN=a DIR={run_dir.path.parent}` writes the model of the last" in said
    kinds = [r.values.get("phase", r.kind) for r in read_metrics(run_dir.metrics)]
    # The last evaluation, which fails here for lack of an engine, comes before.
    assert kinds.index("eval_failed") < kinds.index("saving the model")


async def test_ranks_that_an_earlier_controller_had_asked_to_stop_do_not_finish_a_run(
    run_dir: RunDir, config: Config, redis_url: str, run_name: str
) -> None:
    address = BufferAddress(url=redis_url, run=run_name, settings=config.buffer)
    with pytest.raises(Stopped):
        await _train(run_dir, config, address, [Ranks(replace(REPORT, was_stopped=True))])


async def _train(
    run_dir: RunDir, config: Config, address: BufferAddress, ranks: list[Ranks]
) -> tuple[list[Path], str]:
    """The checkpoints from which later ranks went on, and what was said."""
    resumed_from = list[Path]()

    def new_trainer(folder: Path) -> Ranks:
        resumed_from.append(folder)
        return ranks[len(resumed_from)]

    pools = Pools(
        trainer=cast("TrainerPool", ranks[0]),
        new_trainer=cast("Callable[[Path], TrainerPool]", new_trainer),
        rollout=cast("RolloutPool", IdleEngine()),
    )
    async with opened(address) as buffer:
        await buffer.open(config.buffer, config.trainer.groups_per_step)
    said = StringIO()
    training = Training(
        config=config,
        run_dir=run_dir,
        pools=pools,
        address=address,
        server=None,
        ray_processes={},
        panel=Panel(enabled=False, console=Console(file=said, width=200)),
        started=0.0,
        stop=StopRequest(),
        resumed_step=6,
    )
    await training.run()
    return resumed_from, said.getvalue()


def test_run_does_not_go_on_with_other_problems(run_dir: RunDir, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    rows = [{"question": f"{n}?", "answer": n} for n in range(5)]
    path.write_text("\n".join(map(json.dumps, rows)))
    settings = ["task=capitals", f"task.path={path}", "task.eval_size=1"]
    (run_dir.path / "config.yaml").write_text(
        to_yaml(load_config([f"run.dir={tmp_path}", "trainer.num_steps=8", *settings]))
    )
    resumption = find_resumption(run_dir, [])
    run_dir.write_data(data_of(build_task(resumption.config.task)))
    path.write_text("\n".join(map(json.dumps, [*rows, {"question": "5?", "answer": 5}])))
    words = rf"task\.path={path}: it has 5 problems \(.* but the run began with 4 problems \("
    with pytest.raises(ValueError, match=words):
        resume(run_dir, [], StopRequest(), lambda folder: None)
    assert run_dir.read_record().state == "stopped"
    (run_dir.path / "data.json").write_text("{")
    with pytest.raises(RunDirError, match=r"data\.json is damaged"):
        run_dir.read_data()
    (run_dir.path / "data.json").unlink()
    assert run_dir.read_data() == {}  # of a run that has not written it
