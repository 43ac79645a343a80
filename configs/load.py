"""From YAML files and command-line overrides to one checked `Config`. The only OmegaConf import.

    config.yaml -> group files -> experiment file      composed by Hydra
                          |
                      overrides                        names checked against the schema
                          |
                   merged into the schema              strict keys and types, by OmegaConf
                          |
                       Config                          the rules of __post_init__

Every mistake becomes one `ConfigError` of one line: the setting, its value, and the fix.
"""

from __future__ import annotations

import difflib
import math
import re
import shlex
from collections.abc import Iterable, Sequence
from copy import deepcopy
from dataclasses import asdict, replace
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from hydra import compose, initialize_config_dir
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from configs.choices import TaskKind
from configs.rollout_schema import TaskConfig, TaskSource
from configs.run_files import read_text
from configs.schema import Config
from configs.settings import (
    NAMED_SECTIONS,
    all_sections,
    all_settings,
    mapping_of,
    named_setting,
    named_settings,
    setting_named,
)

CONFIG_DIR = Path(__file__).resolve().parent
GROUPS = tuple(sorted(folder.name for folder in CONFIG_DIR.iterdir() if any(folder.glob("*.yaml"))))

# `${data:word_problems.jsonl}` in a YAML file names a file that ships with the project.
OmegaConf.register_new_resolver("data", lambda name: str(CONFIG_DIR / "data" / name), replace=True)

OF_ANY_TASK = ("chat_template", "renderer", "tool_parser", "seed")
"""Settings of a task that are kept when its kind changes: they belong to the model or the run."""
NAMED_KINDS = (TaskKind.reasoning_gym.name, TaskKind.verifiers.name)
"""Kinds whose tasks come from a library, chosen by task.name."""
NEW_FOR_EACH_RUN = ("run.name", "run.dir")
END_OF_YAML = "..."
_ABSENT = object()


class ConfigError(ValueError):
    """A setting that is unknown, has the wrong type, or breaks a rule; the message has the fix."""


def load_config(overrides: Sequence[str], experiment: str = "quickstart") -> Config:
    """Compose `experiment`, apply `overrides` (`buffer.max_staleness=4`, `model=tiny`) and check.

    Values are YAML; text settings are taken literally. Relative paths are relative to the current
    folder and become absolute, because other processes run in other folders. Raises ConfigError.
    """
    config = _to_schema(_settings(overrides, experiment))
    _anchor_paths(config)
    return config


def _settings(overrides: Sequence[str], experiment: str) -> DictConfig:
    """The settings of the files and `overrides`, before validation."""
    pairs = [_split(override) for override in overrides]
    choices = {"experiment": experiment} | {n: text for n, text in pairs if n in GROUPS}
    for group, option in choices.items():
        _check_option(group, option)
    composed = deepcopy(_compose(tuple(choices.items())))
    composed["experiment"] = choices["experiment"]
    values = [(name, _value(name, text)) for name, text in pairs if name not in GROUPS]
    _forget_other_task(composed, values)
    for name, value in values:
        OmegaConf.update(composed, name, value, force_add=True)
    return composed


def _forget_other_task(composed: DictConfig, values: Sequence[tuple[str, object]]) -> None:
    """Remove the files' settings of the task if `values` choose another kind of task.

    For a reasoning_gym data set or a verifiers environment, another name removes them as well.
    """
    kept: tuple[str, ...]
    wanted = dict(values)
    default = TaskConfig()
    kind = composed.task.get("kind", default.kind.name)
    name_before = composed.task.get("name", default.name)
    if wanted.get("task.kind", kind) != kind:
        kept = OF_ANY_TASK
    elif kind in NAMED_KINDS and wanted.get("task.name", name_before) != name_before:
        kept = (*OF_ANY_TASK, "kind", "python", "eval_size", "max_turns", "max_turn_tokens")
    else:
        return
    for setting in list(composed.task):
        if setting not in kept:
            del composed.task[setting]


