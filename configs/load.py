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

import contextlib
import difflib
import re
import shlex
from collections.abc import Callable, Iterable, Sequence
from copy import deepcopy
from dataclasses import asdict, fields
from enum import Enum
from functools import cache, lru_cache
from io import StringIO
from os.path import isfile
from pathlib import Path
from typing import Any, cast, get_type_hints

import yaml
from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.errors import HydraException
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from configs.algorithm_schema import SETTINGS_FAMILIES, AlgorithmConfig, StreamConfig
from configs.checks import FunctionConfig, Section, default_of
from configs.choices import TaskKind
from configs.corrections import CorrectionConfig
from configs.introspection import (
    all_sections,
    all_settings,
    describe_type,
    in_mapping,
    named_setting,
    named_settings,
    setting_named,
)
from configs.rollout_schema import TaskConfig, TaskSource
from configs.run_files import read_text
from configs.schema import Config, RunConfig

CONFIG_DIR = Path(__file__).resolve().parent
GROUPS = tuple(sorted(folder.name for folder in CONFIG_DIR.iterdir() if any(folder.glob("*.yaml"))))

# `${data:word_problems.jsonl}` in a YAML file names a file that ships with the project.
OmegaConf.register_new_resolver("data", lambda name: str(CONFIG_DIR / "data" / name), replace=True)

OF_ANY_TASK = ("chat_template", "renderer", "template_args", "tool_parser", "seed")
"""Settings of a task that are kept when its kind changes: they belong to the model or the run."""
NAMED_KINDS = (TaskKind.reasoning_gym.name, TaskKind.verifiers.name)
"""Kinds whose tasks come from a library, chosen by task.name."""
SET_WHOLE = ("task.template_args",)
"""Mappings that replace a file's: {} takes its arguments away."""
TASK_IDENTITY = ("task.kind", "task.name")
FUNCTION_SETTINGS: dict[str, type[FunctionConfig]] = {
    f"algorithm.{name}": base
    for name, base in get_type_hints(AlgorithmConfig).items()
    if base in SETTINGS_FAMILIES
}
"""Settings that choose one function each."""
HOW_TO = "docs/configuration.md#an-experiment-of-your-own has an example"
OWN_FILE = "_own_file_"
"""Hydra's name of an experiment that is not in configs/experiment."""
END_OF_YAML = "..."
NOT_COMPOSED = (HydraException, OmegaConfBaseException)


class ConfigError(ValueError):
    """A setting that is unknown, has the wrong type, or breaks a rule; the message has the fix."""


def load_config(overrides: Sequence[str], experiment: str = "quickstart") -> Config:
    """Compose `experiment`, apply `overrides` (`buffer.max_staleness=4`, `model=tiny`) and check.

    `experiment` is the name of a file in configs/experiment, or the path of any other. Values are
    YAML; text settings are taken literally. Relative paths are relative to the current folder and
    become absolute, because other processes run in other folders. Raises ConfigError.
    """
    config = _to_schema(_settings(overrides, experiment))
    _anchor_paths(config)
    return config


def _settings(overrides: Sequence[str], experiment: str) -> DictConfig:
    """The settings of the files and `overrides`, before validation."""
    pairs = [_split(override) for override in overrides]
    choices = {"experiment": experiment} | {n: text for n, text in pairs if n in GROUPS}
    place = choices["experiment"]
    is_path = "/" in place or place.endswith((".yaml", ".yml"))
    own = _read_experiment(place) if is_path else None
    for group, option in choices.items():
        if own is None or group != "experiment":
            _check_option(group, option)
    composed = deepcopy(_compose(tuple(choices.items()), own))
    values = [(name, _value(name, text)) for name, text in pairs if name not in GROUPS]
    _forget_other_task(composed, values)
    _update(composed, values)
    return composed


def _update(settings: DictConfig, values: Sequence[tuple[str, object]]) -> None:
    """Set `values` by name, in `settings` of the files.

    A function may be written as its kind alone. On the command line that also drops the settings
    that a file has given to another kind.
    """
    for name in FUNCTION_SETTINGS:
        if isinstance(kind := OmegaConf.select(settings, name), str):
            OmegaConf.update(settings, name, {"kind": kind}, merge=False)
    kinds = [pair for pair in values if pair[0] in FUNCTION_SETTINGS and isinstance(pair[1], str)]
    for name, kind in kinds:
        OmegaConf.update(settings, name, {"kind": kind}, merge=False, force_add=True)
    for name, value in (pair for pair in values if pair not in kinds):
        OmegaConf.update(settings, name, value, merge=name not in SET_WHOLE, force_add=True)


