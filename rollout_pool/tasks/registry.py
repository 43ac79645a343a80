"""Builds the task that a config names, or a user's task from task.factory."""

from __future__ import annotations

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


NEEDED = ("example", "eval_prompts", "is_held_out", "environment", "demonstration")
"""Needed by every run; `solution` and `score` are only looked up when needed."""


def custom_task(config: TaskConfig) -> Task:
    """Raises ValueError if there is no such factory, or it does not return a task."""
    assert config.factory is not None  # checked by the schema
    made = load_callable(config.factory, "task.factory")(config)
    missing = [name for name in ("name", *NEEDED) if not hasattr(made, name)]
    if missing:
        raise ValueError(
            f"task.factory={config.factory!r}: made a {type(made).__name__} without "
            f"{', '.join(missing)}; see Task in rollout_pool/tasks/task.py"
        )
    task: Task = made
    return task