def overrides_for(config: Config) -> list[str] | None:
    """The overrides with which `load_config` reproduces `config` from its experiment, except for
    run.name and run.dir; None if there are none.

    Passwords in addresses are replaced by ***.
    """
    if config.experiment not in options("experiment"):
        return None
    identity: list[str] = []
    before = _leaves_in(_settings(identity, config.experiment))
    for name, value in (("task.kind", config.task.kind.name), ("task.name", config.task.name)):
        if before[name] != value:  # this removes other settings of the files
            identity.append(f"{name}={_as_text(value)}")
            before = _leaves_in(_settings(identity, config.experiment))
    after = _flat(_plain(asdict(config)), "")
    changed = [
        f"{name}={_as_override(name, value)}"
        for name, value in after.items()
        if name not in NEW_FOR_EACH_RUN and before.get(name, _ABSENT) != value
    ]
    overrides = identity + changed
    try:
        again = load_config(overrides, config.experiment)
    except ConfigError:
        return None
    again.run = replace(config.run)
    if again != config:
        return None
    return [_without_passwords(override) for override in overrides]


def _without_passwords(override: str) -> str:
    if override.startswith("buffer.url="):
        return _without_password(override)
    if override.startswith(("task.rewards=", "task.tasks=")):
        return re.sub(r"\w+://[^\s'\",{}]+", lambda url: _without_password(url[0]), override)
    return override


def _leaves_in(settings: DictConfig) -> dict[str, Any]:
    tree = OmegaConf.merge(OmegaConf.structured(Config), settings)
    return _flat(OmegaConf.to_container(tree, resolve=True, enum_to_str=True), "")


def _flat(tree: Any, prefix: str) -> dict[str, Any]:
    """Settings by dotted name; an absent section counts as a setting with the value None."""
    found: dict[str, Any] = {}
    for key, value in tree.items():
        name = f"{prefix}{key}"
        if name in all_sections() and isinstance(value, dict):
            found |= _flat(value, f"{name}.")
        else:
            found[name] = value
    return found


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return value.name if isinstance(value, Enum) else value


def _as_override(name: str, value: Any) -> str:
    setting = setting_named(name)
    if setting is not None and setting.annotation is str and value is not None:
        return _as_text(value)
    if name in NAMED_SECTIONS:
        usual = _plain(asdict(NAMED_SECTIONS[name]()))
        value = {part: {k: v for k, v in of.items() if v != usual[k]} for part, of in value.items()}
    return (
        yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=math.inf)
        .removesuffix("\n...\n")
        .strip()
    )


def _as_text(value: str) -> str:
    """Text as `_value` reads it: quoted if it would be read as something else."""
    return f"'{value}'" if _is_quoted(value) or value == "null" else value


def _is_quoted(text: str) -> bool:
    return len(text) > 1 and text[0] == text[-1] and text[0] in "'\""


def to_yaml(config: Config) -> str:
    """The resolved settings as YAML, for `make dry-run` and the run's folder.

    Without the password in buffer.url, because people share both. The last line is YAML's own end
    of a document: a file without it was cut off.
    """
    tree = OmegaConf.structured(config)
    if config.buffer.url is not None:
        tree.buffer.url = _without_password(config.buffer.url)
    return f"{OmegaConf.to_yaml(tree)}{END_OF_YAML}\n"


def _without_password(url: str) -> str:
    """Mask the password, also one that contains a slash or an @."""
    url = re.sub(r"(//[^:@/]*):.*@", r"\1:***@", url)
    return re.sub(r"([?&]password=)[^&]*", r"\1***", url)


def read_config(path: Path, overrides: Sequence[str] = ()) -> Config:
    """Read settings that `to_yaml` wrote, and apply `overrides`. Raises ConfigError."""
    settings = _settings_in(path)
    for name, text in map(_split, overrides):
        OmegaConf.update(settings, name, _value(name, text), force_add=True)
    try:
        config = _to_schema(settings)
    except ConfigError as error:
        if overrides:
            raise
        raise ConfigError(f"{path}: {error}") from error
    _anchor_paths(config)
    return config


def _settings_in(path: Path) -> DictConfig:
    try:
        text = read_text(path)
        tree = yaml.safe_load(text)
        if not isinstance(tree, dict):
            raise ConfigError(f"{path} contains no settings")
        if text.rstrip().rpartition("\n")[2] != END_OF_YAML:
            raise ConfigError(
                f"{path} was cut off: its last line is not {END_OF_YAML!r}; add that line if all "
                "settings are there"
            )
        settings: DictConfig = OmegaConf.create(_literal(tree))
    except FileNotFoundError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    except (yaml.YAMLError, OmegaConfBaseException, RecursionError) as error:
        raise ConfigError(f"{path} cannot be read: {_first_line(error)}") from error
    except ValueError as error:
        raise ConfigError(str(error)) from error
    return settings


