"""Settings that do not go together with a model or a task with pictures."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from configs.schema import Config
from rollout_pool.tasks.datasets import QuestionsTask
from rollout_pool.tasks.task import Prompt, Task
from tensors.pictures import takes_pictures


def check_pictures(config: Config, model: Any) -> None:
    """Raises ValueError for a setting that has not been made for a model with pictures; `model` is
    its transformers config."""
    if not takes_pictures(model):
        return
    teachers = [f"task.rewards.{name}" for name in config.task.teachers]
    refused = {
        "model.lora": (config.model.lora is not None, "null"),
        "algorithm.critic": (config.algorithm.critic is not None, "null"),
        "trainer.sequence_parallel_size": (config.trainer.sequence_parallel_size > 1, "1"),
        "rollout.engine.routing_replay": (config.rollout.engine.routing_replay, "false"),
        "trainer.warm_start.num_steps": (config.trainer.warm_start.num_steps > 0, "0"),
        "task.renderer": (config.task.renderer is not None, "null"),
        **dict.fromkeys(teachers, (True, "another kind of reward")),
    }
    for setting, (is_set, fix) in refused.items():
        if is_set:
            raise ValueError(
                f"{setting}: cannot be used with model.path={config.model.path!r}, which takes "
                f"pictures; set it to {fix}"
            )


def shown_by(task: Task, prompts: Sequence[Prompt]) -> Prompt | None:
    """A prompt of `task` with pictures, if one is known: of its `prompts`, or any question."""
    known = [*prompts, *(task.shapes if isinstance(task, QuestionsTask) else ())]
    return next((prompt for prompt in known if prompt.pictures), None)


def check_shown(config: Config, prompt: Prompt, *, has_agent: bool) -> None:
    """Raises ValueError if the task, which shows pictures in `prompt`, is for programs that call
    the model by themselves: the endpoint takes text alone."""
    task, port = config.task, config.rollout.openai.port
    if has_agent:
        setting, fix = f"task.agent={task.agent!r}", "launch the task without an agent"
        setting = setting if task.agent else f"task.kind={task.kind.name}"
    elif port is not None:
        setting, fix = f"rollout.openai.port={port}", "set it to null"
    else:
        return
    raise ValueError(
        f"{setting}: the task shows pictures, as in {prompt.text!r:.60}, and the OpenAI-compatible "
        f"endpoint takes none; {fix}, or leave the pictures out"
    )
