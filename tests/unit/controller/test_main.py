from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

import controller.run  # noqa: F401  (or the process that each launch forks imports torch and Ray)
from configs.load import load_config
from controller.examples import examples_of
from controller.main import (
    EXIT_BAD_INPUT,
    EXIT_FAILED,
    EXIT_NOT_ATTACHED,
    EXIT_STOPPED,
    _Finish,
    _parse,
    _parser,
    main,
)
from controller.run_dir import RunDir, RunDirError
from controller.signals import EXIT_RAY_LOST
from controller.start.attach import NotAttachableError, find_attachment
from controller.start.ray_keeper import RECORD
from processes.child import started_at
from tests.support.controller.records import write_checkpoint
from tests.support.repository import ROOT

BAD_LINE = '{"question": "a", "answer": "#### 1"}\n{"question": 3}\n'


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["bufer.max_staleness=1"], "did you mean buffer.max_staleness"),
        (["buffer.max_staleness=two"], "expected an integer"),
        (["cluster.gpus_per_rank=1"], "need 3 GPUs, and Ray has 0"),
        (["cluster.num_gpus=999"], "cluster.num_gpus=999: this machine has "),
        (["task=gsm8k", "task.path=/nowhere.jsonl"], "there is no such file"),
        (
            ["model=pretrained", "model.path=/nowhere/model", "trainer.warm_start.num_steps=0"],
            "model.path='/nowhere/model'",
        ),
        (["task.name=spell_bakward"], "did you mean spell_backward?"),
        (["--experiment=gsm8k-smoke", "task.path={folder}/bad.jsonl"], "/bad.jsonl, line 2"),
    ],
)
def test_bad_input_is_one_message_and_starts_nothing(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], settings: list[str], message: str
) -> None:
    runs = tmp_path / "runs"
    (tmp_path / "bad.jsonl").write_text(BAD_LINE)
    settings = [setting.replace("{folder}", str(tmp_path)) for setting in settings]
    assert main(["launch", f"run.dir={runs}", *settings]) == EXIT_BAD_INPUT
    error = capfd.readouterr().err
    assert error.startswith("leash: ") and message in error
    assert error.count("\n") == 1
    assert not runs.exists()


def test_settings_may_stand_on_both_sides_of_an_option(capfd: pytest.CaptureFixture[str]) -> None:
    arguments = ["trainer.num_steps=7", "--experiment", "gsm8k-smoke", "run.seed=5"]
    assert main(["dry-run", *arguments]) == 0
    output = capfd.readouterr().out
    assert "num_steps: 7" in output and "seed: 5" in output and "Processes of this run" in output


def test_every_command_says_what_it_and_its_options_do() -> None:
    parser = _parser()
    (verbs,) = (a for a in parser._actions if isinstance(a, argparse._SubParsersAction))
    assert {choice.dest for choice in verbs._choices_actions} == set(verbs.choices)
    for verb, sub in {"": parser, **verbs.choices}.items():
        assert sub.description and sub.description.endswith("."), verb
        for action in sub._actions:
            assert action is verbs or action.help, (verb, action.dest)
            assert (action.help or "x")[-1] not in ",;:", (verb, action.dest)


def test_help_of_every_command_has_examples_that_it_parses() -> None:
    (verbs,) = (a for a in _parser()._actions if isinstance(a, argparse._SubParsersAction))
    for verb, sub in verbs.choices.items():
        assert "examples:\n  leash " in sub.format_help(), verb
        assert examples_of(verb), verb
        for line in examples_of(verb):
            leash, *words = shlex.split(line.partition(" > ")[0])
            assert leash == "leash" and _parse(words).verb == verb, line


def test_terminal_without_a_check_mark_ends_no_command() -> None:
    code = (
        "from controller.main import main\n"
        "main(['status', '--run', 'nowhere', '--dir', 'nowhere'])\n"
        "print('\u2713 placement')\n"
    )
    variables = {**os.environ, "PYTHONIOENCODING": "latin-1"}
    ended = subprocess.run(
        [sys.executable, "-c", code], env=variables, stdout=subprocess.PIPE, check=True
    )
    assert ended.stdout == b"? placement\n"


