"""The card of a model that a run has trained: README.md in its folder, as model hubs show it."""

from __future__ import annotations

import json
import platform
import re
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from configs.load import experiment_yaml
from configs.rollout_schema import TaskConfig
from configs.schema import Config
from controller.metrics.history import EVAL_FAILED, Record
from controller.report.result import RunResult, summarize
from controller.run_dir import RunDir
from trainer_pool.state.checkpoint import TrainState

CARD = "README.md"
FIGURES = (
    "steps", "eval_before", "eval_after", "eval_version", "eval_size", "eval_samples",
    "pass_at_k", "eval_sets", "reward_first", "reward_last", "by_task",
)  # fmt: skip
"""Fields of the result that are of the model, not of the run's course."""
PACKAGES = ("torch", "transformers", "deepspeed", "sglang", "ray", "datasets", "numpy")
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
_NAME = r"(?:key|token|password|secret|authorization)"
_SECRET_NAME = re.compile(rf"(?i){_NAME}(s?)(?![a-z])(?!.*_(?:env|file)$)")
"""Anybody's own parameters may hold them. The settings name only files and variables of keys."""
_SECRET = re.compile(
    rf"""(?ix) ( (?: {_NAME}s? [\\'"]* \s*[:=] | (?<!\S) --?[\w-]*{_NAME}s?(?=\s) ) \s*
               (?: (?:basic|bearer|token|digest) \s+ )? | bearer\s+ )
         (?: "(?:\\.|[^"\\])*" | '[^']*' | \[[^\]]*\] | \S+ )"""
)
"""A secret in a text, up to the quote, the bracket or the white space that ends it."""


def write_card(folder: Path, run_dir: RunDir, config: Config, result: RunResult) -> None:
    """`result`: of the run when it had this model."""
    text = model_card(config, result, run_dir.read_data())
    (folder / CARD).write_text(text, encoding="utf-8")


def result_at(
    run_dir: RunDir, config: Config, records: Sequence[Record], state: TrainState
) -> RunResult:
    """The result of the run as it was at a checkpoint (pure)."""

    def is_later(record: Record) -> bool:
        if record.kind == "step":
            return record.count("step") > state.step
        name = {"eval": "version_min", EVAL_FAILED: "version"}.get(record.kind)
        return name is not None and record.count(name) > state.version

    known = [record for record in records if not is_later(record)]
    return summarize(run=run_dir.name, config=config, records=known, wall_s=0.0, state="stopped")


def model_card(config: Config, result: RunResult, data: Mapping[str, str]) -> str:
    """`data`: of the run's tasks by name, as `RunDir.read_data`."""
    base = config.model.path
    is_named = base is not None and _HUB_NAME.fullmatch(base) and not Path(base).exists()
    head = ["library_name: transformers", *([f"base_model: {base}"] if is_named else [])]
    fields = json.loads(result.as_json())
    figures = [(n, json.dumps(fields[n])) for n in FIGURES if fields[n] not in (None, {})]
    sources = [
        (name or one.kind.name, _source(one), data.get(name, "made by the task"))
        for name, one in config.task.by_name.items()
    ]
    settings = experiment_yaml(config, _masked)
    return "\n".join(
        (
            *("---", *head, "pipeline_tag: text-generation", "tags: [reinforcement-learning]"),
            *("---", "", f"# {result.run}", ""),
            f"Trained by reinforcement learning with Leash for {result.steps} steps, from "
            f"{base or 'a model built from scratch'}.",
            *("", "## Result", "", "| | |", "|---|---|", *(f"| {n} | {v} |" for n, v in figures)),
            *("", "## Data", "", "| task | source | problems |", "|---|---|---|"),
            *(f"| {' | '.join(row)} |" for row in sources),
            *("", "## Settings that differ from the defaults", "", "```yaml"),
            *(settings.rstrip(), "```", "", "## Packages", "", ", ".join(_versions()), ""),
        )
    )


def _masked(value: Any, named: re.Match[str] | None = None) -> Any:
    """The settings without secrets. `named`: the name of a secret that the value is under."""
    if isinstance(value, dict):
        return {n: _masked(v, _SECRET_NAME.search(str(n)) or named) for n, v in value.items()}
    if isinstance(value, list):
        return [_masked(one, named) for one in value]
    if isinstance(value, str):
        return "***" if named else _SECRET.sub(r"\1***", value)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    # Several are no secret but a count, as in max_prompt_tokens.
    return "***" if named and not named[1] and is_number else value


def _source(task: TaskConfig) -> str:
    where = task.path or task.factory or task.name
    held_out = f", held out: {task.eval_path}" if task.eval_path else ""
    return f"{where}{held_out}".replace("|", r"\|")


def _versions() -> Iterator[str]:
    yield f"Python {platform.python_version()}"
    for name in PACKAGES:
        try:
            yield f"{name} {version(name)}"
        except PackageNotFoundError:
            continue