def _forget_other_task(composed: DictConfig, values: Sequence[tuple[str, object]]) -> None:
    """Remove the files' settings of the task if `values` choose another kind of task.

    For a reasoning_gym data set or a verifiers environment, another name removes them as well.
    """
    kept: tuple[str, ...]
    wanted = dict(values)
    before = _kind_and_name(composed.get("task"))
    after = wanted.get("task.kind", before[0]), wanted.get("task.name", before[1])
    if after[0] != before[0]:
        kept = OF_ANY_TASK
    elif _is_other_task(before, after):
        kept = (*OF_ANY_TASK, "kind", "python", "eval_size", "max_turns", "max_turn_tokens")
    else:
        return
    task = composed.get("task")
    for setting in list(task) if isinstance(task, DictConfig) else ():
        if setting not in kept:
            del task[setting]


def _kind_and_name(task: Any) -> tuple[object, object]:
    default = TaskConfig()
    task = task if isinstance(task, DictConfig) else OmegaConf.create()
    return task.get("kind", default.kind.name), task.get("name", default.name)


def _is_other_task(before: tuple[object, object], after: tuple[object, object]) -> bool:
    return before[0] != after[0] or (before[0] in NAMED_KINDS and before[1] != after[1])


def experiment_yaml(config: Config, shown: Callable[[Any], Any] = lambda tree: tree) -> str:
    """An experiment file with which `load_config` gives `config` again, except for run.name.

    It chooses no files and holds the values that differ from the schema's defaults, so that it
    stays what it is when files of the groups change. Passwords in addresses are replaced by ***.
    `shown`: makes of the values, by name, those that are written.
    """
    tree = {"experiment": config.experiment, **_differing(config)}
    run = tree.get("run", {})
    run.pop("name", None)
    if run.get("dir") == _absolute(RunConfig().dir):
        del run["dir"]
    if not run:
        tree.pop("run", None)
    return OmegaConf.to_yaml(OmegaConf.create(_literal(shown(_without_passwords(tree)))))


def _differing(section: Section) -> dict[str, Any]:
    """The settings that are not their defaults, by name."""
    values = {one.name: _brief(getattr(section, one.name)) for one in fields(section)}  # type: ignore[arg-type]
    usual = {one.name: _brief(default_of(one)) for one in fields(section)}  # type: ignore[arg-type]
    return {name: value for name, value in values.items() if value != usual[name]}