def test_unknown_option_is_refused(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        main(["launch", "--experimnt", "x"])
    assert exit_info.value.code == 2
    assert "unrecognized arguments: --experimnt" in capfd.readouterr().err


@pytest.fixture
def orphan(runs: Path) -> RunDir:
    """The folder of a run that has a checkpoint, and whose controller has died."""
    run_dir = RunDir.create(str(runs), "a", "quickstart")
    config = load_config(["run.max_restarts=2", f"run.dir={runs}", "run.name=a"])
    run_dir.write_config(config)
    (run_dir.path / "checkpoints").mkdir()
    (run_dir.path / "checkpoints" / "latest").write_text("step-000003\n")
    run_dir.write_record(replace(run_dir.read_record(), process_started=0.0))
    return run_dir


def test_guard_has_a_run_resumed_whose_controller_died_as_often_as_the_setting_says(
    orphan: RunDir, capfd: pytest.CaptureFixture[str]
) -> None:
    guard = _Finish()
    for _ in range(2):
        assert callable(guard(str(orphan.path), False, -9))
        record = orphan.read_record()  # until the next controller writes its own
        assert (record.state, record.pid, record.is_alive) == ("running", os.getpid(), True)
    assert guard(str(orphan.path), False, -9) == EXIT_FAILED
    assert orphan.read_record().state == "failed"
    errors = capfd.readouterr().err
    assert errors.count("the controller died (exit code -9); another one goes on\n") == 2
    assert errors.count("the controller died (exit code -9); ending what it left\n") == 1


def test_guard_has_another_controller_attach_while_the_keeper_lives_and_else_resume(
    orphan: RunDir,
) -> None:
    guard = _Finish()
    assert guard._next_verb(orphan, -9) == "resume"
    with subprocess.Popen(["sleep", "600"]) as keeper:
        started = started_at(keeper.pid)
        record = {"pid": keeper.pid, "started": started, "address": "127.0.0.1:1"}
        (orphan.make_temporary() / RECORD).write_text(json.dumps(record))
        assert guard._next_verb(orphan, -9) == "attach"
        assert guard._next_verb(orphan, EXIT_NOT_ATTACHED) == "resume"
        assert guard._next_verb(orphan, EXIT_RAY_LOST) == "resume"
        (orphan.path / "checkpoints" / "latest").unlink()
        assert guard._next_verb(orphan, -9) == "attach"
        assert guard._next_verb(orphan, EXIT_NOT_ATTACHED) is None
        keeper.kill()
    assert guard._next_verb(orphan, -9) is None
    orphan.remove_temporary()


def test_guard_follows_one_that_could_not_attach_by_one_that_resumes(
    orphan: RunDir, capfd: pytest.CaptureFixture[str]
) -> None:
    guard = _Finish()
    for exit_code in (-9, EXIT_NOT_ATTACHED, -9, EXIT_NOT_ATTACHED):
        # The next one dies early: it has not told the folder.
        assert callable(guard(str(orphan.path) if exit_code == -9 else None, False, exit_code))
    assert guard(None, False, -9) == EXIT_FAILED
    assert capfd.readouterr().err.count("another one goes on") == 2


def test_attach_refuses_a_run_that_has_ended_or_has_a_controller(
    orphan: RunDir, capfd: pytest.CaptureFixture[str]
) -> None:
    here = os.getpid()
    record = replace(orphan.read_record(), process_started=started_at(here))
    orphan.write_record(replace(record, pid=here))
    with pytest.raises(RunDirError, match=f"its controller, process {here}, is not gone"):
        orphan.take_over()
    orphan.end("stopped")
    assert main(["attach", "--dir", str(orphan.path.parent)]) == EXIT_BAD_INPUT
    assert "RUN='a': it has ended; `make resume RUN=a DIR=" in capfd.readouterr().err
    assert orphan.read_record().state == "stopped"


def test_attach_refuses_a_run_whose_keeper_is_gone(
    orphan: RunDir, capfd: pytest.CaptureFixture[str]
) -> None:
    why = "no keeper of its Ray lives"
    with pytest.raises(NotAttachableError, match=rf"cannot attach to a \({why}\); it goes on from"):
        find_attachment(orphan, orphan.read_config())
    (orphan.path / "checkpoints" / "latest").unlink()
    assert main(["attach", "--run", "a", "--dir", str(orphan.path.parent)]) == EXIT_FAILED
    assert f"leash: cannot attach to a ({why}); launch it again\n" in capfd.readouterr().err
    assert orphan.read_record().state == "failed"


def test_resume_ends_nothing_of_a_run_that_goes_on_before_it_knows_that_it_can(
    orphan: RunDir, capfd: pytest.CaptureFixture[str]
) -> None:
    words, before = ["resume", "--dir", str(orphan.path.parent)], orphan.read_record()
    assert main([*words, "buffer.max_stalenes=1"]) == EXIT_BAD_INPUT
    assert "did you mean buffer.max_staleness?" in capfd.readouterr().err
    (orphan.path / "checkpoints" / "latest").unlink()
    assert main(words) == EXIT_BAD_INPUT
    error = capfd.readouterr().err
    assert "has not ended, and has no checkpoint yet" in error and "`make attach RUN=a" in error
    assert orphan.read_record() == before


def test_resume_refuses_a_run_whose_controller_lives_before_it_loads_anything(
    orphan: RunDir, capfd: pytest.CaptureFixture[str]
) -> None:
    write_checkpoint(orphan, step=3, version=3)
    with subprocess.Popen(["sleep", "600"]) as other:
        started = started_at(other.pid)
        record = replace(orphan.read_record(), pid=other.pid, process_started=started)
        orphan.write_record(record)
        command = [sys.executable, "-X", "importtime", "-m", "controller.main", "resume"]
        where = ["--run", "a", "--dir", str(orphan.path.parent)]
        ended = subprocess.run([*command, *where], capture_output=True, text=True, cwd=ROOT)
        other.kill()
    assert ended.returncode == EXIT_BAD_INPUT
    words = f"leash: RUN='a': its controller is process {other.pid} on this machine; `make stop"
    assert words in ended.stderr
    loaded = {line.rpartition("|")[2].strip() for line in ended.stderr.splitlines()}
    assert not loaded & {"torch", "ray", "transformers"}
    assert orphan.read_record() == record


def test_guard_ends_a_run_that_was_asked_to_stop_or_has_no_checkpoint(orphan: RunDir) -> None:
    (orphan.path / "checkpoints" / "latest").unlink()
    assert _Finish()(str(orphan.path), False, -9) == EXIT_FAILED
    orphan.write_record(replace(orphan.read_record(), state="running"))
    (orphan.path / "checkpoints" / "latest").write_text("step-000003\n")
    assert _Finish()(str(orphan.path), True, -9) == EXIT_STOPPED
    assert orphan.read_record().state == "stopped"


@pytest.mark.parametrize("was_asked", [False, True])  # by `make stop`, by Ctrl-C
def test_controller_that_says_it_was_stopped_is_not_followed_by_another(
    orphan: RunDir, capfd: pytest.CaptureFixture[str], was_asked: bool
) -> None:
    assert _Finish()(str(orphan.path), was_asked, EXIT_STOPPED) == EXIT_STOPPED
    assert "leash: the controller stopped early; ending what it left" in capfd.readouterr().err
    record = orphan.read_record()
    assert (record.state, record.error) == ("stopped", "the controller stopped early")


def test_guard_leaves_a_run_alone_that_somebody_has_resumed_meanwhile(orphan: RunDir) -> None:
    other = psutil.Process(os.getppid())
    changed = {"pid": other.pid, "process_started": started_at(other.pid)}
    orphan.write_record(replace(orphan.read_record(), **changed))
    assert _Finish()(str(orphan.path), False, -9) == EXIT_FAILED
    assert orphan.read_record().state == "running"


def test_run_that_a_guard_has_adopted_is_reopened_by_its_next_controller_alone(
    orphan: RunDir,
) -> None:
    orphan.adopt()
    with pytest.raises(RunDirError, match=f"its controller is process {os.getpid()} on"):
        orphan.reopen(lambda: None)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            orphan.reopen(lambda: None)
            code = 0
        finally:
            os._exit(code)  # an error must not go on as a second run of all tests
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert orphan.read_record().pid == child
