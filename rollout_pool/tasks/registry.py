"""Builds the task that a config names, or a user's task from task.factory."""

from __future__ import annotations

from collections.abc import Mapping

from configs.choices import TaskKind
from configs.dotted import load_callable
from configs.rollout_schema import TaskConfig
from rollout_pool.tasks.task import Task


def build_task(config: TaskConfig) -> Task:
    """The task that `config` describes.

    Raises ValueError naming the setting for an unknown task, bad parameters or bad data.
    """
    # Imported here: each imports libraries that take seconds and that the others do not need.
    match config.kind:
        case TaskKind.reasoning_gym:
            from rollout_pool.tasks.reasoning_gym import ReasoningGymTask

            return ReasoningGymTask(config)
        case TaskKind.questions:
            from rollout_pool.tasks.datasets import QuestionsTask

            return QuestionsTask(config)
        case TaskKind.gsm8k:
            from rollout_pool.tasks.gsm8k import Gsm8kTask

            return Gsm8kTask(config)
        case TaskKind.math:
            from rollout_pool.tasks.math_problems import MathTask

            return MathTask(config)
        case TaskKind.code:
            from rollout_pool.tasks.programs import CodeTask

            return CodeTask(config)
        case TaskKind.alphabet_sort:
            from rollout_pool.tasks.alphabet_sort import AlphabetSortTask

            return AlphabetSortTask(config)
        case TaskKind.verifiers:
            from rollout_pool.tasks.verifiers.adapter import VerifiersTask

            return VerifiersTask(config)
        case TaskKind.mixture:
            from rollout_pool.tasks.mixture import AgentMixture, Mixture

            kinds = {task.kind for task in config.tasks.values()}
            return (AgentMixture if kinds == {TaskKind.verifiers} else Mixture)(config, build_task)
        case TaskKind.custom:
            return custom_task(config)


def data_of(task: Task) -> dict[str, str]:
    """The data (`ProblemTask.data`) of each task of a mixture by its name, or of `task` by the name
    "". Tasks that make their prompts have none."""
    from rollout_pool.tasks.datasets import ProblemTask
    from rollout_pool.tasks.mixture import Mixture

    tasks = {"": task}
    if isinstance(task, Mixture):
        tasks = {name: member.task for name, member in task.members.items()}
    return {name: one.data for name, one in tasks.items() if isinstance(one, ProblemTask)}


def check_data(config: TaskConfig, task: Task, before: Mapping[str, str]) -> None:
    """Raises ValueError if the data of `task` are no longer those that the run began with.
    `before`: what `data_of` said then; a task that is not in it is not checked."""
    data = data_of(task)
    for name, one in config.by_name.items():
        if name in before and before[name] != data.get(name):
            setting = f"task.tasks.{name}" if name else "task"
            setting += f".name={one.name!r}" if one.path is None else f".path={one.path}"
            raise ValueError(
                f"{setting}: it has {data.get(name)}, but the run began with {before[name]}; each "
                "epoch would go on in another order, in which problems that are due never come and "
                "trained ones come again: put the data back as they were, or launch a new run"
            )


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
