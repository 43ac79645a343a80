"""One thing about a run that its operator should know, and the command that mends it (pure)."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from enum import Enum
from functools import cache
from math import ceil

from configs.introspection import setting_named

log = logging.getLogger(__name__)

_SHORT = {
    "rollout.num_engines": "make scale ROLLOUT",
    "buffer.max_staleness": "make tune MAX_STALENESS",
}
"""Settings with a variable of their own in the Makefile."""

MUCH = 0.25
"""Fraction of the time from which a wait needs a remedy."""


class Level(Enum):
    alarm = "alarm"
    """Something is broken, or keeps the run from learning."""
    hint = "hint"
    """The run could be faster, or somebody should look at something."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Finding:
    """Example, with changes=("rollout.num_engines=6",):

    found.sentence     # "Rollouts are the bottleneck: .... Add engines."
    found.command()    # "make scale ROLLOUT=6"
    """

    level: Level
    part: str
    """The part of the run that is at fault: trainer, rollout, rewards, weights, redis, disk, ..."""
    words: str
    """With its numbers, short enough for the line of a step."""
    advice: str
    changes: tuple[str, ...] = ()
    """Settings that would mend it, as on the command line."""

    @property
    def sentence(self) -> str:
        return f"{_capital(self.words)}. {_capital(self.advice)}."

    def line(self, run: str = "") -> str:
        """The sentence, with the command if there is one."""
        command = self.command(run)
        return f"{self.sentence} Try `{command}`." if command else self.sentence

    @property
    def is_live(self) -> bool:
        """A running job takes all its changes."""
        settings = [setting_named(change.partition("=")[0]) for change in self.changes]
        return all(setting is not None and setting.is_live for setting in settings)

    def command(self, run: str = "") -> str:
        """The command that makes its changes, if any. `run` names the run, as " RUN=night"."""
        if not self.changes:
            return ""
        settings = f'ARGS="{" ".join(self.changes)}"'
        if not self.is_live:
            return f"make stop{run} && make resume{run} {settings}"
        if self.changes == ("buffer.paused=False",):
            return f"make unpause{run}"
        name, _, value = self.changes[0].partition("=")
        if len(self.changes) == 1 and name in _SHORT:
            return f"{_SHORT[name]}={value}{run}"
        return f"make tune {settings}{run}"


def alarm(part: str, words: str, advice: str, *changes: str) -> Finding:
    return Finding(level=Level.alarm, part=part, words=words, advice=advice, changes=changes)


def hint(part: str, words: str, advice: str, *changes: str) -> Finding:
    return Finding(level=Level.hint, part=part, words=words, advice=advice, changes=changes)


def enough(number: int, waited: float) -> int:
    """How many of a part nobody would wait for, if others waited for this fraction of the time with
    `number` of them; at most twice as many."""
    return min(2 * number, max(number + 1, ceil(number / max(0.5, 1 - waited))))


@cache
def log_once(what: str) -> None:
    """The error that is being handled, which costs the run no more than `what`."""
    log.warning("%s failed, and the run goes on without", what, exc_info=True)


def _capital(text: str) -> str:
    """A sentence may begin with a setting, a file or the name of a part: those stay as they are."""
    return text[:1].upper() + text[1:] if text.partition(" ")[0].isalpha() else text
