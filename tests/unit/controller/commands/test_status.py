"""`make status` against a real server while a run goes on, and from the folder after its end."""

from __future__ import annotations

import asyncio
import io
import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

import pytest
from rich.console import Console

from buffer.redis.connection import connect
from buffer.run_state import STREAM_START, MetricsEntry, RunState
from controller.commands.status import print_status
from controller.main import EXIT_BAD_INPUT
from controller.metrics.history import Record, read_metrics
from controller.report.summary import write_summary
from controller.run_dir import RunDir
from controller.signals import EXIT_FAILED
from processes.child import started_at
from tests.support.controller.buffers import Command, opened
from tests.support.controller.records import buffer_record, eval_record, record_all, step_record


@pytest.fixture
def trained_run(run_dir: RunDir) -> RunDir:
    """A run that has trained ten steps."""
    return _trained(run_dir, 1000.0)


def _trained(run_dir: RunDir, began: float) -> RunDir:
    records = [
        Record(t=began, kind="phase", values={"phase": "training"}),
        eval_record(0, began, 0.31),
    ]
    for step in range(10):
        t, waits = began + 1 + step, {("trainer", "rollout"): 0.6 * step}
        records += [step_record(step, t), buffer_record(t, waits=waits)]
    record_all(run_dir, records)
    return run_dir


def status_of(run_dir: RunDir) -> str:
    console = Console(width=100)
    with console.capture() as capture:
        print_status(run_dir, console=console)
    return capture.get()


async def _begin_run(url: str, run: str) -> None:
    state = RunState(await connect(url), run)
    async with opened(url, run, groups_per_step=16, max_staleness=2) as buffer:
        await buffer.admit("group-0", timeout_s=60)
    await state.record_commits({"engine-0": 0})
    await state.add_wait("trainer", "rollout", 7.5)
    await state.count("tokens_generated", 1234)
    await state.close()