def _brief(value: Any) -> Any:
    """As it may be written in a file, without what has its default."""
    if isinstance(value, Section):
        found = _differing(value)
        return value.kind if isinstance(value, FunctionConfig) and len(found) == 1 else found
    if isinstance(value, dict):
        return {key: _brief(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_brief(item) for item in value]
    return value.name if isinstance(value, Enum) else value


def _changed(value: Any, kind: type, change: Callable[[Any], Any]) -> Any:
    """`value`, which may hold mappings and lists, with every value of this kind changed."""
    if isinstance(value, dict):
        return {key: _changed(item, kind, change) for key, item in value.items()}
    if isinstance(value, list):
        return [_changed(item, kind, change) for item in value]
    return change(value) if isinstance(value, kind) else value


def _without_passwords(value: Any) -> Any:
    def masked(text: str) -> str:
        return re.sub(r"\w+://\S+", lambda url: _without_password(url[0]), text)

    return _changed(value, str, masked)


def _flat(tree: Any, prefix: str) -> dict[str, Any]:
    """Settings by dotted name; an absent section counts as a setting with the value None."""
    found: dict[str, Any] = {}
    for key, value in tree.items():
        name = f"{prefix}{key}"
        if name in all_sections() and name not in FUNCTION_SETTINGS and isinstance(value, dict):
            found |= _flat(value, f"{name}.")
        else:
            found[name] = value
    return found


def _plain(value: Any) -> Any:
    return _changed(value, Enum, lambda choice: choice.name)


def _is_quoted(text: str) -> bool:
    return len(text) > 1 and text[0] == text[-1] and text[0] in "'\""


def to_yaml(config: Config) -> str:
    """The resolved settings as YAML, for `make dry-run` and the run's folder.

    Without the password in buffer.url, because people share both. The last line is YAML's own end
    of a document: a file without it was cut off.
    """
    tree = _plain(asdict(config))
    if config.buffer.url is not None:
        tree["buffer"]["url"] = _without_password(config.buffer.url)
    return f"{OmegaConf.to_yaml(OmegaConf.create(tree))}{END_OF_YAML}\n"


def _without_password(url: str) -> str:
    """Mask the password, also one that contains a slash or an @."""
    url = re.sub(r"(//[^:@/]*):.*@", r"\1:***@", url)
    return re.sub(r"([?&]password=)[^&]*", r"\1***", url)


def read_config(path: Path, overrides: Sequence[str] = ()) -> Config:
    """Read settings that `to_yaml` wrote, and apply `overrides`. Raises ConfigError."""
    settings = _settings_in(path)
    _update(settings, [(name, _value(name, text)) for name, text in map(_split, overrides)])
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
        tree = _tree(text)
        if not isinstance(tree, dict):
            raise ConfigError(f"{path} contains no settings; restore it")
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


@lru_cache(maxsize=4)  # a command reads its run's more than once
def _tree(text: str) -> Any:
    return yaml.safe_load(text)


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
        raise ConfigError(f"{name}: {unknown_setting(name)}")
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        problem = _first_line(error)
        raise ConfigError(f"{name}={text}: not a YAML value ({problem}); quote it") from None


def _literal(value: Any) -> Any:
    """The value with `${` escaped, so that OmegaConf sees no variable."""
    return _changed(value, str, lambda text: text.replace("${", "\\${"))


def _check_option(group: str, option: str) -> None:
    known = options(group)
    if option not in known:
        guess = _nearest(option, known)
        raise ConfigError(
            f"{group}={option}: there is no such {group};{guess} "
            f"choose one of {', '.join(known)} (the files of configs/{group}/)"
            f"{', or give the path of a file' if group == 'experiment' else ''}"
        )


def _read_experiment(place: str) -> str:
    """The text of a user's file. Raises ConfigError if it holds no settings."""
    try:
        text = read_text(Path(place).expanduser())
    except FileNotFoundError:
        raise ConfigError(f"experiment={place}: there is no such file; correct the path") from None
    except ValueError as error:
        raise ConfigError(f"experiment={place}: {error}") from None
    settings: object = None
    try:
        with contextlib.suppress(OSError):  # a text or a number
            settings = OmegaConf.load(StringIO(text))
    except (yaml.YAMLError, OmegaConfBaseException, RecursionError) as error:
        raise ConfigError(f"experiment={place}: correct its YAML ({_in_one_line(error)})") from None
    if not isinstance(settings, DictConfig) or not settings:
        raise ConfigError(f"experiment={place}: has no settings; {HOW_TO}")
    return text


@cache
def _compose(choices: tuple[tuple[str, str], ...], own: str | None) -> DictConfig:
    """The YAML files of `choices` (group, file), untyped, with all variables resolved.

    `own` is the text of an experiment that is not in configs/experiment.
    """
    chosen = dict(choices)
    experiment = chosen.pop("experiment")
    try:
        if own is not None:
            ConfigStore.instance().store(
                group="experiment",
                name=OWN_FILE,
                node=OmegaConf.load(StringIO(own)),
                package="_global_",
            )
        with initialize_config_dir(config_dir=str(CONFIG_DIR), version_base="1.3"):
            lines = [f"{group}={option}" for group, option in chosen.items()]
            lines.append(f"experiment={experiment if own is None else OWN_FILE}")
            composed = compose("config", overrides=lines, return_hydra_config=True)
        OmegaConf.set_struct(composed, False)
        task_file = composed.pop("hydra").runtime.choices.get("task")
        for group, option in chosen.items():
            # In Hydra the experiment overrides such a file, but the user chose this one.
            composed.merge_with({group: OmegaConf.load(CONFIG_DIR / group / f"{option}.yaml")})
        # Escaped again: a text may hold what looks like a variable.
        plain = _literal(OmegaConf.to_container(composed, resolve=True))
        composed = cast("DictConfig", OmegaConf.create(plain))
    except (*NOT_COMPOSED, yaml.YAMLError, ValueError, RecursionError) as error:
        why = _in_one_line(error).replace(f"'experiment/{OWN_FILE}'", "its defaults")
        why = why.replace("'override ", "'override /")  # without it Hydra looks beside the file
        raise ConfigError(f"experiment={experiment}: does not compose: {why}; {HOW_TO}") from None
    name = experiment if own is None else Path(experiment).stem
    label = composed.get("experiment") or name
    if isinstance(label, DictConfig):
        raise ConfigError(
            f"experiment={experiment}: its files in {CONFIG_DIR}/experiment must begin with the "
            "line `# @package _global_`"
        )
    composed["experiment"] = re.sub(r"[^A-Za-z0-9._-]+", "-", str(label)).strip("-._") or "own"
    if task_file is not None and isinstance(composed.get("task"), DictConfig):
        _check_task_file(composed, task_file, experiment)
    return composed


def _check_task_file(composed: DictConfig, task_file: str, experiment: str) -> None:
    """Refuse a task that would keep settings of the file of another."""
    before = _kind_and_name(OmegaConf.load(CONFIG_DIR / "task" / f"{task_file}.yaml"))
    after = _kind_and_name(composed.task)
    if _is_other_task(before, after):
        place = before[0] == after[0]  # the kind, or the name
        raise ConfigError(
            f"experiment={experiment}: {TASK_IDENTITY[place]}={after[place]}: it would keep "
            f"settings of configs/task/{task_file}.yaml, which has {before[place]}; add "
            "`- override /task: null`, or the file of your task, to its defaults"
        )


def _to_schema(composed: DictConfig) -> Config:
    """Strict keys and types by OmegaConf, then the schema's own rules."""
    for name in all_sections():
        section = OmegaConf.select(composed, name)
        # OmegaConf rejects a scalar here as well, but does not say where.
        if not (section is None or isinstance(section, DictConfig) or name in FUNCTION_SETTINGS):
            raise ConfigError(f"{name}={section!r}: is a section; set its settings one by one")
    for setting in all_settings():
        if setting.annotation in (str, list[str]) and not setting.name.startswith("algorithm."):
            given = OmegaConf.select(composed, setting.name)
            words = given if isinstance(given, ListConfig) else [given]
            if any(isinstance(word, bool) for word in words):
                fix = "expected text, and YAML takes yes, no, on and off for these: quote them"
                raise ConfigError(f"{setting.name}={given!r}: {fix}")
    try:
        config = OmegaConf.to_object(_merged(composed))
    except OmegaConfBaseException as error:
        raise ConfigError(_explain(error, composed)) from None
    except ValueError as error:
        raise ConfigError(str(error)) from None
    assert isinstance(config, Config)
    return config


def _merged(settings: DictConfig) -> DictConfig:
    """`settings` over the defaults of the schema."""
    schema, settings = _schema(Config), deepcopy(settings)
    if "algorithm" in settings:
        schema.algorithm = _with_functions(AlgorithmConfig, settings.algorithm, "algorithm.")
    merged = OmegaConf.unsafe_merge(schema, settings)  # both are copies
    assert isinstance(merged, DictConfig)
    return merged


def _schema(section: type) -> DictConfig:
    """The defaults of a section. Making them takes eight times as long as copying them."""
    return deepcopy(_schema_of(section))


@cache
def _schema_of(section: type) -> DictConfig:
    return cast("DictConfig", OmegaConf.structured(section))


def _with_functions(section: type[Section], settings: DictConfig, prefix: str) -> DictConfig:
    """The schema of a section, with each function's settings as `settings` give them.

    They are moved out of `settings`, which OmegaConf then merges into the rest.
    """
    schema = _schema(section)
    for name, annotation in get_type_hints(section).items():
        if name not in settings:
            continue
        given, place = settings[name], f"{prefix}{name}"
        if annotation in SETTINGS_FAMILIES:
            schema[name] = _function(annotation, settings.pop(name), place)
        elif annotation == list[CorrectionConfig]:
            if not isinstance(given, ListConfig):
                raise ConfigError(
                    f"{place}={given!r}: expected a list, as "
                    "[veto, {kind: tis_token, tis_cap: 2}]"
                )
            every = enumerate(settings.pop(name))
            schema[name] = [_function(CorrectionConfig, one, f"{place}.{i}") for i, one in every]
        elif annotation == dict[str, StreamConfig] and isinstance(given, DictConfig):
            for key, one in given.items():
                stream = f"{place}.{key!s}"
                if not isinstance(one, DictConfig):
                    raise ConfigError(f"{stream}={one!r}: expected a mapping")
                schema[name][key] = _with_functions(StreamConfig, one, f"{stream}.")
    return schema


def _function(base: type[FunctionConfig], given: object, place: str) -> DictConfig:
    """One function's settings over the defaults of its kind.

    `given` is the kind or a mapping of settings, in which the kind may be missing: then it is the
    family's first. Raises ConfigError that begins with `place`, the setting's name.
    """
    family = SETTINGS_FAMILIES[base]
    kinds = [*family.kinds]
    settings = OmegaConf.create({"kind": given}) if isinstance(given, str) else given
    if not isinstance(settings, DictConfig):
        raise ConfigError(f"{place}={given!r}: expected {describe_type(base)}")
    kind = str(settings.setdefault("kind", kinds[0]))
    section = family.section(kind)
    if section is None:
        raise ConfigError(f"{place}={kind!r}: must be {', '.join(kinds)} or file.py:name")
    known = [field.name for field in fields(section) if field.name != "kind"]
    for name in settings:
        if name not in (*known, "kind"):
            raise ConfigError(
                f"{place}.{name!s}: {kind} has no such setting; it has {', '.join(known) or 'none'}"
            )
    try:
        return cast("DictConfig", OmegaConf.merge(_schema(section), settings))
    except OmegaConfBaseException as error:
        raise ConfigError(_explain(error, settings, f"{place}.")) from None


def _explain(error: OmegaConfBaseException, composed: DictConfig, prefix: str = "") -> str:
    name = re.sub(r"\[\d+\]$", "", f"{prefix}{error.full_key or ''}")  # one of a list
    setting = setting_named(name) or named_setting(name)
    if setting is not None:
        value = OmegaConf.select(composed, name.removeprefix(prefix))
        return f"{name}={value!r}: expected {setting.expected}"
    if name in all_sections():
        return f"{name}: expected a mapping of its settings"
    return f"{name}: {unknown_setting(name)}"


def _anchor_paths(config: Config) -> None:
    """Make paths absolute, relative to the current folder."""
    run, buffer, model, algorithm = config.run, config.buffer, config.model, config.algorithm
    run.dir = _absolute(run.dir)
    buffer.password_file = buffer.password_file and _absolute(buffer.password_file)
    buffer.tls_ca_file = buffer.tls_ca_file and _absolute(buffer.tls_ca_file)
    task = config.task
    task.agent = task.agent and _absolute_code(task.agent)
    for one in (task, *task.tasks.values(), *task.eval_sets.values()):
        _anchor_task(one)
    algorithm.kl.estimator = _absolute_code(algorithm.kl.estimator)
    for function in algorithm.functions:
        function.kind = _absolute_code(function.kind)
    command = config.rollout.eval.command
    command[:] = [_absolute(word) if isfile(word) else word for word in command]
    model.path = model.path and _absolute_or_hub(model.path)
    if model.lora is not None and model.lora.resume_from is not None:
        model.lora.resume_from = _absolute(model.lora.resume_from)
    if (critic := algorithm.critic) is not None:
        critic.path = critic.path and _absolute_or_hub(critic.path)
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


def unknown_setting(name: str) -> str:
    """The message for an unknown setting: the nearest name, or the names in its section."""
    mapping, _ = in_mapping(name)
    names = [setting.name for setting in named_settings().get(mapping, all_settings())]
    guess = _nearest(name, names)
    if guess:
        return f"there is no such setting;{guess} (docs/configuration.md lists all)"
    section = mapping or name.rpartition(".")[0]
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
    close = [*dict.fromkeys(same_leaf)][:2] or difflib.get_close_matches(
        name, known, n=1, cutoff=0.75
    )
    if not close:
        leaves = {other.split(".")[-1]: other for other in known}
        close = [leaves[x] for x in difflib.get_close_matches(leaf, leaves, n=1, cutoff=0.8)]
    return f" did you mean {' or '.join(close)}?" if close else ""


def _in_one_line(error: Exception) -> str:
    """The message of Hydra or a YAML parser, without the list of folders in which it looked."""
    return " ".join(str(error).partition("Config search path")[0].split())


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]
