"""A user's own task, made by the function or class that task.factory names."""

from __future__ import annotations

from configs.rollout_schema import TaskConfig
from rollout_pool.tasks.dotted import load_callable
from rollout_pool.tasks.task import Task

NEEDED = ("example", "eval_prompts", "is_held_out", "environment", "demonstration")
"""Without these no run can start; `solution` and `score` are asked for when they are needed."""


def custom_task(config: TaskConfig) -> Task:
    """Raises ValueError if there is no such factory, or what it makes is no task."""
    assert config.factory is not None  # the schema holds kind and factory together
    made = load_callable(config.factory, "task.factory")(config)
    missing = [name for name in ("name", *NEEDED) if not hasattr(made, name)]
    if missing:
        raise ValueError(
            f"task.factory={config.factory!r}: made a {type(made).__name__} without "
            f"{', '.join(missing)}; see Task in rollout_pool/tasks/task.py"
        )
    task: Task = made
    return task
