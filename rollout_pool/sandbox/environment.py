"""The Python that runs the programs: an interpreter, and the packages that they may import."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass

from rollout_pool.sandbox.view import SCRATCH

OLDEST_PYTHON = (3, 11)
_TIMEOUT_S = 60.0
_DESCRIBE = (
    "import json, os, site, sys; print(json.dumps({'version': sys.version_info[:2], "
    "'interpreter': getattr(sys, '_base_executable', ''), 'library': os.path.dirname(os.__file__), "
    "'packages': site.getsitepackages()}))"
)


@dataclass(kw_only=True, slots=True, frozen=True)
class PythonEnvironment:
    interpreter: str
    """The base interpreter: a virtual environment's own would bring its packages by itself."""
    packages: tuple[str, ...] = ()
    """Folders of packages, which programs can read."""


BARE = PythonEnvironment(interpreter=sys._base_executable)  # type: ignore[attr-defined]
"""This process's Python with its standard library only."""


def find_environment(python: str, setting: str) -> PythonEnvironment:
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
        if os.path.commonpath([folder, SCRATCH]) == SCRATCH:
            raise ValueError(
                f"{what}: {folder} lies in {SCRATCH}, where programs see their own folder instead; "
                "make the environment elsewhere"
            )
    return PythonEnvironment(interpreter=found["interpreter"], packages=tuple(packages))
