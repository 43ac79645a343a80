"""`leash completion`: a script by which bash or zsh completes commands, options and names."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

import shtab

from configs.introspection import all_settings

SHELLS = ("bash", "zsh")
RUNS, SETTINGS = "_leash_runs", "_leash_settings"
NAMES_OF_RUNS = (
    'for record in runs/*/run.json; do [ -f "$record" ] && basename "$(dirname "$record")"; done'
)
BASH = f"""
{RUNS}() {{ compgen -W "$({NAMES_OF_RUNS})" -- "$1"; }}
{SETTINGS}() {{ compopt -o nospace 2>/dev/null; compgen -W "NAMES" -- "$1"; }}
"""
ZSH = f"""
{RUNS}() {{ setopt localoptions nullglob; compadd -- $({NAMES_OF_RUNS}) }}
{SETTINGS}() {{ compadd -S '' -- NAMES }}
"""


def completion(parser: argparse.ArgumentParser, shell: str) -> str:
    """The script, with the names of all settings; those of runs are looked up below runs/."""
    for action in _actions(parser):
        if action.dest in ("run", "a", "b"):
            action.complete = dict.fromkeys(SHELLS, RUNS)  # type: ignore[attr-defined]
        elif action.dest == "overrides":
            action.complete = dict.fromkeys(SHELLS, SETTINGS)  # type: ignore[attr-defined]
        elif action.dest == "dir":
            action.complete = shtab.DIRECTORY  # type: ignore[attr-defined]
        elif action.type is Path:
            action.complete = shtab.FILE  # type: ignore[attr-defined]
    names = " ".join(f"{setting.name}=" for setting in all_settings())
    script: str = shtab.complete(parser, shell, preamble=BASH if shell == "bash" else ZSH)
    return script.replace("NAMES", names)


def _actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    for action in parser._actions:
        yield action
        if isinstance(action, argparse._SubParsersAction):
            for below in action.choices.values():
                yield from _actions(below)
