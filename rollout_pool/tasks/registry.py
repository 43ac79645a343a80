"""Builds the task that a config names."""

from __future__ import annotations

from configs.choices import TaskKind
from configs.rollout_schema import TaskConfig
from rollout_pool.tasks.task import Task


def build_task(config: TaskConfig) -> Task:
    """The task that `config` describes.

    Raises ValueError naming the setting for an unknown task, bad parameters or bad data.
    """
    # Imported here: each brings libraries that take seconds to import and the others do not need.
    match config.kind:
        case TaskKind.reasoning_gym:
            from rollout_pool.tasks.generated import ReasoningGymTask

            return ReasoningGymTask(config)
        case TaskKind.questions:
            from rollout_pool.tasks.questions import QuestionsTask

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
            from rollout_pool.tasks.verifiers_task import VerifiersTask

            return VerifiersTask(config)
        case TaskKind.custom:
            from rollout_pool.tasks.custom import custom_task

            return custom_task(config)
