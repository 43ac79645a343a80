"""Enforces the boundaries of the packages, by the imports and strings in their sources."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from tests.support.repository import ROOT

MAY_IMPORT = {
    "configs": set(),
    "host": set(),
    "processes": {"configs", "host"},
    "buffer": {"configs", "host", "processes"},
    "tensors": set(),
    "weight_sync": {"configs", "host", "processes", "tensors"},
    "trainer_pool": {"configs", "host", "processes", "buffer", "tensors", "weight_sync"},
    "rollout_pool": {"configs", "host", "processes", "buffer", "tensors", "weight_sync"},
    "controller": {
        "configs",
        "host",
        "processes",
        "buffer",
        "tensors",
        "weight_sync",
        "trainer_pool",
        "rollout_pool",
    },
}
"""Which of our packages each of them may import, besides itself."""

HOMES = {
    "deepspeed": ("trainer_pool/model/engine.py",),
    "redis": ("buffer/",),
    "omegaconf": ("configs/",),
    "hydra": ("configs/",),
}
"""Where a dependency may be imported."""

UNSAFE_TO_READ = {"pickle", "cloudpickle", "dill", "marshal", "shelve"}

SGLANG_PATHS = (
    "/generate",
    "/pause_generation",
    "/continue_generation",
    "/init_weights_update_group",
    "/destroy_weights_update_group",
    "/update_weights_from",
    "/abort_request",
    "/flush_cache",
    "/freeze_gc",
    "/model_info",
    "/server_info",
    "/health",
)
SGLANG_CLIENT = "rollout_pool/engines/sglang/client.py"
SGLANG_BROADCAST = "benchmarks/weights/sglang_broadcast.py"
"""A baseline that no run uses."""

SOURCES = sorted(path for package in MAY_IMPORT for path in (ROOT / package).rglob("*.py"))


MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts): path
    for path in SOURCES
    if path.stem != "__init__"
}

FLOORS = {
    "buffer": ("types staleness admission", "redis", "wire", "*", "dump"),
    "weight_sync": ("*", "sender receiver", "coordinator", "checkpoint_engine"),
    "trainer_pool": ("types collectives", "state", "algorithms data model", "*"),
    "rollout_pool": (
        "types cancelling",
        "sandbox sampling",
        "episodes",
        "tasks",
        "rewards endpoint engines",
        "worker",
        "actors",
        "pool",
    ),
    "controller": (
        "units signals run_dir ray_environment buffer_access simulate",
        "metrics",
        "watch evaluation",
        "report",
        "start commands cluster",
        "page",
        "*",
    ),
}
"""Layers of a package, lowest first: names of files and folders, * for all other files. Each may
import from its own layer and from lower ones."""


TESTS = sorted((ROOT / "tests").rglob("*.py"))


def _name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


@cache
def _nodes(path: Path) -> tuple[ast.AST, ...]:
    return tuple(ast.walk(_tree(path)))


def _imports(path: Path) -> Iterator[str]:
    """Every module that the file imports, also those inside functions."""
    for node in _nodes(path):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{_name(path)}: write imports from the package's name"
            yield node.module or ""


def _docstrings(path: Path) -> Iterator[ast.Constant]:
    """Docstrings of modules, classes, functions and attributes."""
    for node in _nodes(path):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            yield node.value


def _strings(path: Path) -> Iterator[str]:
    """Every string of the file that is not a docstring."""
    documentation = {id(constant) for constant in _docstrings(path)}
    for node in _nodes(path):
        is_text = isinstance(node, ast.Constant) and isinstance(node.value, str)
        if is_text and id(node) not in documentation:
            yield node.value


def test_packages_import_only_what_is_allowed() -> None:
    for path in SOURCES:
        package = _name(path).split("/")[0]
        ours = {name.split(".")[0] for name in _imports(path)} & set(MAY_IMPORT)
        assert ours <= MAY_IMPORT[package] | {package}, _name(path)


@pytest.mark.parametrize("dependency", HOMES)
def test_heavy_dependency_has_one_home(dependency: str) -> None:
    users = {
        _name(path)
        for path in SOURCES
        if any(name.split(".")[0] == dependency for name in _imports(path))
    }
    assert all(user.startswith(HOMES[dependency]) for user in users), users


def test_nothing_that_runs_code_when_read_is_imported() -> None:
    users = {
        _name(path)
        for path in SOURCES
        if UNSAFE_TO_READ & {name.split(".")[0] for name in _imports(path)}
    }
    assert users == set()


def test_no_wait_drops_its_cancellation() -> None:
    """As asyncio.wait_for does in Python 3.11 if it ends in the same turn; asyncio.timeout keeps
    it."""
    users = [
        _name(path)
        for path in SOURCES
        for node in _nodes(path)
        if isinstance(node, ast.Attribute)
        and node.attr == "wait_for"
        and isinstance(node.value, ast.Name)
        and node.value.id == "asyncio"
    ]
    assert users == []


def test_one_file_knows_the_http_paths_of_sglang() -> None:
    users = {
        _name(path)
        for path in SOURCES
        if any(text.startswith(SGLANG_PATHS) for text in _strings(path))
    }
    assert users <= {SGLANG_CLIENT, SGLANG_BROADCAST}


def test_one_file_knows_which_kinds_of_engines_there_are() -> None:
    users = {
        _name(path)
        for path in SOURCES
        if any(name.startswith("rollout_pool.engines.sglang") for name in _imports(path))
    }
    outside = {user for user in users if not user.startswith("rollout_pool/engines/sglang/")}
    assert outside == {"rollout_pool/engines/kinds.py", "rollout_pool/rewards/teacher.py"}


@pytest.mark.parametrize("types", ["buffer/types.py", "weight_sync/types.py"])
def test_border_types_import_no_framework(types: str) -> None:
    imported = {name.split(".")[0] for name in _imports(ROOT / types)}
    assert not imported & {"torch", "redis", "ray"}


def _ours(path: Path) -> Iterator[str]:
    """Every module of ours that the file imports, for its types alone too."""
    for node in _nodes(path):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in MAY_IMPORT:
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                yield name if name in MODULES else node.module or ""


def _room(module: str) -> tuple[str, str]:
    """A module's package, and the folder in it, or its own name if it stands in none."""
    package, room, *_ = [*module.split("."), ""]
    return package, room


