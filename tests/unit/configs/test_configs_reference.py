"""The documentation page and the view of the schema that it is made from."""

from __future__ import annotations

import json
from dataclasses import fields

from configs.choices import OnStale
from configs.load import CONFIG_DIR, GROUPS, options
from configs.reference import PAGE, reference_markdown
from configs.schema import Config
from configs.settings import all_sections, all_settings, enum_docs


def test_the_page_in_docs_is_current() -> None:
    assert PAGE.read_text() == reference_markdown(), "run `make docs`"


def test_the_page_has_every_setting_once() -> None:
    page = reference_markdown()
    for setting in all_settings()[1:]:  # `experiment` is a group of files, with a table of its own
        assert page.count(f"| `{setting.name}` |") == 1


def test_settings_know_type_default_and_description() -> None:
    by_name = {setting.name: setting for setting in all_settings()}
    staleness = by_name["buffer.max_staleness"]
    assert (staleness.expected, staleness.default) == ("an integer", 2)
    assert "policy versions" in staleness.doc
    assert by_name["buffer.on_stale"].expected == "one of requeue, drop, mask_tokens, wait"
    assert by_name["buffer.on_stale"].default == "requeue"
    assert by_name["model.path"].expected == "text or null"
    assert by_name["task.params"].is_open


def test_every_section_of_the_schema_is_seen() -> None:
    top = {name for name in all_sections() if "." not in name}
    assert top | {"experiment"} == {field.name for field in fields(Config)}
    assert "model.scratch" in all_sections()


def test_choices_are_explained_by_their_comments() -> None:
    assert "`requeue`: run its prompt again" in enum_docs(OnStale)


def test_every_file_of_a_group_opens_with_a_sentence() -> None:
    for group in GROUPS:
        for option, sentence in options(group).items():
            assert sentence.endswith("."), f"{group}/{option}.yaml"


def test_the_word_problems_have_the_form_of_gsm8k() -> None:
    lines = (CONFIG_DIR / "data" / "word_problems.jsonl").read_text().splitlines()
    problems = [json.loads(line) for line in lines]
    assert len(problems) == 60
    assert len({problem["question"] for problem in problems}) == 60
    for problem in problems:
        assert set(problem) == {"question", "answer"}
        int(problem["answer"].rpartition("#### ")[2])
