"""`make resume` and the history of a run that goes on."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from rich.console import Console

from buffer.connect import Buffer
from buffer.redis.client import BufferConnectionError
from buffer.run_state import RunState
from configs.load import ConfigError, load_config
from configs.schema import BufferConfig, Config, LoraConfig
from controller.buffer_access import BufferAddress
from controller.commands.export import _checkpoint as checkpoint_of
from controller.history_writer import HistoryWriter
from controller.metrics.history import ATTACHED, RESUMED, TUNED, MetricsLog, Record, read_metrics
from controller.report.panel import Panel, render
from controller.report.result import summarize
from controller.run import Run, launch, resume
from controller.run_dir import RunDir, RunDirError
from controller.signals import StopRequest
from controller.start.resume import FIXED, changes_by_resume, find_resumption
from controller.watch.run_view import RunView
from rollout_pool.tasks.registry import build_task, data_of
from tests.support.controller.buffers import fill
from tests.support.controller.records import (
    buffer_record,
    eval_record,
    record_all,
    settings_of_run,
    step_record,
)
from tests.support.repository import ROOT
from trainer_pool.state.checkpoint import CheckpointStore, read_state


def test_resumption_is_the_last_checkpoint_with_the_settings_of_the_run(
    ended_run: RunDir, config: Config
) -> None:
    found = find_resumption(ended_run, [])
    assert found.checkpoint == ended_run.path / "checkpoints" / "step-000006"
    assert found.state == read_state(found.checkpoint) and found.state.step == 6
    assert found.newest_version == 7  # of a step after the checkpoint
    assert found.config == config and not found.overridden
    found = find_resumption(ended_run, ["buffer.max_staleness=5", "trainer.num_ranks=4"])
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
    ended_run: RunDir, override: str, reason: str
) -> None:
    with pytest.raises(ConfigError, match=reason):
        find_resumption(ended_run, [override])


def test_refusal_of_a_live_setting_names_tune_and_the_value_that_it_has(
    ended_run: RunDir,
) -> None:
    change = {"setting": "buffer.on_stale", "before": "requeue", "after": "wait", "who": "a@b"}
    with MetricsLog(ended_run.metrics) as log:
        log.append(TUNED, change)
    with pytest.raises(ConfigError, match=r"here wait: .* `make tune.*` may change it"):
        find_resumption(ended_run, ["buffer.on_stale=drop"])


@pytest.mark.parametrize(
    ("live", "override", "reason"),
    [
        ({"capacity_groups": "16"}, "trainer.groups_per_step=32", "capacity_groups=16: what one"),
        ({"on_stale": "wait"}, "rollout.tail=postpone", "rollout.tail='postpone': with buffer.on_"),
    ],
)
async def test_settings_of_a_resume_must_go_with_those_that_were_changed_during_the_run(
    ended_run: RunDir,
    open_run: tuple[BufferAddress, Buffer, RunState],
    monkeypatch: pytest.MonkeyPatch,
    live: dict[str, str],
    override: str,
    reason: str,
) -> None:
    address, buffer, _ = open_run
    monkeypatch.setattr(Run, "_address", address)

    async def go_on(*overrides: str) -> None:
        found = find_resumption(ended_run, overrides)
        await Run(found.config, ended_run, Panel(False), StopRequest(), found)._open_buffer()

    await buffer.change_settings(live)
    with pytest.raises(ValueError, match=reason):
        await go_on(override)
    if "capacity_groups" in live:
        await go_on(override, "buffer.capacity_groups=32")
        assert (await buffer.stats()).capacity_groups == 32


def test_relative_path_in_the_arguments_of_a_resume_is_one_of_the_current_folder(
    ended_run: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = ended_run.read_config(["task.eval_path=held-out.jsonl"])
    assert config.task.eval_path == str(tmp_path / "held-out.jsonl")


def test_page_lists_what_a_run_keeps() -> None:
    page = (ROOT / "docs" / "commands.md").read_text()
    kept = r"\*\*Settings that a run keeps\*\*.*?: (.*?)\. Anything\s+else"
    (names,) = re.findall(kept, page, re.DOTALL)
    assert set(re.findall(r"`([a-z_.]+)`", names)) == set(FIXED)


def test_reference_that_the_run_did_not_keep_is_refused(ended_run: RunDir) -> None:
    with pytest.raises(ConfigError, match=r"algorithm\.kl\.weight=0\.1: the run began without"):
        find_resumption(ended_run, ["algorithm.kl.weight=0.1"])
    given = ["algorithm.kl.weight=0.1", "algorithm.kl.reference=/a/model"]
    assert find_resumption(ended_run, given).config.algorithm.kl.weight == 0.1
    (ended_run.path / "reference_model").mkdir()
    assert find_resumption(ended_run, given[:1]).config.algorithm.kl.weight == 0.1


def test_critic_that_the_run_did_not_begin_with_is_refused(ended_run: RunDir) -> None:
    with pytest.raises(ConfigError, match=r"algorithm\.critic: the run has none, whose values"):
        find_resumption(ended_run, ["algorithm.advantage=gae", "algorithm.critic={}"])


def test_run_without_a_checkpoint_or_with_all_steps_done_is_refused(ended_run: RunDir) -> None:
    with pytest.raises(ConfigError, match=r"trainer\.num_steps"):
        find_resumption(ended_run, ["trainer.num_steps=0"])
    ended_run.end("finished")
    assert find_resumption(ended_run, []).state.step == 6  # it was made to train more
    with pytest.raises(RunDirError, match=r'finished its 6 steps; ARGS="trainer.num_steps=12"'):
        find_resumption(ended_run, ["trainer.num_steps=6"])
    (ended_run.path / "checkpoints" / "latest").unlink()
    with pytest.raises(RunDirError, match="before its first checkpoint"):
        find_resumption(ended_run, [])
    assert ended_run.resume_command is None


def test_export_takes_the_checkpoint_that_a_resume_goes_on_from(ended_run: RunDir) -> None:
    folder = ended_run.path / "checkpoints"
    for name in ("step-000009", "step-000006.bak"):  # undone by a restart; a user's copy
        (folder / name).mkdir()
    assert checkpoint_of(ended_run, None) == folder / "step-000006"
    assert checkpoint_of(ended_run, "9") == folder / "step-000009"
    with pytest.raises(RunDirError, match=r"STEP=7: a has no checkpoint of it; there are 6, 9"):
        checkpoint_of(ended_run, "7")
    (folder / "latest").unlink()
    with pytest.raises(RunDirError, match="no checkpoint yet"):
        checkpoint_of(ended_run, None)


def test_run_is_reopened_by_one_process_when_it_has_ended(ended_run: RunDir) -> None:
    started = ended_run.read_record().started
    assert ended_run.resume_command == f"make resume RUN=a DIR={ended_run.path.parent}"
    ended_run.write_record(replace(ended_run.read_record(), pid=1))
    ended_run.reopen(lambda: None)
    record = ended_run.read_record()
    assert (record.pid, record.started, record.state) == (psutil.Process().pid, started, "running")
    assert record.ended is None and record.is_running
    with pytest.raises(RunDirError, match=r"controller is process .* `make stop RUN=a DIR=/.*`"):
        ended_run.reopen(lambda: None)


def test_run_whose_controller_is_lost_with_its_machine_can_be_reopened_by_hand(
    ended_run: RunDir,
) -> None:
    path = ended_run.path / "run.json"
    ended = ended_run.read_record()
    ended_run.make_temporary()
    ended_run.write_record(replace(ended, state="running", host="a-lost-machine"))
    with pytest.raises(RunDirError, match=f'on a-lost-machine; .* for "running" in {path}'):
        ended_run.reopen(lambda: None)
    path.write_text(path.read_text().replace('"running"', '"failed"'))
    ended_run.reopen(lambda: None)
    assert ended_run.read_record().is_running and ended_run.read_record().is_here
    ended_run.make_temporary()
    ended_run.remove_temporary()


def test_resume_goes_on_from_a_checkpoint_that_the_run_completed_while_it_ended(
    ended_run: RunDir,
) -> None:
    store = CheckpointStore(ended_run.path / "checkpoints")
    before = find_resumption(ended_run, [])
    store.begin(7)  # the run was ending as the resume began
    store.commit(replace(before.state, step=7))
    found = ended_run.reopen(lambda: find_resumption(ended_run, []))
    assert found.state.step == 7 and ended_run.read_record().is_running


def test_resume_leaves_a_run_as_it_is_that_has_finished_meanwhile(
    ended_run: RunDir, config: Config
) -> None:
    store = CheckpointStore(ended_run.path / "checkpoints")
    store.begin(8)
    store.commit(replace(find_resumption(ended_run, []).state, step=8))
    ended_run.end("finished")
    before = ended_run.read_record()
    with pytest.raises(RunDirError, match="it has finished its 8 steps"):
        resume(ended_run, config, [], StopRequest(), lambda folder: None)
    assert ended_run.read_record() == before


def test_adapter_that_a_run_began_with_need_not_exist_any_more(
    ended_run: RunDir, config: Config
) -> None:
    """Its checkpoint has the adapter. Refused for another reason, so that nothing starts."""
    config.model.lora = LoraConfig(resume_from="/no/such/folder")
    ended_run.write_config(config)
    with pytest.raises(ConfigError, match=r"trainer\.num_steps=0"):
        resume(ended_run, config, ["trainer.num_steps=0"], StopRequest(), lambda folder: None)
    assert ended_run.read_config().model.lora == config.model.lora


def test_changed_settings_are_kept_once_redis_has_them_too(
    ended_run: RunDir, config: Config
) -> None:
    config.buffer.url = "redis://user:secret@127.0.0.1:1/0"
    ended_run.write_config(config)
    with pytest.raises(ValueError, match="does not keep its password"):
        go_on(ended_run, ["buffer.max_staleness=5"])
    assert ended_run.read_record().state == "failed"
    ended_run.write_record(replace(ended_run.read_record(), state="failed"))
    (ended_run.path / "password").write_text("secret")
    password = [f"buffer.password_file={ended_run.path / 'password'}"]
    with pytest.raises(BufferConnectionError, match=r"127\.0\.0\.1:1"):  # it is asked
        go_on(ended_run, password)
    again = find_resumption(ended_run, [])  # it would not replace the setting in Redis
    assert again.config.buffer.max_staleness == config.buffer.max_staleness


def test_settings_that_are_no_longer_as_the_history_says_are_recorded_anew(config: Config) -> None:
    def tuned(setting: str, after: str) -> Record:
        return Record(t=1.0, kind=TUNED, values={"setting": setting, "after": after})

    history = [tuned("buffer.max_staleness", "3"), tuned("trainer.learning_rate", "0.5")]
    history += [tuned("buffer.max_staleness", "4"), tuned("rollout.group_size", "6")]
    held = {"max_staleness": "1", "group_size": "6"}  # the first one is replaced, the rate is lost
    changed = {str(one.pop("setting")): one for one in changes_by_resume(config, held, history)}
    assert changed == {
        "buffer.max_staleness": {"before": "4", "after": "1", "who": "the resume"},
        "trainer.learning_rate": {
            "before": "0.5",
            "after": f"{config.trainer.learning_rate}",
            "who": "the resume",
        },
    }


def go_on(ended_run: RunDir, overrides: Sequence[str]) -> None:
    config = find_resumption(ended_run, overrides).config
    resume(ended_run, config, overrides, StopRequest(), lambda folder: None)


def test_launch_refuses_a_redis_with_settings_of_a_run_that_has_pushed_nothing(
    config: Config, redis_url: str, run_name: str
) -> None:
    asyncio.run(fill(redis_url, run_name))  # and lives, or has failed: its settings would hold
    config.run.name, config.buffer.url = run_name, redis_url
    # To get no further.
    config.cluster.host, config.cluster.ray_address = "127.0.0.1", "127.0.0.1:1"
    with pytest.raises(ValueError, match="already holds a run of this name"):
        launch(config, StopRequest(), lambda folder: None)


def resumed_record(step: int, t: float) -> Record:
    return Record(t=t, kind=RESUMED, values={"step": step, "away_s": 990.0})


def test_steps_after_the_checkpoint_and_the_time_in_between_do_not_count(
    ended_run: RunDir, config: Config
) -> None:
    before = [step_record(step, 1000.0 + step, reward=0.0) for step in range(8)]
    after = [step_record(step, 2000.0 + step, reward=1.0) for step in range(6, 8)]
    ended_run.metrics.unlink()
    records = [eval_record(0, 999.0, 0.1), *before, resumed_record(6, 2000.0), *after]
    record_all(ended_run, [*records, buffer_record(2008.0)])
    read = read_metrics(ended_run.metrics)
    steps = [record for record in read if record.kind == "step"]
    assert [step.count("step") for step in steps] == list(range(1, 9))
    assert [step.number("reward_mean") for step in steps] == [0.0] * 6 + [1.0] * 2
    result = summarize(run="a", config=config, records=read, wall_s=1009.0)
    assert result.steps == 8
    assert result.wall_s == pytest.approx(1009.0 - 990.0)
    assert result.train_s < 20
    view = RunView(run="a", config=settings_of_run(8), started=999.0)
    for record in records:
        view.apply(record)
    assert view.step == 8 and len(view.steps) == 8
    assert view.seconds_per_step == pytest.approx(1.0)


async def test_history_of_a_run_that_goes_on_is_read_from_where_it_was_recorded(
    open_run: tuple[BufferAddress, Buffer, RunState], tmp_path: Path
) -> None:
    path, steps = tmp_path / "metrics.jsonl", list[Record]()
    address, buffer, state = open_run

    def writer(log: MetricsLog, history: list[Record]) -> tuple[HistoryWriter, RunView]:
        view = RunView(run=address.run, config=settings_of_run(8), started=0.0)
        return HistoryWriter(buffer, state, log, view, history, steps.append), view

    with MetricsLog(path) as log:
        first, _ = writer(log, [])
        await state.append_metrics(step_record(0, 1.0).values, "step")
        await first.drain_metrics(block_s=1.0)
        first.record("phase", {"phase": "training"})
    await state.append_metrics(step_record(1, 2.0).values, "step")  # nobody records it
    with MetricsLog(path) as log:
        second, view = writer(log, read_metrics(path))
        assert view.step == 1 and view.phase == "training"
        await second.resume(1)
        assert view.step == 1
        await state.append_metrics(step_record(1, 3.0).values, "step")
        await second.drain_metrics(block_s=1.0)
    with MetricsLog(path) as log:
        third, view = writer(log, read_metrics(path))
        await third.attach()
        third.record("phase", {"phase": "training"})
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
    open_run: tuple[BufferAddress, Buffer, RunState],
) -> None:
    _, buffer, state = open_run
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
    assert await buffer.setting("groups_per_step") == 16


def test_checkpoint_that_fails_is_told_until_one_succeeds() -> None:
    view = RunView(run="a", config=settings_of_run(8), started=0.0)
    values = {"step": 4, "bytes": 0, "write_s": 0.1}
    failed = {**values, "error": "trainer-1: [Errno 28] No space left on device"}
    view.apply(Record(t=1.0, kind="checkpoint", values=failed))
    text = "\n".join(str(segment.text) for segment in Console(width=200).render(render(view, 200)))
    assert "There is no checkpoint of step 4, which does not stop the run: trainer-1" in text
    view.apply(Record(t=2.0, kind="checkpoint", values=values))
    assert view.checkpoint_failure is None


def test_run_does_not_go_on_with_other_problems(ended_run: RunDir, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    rows = [{"question": f"{n}?", "answer": n} for n in range(5)]
    path.write_text("\n".join(map(json.dumps, rows)))
    settings = ["task=capitals", f"task.path={path}", "task.eval_size=1"]
    ended_run.write_config(load_config([f"run.dir={tmp_path}", "trainer.num_steps=8", *settings]))
    resumption = find_resumption(ended_run, [])
    ended_run.write_data(data_of(build_task(resumption.config.task)))
    path.write_text("\n".join(map(json.dumps, [*rows, {"question": "5?", "answer": 5}])))
    words = rf"task\.path={path}: it has 5 problems \(.* but the run began with 4 problems \("
    with pytest.raises(ValueError, match=words):
        go_on(ended_run, [])
    assert ended_run.read_record().state == "stopped"
    (ended_run.path / "data.json").write_text("{")
    with pytest.raises(RunDirError, match=r"data\.json is damaged"):
        ended_run.read_data()
    (ended_run.path / "data.json").unlink()
    assert ended_run.read_data() == {}  # of a run that has not written it
