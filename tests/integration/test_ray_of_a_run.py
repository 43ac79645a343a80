"""The Ray that a launch starts: its access, what it leaves and prints, which actors restart."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support.repository import ROOT

pytestmark = pytest.mark.slow

SCENE = "tests.support.ray_scene"


@dataclass(kw_only=True, slots=True, frozen=True)
class Scene:
    seen: dict[str, Any]
    stderr: str
    home: Path


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    """One start of Ray, in a process of its own whose HOME is empty, for all tests here."""
    home, runs = tmp_path_factory.mktemp("home"), tmp_path_factory.mktemp("runs")
    told = subprocess.run(
        [sys.executable, "-m", SCENE, str(runs)],
        cwd=ROOT,
        env={k: v for k, v in os.environ.items() if not k.startswith("RAY_")} | {"HOME": str(home)},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert told.returncode == 0, (told.stdout + told.stderr)[-6000:]
    yield Scene(seen=json.loads(told.stdout.splitlines()[-1]), stderr=told.stderr, home=home)


def test_folder_of_ray_and_its_token_are_their_owners_alone(scene: Scene) -> None:
    assert [oct(mode) for mode in scene.seen["modes"]] == [oct(0o700), oct(0o600)]
    assert scene.seen["longest_socket"] <= 107
    assert scene.seen["is_gone"]


def test_token_is_of_the_run_and_none_is_written_at_home(scene: Scene) -> None:
    assert list(scene.home.glob(".ray/*token*")) == []
    assert "joined" not in scene.seen["stranger"]
    assert "InvalidAuthToken" in scene.seen["stranger"]


def test_logs_of_ray_are_kept_without_following_links(scene: Scene) -> None:
    assert "raylet.out" in scene.seen["kept"]
    assert "planted" not in scene.seen["kept"]
    assert [oct(mode) for mode in scene.seen["file_modes"]] == [oct(0o600)]


def test_killed_actors_restart_though_the_driver_holds_none_of_their_arguments(
    scene: Scene,
) -> None:
    names = ("worker-0", "engine-0", "receiver-0", "scorer-0")
    assert scene.seen["restarted"] == dict.fromkeys(names, True)
    assert "constructor arguments" not in scene.seen["messages"]


def test_actors_tell_of_sigterm_instead_of_ending_until_a_second_one(scene: Scene) -> None:
    assert scene.seen["noticed"] == {"engine-0": [True] * 3, "worker-0": [True] * 3}


def test_pool_counts_the_places_that_are_free(scene: Scene) -> None:
    before, after = scene.seen["places"]
    assert before == after + 1


def test_pool_knows_the_node_that_ray_is_to_empty(scene: Scene) -> None:
    assert scene.seen["draining"]


def test_messages_of_ray_go_to_a_log_instead_of_the_screen(scene: Scene) -> None:
    for line in ("STACK TRACE", "of C++", "of Ray's logger"):
        assert line in scene.seen["messages"]
        assert line not in scene.stderr
    assert scene.stderr == "of the launch\n"


def test_run_that_joins_a_cluster_listens_where_ray_knows_its_machine(scene: Scene) -> None:
    assert scene.seen["host_of_a_joining_run"] == scene.seen["own_address"]
