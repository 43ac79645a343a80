"""The command that repeats a run, and the name of its task, from its settings alone."""

from __future__ import annotations

import shlex
from pathlib import Path

from configs.choices import TaskKind
from configs.load import overrides_for
from configs.rollout_schema import TaskConfig
from configs.schema import Config


def repeat_command(config: Config) -> str | None:
    """To be pasted into a shell in the project's folder; None if no command says these settings.

    The new run gets a folder of its own. A password in an address stands there as ***.
    """
    overrides = overrides_for(config)
    if overrides is None:
        return None
    words = " ".join(shlex.quote(override) for override in overrides)
    if any("\n" in override for override in overrides):  # make would end its line there
        return f".venv/bin/leash launch --experiment {config.experiment} {words}"
    command = f"make launch EXPERIMENT={config.experiment}"
    if not overrides:
        return command
    is_plain = all(shlex.quote(override) == override for override in overrides)
    words = words.replace("$", "$$")  # make reads it first
    return f'{command} ARGS="{words}"' if is_plain else f"{command} ARGS={shlex.quote(words)}"


def task_label(config: TaskConfig) -> str:
    """What tells a task from others of its kind."""
    match config.kind:
        case TaskKind.custom:
            return f"custom, {config.factory}"
        case TaskKind.alphabet_sort | TaskKind.questions if config.path is None:
            return config.kind.name
        case _ if config.path is not None:
            return f"{config.kind.name}, {Path(config.path).name}"
        case _:
            return f"{config.kind.name}, {config.name}"
