"""Builds the task that a config names, or a user's task from task.factory."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module

from configs.choices import TaskKind
from configs.rollout_schema import TaskConfig
from host.user_code import load_callable
from rollout_pool.tasks.mixture import AgentMixture, Mixture, members_of
from rollout_pool.tasks.task import Task

_CLASSES = {
    TaskKind.reasoning_gym: "reasoning_gym:ReasoningGymTask",
    TaskKind.questions: "datasets:QuestionsTask",
    TaskKind.gsm8k: "math_problems:Gsm8kTask",
    TaskKind.math: "math_problems:MathTask",
    TaskKind.code: "programs:CodeTask",
    TaskKind.alphabet_sort: "alphabet_sort:AlphabetSortTask",
    TaskKind.repository: "repository:RepositoryTask",
    TaskKind.verifiers: "verifiers.adapter:VerifiersTask",
}


def build_task(config: TaskConfig) -> Task:
    """The task that `config` describes.

    Raises ValueError naming the setting for an unknown task, bad parameters or bad data.
    """
    if config.kind is TaskKind.custom:
        return custom_task(config)
    if config.tasks or config.eval_sets:
        kinds = {task.kind for task in config.by_name.values()}
        return (AgentMixture if kinds == {TaskKind.verifiers} else Mixture)(config, build_task)
    # Imported here: each imports libraries that take seconds and that the others do not need.
    module, _, name = _CLASSES[config.kind].partition(":")
    task: Task = getattr(import_module(f"rollout_pool.tasks.{module}"), name)(config)
    return task


def data_of(task: Task) -> dict[str, str]:
    """The data (`ProblemTask.data`) of each task of a mixture by its name, or of `task` under the
    name "". Tasks that make their prompts have none."""
    from rollout_pool.tasks.datasets import ProblemTask

    return {n: one.data for n, one in members_of(task).items() if isinstance(one, ProblemTask)}


def check_data(config: TaskConfig, task: Task, before: Mapping[str, str]) -> None:
    """Raises ValueError if the data of `task` are no longer those that the run began with.
    `before`: what `data_of` said then; a task that is not in it is not checked."""
    data = data_of(task)
    for name, one in config.by_name.items():
        if name in before and before[name] != data.get(name):
            setting = config.section_of(name)
            setting += f".name={one.name!r}" if one.path is None else f".path={one.path}"
            raise ValueError(
                f"{setting}: it has {data.get(name)}, but the run began with {before[name]}; each "
                "epoch would go on in another order, in which problems that are due never come and "
                "trained ones come again: put the data back as they were, or launch a new run"
            )


def epoch_of(task: Task, index: int) -> tuple[str, int]:
    """The task of a mixture whose turn it is at `index`, or "", and the epoch of its problems, from
    1; 0 if it makes its prompts."""
    from rollout_pool.tasks.datasets import ProblemTask

    # Not `member_of`: it leads far ahead if the prompt whose turn it is is held out.
    name, turn = task.turn(index) if isinstance(task, Mixture) else ("", index)
    member = members_of(task)[name]
    return name, member.epochs.find(turn)[0] + 1 if isinstance(member, ProblemTask) else 0


NEEDED = ("example", "eval_prompts", "is_held_out", "environment", "demonstration")
"""Needed by every run; `solution` and `score` are only looked up when needed."""


def custom_task(config: TaskConfig) -> Task:
    """Raises ValueError if there is no such factory, it fails, or it does not return a task."""
    assert config.factory is not None  # checked by the schema
    factory = load_callable(config.factory, "task.factory")
    try:
        made = factory(config)
    except ValueError:  # names a setting, as those of the other tasks do
        raise
    except (Exception, SystemExit) as error:  # a user's code may raise anything
        raise ValueError(
            f"task.factory={config.factory!r}: failed: {type(error).__name__}: {error}"
        ) from error
    missing = [name for name in ("name", *NEEDED) if not hasattr(made, name)]
    if missing:
        raise ValueError(
            f"task.factory={config.factory!r}: made a {type(made).__name__} without "
            f"{', '.join(missing)}; see Task in rollout_pool/tasks/task.py"
        )
    task: Task = made
    return task
