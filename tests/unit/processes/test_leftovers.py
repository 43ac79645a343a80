"""Files left by killed processes are listed until they are removed on their host."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from configs.environment import RUN_VARIABLE
from processes.leftovers import (
    hosts_with_leftovers,
    list_path,
    remove_leftovers,
    remove_leftovers_of_dead_runs,
    write_list,
)

HERE = socket.gethostname()
Staged = Callable[[Path, str], Path]


@pytest.fixture
def staged(tmp_path: Path) -> Staged:
    """A folder with something in it, listed in a run for a host."""

    def make(run_dir: Path, host: str) -> Path:
        folder = tmp_path / f"staged-{run_dir.name}-{host}"
        folder.mkdir()
        (folder / "model").write_text("x")
        write_list(run_dir / "leftovers" / host / "receiver-0", [folder, folder / "gone"])
        return folder

    return make


def test_leftovers_are_listed_by_host_and_removed_there_alone(
    tmp_path: Path, staged: Staged
) -> None:
    run = tmp_path / "a"
    here, elsewhere = staged(run, HERE), staged(run, "another-host")
    assert list_path(run, "engine-0") == run / "leftovers" / HERE / "engine-0"
    assert hosts_with_leftovers(run) == sorted([HERE, "another-host"])
    remove_leftovers(run)
    assert not here.exists() and elsewhere.exists()
    assert hosts_with_leftovers(run) == ["another-host"]
    remove_leftovers(run)
    remove_leftovers(tmp_path / "no-such-run")


@pytest.mark.parametrize("text", ["FOLDER", ".\n", "FOLDER\nprecious\n", "\xff\n", "\0\n", "pipe"])
def test_damaged_list_removes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    folder = tmp_path / "precious"
    folder.mkdir()
    monkeypatch.chdir(tmp_path)
    list_file = list_path(tmp_path, "engine-0")
    list_file.parent.mkdir(parents=True)
    if text == "pipe":
        os.mkfifo(list_file)
    else:
        list_file.write_text(text.replace("FOLDER", str(folder)), encoding="latin-1")
    remove_leftovers(tmp_path)
    assert folder.exists() and list_file.exists()


def test_leftovers_that_cannot_be_removed_stay_listed(tmp_path: Path) -> None:
    write_list(list_path(tmp_path, "engine-0"), ["/proc/self/fd"])
    remove_leftovers(tmp_path)
    assert hosts_with_leftovers(tmp_path) == [HERE]


def test_leftovers_through_a_link_are_those_of_others(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.mkdir()
    (tmp_path / "link").symlink_to(precious)
    write_list(list_path(tmp_path, "engine-0"), [tmp_path / "link"])
    remove_leftovers(tmp_path)
    assert precious.is_dir() and not (tmp_path / "link").is_symlink()


def test_list_that_was_never_finished_is_not_believed(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.mkdir()
    part = list_path(tmp_path, ".engine-0.part")
    part.parent.mkdir(parents=True)
    part.write_text(str(precious))
    remove_leftovers(tmp_path)
    assert precious.is_dir() and hosts_with_leftovers(tmp_path) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")
def test_list_of_another_user_is_not_believed(tmp_path: Path, staged: Staged) -> None:
    folder = staged(tmp_path / "a", HERE)
    os.chown(list_path(tmp_path / "a", "receiver-0"), 65534, 65534)
    remove_leftovers(tmp_path / "a")
    assert folder.exists() and hosts_with_leftovers(tmp_path / "a") == [HERE]


def test_next_launch_removes_what_dead_runs_left_here_and_touches_no_living_one(
    tmp_path: Path, staged: Staged
) -> None:
    dead, living = tmp_path / "dead", tmp_path / "living"
    of_dead, of_living = staged(dead, HERE), staged(living, HERE)
    environment = {**os.environ, RUN_VARIABLE: str(living)}
    command = [sys.executable, "-c", "print('up', flush=True); input()"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == b"up\n"
        remove_leftovers_of_dead_runs(tmp_path)
        assert not of_dead.exists() and of_living.exists()
        process.communicate(b"\n")
    remove_leftovers_of_dead_runs(tmp_path)
    assert not of_living.exists()
    assert hosts_with_leftovers(dead) == hosts_with_leftovers(living) == []