@pytest.fixture
def going_run(run_dir: RunDir, redis_url: str, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    """One that has just trained its tenth step, with its buffer, however slow the machine is."""
    now = time.time()
    monkeypatch.setattr("controller.watch.look.time", SimpleNamespace(time=lambda: now))
    _trained(run_dir, now - 10)
    asyncio.run(_begin_run(redis_url, run_dir.name))
    run_dir.write_redis_url(redis_url)
    return run_dir


def test_running_run_is_shown_live(going_run: RunDir, redis_url: str) -> None:
    text = status_of(going_run)
    first = text.splitlines()[0]
    assert first.startswith("Rollouts are the bottleneck: the trainer waited ")
    where = f"RUN={going_run.name} DIR={going_run.path.parent}"
    assert first.endswith(f" Try `make scale ROLLOUT=2 {where}`.")
    assert "step 10 of 60" in text
    assert "1 running" in text
    assert "1 of 48 groups" in text
    assert text.count("make scale ROLLOUT=2") == 2, "the panel says it too"
    assert " ".join(text.split()).count(f"RUN={going_run.name}") >= 3
    assert redis_url not in text, "the password stays in its file"


def test_controller_that_a_signal_has_stopped_is_named(going_run: RunDir) -> None:
    controller = subprocess.Popen(["sleep", "3600"])
    try:
        started = started_at(controller.pid)
        record = replace(going_run.read_record(), pid=controller.pid, process_started=started)
        going_run.write_record(record)
        for number, is_named in ((signal.SIGSTOP, True), (signal.SIGCONT, False)):
            controller.send_signal(number)
            os.waitpid(controller.pid, os.WUNTRACED | os.WCONTINUED)
            first = status_of(going_run).splitlines()[0]
            words = f"The controller, process {controller.pid}, stands still: a signal has stopped"
            assert first.startswith(words) is is_named
    finally:
        controller.kill()
        controller.wait()


def test_status_as_json_has_the_verdict_and_its_command(going_run: RunDir, leash: Command) -> None:
    found = json.loads(leash("status", "--json"))
    assert found["run"] == going_run.name and found["state"] == "running"
    assert found["verdict"] == found["findings"][0]
    assert found["verdict"]["part"] == "rollout" and found["verdict"]["level"] == "hint"
    assert found["verdict"]["command"].startswith("make scale ROLLOUT=2 RUN=")
    assert 0.25 < found["waits"]["trainer_for_rollout"] < 0.9
    [lease] = [one for one in found["stages"] if one["name"] == "lease"]
    assert lease.pop("share") == pytest.approx(0.3125)
    assert lease == {"of": "trainer", "name": "lease", "waits_for": "rollouts"}


def test_shares_of_the_stages_are_shown_on_request(going_run: RunDir, leash: Command) -> None:
    assert "waits for" not in leash("status")
    [lease] = [line for line in leash("status", "--waits").splitlines() if " lease " in line]
    assert lease.split() == ["trainer", "lease", "31.2%", "rollouts"]


@pytest.mark.parametrize(("answer", "number"), [("y\n", ["2"]), ("n\n", []), ("", [])])
def test_fix_runs_the_command_of_the_verdict_after_a_yes(
    going_run: RunDir,
    leash: Command,
    monkeypatch: pytest.MonkeyPatch,
    answer: str,
    number: list[str],
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(answer))
    text = leash("status", "--fix")
    assert "make scale ROLLOUT=2" in text and "Run it? [y/N]" in text
    assert (f"{going_run.name}: rollout.num_engines 1 -> 2" in text) == bool(number)
    [*entries] = asyncio.run(_metrics(going_run))
    assert [entry.record["after"] for entry in entries if entry.kind == "tuned"] == number


async def _metrics(run_dir: RunDir) -> list[MetricsEntry]:
    state = RunState(await connect(str(run_dir.read_redis_url())), run_dir.name)
    entries = await state.read_metrics(STREAM_START, block_s=0)
    await state.close()
    return entries


def test_fix_refuses_what_takes_a_restart(trained_run: RunDir, leash: Command) -> None:
    trained_run.end("finished")
    error = leash("status", "--fix", exit_code=EXIT_BAD_INPUT)
    assert "FIX=1: the verdict has no command for a running job" in error


def test_starting_run_is_reported(run_dir: RunDir) -> None:
    assert "is starting" in status_of(run_dir)


def test_redis_of_a_run_that_does_not_answer_is_named_with_its_log(
    run_dir: RunDir, leash: Callable[..., str]
) -> None:
    run_dir.write_redis_url("redis://127.0.0.1:1/0")
    error = leash("status", exit_code=EXIT_FAILED)
    assert f"the Redis of {run_dir.name} does not answer" in error
    assert str(run_dir.log_of("redis")) in error and "buffer.url" not in error


@pytest.mark.parametrize(
    ("name", "before", "after", "code", "words"),
    [
        ("metrics.jsonl", r"(?s).*", "", 0, "Nothing is measured so far."),
        ("metrics.jsonl", r"[^\n]{9}\n\Z", "", 0, "Rollouts are the bottleneck"),
        ("metrics.jsonl", r"\Z", "null\n", EXIT_BAD_INPUT, "metrics.jsonl:23 is damaged: "),
        ("config.yaml", r"(?s).*", "", EXIT_BAD_INPUT, "config.yaml contains no settings; restore"),
        ("config.yaml", "(  )num_steps", r"\1an_old: 1\n\g<0>", EXIT_BAD_INPUT, "no such setting"),
        ("redis.url", r"@.*", "", EXIT_FAILED, "does not answer"),
        ("run.json", r"(?s).*", "{", EXIT_BAD_INPUT, "run.json is damaged: "),
    ],
)
def test_files_of_a_start_a_crash_or_another_version_are_answered_with_words(
    going_run: RunDir, leash: Command, name: str, before: str, after: str, code: int, words: str
) -> None:
    file = going_run.path / name
    file.write_text(re.sub(before, after, file.read_text(), count=1))
    assert words in leash("status", exit_code=code)


def test_run_without_its_controller_is_reported(trained_run: RunDir) -> None:
    write_summary(trained_run, read_metrics(trained_run.metrics))  # of an earlier end
    trained_run.write_record(replace(trained_run.read_record(), process_started=0.0))
    text = status_of(trained_run)
    assert text.startswith(f"{trained_run.name}: its controller is gone")
    assert "It made 10 steps" in text and "Rollouts are the bottleneck" in text
    assert "= trained" not in text


def test_finished_run_shows_its_summary_and_bottleneck(trained_run: RunDir) -> None:
    write_summary(trained_run, read_metrics(trained_run.metrics))
    trained_run.end("finished")
    text = status_of(trained_run)
    assert f"{trained_run.name}: finished" in text
    assert "= trained" in text
    assert "Rollouts are the bottleneck: the trainer waited 55% of the run" in text


def test_one_object_and_a_question_are_refused_together(
    trained_run: RunDir, leash: Command
) -> None:
    error = leash("status", "--json", "--fix", exit_code=EXIT_BAD_INPUT)
    assert "JSON=1 FIX=1: " in error


def test_run_that_is_being_resumed_says_nothing_of_before(going_run: RunDir) -> None:
    record = going_run.read_record()
    going_run.write_record(replace(record, resumed=time.time()))
    text = status_of(going_run)
    assert "Nothing is measured so far." in text and "starting" in text
