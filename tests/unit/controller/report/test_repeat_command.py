"""The command of a summary repeats the run: through the shell, and through make."""

from __future__ import annotations

import shlex
import subprocess
from dataclasses import replace

import pytest

from configs.load import load_config
from controller.report.summary import repeat_command, task_label
from tests.support.repository import ROOT

LAUNCH = ("-m", "controller.main", "launch")


def given_to_leash(command: str) -> list[str]:
    """What `leash launch` gets if `command` is typed into a shell in the project's folder."""
    if command.startswith("make "):
        output = subprocess.run(
            ["bash", "-c", command.replace("make ", "make --no-print-directory -n ", 1)],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        )
        command = output.stdout.strip().splitlines()[-1]
    words = shlex.split(command)
    return words[words.index("launch") + 1 :]


def loaded(arguments: list[str]) -> object:
    place = arguments.index("--experiment")
    experiment = arguments[place + 1]
    return load_config(arguments[:place] + arguments[place + 2 :], experiment)


@pytest.mark.parametrize(
    ("overrides", "experiment"),
    [
        ([], "quickstart"),
        (["trainer.num_steps=7", "run.seed=3", "weight_sync=delta"], "alphabet-sort"),
        (["model=pretrained", "model.path=Qwen/Qwen3-0.6B", "task=chain_sum"], "quickstart"),
        (["task.kind=custom", "task.factory=m:make", "task.params={a: [1, 'x y']}"], "quickstart"),
        (["task.instruction= costs $5 'or' \"so\" ${x} \\d # \\$HOME"], "quickstart"),
        (["task.instruction=two\nlines", "task.system_prompt='quoted'"], "quickstart"),
        (["task.rewards={t: {weight: 2.5}, f: {kind: function, function: 'm:f'}}"], "quickstart"),
        (["rollout.engine.extra_args=[--log-level=error, 'a b']"], "gsm8k-smoke"),
        (["run.loggers=[tensorboard,wandb]", "run.panel=false"], "quickstart"),
    ],
)
def test_repeat_command_gives_the_same_settings(overrides: list[str], experiment: str) -> None:
    config = load_config([*overrides, "run.name=first"], experiment)
    command = repeat_command(config)
    assert command is not None
    again = loaded(given_to_leash(command))
    config.run.name = None  # the new run's folder is its own
    assert again == config


def test_repeat_command_shows_no_password() -> None:
    command = repeat_command(load_config(["buffer.url=redis://me:secret@host:6379/0"]))
    assert command is not None and "secret" not in command and "redis://me:***@host" in command


def test_repeat_command_hides_only_the_password_of_a_reward() -> None:
    judge = "{kind: judge, url: 'http://me:secret@judge:1/v1', model: a@b}"
    command = repeat_command(load_config([f"task.rewards={{task: {{weight: 1.0}}, j: {judge}}}"]))
    assert command is not None and "secret" not in command
    assert "http://me:***@judge:1/v1" in command and "a@b" in command


def test_settings_that_no_command_reproduces_have_none() -> None:
    config = load_config([])
    assert repeat_command(replace(config, experiment="gone")) is None
    fewer = replace(config, task=replace(config.task, params={"min_word_len": 3}))
    assert repeat_command(fewer) is None, "a file's parameter cannot be taken away"


@pytest.mark.parametrize(
    ("overrides", "label"),
    [
        ([], "reasoning_gym, spell_backward"),
        (["task.kind=custom", "task.factory=pkg.mine:make"], "custom, pkg.mine:make"),
        (["task.kind=gsm8k", "task.path=/data/mine.jsonl"], "gsm8k, mine.jsonl"),
        (["task=gsm8k"], "gsm8k, openai/gsm8k"),
        (["task=alphabet_sort"], "alphabet_sort"),
    ],
)
def test_task_label_distinguishes_tasks_of_a_kind(overrides: list[str], label: str) -> None:
    assert task_label(load_config(overrides).task) == label