def differences(before: Config, after: Config) -> dict[str, tuple[object, object]]:
    """The settings that differ, by dotted name, with both values."""
    old, new = (_flat(_plain(asdict(config)), "") for config in (before, after))
    names = [*old, *(name for name in new if name not in old)]
    pairs = {name: (old.get(name), new.get(name)) for name in names}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def options(group: str) -> dict[str, str]:
    """The files of a group, e.g. the experiments, with the first comment of each, if any."""
    return {
        path.stem: _opening_sentence(path) for path in sorted((CONFIG_DIR / group).glob("*.yaml"))
    }


def _opening_sentence(path: Path) -> str:
    comments = [line for line in path.read_text().splitlines() if line.startswith("# ")]
    return next((c.removeprefix("# ") for c in comments if not c.startswith("# @package")), "")


def _split(override: str) -> tuple[str, str]:
    name, equals, text = override.partition("=")
    if not equals or not name:
        raise ConfigError(f"{override!r}: write SETTING=VALUE, as in buffer.max_staleness=4")
    return name, text


def _value(name: str, text: str) -> object:
    """The value of a setting on the command line; checks the name."""
    setting = setting_named(name)
    if setting is not None and setting.annotation is str:
        return None if text == "null" else _literal(text[1:-1] if _is_quoted(text) else text)
    is_open = any(s.is_open and name.startswith(f"{s.name}.") for s in all_settings())
    if setting is None and not is_open and name not in all_sections():
        raise ConfigError(f"{name}: {_unknown(name)}")
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        problem = _first_line(error)
        raise ConfigError(f"{name}={text}: not a YAML value ({problem}); quote it") from None


