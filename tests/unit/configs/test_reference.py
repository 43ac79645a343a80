"""The documentation page and the view of the schema that it is made from."""

from __future__ import annotations

import inspect
import json
import math
import re
from collections.abc import Iterator
from dataclasses import fields
from enum import Enum

import pytest

from configs import choices
from configs.algorithm_schema import StreamConfig
from configs.checks import FunctionConfig, bound_of
from configs.choices import OnStale
from configs.introspection import all_sections, all_settings, enum_docs
from configs.load import CONFIG_DIR, GROUPS, options
from configs.reference import PAGE, reference_markdown
from configs.rollout_schema import RewardConfig
from configs.schema import Config

ENUMS = [value for value in vars(choices).values() if isinstance(value, type) and value is not Enum]

FREE_TEXT = {
    "experiment",  # a file's name, looked up
    "task.prompt_pattern",  # compiled by the task, which says what is wrong with it
    "task.instruction",
    "task.system_prompt",
    "rollout.engine.extra_args",
    "buffer.url",  # taken apart by the schema
}
"""Texts that may be anything, or are looked at where they are used."""


def test_every_number_and_text_has_a_bound_beside_its_field() -> None:
    bare = {
        setting.name
        for setting in all_settings()
        if setting.bound is None and setting.annotation in (int, float, str, list[str])
    }
    assert bare == FREE_TEXT
    in_rewards = {field.name for field in fields(RewardConfig) if bound_of(field) is None}
    assert in_rewards == {"kind", "of", "prompt", "rubric", "all_or_nothing"}
    in_streams = {field.name for field in fields(StreamConfig) if bound_of(field) is None}
    assert in_streams == {"loss", "tokens", "aggregation"}


def outside(words: str) -> Iterator[float]:
    """Values next to the limits that a number's bound names, and those that no comparison finds."""
    limits, _, also = words.partition(", or ")
    if " to " in limits:
        limits = "at least {} and at most {}".format(*limits.split(" to "))
    yield from (math.nan, math.inf, -math.inf)
    steps = {"at least": -1, "at most": 1, "above": 0, "below": 0}
    for word, limit in re.findall(r"(at least|at most|above|below) (\S+)", limits):
        value = float(limit)
        value += steps[word] * max(1.0, abs(value) * 1e-9)  # words have 15 digits
        if value != float(also or "nan"):
            yield value


def test_values_beyond_a_bound_are_refused_by_name() -> None:
    tried = 0
    for setting in all_settings():
        if setting.bound is None or setting.annotation not in (int, float):
            continue
        leaf = setting.name.rpartition(".")[2]
        for value in outside(setting.bound.words):
            with pytest.raises(ValueError, match=re.escape(f"{setting.name}={value!r}: must be ")):
                is_function = issubclass(setting.section, FunctionConfig)
                setting.section(**{leaf: value}, **({"kind": "own"} if is_function else {}))
            tried += 1
    assert tried > 300


def test_defaults_are_within_their_bounds() -> None:
    for section in all_sections().values():
        section(**({"kind": "own"} if issubclass(section, FunctionConfig) else {}))


def test_page_in_docs_is_current() -> None:
    assert PAGE.read_text() == reference_markdown(), "run `make docs`"


def test_page_has_every_setting_once() -> None:
    page = reference_markdown()
    for setting in all_settings()[1:]:  # `experiment` is a group of files, with a table of its own
        alike = [one for one in all_settings() if one.name == setting.name]  # of other kinds
        assert page.count(f"| `{setting.name}` |") == len(alike)


def test_settings_know_type_default_and_description() -> None:
    by_name = {setting.name: setting for setting in all_settings()}
    staleness = by_name["buffer.max_staleness"]
    assert (staleness.expected, staleness.default) == ("an integer, at least 0", 2)
    assert "policy versions" in staleness.doc
    assert by_name["buffer.on_stale"].expected == "one of requeue, drop, mask_tokens, wait"
    assert by_name["buffer.on_stale"].default == "requeue"
    assert by_name["model.path"].expected == "text, not empty, or null"
    assert by_name["task.params"].is_open


def test_every_section_of_the_schema_is_seen() -> None:
    top = {name for name in all_sections() if "." not in name}
    assert top | {"experiment"} == {field.name for field in fields(Config)}
    assert "model.scratch" in all_sections()


def test_choices_are_explained_by_their_comments() -> None:
    output = enum_docs(OnStale)
    assert "`requeue`: run its prompt again" in output
    assert "`mask_tokens`: exclude its stale tokens from the loss" in output
    assert '`"' not in output and "`)" not in output


@pytest.mark.parametrize("choices", ENUMS, ids=lambda choices: choices.__name__)
def test_choices_in_the_page_are_members_and_nothing_else(choices: type[Enum]) -> None:
    named = re.findall(r"`([^`]*)`: ", enum_docs(choices))
    assert set(named) <= {member.name for member in choices}
    text = inspect.getsource(choices)
    assert len(named) == text.count("  # "), "every comment is a member's"


def test_every_file_of_a_group_opens_with_a_sentence() -> None:
    for group in GROUPS:
        for option, sentence in options(group).items():
            assert sentence.endswith("."), f"{group}/{option}.yaml"


def test_word_problems_have_the_form_of_gsm8k() -> None:
    lines = (CONFIG_DIR / "data" / "word_problems.jsonl").read_text().splitlines()
    problems = [json.loads(line) for line in lines]
    assert len(problems) == 60
    assert len({problem["question"] for problem in problems}) == 60
    for problem in problems:
        assert set(problem) == {"question", "answer"}
        int(problem["answer"].rpartition("#### ")[2])
