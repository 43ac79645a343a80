"""The environments of programs: a Python and packages that they may import, or a command."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from rollout_pool.sandbox.view import FILE, OUTPUT, SCRATCH

OLDEST_PYTHON = (3, 11)
_TIMEOUT_S = 60.0
_DESCRIBE = (
    "import json, os, site, sys; print(json.dumps({'version': sys.version_info[:2], "
    "'interpreter': getattr(sys, '_base_executable', ''), 'library': os.path.dirname(os.__file__), "
    "'packages': site.getsitepackages()}))"
)


@dataclass(kw_only=True, slots=True, frozen=True)
class ProgramEnvironment:
    interpreter: str
    """The base interpreter: a virtual environment's own would bring its packages by itself."""
    packages: tuple[str, ...] = ()
    """Folders of packages, which programs can read."""
    command: tuple[str, ...] = ()
    """Runs a program of another language: the path of the executable, then its arguments, the first
    of which is its name. `interpreter` only prepares it."""
    compiles: bool = False
    """The command makes a file of the program; it may start processes, and sees /usr."""


BARE = ProgramEnvironment(interpreter=sys._base_executable)  # type: ignore[attr-defined]
"""This process's Python with its standard library only."""


def find_command(
    command: Sequence[str], setting: str, *, compiles: bool = False
) -> ProgramEnvironment:
    """The environment of `command`, in which {file} stands for the program's file, and {output} for
    the one that a compiler makes.

    Raises ValueError naming `setting` if there is no such command.
    """
    arguments = [word.replace("{file}", FILE).replace("{output}", OUTPUT) for word in command]
    what, path = f"{setting}={list(command)}", arguments[0]
    if path != FILE:
        if (found := shutil.which(path)) is None:
            raise ValueError(
                f"{what}: there is no executable {path!r}; install it, or give its path"
            )
        path = os.path.realpath(found)
        _check_place(path, what)
    return dataclasses.replace(BARE, command=(path, *arguments), compiles=compiles)


def _check_place(path: str, what: str) -> None:
    if os.path.commonpath([path, SCRATCH]) == SCRATCH:
        raise ValueError(
            f"{what}: {path} lies in {SCRATCH}, where programs see their own folder instead; "
            "put it elsewhere"
        )


def find_python(python: str, setting: str) -> ProgramEnvironment:
    """The environment of the interpreter at the path `python`, as env/bin/python.

    Raises ValueError naming `setting` if programs cannot run with it.
    """
    what = f"{setting}={python!r}"
    if not os.path.isfile(python):
        raise ValueError(
            f"{what}: there is no such file; give the interpreter of an environment, as env/bin/"
            "python after python3 -m venv env"
        )
    try:
        done = subprocess.run(
            [python, "-I", "-c", _DESCRIBE],
            capture_output=True,
            text=True,
            check=True,
            timeout=_TIMEOUT_S,
            stdin=subprocess.DEVNULL,
        )
        found = json.loads(done.stdout)
        version = tuple(found["version"])
    except (OSError, ValueError, KeyError, TypeError, subprocess.SubprocessError) as error:
        raise ValueError(f"{what}: does not run as a Python: {error}") from error
    if version < OLDEST_PYTHON:
        needed, has = (".".join(map(str, numbers)) for numbers in (OLDEST_PYTHON, version))
        raise ValueError(f"{what}: is Python {has}, and the sandbox needs {needed} or newer")
    packages = [os.path.realpath(path) for path in found["packages"] if os.path.isdir(path)]
    for folder in (*packages, os.path.realpath(found["library"])):
        _check_place(folder, what)
    return ProgramEnvironment(interpreter=found["interpreter"], packages=tuple(packages))
