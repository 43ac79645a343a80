"""Loads code of a user that a setting names as `module:name` or `file.py:name`.

A file is loaded once per process, so that two names from one file share its state. It may import
the modules beside it, as a program that Python runs.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any


def load_dotted(name: str, setting: str) -> Any:
    """The object named `name`.

    Example: load_dotted("my_rewards.py:brevity", "task.rewards.brevity.function")
    Raises ValueError naming the setting, its value and the problem.
    """
    place, _, attribute = name.rpartition(":")
    if not place or not attribute:
        raise ValueError(f"{setting}={name!r}: write it as module:name or file.py:name")
    module = _load_module(place, f"{setting}={name!r}")
    found: Any = module
    for part in attribute.split("."):
        try:
            found = getattr(found, part)
        except AttributeError as error:
            raise ValueError(f"{setting}={name!r}: {place} has nothing named {part!r}") from error
    return found


def load_callable(name: str, setting: str) -> Any:
    """The same for a function or a class. Raises ValueError if it is neither."""
    found = load_dotted(name, setting)
    if not callable(found):
        raise ValueError(
            f"{setting}={name!r}: must be a function or a class, not {type(found).__name__}"
        )
    return found


def _load_module(place: str, what: str) -> ModuleType:
    is_file = place.endswith(".py")
    if is_file and not Path(place).is_file():
        raise ValueError(f"{what}: there is no file {place}")
    try:
        return _load_file(Path(place).resolve()) if is_file else importlib.import_module(place)
    except ModuleNotFoundError as error:
        raise ValueError(
            f"{what}: there is no module named {error.name!r}; put it on PYTHONPATH, install it, "
            "or give the path of its file, and put what a file imports beside it"
        ) from error
    except (Exception, SystemExit) as error:  # a user's file may raise anything
        raise ValueError(
            f"{what}: {place} could not be loaded: {type(error).__name__}: {error}"
        ) from error


def _load_file(path: Path) -> ModuleType:
    if str(path) in sys.modules:
        return sys.modules[str(path)]
    spec = importlib.util.spec_from_file_location(str(path), path)
    assert spec is not None and spec.loader is not None, path  # the name ends in .py
    module = importlib.util.module_from_spec(spec)
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))  # last: a name beside the file hides no installed one
    sys.modules[str(path)] = module  # dataclasses look up their module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[str(path)]
        raise
    return module
