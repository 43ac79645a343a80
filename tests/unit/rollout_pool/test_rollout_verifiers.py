"""Settings of environments of the verifiers library; the real ones are in tests/integration."""

from __future__ import annotations

import sys

import pytest

from configs.choices import TaskKind
from configs.load import ConfigError, load_config
from configs.rollout_schema import TaskConfig
from rollout_pool.tasks.registry import build_task


def config_of(**changes):
    return TaskConfig(**{"kind": TaskKind.verifiers, "name": "sums", "eval_size": 2, **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"instruction": " Think."}, r"task.instruction=' Think.': .* brings its own"),
        ({"tools": ["python"]}, r"task.tools=\['python'\]: .* brings its own"),
        ({"params": {"taskset": 3}}, r"task.params.taskset=3: must be the settings"),
        ({"params": {"taskset": {"id": "x"}}}, r"task.params.taskset=.* without its id"),
        ({"python": "no/python"}, r"task.python='no/python': there is no such .*install-verifiers"),
        ({"python": sys.executable}, r"task.python=.*: has no verifiers library of version 0.4 .*"),
        ({"python": sys.executable, "path": "no/folder"}, r"task.path='no/folder': there is no su"),
        ({"python": "/bin/false"}, r"task.name='sums': its process ended"),
    ],
)
def test_impossible_settings_are_named(changes, message):
    with pytest.raises(ValueError, match=message):
        build_task(config_of(**changes))


def test_error_in_a_mixture_names_the_setting_of_its_task():
    tasks = "task.tasks.sums={kind: verifiers, name: sums, python: no/python}"
    config = load_config(["task.kind=mixture", tasks])
    with pytest.raises(ValueError, match=r"^task.tasks.sums.python='.*/no/python': there is no"):
        build_task(config.task)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["task.kind=mixture", "task.tasks.a={kind: verifiers, name: a}", "task.tasks.b={}"],
            r"task.tasks.*.kind=.*cannot be mixed",
        ),
        (["task.python=env/bin/python"], r"task.python=.*task.kind=verifiers only"),
    ],
)
def test_settings_that_do_not_go_together_are_named(overrides, message):
    with pytest.raises(ConfigError, match=message):
        load_config(overrides)
