"""Evaluations by a program of the user's: its numbers become a record; it never ends the run."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from configs.rollout_schema import EvalConfig
from configs.run_files import Scalar
from controller.evaluation.outside import CommandEvaluations, read_numbers
from controller.run_dir import EVALUATED, RunDir
from processes.child import has_ended
from tests.support.rollout import until

PYTHON = (sys.executable, "-I", "-S")
EXPORT = """
import os, sys
step, to = (word.partition("=")[2] for word in sys.argv[-2:])
print("exported step", step)
os.mkdir(to)
open(f"{to}/step", "w").write(step)
"""
PROGRAM = """
import sys
model, out = sys.argv[1:]
open(out, "w").write('{"gsm8k": 0.5, "step": %s}' % open(f"{model}/step").read())
"""


class Reports:
    """The records of evaluations and what was said of them."""

    def __init__(self) -> None:
        self.records = list[Mapping[str, Scalar]]()
        self.words = ""

    async def append(self, values: Mapping[str, Scalar], kind: str) -> None:
        assert kind == "eval_command"
        self.records.append(values)

    def say(self, words: str) -> None:
        self.words += words


@pytest.fixture
def reports() -> Reports:
    return Reports()


Make = Callable[..., CommandEvaluations]


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    return RunDir.create(str(tmp_path), "a", "quickstart")


@pytest.fixture
def make(run_dir: RunDir, reports: Reports, tmp_path: Path) -> Make:
    def make(
        program: str = PROGRAM, *more: str, export: str = EXPORT, limit_s: float = 600.0
    ) -> CommandEvaluations:
        own, exporter = tmp_path / "evals.py", tmp_path / "export.py"
        own.write_text(program)
        exporter.write_text(export)
        settings = EvalConfig(
            command=[*PYTHON, str(own), "{model}", "{out}", *more],
            command_every=20,
            command_timeout_s=limit_s,
        )
        export_command = (*PYTHON, str(exporter))
        return CommandEvaluations(settings, run_dir, reports.append, reports.say, export_command)

    return make


async def test_numbers_of_the_program_become_a_record_and_its_folder_is_removed(
    make: Make, reports: Reports, run_dir: RunDir
) -> None:
    (run_dir.path / EVALUATED / "model").mkdir(parents=True)  # a killed controller left it
    await make().end(40)
    (record,) = reports.records
    assert record.items() >= {"step": 40, "result": "ok", "skipped": 0}.items()
    assert (record["metric/gsm8k"], record["metric/step"]) == (0.5, 40.0)
    assert float(record["seconds"]) > 0 and reports.words == ""
    assert not (run_dir.path / EVALUATED).exists()


async def test_checkpoint_that_comes_due_while_another_one_is_evaluated_is_counted(
    make: Make, reports: Reports
) -> None:
    evaluations = make()
    async with asyncio.TaskGroup() as tasks:
        for step in (0, 10, 20, 40):  # the first two are not due
            evaluations.note_checkpoint(step, tasks)
        await evaluations.end(60)
    seen = [(record["step"], record["result"], record["skipped"]) for record in reports.records]
    assert seen == [(20, "ok", 1), (60, "ok", 0)]


async def test_run_without_a_program_evaluates_nothing(run_dir: RunDir, reports: Reports) -> None:
    evaluations = CommandEvaluations(EvalConfig(), run_dir, reports.append, reports.say)
    async with asyncio.TaskGroup() as tasks:
        evaluations.note_checkpoint(20, tasks)
        await evaluations.end(40)
    assert reports.records == []


@pytest.mark.parametrize(
    ("settings", "why", "output"),
    [
        ({"program": "print('no such task'); raise SystemExit(3)"}, "exit code 3", "no such task"),
        ({"export": "raise SystemExit('no checkpoint')"}, "exit code 1", "no checkpoint"),
        ({"program": ""}, 'as {"gsm8k": 0.61} to {out}: [Errno 2] No such file', "exported step"),
        ({"program": "import time; time.sleep(600)", "limit_s": 0.05}, "=0.05 is over; raise", ""),
    ],
)
async def test_program_that_fails_is_told_with_the_end_of_its_output(
    make: Make,
    reports: Reports,
    run_dir: RunDir,
    settings: dict[str, str | float],
    why: str,
    output: str,
) -> None:
    await make(**settings).end(40)
    (record,) = reports.records
    assert record["result"] == "failed" and why in str(record["why"])
    assert reports.words.startswith("rollout.eval.command has not evaluated step 40: ")
    assert why in reports.words and output in reports.words.partition("the last lines of")[2]
    assert not (run_dir.path / EVALUATED).exists()


FORKS = """
import os, sys, time
if pid := os.fork():
    with open(sys.argv[3], "w") as file:
        print(pid, file=file)
time.sleep(600)
"""


async def test_processes_of_the_program_end_with_the_run(
    make: Make, reports: Reports, run_dir: RunDir, tmp_path: Path
) -> None:
    file = tmp_path / "pid"
    evaluating = asyncio.create_task(make(FORKS, str(file)).end(40))
    await until(lambda: file.exists() and file.read_text().endswith("\n"))
    evaluating.cancel()
    with pytest.raises(asyncio.CancelledError):
        await evaluating
    assert await asyncio.to_thread(has_ended, int(file.read_text()), 60.0)
    assert reports.records == [] and not (run_dir.path / EVALUATED).exists()


def test_model_that_a_killed_controller_has_left_goes_with_its_other_leftovers(
    run_dir: RunDir,
) -> None:
    (run_dir.path / EVALUATED / "model").mkdir(parents=True)
    run_dir.remove_temporary()
    assert not (run_dir.path / EVALUATED).exists()


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("gsm8k 0.5", "Expecting value"),
        ("[0.5]", r"it must not be \[0\.5\]"),
        ("{}", "it must not be {}"),
        ('{"a": 1, "b": NaN}', r"it must not be \('b', nan\)"),
        ('{"a": 1e999}', r"it must not be \('a', inf\)"),
        ('{"a": 1' + 400 * "0" + "}", "too large"),
        ('{"a": true}', r"it must not be \('a', True\)"),
        ('{"a": {"b": 1}}', r"it must not be \('a', {'b': 1}\)"),
        (r'{"a\nb": 1}', "it must not be"),
        (100_000 * "[", "recursion"),
    ],
)
def test_file_without_usable_numbers_is_refused(tmp_path: Path, text: str, wrong: str) -> None:
    file = tmp_path / "out"
    file.write_text(text)
    with pytest.raises(ValueError, match=f"rollout.eval.command must write a JSON.*{wrong}"):
        read_numbers(file)