def test_folders_of_a_package_import_one_way() -> None:
    for module, path in MODULES.items():
        package, room = _room(module)
        if package not in FLOORS:
            continue
        floors = FLOORS[package]
        for imported in _ours(path):
            its_package, its_room = _room(imported)
            if its_package == package:
                assert _floor(floors, its_room) <= _floor(floors, room), f"{module}: {imported}"


def _floor(floors: Sequence[str], room: str) -> int:
    named = [number for number, rooms in enumerate(floors) if room in rooms.split()]
    return named[0] if named else floors.index("*")


def test_modules_have_no_import_cycle_and_packages_at_most_ten_floors() -> None:
    imports = {module: set(_ours(path)) for module, path in MODULES.items()}
    floors: dict[str, int] = {}
    for module in TopologicalSorter(imports).static_order():  # raises CycleError, naming the circle
        own = [m for m in imports.get(module, ()) if _room(m)[0] == _room(module)[0]]
        floors[module] = 1 + max((floors[m] for m in own), default=0)
    assert {module: floor for module, floor in floors.items() if floor > 10} == {}


def test_folders_have_at_most_fifteen_files() -> None:
    sources = [*SOURCES, *(ROOT / "benchmarks").rglob("*.py")]
    folders = Counter(_name(path.parent) for path in sources if path.stem != "__init__")
    assert {folder: number for folder, number in folders.items() if number > 15} == {}


def test_functions_are_short_enough_to_be_read_at_once() -> None:
    for path in SOURCES:
        for node in _nodes(path):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = (node.end_lineno or node.lineno) - node.lineno + 1
                assert length <= 80, f"split {node.name} in {_name(path)}"


def test_modules_begin_with_their_role() -> None:
    written = [path for path in SOURCES if path.read_text().strip()]
    assert [_name(path) for path in written if not ast.get_docstring(_tree(path))] == []


def test_docstrings_begin_with_a_subject_or_a_verb() -> None:
    openings = {"Of", "Those", "That", "What", "Who", "Whose"}
    found = [
        f"{_name(path)}:{constant.lineno}"
        for path in (*SOURCES, *TESTS)
        for constant in _docstrings(path)
        if openings & {*re.findall(r"\w+", str(constant.value))[:1]}
    ]
    assert found == []


def test_every_folder_is_named_for_what_it_holds() -> None:
    folders = {path.parent for path in SOURCES}
    assert not {folder.name for folder in folders} & {"utils", "util", "common", "helpers", "misc"}


def test_every_folder_with_code_is_a_package_of_the_distribution() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    listed = set(project["tool"]["setuptools"]["packages"]["find"]["include"])
    assert listed == {f"{package}*" for package in MAY_IMPORT}
    folders = {path.parent for path in SOURCES}
    assert [_name(folder) for folder in folders if not (folder / "__init__.py").exists()] == []


def test_folders_of_unit_tests_are_those_of_the_packages() -> None:
    unit = ROOT / "tests" / "unit"
    folders = {path.parent.relative_to(unit) for path in TESTS if path.is_relative_to(unit)}
    assert [str(folder) for folder in folders if not (ROOT / folder).is_dir()] == []


def test_no_test_imports_another_or_a_mock() -> None:
    for path in TESTS:
        for name in _imports(path):
            assert not any(part.startswith("test_") for part in name.split(".")), _name(path)
            assert name.split(".")[0] != "unittest", _name(path)


def test_licence_is_apache_2_in_the_metadata_and_in_full() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert (project["license"], project["license-files"]) == ("Apache-2.0", ["LICENSE"])
    text = (ROOT / "LICENSE").read_text()
    for part in ("Version 2.0, January 2004", "9. Accepting Warranty", "END OF TERMS", "APPENDIX"):
        assert part in text


PUBLIC = [package for package in MAY_IMPORT if (ROOT / package / "__init__.pyi").exists()]
IMPORT_ALL = f"""
import sys
import {", ".join(PUBLIC)}
from buffer import Trajectory, TrajectoryGroup
from weight_sync import GroupSpec
print(*{{"torch", "ray", "redis", "transformers"}} & set(sys.modules))
"""


def test_public_types_are_read_without_torch_ray_or_redis() -> None:
    seen = subprocess.run(
        [sys.executable, "-c", IMPORT_ALL], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert seen.stdout.strip() == ""


@pytest.mark.parametrize("package", PUBLIC)
def test_packages_hand_on_their_public_names_alone(package: str) -> None:
    module = importlib.import_module(package)
    assert PUBLIC and module.__doc__
    for name in module.__all__:
        public = getattr(module, name)
        assert public is not None and not name.startswith("_")
