"""The pages for users and contributors agree with the settings, the Makefile and each other."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from configs.load import load_config
from tests.support.repository import ROOT

PACKAGES = (
    "configs",
    "buffer",
    "tensors",
    "weight_sync",
    "trainer_pool",
    "rollout_pool",
    "controller",
)
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "benchmarks/README.md")),
    *sorted((ROOT / "docs").glob("*.md")),
]


def anchors(page: Path) -> set[str]:
    """Returns the anchors that GitHub makes of the headings."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_of_a_page_lead_to_files_and_headings(page: Path) -> None:
    links = [link for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()) if ":" not in link]
    for link in links:
        file, _, anchor = link.partition("#")
        target = page.parent / file if file else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


def test_headings_that_settings_and_messages_name_exist() -> None:
    named = set[str]()
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            named |= set(re.findall(r"docs/[a-z-]+\.md#[a-z-]+", path.read_text()))
    assert "docs/algorithms.md#losses" in named
    for link in named:
        file, _, anchor = link.partition("#")
        assert anchor in anchors(ROOT / file), link


def test_every_make_target_is_on_a_page() -> None:
    targets = re.findall(r"^([a-z0-9-]+):.*##", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert "launch" in targets
    text = "\n".join(page.read_text() for page in PAGES)
    assert [target for target in targets if not re.search(rf"make {target}(?![\w-])", text)] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_settings_of_every_launch_on_a_page_are_accepted(page: Path) -> None:
    for command in re.findall(r"make launch [^`\n]*", page.read_text()):
        settings = re.search(r'ARGS="(.*?)"', command)
        experiment = re.search(r"EXPERIMENT=([\w.-]+)", command)
        if settings and "..." not in settings[1]:
            overrides = shlex.split(settings[1])
            load_config(overrides, experiment[1] if experiment else "quickstart")
