"""The lock files install from a package index alone, on Linux with Python 3.11 and 3.12."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

from tests.support.repository import ROOT

LOCKS = {
    kind: (ROOT / f"deploy/requirements-{kind}.lock").read_text()
    for kind in ("cpu", "gpu", "verifiers")
}
SOURCES = {"antlr4-python3-runtime", "cellpylib", "deepspeed", "pycosat", "zss"}
"""Without a wheel; each archive on the index was looked into and holds the whole source."""


def packages(lock: str) -> set[str]:
    return set(re.findall(r"^([a-z0-9.-]+)==", lock, re.MULTILINE))


@pytest.mark.parametrize("kind", LOCKS)
def test_packages_of_a_lock_have_wheels_or_are_whole_sources(kind: str) -> None:
    # `make lock` writes this line, after it has found a wheel for Linux on x86_64 of every other.
    from_source = re.search(r"^# built from source: (.*)$", LOCKS[kind], re.MULTILINE)
    assert from_source is not None
    assert set(from_source[1].split()) <= SOURCES


@pytest.mark.parametrize("kind", LOCKS)
def test_packages_of_a_lock_have_one_version_each_and_hashes_and_no_address(kind: str) -> None:
    entries = re.split(r"\n(?=\S)", LOCKS[kind].strip())
    for entry in (entry for entry in entries if not entry.startswith("#")):
        name, *hashes = entry.split("--hash=sha256:")
        assert re.match(r"[a-z0-9.-]+==[\w.+!]+( ; .*)? \\\n", name), entry
        assert hashes and all(re.match(r"[0-9a-f]{64}\b", digest) for digest in hashes), entry


def test_packages_that_ours_import_are_named_in_pyproject() -> None:
    """A package that only comes with another may go with the other's next version."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lists = [project["dependencies"], *project["optional-dependencies"].values()]
    named = {word for of in lists for text in of for word in re.findall(r"[\w.-]+", text.lower())}
    ours = {"configs", "host", "processes", "buffer", "tensors", "weight_sync"}
    ours |= {"trainer_pool", "rollout_pool", "controller"}
    imported = set[str]()
    for path in (path for package in ours for path in (ROOT / package).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                imported |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                imported.add(node.module.partition(".")[0])
    # verifiers is installed in an environment of its own.
    others = imported - ours - {"verifiers"} - set(sys.stdlib_module_names)
    packages = packages_distributions()
    lacking = {
        name
        for name in others
        if not named & {d.lower().replace("_", "-") for d in packages.get(name, [name])}
    }
    assert "mcp" in others and lacking == set()


def test_lock_for_gpus_has_the_whole_of_sglang_but_its_placeholder() -> None:
    names = packages(LOCKS["gpu"])
    assert {"sglang", "sglang-kernel", "flashinfer-python", "ninja"} <= names
    assert "checkpoint-engine" in names  # weight_sync.commit=ipc
    assert "cuda-tile" not in names  # its archive on the index fetches a wheel from elsewhere


@pytest.mark.parametrize(
    ("version", "is_refused"), [("2.31", True), ("2.34", False), ("2.4", True)]
)
def test_gpu_build_is_refused_with_an_older_glibc(
    tmp_path: Path, version: str, is_refused: bool
) -> None:
    for folder in ("bin", "deploy"):
        (tmp_path / folder).mkdir()
    shutil.copy(ROOT / "deploy/install.sh", tmp_path / "deploy")
    (tmp_path / "bin/getconf").write_text(f"#!/bin/sh\necho glibc {version}\n")
    (tmp_path / "bin/getconf").chmod(0o755)
    path = f"{tmp_path}/bin:{os.environ['PATH']}"
    # It never gets further than this folder, which has no pyproject.toml.
    ended = subprocess.run(
        ["bash", tmp_path / "deploy/install.sh", "gpu"],
        env={"PATH": path, "PYTHON": "false"},
        capture_output=True,
        text=True,
    )
    assert ended.returncode != 0
    words = f"needs glibc 2.34 or newer and this machine has {version}"
    assert (words in ended.stderr) == is_refused
