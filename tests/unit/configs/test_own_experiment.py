"""Experiments by path: what they are built on, and what a run writes to be repeated."""

from __future__ import annotations

import os
import re
from contextlib import chdir
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from configs import load
from configs.load import ConfigError, experiment_yaml, load_config, options
from configs.reference import PAGE
from configs.schema import Config

HOW_TO = "docs/configuration.md#an-experiment-of-your-own"


def written(folder: Path, text: str, name: str = "mine.yaml") -> str:
    (folder / name).write_text(text)
    return str(folder / name)


def refusal(experiment: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config([], experiment)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_example_of_the_page_changes_task_algorithm_and_steps_of_its_base(tmp_path: Path) -> None:
    example = re.findall(r"```yaml\n(.*?)```", PAGE.read_text(), re.DOTALL)[0]
    config = load_config([], written(tmp_path, example))
    base = load_config(["task=chain_sum", "algorithm=gspo", "trainer.num_steps=100"])
    base.experiment = "mine"
    assert config == base and config.algorithm.loss.kind == "gspo"


def test_experiment_by_path_may_be_relative_and_among_the_overrides(tmp_path: Path) -> None:
    text = "defaults: [gsm8k-smoke]\ntrainer: {num_steps: 7, learning_rate: 1e-5}\n"
    written(tmp_path, text, "my run.yml")
    with chdir(tmp_path):
        for config in (load_config([], "my run.yml"), load_config(["experiment=./my run.yml"])):
            assert (config.trainer.num_steps, config.trainer.learning_rate) == (7, 1e-5)
            assert config.experiment == "my-run", "the name of the run begins with it"
        assert load_config(["trainer.num_steps=9"], "my run.yml").trainer.num_steps == 9


def test_experiment_by_path_is_read_anew_when_it_has_changed(tmp_path: Path) -> None:
    for steps in (3, 4):
        path = written(tmp_path, f"defaults: [quickstart]\ntrainer: {{num_steps: {steps}}}\n")
        assert load_config([], path).trainer.num_steps == steps


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "mine.yaml: there is no such file"),
        ("", f"mine.yaml: has no settings; {HOW_TO}"),
        ("7", "mine.yaml: has no settings"),
        ("[a, b]", "mine.yaml: has no settings"),
        ("a: [", "mine.yaml: correct its YAML (while parsing"),
        ("defaults: [quikstart]", "Could not load 'experiment/quikstart'"),
        ("defaults: [quickstart, override /task: nope]", "Could not find 'task/nope'"),
        ("defaults: [quickstart, /task: chain_sum]", "use 'override /task: chain_sum'"),
        ("defaults: quickstart", "in its defaults, defaults must be a list"),
        ("defaults: [/experiment: quickstart]", f"; {HOW_TO}"),
        ("defaults: [quickstart]\nbuffer: {max_stalenes: 3}", "did you mean buffer.max_staleness"),
        ("defaults: [quickstart]\ntask: 5", "task=5: is a section"),
        ("buffer: {max_staleness: 3}", "model.path=None"),
    ],
)
def test_experiment_that_is_none_is_refused_with_the_reason(
    tmp_path: Path, text: str | None, words: str
) -> None:
    path = tmp_path / "mine.yaml"
    if text is not None:
        path.write_text(text)
    assert words in refusal(str(path))


def test_folder_and_pipe_are_no_experiments(tmp_path: Path) -> None:
    assert "cannot be read: Is a directory" in refusal(f"{tmp_path}/")
    os.mkfifo(tmp_path / "pipe.yaml")
    assert "not a regular file" in refusal(str(tmp_path / "pipe.yaml"))


@pytest.mark.parametrize("task", ["{kind: custom, factory: 'm:make'}", "{name: chain_sum}"])
def test_task_of_another_kind_than_that_of_its_file_is_refused(tmp_path: Path, task: str) -> None:
    path = written(tmp_path, f"defaults: [quickstart]\ntask: {task}\n")
    assert "task/spell_backward.yaml" in refusal(path) and "- override /task: null" in refusal(path)
    written(tmp_path, f"defaults: [quickstart, override /task: null]\ntask: {task}\n")
    config = load_config([], path).task
    assert (config.params, config.prompt_pattern) == ({}, None)


def test_experiment_of_the_package_without_its_first_line_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for source in load.CONFIG_DIR.rglob("*.yaml"):
        target = tmp_path / source.relative_to(load.CONFIG_DIR)
        target.parent.mkdir(exist_ok=True)
        target.write_text(source.read_text())
    written(tmp_path / "experiment", "trainer: {num_steps: 3}\n", "bare.yaml")
    monkeypatch.setattr(load, "CONFIG_DIR", tmp_path)
    assert "must begin with the line `# @package _global_`" in refusal("bare")


def again(config: Config, folder: Path) -> Config:
    found = load_config([], written(folder, experiment_yaml(config), "experiment.yaml"))
    found.run.name = config.run.name
    return found


@pytest.mark.parametrize("experiment", options("experiment"))
def test_written_experiment_gives_the_same_settings(experiment: str, tmp_path: Path) -> None:
    config = load_config(["run.name=first"], experiment)
    assert again(config, tmp_path) == config


@pytest.mark.parametrize(
    "overrides",
    [
        ["trainer.num_steps=7", "run.seed=3", "weight_sync=delta", "algorithm=dapo"],
        ["model=pretrained", "model.path=Qwen/Qwen3-0.6B", "task=chain_sum"],
        ["task.kind=custom", "task.factory=m:make", "task.params={a: [1, 'x y']}"],
        ["task.kind=gsm8k", "rollout.max_prompt_tokens=99"],
        ["task=mixed", "task.curriculum=0.1"],
        ["task=code", "algorithm.correction=[]", "algorithm.proximal=rollout"],
        ["task.instruction= costs $5 'or' \"so\" ${x} \\d # \\$HOME"],
        ["task.instruction=two\nlines", "task.system_prompt='1e-5'"],
        ["task.rewards={t: {weight: 2.5}, f: {kind: function, function: 'm:f'}}"],
        ["rollout.engine.extra_args=[--log-level=error, 'a b']"],
        ["run.loggers=[tensorboard,wandb]", "run.panel=false", "run.dir=/data/runs"],
        ["algorithm=distill", "task.rewards={x: {kind: teacher, url: 'http://h', model: m}}"],
    ],
)
def test_written_experiment_gives_the_same_choices(overrides: list[str], tmp_path: Path) -> None:
    config = load_config(overrides)
    assert again(config, tmp_path) == config


def test_written_experiment_holds_what_differs_from_the_defaults() -> None:
    chosen = ["algorithm=gspo", "model=pretrained", "model.path=a/b"]
    tree = OmegaConf.create(experiment_yaml(load_config([*chosen, "trainer.num_steps=7"])))
    assert tree.trainer.num_steps == 7 and tree.model == {"path": "a/b"}
    assert tree.algorithm.loss == "gspo"
    assert "defaults" not in tree and "buffer" not in tree


def test_written_experiment_holds_no_password(tmp_path: Path) -> None:
    judge = "{kind: judge, url: 'http://me:secret@judge:1/v1', model: a@b}"
    config = load_config(
        [
            "buffer.url=redis://me:secret@host:6379/0",
            f"task.rewards={{task: {{weight: 1.0}}, j: {judge}}}",
        ]
    )
    text = experiment_yaml(config)
    assert "secret" not in text and "redis://me:***@host" in text
    assert "http://me:***@judge:1/v1" in text and "a@b" in text
    assert "without the password" in refusal(written(tmp_path, text))
