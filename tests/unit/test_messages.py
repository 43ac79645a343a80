"""Every message that a person can meet says what to do, or stands in docs/failures.md with a cure.

Read from the sources: a message is the text that is raised or said, without the values in it. The
exceptions are in messages_without_a_cure.txt, by the reason; that list may only become shorter.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.repository import ROOT

ROOMS = (
    "configs",
    "controller",
    "host",
    "processes",
    "buffer/redis",
    "rollout_pool/rewards",
    "rollout_pool/tasks",
    "rollout_pool/episodes",
    "trainer_pool/algorithms",
)
"""Where settings, files, other programs and users' own code are read; elsewhere an error is one
process's message to another, and the run's own words are round it."""
EXEMPT = Path(__file__).with_name("messages_without_a_cure.txt")
MOST_EXEMPT = 56
"""Lower it with the list."""
SAYING = ("say", "failure", "RunFailed")
VERBS = (
    "add|ask|call|change|check|choose|compare|copy|correct|declare|deploy|discard|do|end|export|free|give|"
    "have|hold|install|keep|launch|leave|let|load|look|lower|make|move|name|number|pass|put|quote|raise|"
    "remove|rename|restart|restore|resume|return|run|save|say|score|see|send|serve|set|shorten|shrink|"
    "split|start|take|train|try|update|use|write"
)
CURE = re.compile(
    rf"(?:^|[;:.,(?`] |; ?\{{\}} |\b(?:or|and|to|then) )(?:{VERBS})\b"
    r"|\b(?:did you mean|must|expected|needs?|at least|at most)\b"
    r"|\b(?:may say why|says why|its log|last lines of)\b"
    r"|; ?\{|; [a-z_.]+=|docs/|logs/|`make|`\{\}`"
    r"|\b(?:it has|there are|there is none here but|What can:) \{|ARGS=",
    re.IGNORECASE,
)
"""An instruction, a limit, the values that are possible, or the place that says more."""
FEWEST_WORDS = 3
"""A text of fewer words is the frame of another message."""


def text_of(node: ast.expr) -> str:
    """The text of an expression with {} for what is not constant; "" if none of it is."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(v.value if isinstance(v, ast.Constant) else "{}" for v in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        left, right = text_of(node.left), text_of(node.right)
        return (left or "{}") + (right or "{}") if left or right else ""
    return ""


def messages(source: str) -> Iterator[str]:
    """Texts that are raised, or said to the person at the launch."""
    for node in ast.walk(ast.parse(source)):
        arguments: list[ast.expr] = []
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            arguments = node.exc.args
        elif isinstance(node, ast.Call):
            name = getattr(node.func, "id", getattr(node.func, "attr", ""))
            arguments = node.args if name in SAYING else []
        found = next(filter(None, map(text_of, arguments)), "")
        if len(re.findall(r"[a-z]{2,}", found)) >= FEWEST_WORDS:
            yield found


def documented() -> list[list[str]]:
    """The messages of docs/failures.md, each as its constant parts."""
    page = (ROOT / "docs/failures.md").read_text()
    firsts = re.findall(r"^\| (`.*?) \| ", page, re.MULTILINE)
    quoted = [one for first in firsts for one in re.findall(r"`([^`]+)`", first)]
    return [parts for one in quoted if (parts := constant_parts(one))]


def constant_parts(quoted: str) -> list[str]:
    """The parts of a message on the page that are no values; [] if they would fit many others."""
    parts = [part.strip(" :;,.") for part in re.split(r"\.\.\.|[\w-]*\d[\w.-]*|=", quoted)]
    known = [part for part in parts if len(part) > 3]
    return known if any(len(part) >= 8 for part in known) else []


def without_cure(source: str, pages: list[list[str]]) -> list[str]:
    return [
        message
        for message in messages(source)
        if not CURE.search(message)
        and not any(all(part in message for part in parts) for parts in pages)
    ]


def all_without_cure() -> set[str]:
    pages = documented()
    return {
        f"{path.relative_to(ROOT)}: {message}".replace("\n", " ")
        for room in ROOMS
        for path in (ROOT / room).rglob("*.py")
        for message in without_cure(path.read_text(), pages)
    }


def exempt() -> set[str]:
    lines = EXEMPT.read_text().splitlines()
    return {line for line in lines if line and not line.startswith("#")}


def test_message_says_what_to_do_or_stands_on_the_page_with_its_cure() -> None:
    new = sorted(all_without_cure() - exempt())
    assert new == [], "say what to do behind a semicolon, or add a row to docs/failures.md"


def test_list_of_exceptions_only_becomes_shorter() -> None:
    assert sorted(exempt() - all_without_cure()) == [], "remove these lines, and lower MOST_EXEMPT"
    assert len(exempt()) == MOST_EXEMPT


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ('raise ValueError(f"rollout.x={x}: the value does not fit")', True),
        ('raise ValueError(f"rollout.x={x}: the value does not fit; lower rollout.y")', False),
        ('raise ValueError(f"rollout.x={x}: the value does not fit; {fix}")', False),
        ('raise RunFailed("nothing of it " + "is left")', True),
        ('self.say(f"the engine {name} is gone for good")', True),
        ('raise ValueError(f"Redis at {url} has version {v}")', False),  # a row of the page
        ('raise ValueError(f"{where}: {error}")', False),  # the frame of another
        ('log.debug("the engine is gone for good")', False),
    ],
)
def test_planted_message_without_a_cure_is_noticed(source: str, found: bool) -> None:
    assert bool(without_cure(source, documented())) is found
