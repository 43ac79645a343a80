"""Introspection of the schema: every setting's dotted name, type, default and description.

Used by `load.py` for its error messages and by `reference.py` for the documentation page.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass, replace
from enum import Enum
from functools import cache
from itertools import chain, pairwise
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from configs import (
    advantages,
    algorithm_schema,
    choices,
    container_schema,
    corrections,
    losses,
    rollout_schema,
    schema,
)
from configs.algorithm_schema import SETTINGS_FAMILIES
from configs.checks import (
    CODE_PATTERN,
    Bound,
    FunctionConfig,
    bound_of,
    default_of,
    is_live,
    matching,
)

TYPE_WORDS: dict[object, str] = {
    bool: "true or false",
    int: "an integer",
    float: "a number",
    str: "text",
}


@dataclass(kw_only=True, slots=True, frozen=True)
class Setting:
    """One leaf of the configuration."""

    name: str
    """Dotted, as on the command line: `buffer.max_staleness`."""
    section: type
    """The dataclass that contains it."""
    annotation: object
    """Its type, without the `| None`."""
    is_optional: bool
    default: object
    """The schema's one default (Enum members as their name)."""
    doc: str
    bound: Bound | None
    """Restricts its values beyond their type."""
    is_live: bool
    """It may change while the run is going on."""
    kinds: tuple[str, ...] = ()
    """The kinds of function that have it, if others of their family do not."""

    @property
    def expected(self) -> str:
        """The valid values, as the end of "expected ..."."""
        text = describe_type(self.annotation)
        if self.bound is not None:
            text += f", {self.bound.short}"
        if not self.is_optional:
            return text
        return f"{text}, or null" if self.bound is not None else f"{text} or null"

    @property
    def is_open(self) -> bool:
        """It is a mapping with arbitrary keys (arguments of a task's generator)."""
        return get_origin(self.annotation) is dict


def describe_type(annotation: object) -> str:
    """The name of a type, e.g. "an integer" or "one of requeue, drop"."""
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        return "one of " + ", ".join(member.name for member in annotation)
    if get_origin(annotation) is list:
        return "a list, each " + describe_type(get_args(annotation)[0])
    if annotation in SETTINGS_FAMILIES:
        return "a kind, or a mapping with kind and settings"
    if get_origin(annotation) is dict or is_dataclass(annotation):
        return "a mapping"
    return TYPE_WORDS.get(annotation, str(annotation))


@cache
def all_settings() -> tuple[Setting, ...]:
    """Every leaf of `schema.Config`, in source order."""
    return tuple(_walk(schema.Config, prefix=""))


@cache
def live_settings() -> dict[str, str]:
    """The settings that may change while a run goes on, by their names in its Redis."""
    return {s.name.rpartition(".")[2]: s.name for s in all_settings() if s.is_live}


def setting_named(name: str) -> Setting | None:
    return next((setting for setting in all_settings() if setting.name == name), None)


NAMED_SECTIONS = {
    "algorithm.streams": algorithm_schema.StreamConfig,
    "algorithm.correction": corrections.CorrectionConfig,
    "task.rewards": rollout_schema.RewardConfig,
    "task.rubric": rollout_schema.Criterion,
    "task.tasks": rollout_schema.MixedTask,
    "task.eval_sets": rollout_schema.EvalSet,
}
"""Settings that are mappings of sections, which the user names, or lists of them."""


@cache
def named_settings() -> dict[str, tuple[Setting, ...]]:
    """The settings of each of `NAMED_SECTIONS`, by `MAPPING.NAME`."""
    return {
        f"{name}.NAME": tuple(_walk(section, prefix=f"{name}.NAME."))
        for name, section in NAMED_SECTIONS.items()
    }


def named_setting(name: str) -> Setting | None:
    """The setting of a mapping whose section the user named."""
    mapping, rest = in_mapping(name)
    every = named_settings().get(mapping, ())
    return next((setting for setting in every if setting.name == f"{mapping}.{rest}"), None)


def in_mapping(name: str) -> tuple[str, str]:
    """The key in `named_settings` of a setting that is in one of its mappings, and its name there;
    otherwise "" and "".

    Example: in_mapping("task.tasks.sums.rewards.right.kind") == ("task.rewards.NAME", "kind")
    """
    words = name.split(".")
    for place in range(len(words) - 3, 0, -1):  # the innermost: a task of a mixture has rewards
        if (mapping := f"{words[0]}.{words[place]}") in NAMED_SECTIONS:
            return f"{mapping}.NAME", ".".join(words[place + 2 :])
    return "", ""


