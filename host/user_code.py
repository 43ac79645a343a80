"""Loads code of a user that a setting names as `module:name` or `file.py:name`.

A file is loaded once per process, so that two names from one file share its state. It may import
the modules beside it, as a program that Python runs. A process has one module of a name: a file
that would get another folder's is refused.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

_folders: list[Path] = []
"""Folders of the files loaded so far, on sys.path in this order."""


def load_callable(name: str, setting: str) -> Any:
    """The function or class named `name`.

    Example: load_callable("my_rewards.py:brevity", "task.rewards.brevity.function")
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
            raise ValueError(
                f"{setting}={name!r}: {place} has nothing named {part!r}; correct the name"
            ) from error
    if not callable(found):
        raise ValueError(
            f"{setting}={name!r}: must be a function or a class, not {type(found).__name__}"
        )
    return found


def _load_module(place: str, what: str) -> ModuleType:
    is_file = place.endswith(".py")
    if is_file and not Path(place).is_file():
        raise ValueError(f"{what}: there is no file {place}; correct the path")
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
    _check_neighbours(path)
    if path.parent not in _folders:
        _folders.append(path.parent)
        sys.path.append(str(path.parent))  # last: a name beside the file hides no installed one
    sys.modules[str(path)] = module  # dataclasses look up their module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[str(path)]
        raise
    return module


def _check_neighbours(path: Path) -> None:
    is_known = path.parent in _folders
    earlier = _folders[: _folders.index(path.parent)] if is_known else _folders
    for mine in _imported_beside(path, set()) if earlier else ():
        name = mine.parent.name if mine.name == "__init__.py" else mine.stem
        for other in filter(None, (_module_in(folder, name) for folder in earlier)):
            raise ImportError(f"it would get {other} where it imports {mine}: rename one of them")


def _imported_beside(path: Path, seen: set[Path]) -> Iterator[Path]:
    """The modules in the folder of `path` that it imports, and those that they import."""
    for node in ast.walk(ast.parse(path.read_bytes())):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names = [node.module]
        for name in names:
            found = _module_in(path.parent, name.partition(".")[0])
            if found is not None and found not in seen:
                seen.add(found)
                yield found
                yield from _imported_beside(found, seen)


def _module_in(folder: Path, name: str) -> Path | None:
    places = (folder / f"{name}.py", folder / name / "__init__.py")
    return next((place for place in places if place.is_file()), None)