def _literal(value: Any) -> Any:
    """The value with `${` escaped, so that OmegaConf sees no variable."""
    if isinstance(value, dict):
        return {name: _literal(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_literal(item) for item in value]
    return value.replace("${", "\\${") if isinstance(value, str) else value


def _check_option(group: str, option: str) -> None:
    known = options(group)
    if option not in known:
        guess = _nearest(option, known)
        raise ConfigError(
            f"{group}={option}: there is no such {group};{guess} "
            f"choose one of {', '.join(known)} (the files of configs/{group}/)"
        )


@cache
def _compose(choices: tuple[tuple[str, str], ...]) -> DictConfig:
    """The YAML files of `choices` (group, file), untyped, with all variables resolved."""
    try:
        with initialize_config_dir(config_dir=str(CONFIG_DIR), version_base="1.3"):
            lines = [f"{group}={option}" for group, option in choices]
            composed = compose("config", overrides=lines)
        OmegaConf.set_struct(composed, False)
        for group, option in choices:
            if group != "experiment":
                # In Hydra the experiment overrides such a file, but the user chose this one.
                file = CONFIG_DIR / group / f"{option}.yaml"
                composed.merge_with({group: OmegaConf.load(file)})
        OmegaConf.resolve(composed)
    except (HydraException, OmegaConfBaseException, yaml.YAMLError) as error:
        raise ConfigError(f"the files of {CONFIG_DIR} do not compose: {error}") from error
    return composed


def _to_schema(composed: DictConfig) -> Config:
    """Strict keys and types by OmegaConf, then the schema's own rules."""
    for name in all_sections():
        section = OmegaConf.select(composed, name)
        # OmegaConf rejects a scalar here as well, but does not say where.
        if section is not None and not isinstance(section, DictConfig):
            raise ConfigError(f"{name}={section!r}: is a section; set its settings one by one")
    try:
        merged = OmegaConf.merge(OmegaConf.structured(Config), composed)
        config = OmegaConf.to_object(merged)
    except OmegaConfBaseException as error:
        raise ConfigError(_explain(error, composed)) from None
    except ValueError as error:
        raise ConfigError(str(error)) from None
    assert isinstance(config, Config)
    return config


def _explain(error: OmegaConfBaseException, composed: DictConfig) -> str:
    name = error.full_key or ""
    setting = setting_named(name) or named_setting(name)
    if setting is not None:
        return f"{name}={OmegaConf.select(composed, name)!r}: expected {setting.expected}"
    if name in all_sections():
        return f"{name}: expected a mapping of its settings"
    return f"{name}: {_unknown(name)}"


def _anchor_paths(config: Config) -> None:
    """Make paths absolute, relative to the current folder."""
    run, buffer, model, algorithm = config.run, config.buffer, config.model, config.algorithm
    run.dir = _absolute(run.dir)
    buffer.password_file = buffer.password_file and _absolute(buffer.password_file)
    config.task.agent = config.task.agent and _absolute_code(config.task.agent)
    for task in (config.task, *config.task.tasks.values()):
        _anchor_task(task)
    algorithm.loss = _absolute_code(algorithm.loss)
    algorithm.aggregation = _absolute_code(algorithm.aggregation)
    algorithm.advantage.kind = _absolute_code(algorithm.advantage.kind)
    algorithm.kl.estimator = _absolute_code(algorithm.kl.estimator)
    algorithm.correction.kinds = [_absolute_code(kind) for kind in algorithm.correction.kinds]
    for stream in algorithm.streams.values():
        stream.loss = _absolute_code(stream.loss)
        stream.aggregation = _absolute_code(stream.aggregation)
    model.path = model.path and _absolute_or_hub(model.path)
    algorithm.kl.reference = algorithm.kl.reference and _absolute_or_hub(algorithm.kl.reference)


def _anchor_task(task: TaskSource) -> None:
    if task.is_from_hub:
        task.name = _absolute_or_hub(task.name)
    task.path = task.path and _absolute(task.path)
    task.eval_path = task.eval_path and _absolute(task.eval_path)
    task.python = task.python and _absolute(task.python)
    task.factory = task.factory and _absolute_code(task.factory)
    task.env = task.env and _absolute_code(task.env)
    task.tools = [_absolute_tool(tool) for tool in task.tools]
    for reward in task.rewards.values():
        reward.function = reward.function and _absolute_code(reward.function)
        reward.path = reward.path and _absolute(reward.path)
        reward.python = reward.python and _absolute(reward.python)
        for command in (reward.command, reward.compile):
            if command and "/" in command[0]:
                command[0] = _absolute(command[0])


def _absolute(path: str) -> str:
    return str(Path(path).expanduser().absolute())


def _absolute_or_hub(path: str) -> str:
    """A name on the hub looks like a path too: only an existing folder, or ./ and ~, is one."""
    is_folder = Path(path).expanduser().is_dir() or path[0] in "./~"
    return _absolute(path) if is_folder else path


def _absolute_code(name: str) -> str:
    """Make the file of `file.py:name` absolute; a module's name stays as it is."""
    file, colon, function = name.rpartition(":")
    return f"{_absolute(file)}{colon}{function}" if file.endswith(".py") else name


def _absolute_tool(name: str) -> str:
    """The same; also make the files absolute that the command of an MCP server names."""
    kind, colon, command = name.partition(":")
    if kind != "mcp" or command.startswith(("http://", "https://")):
        return _absolute_code(name)
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise ConfigError(f"task.tools={name!r}: is no command: {error}; correct it") from error
    return kind + colon + shlex.join(_absolute(w) if Path(w).is_file() else w for w in words)


def _unknown(name: str) -> str:
    """The message for an unknown setting: the nearest name, or the names in its section."""
    names = [setting.name for setting in named_settings().get(mapping_of(name), all_settings())]
    guess = _nearest(name, names)
    if guess:
        return f"there is no such setting;{guess} (docs/configuration.md lists all)"
    section = mapping_of(name) or name.rpartition(".")[0]
    while section and section not in all_sections() and section not in named_settings():
        section = section.rpartition(".")[0]
    if section:
        inside = [other for other in names if other.startswith(f"{section}.")]
        return f"there is no such setting; {section} has {', '.join(inside)}"
    sections = [other for other in all_sections() if "." not in other]
    return f"there is no such setting; the sections are {', '.join(sections)}"


def _nearest(name: str, known: Iterable[str]) -> str:
    """ " did you mean ...?" for a misspelled name or a missing section, otherwise ""."""
    known = list(known)
    leaf = name.split(".")[-1]
    same_leaf = [other for other in known if other.split(".")[-1] == leaf]
    close = same_leaf[:2] or difflib.get_close_matches(name, known, n=1, cutoff=0.75)
    if not close:
        leaves = {other.split(".")[-1]: other for other in known}
        close = [leaves[x] for x in difflib.get_close_matches(leaf, leaves, n=1, cutoff=0.8)]
    return f" did you mean {' or '.join(close)}?" if close else ""


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]