@cache
def all_sections() -> dict[str, type]:
    """Dotted name of every section, e.g. `trainer.warm_start`, and its dataclass."""
    sections = {setting.name.rpartition(".")[0]: setting.section for setting in all_settings()}
    return {name: section for name, section in sections.items() if name}


def _walk(section: type, prefix: str) -> Iterator[Setting]:
    if section in SETTINGS_FAMILIES:
        yield from _walk_kinds(section, prefix)
    else:
        yield from _walk_fields(section, prefix)


def _walk_kinds(section: type, prefix: str) -> Iterator[Setting]:
    """The settings of all kinds of a family, one after the other; equal ones are one."""
    kinds, own = SETTINGS_FAMILIES[section]
    names = ", ".join(kinds)
    yield Setting(
        name=f"{prefix}kind",
        section=section,
        annotation=str,
        is_optional=False,
        default=next(iter(kinds)),
        doc="The function, which has the settings below that name it.",
        bound=matching("|".join([*kinds, CODE_PATTERN]), f"{names} or file.py:name")["bound"],
        is_live=False,
    )
    found: dict[tuple[str, str], tuple[Setting, list[str]]] = {}
    for kind, settings in {**kinds, "file.py:name": own}.items():
        for setting in _walk_fields(settings, prefix):
            if setting.name != f"{prefix}kind":
                key = setting.name, repr(setting.default)
                found.setdefault(key, (setting, []))[1].append(kind)
    for setting, having in found.values():
        yield setting if len(having) > len(kinds) else replace(setting, kinds=tuple(having))


def _walk_fields(section: type, prefix: str) -> Iterator[Setting]:
    docs = _field_docs(section)
    hints = get_type_hints(section)
    for field in fields(section):
        name = prefix + field.name
        annotation, is_optional = _without_none(hints[field.name])
        if is_dataclass(annotation) and isinstance(annotation, type):
            yield from _walk(annotation, f"{name}.")
            continue
        yield Setting(
            name=name,
            section=section,
            annotation=annotation,
            is_optional=is_optional,
            default=_default(default_of(field)),
            doc=docs.get(field.name, ""),
            bound=bound_of(field),
            is_live=is_live(field),
        )


def _without_none(annotation: Any) -> tuple[Any, bool]:
    if get_origin(annotation) in (Union, UnionType):
        rest = [arg for arg in get_args(annotation) if arg is not type(None)]
        assert len(rest) == 1, f"{annotation}: OmegaConf checks one type (or None) a field"
        return rest[0], True
    return annotation, False


def _default(value: object) -> object:
    if isinstance(value, list):
        return [one.kind if isinstance(one, FunctionConfig) else one for one in value]
    return value.name if isinstance(value, Enum) else value


@cache
def _class_nodes() -> dict[str, ast.ClassDef]:
    families = (losses, corrections, advantages)
    modules = (schema, *families, algorithm_schema, rollout_schema, container_schema, choices)
    trees = [ast.parse(inspect.getsource(module)) for module in modules]
    bodies = [node for tree in trees for node in tree.body]
    return {node.name: node for node in bodies if isinstance(node, ast.ClassDef)}


def section_doc(section: type) -> str:
    """The docstring in the source; `__doc__` of a dataclass without one is generated."""
    return ast.get_docstring(_class_nodes()[section.__name__]) or ""


def enum_docs(names: type[Enum]) -> str:
    """The docstring of an Enum and the comments after its members."""
    members = re.findall(r"^    (\w+) = .*  # (.+)$", inspect.getsource(names), re.MULTILINE)
    comments = [f"`{name}`: {comment}." for name, comment in members]
    doc = ast.get_docstring(_class_nodes()[names.__name__]) or ""
    return " ".join([*doc.split(), *comments])


def _field_docs(section: type) -> dict[str, str]:
    """The string below each field, its own or inherited; only the source has it."""
    nodes = _class_nodes()
    own = [nodes[base.__name__].body for base in section.__mro__ if base.__name__ in nodes]
    docs = {}
    for node, following in chain.from_iterable(map(pairwise, own)):
        if (
            isinstance(node, ast.AnnAssign)
            and isinstance(node.target, ast.Name)
            and isinstance(following, ast.Expr)
            and isinstance(following.value, ast.Constant)
        ):
            docs[node.target.id] = inspect.cleandoc(str(following.value.value))
    return docs
