"""Facts on a machine, and what machines measure of one another. Real sockets."""

from __future__ import annotations

import shutil
import socket
import tomllib
from pathlib import Path

import pytest

from controller.cluster.facts import PACKAGES, ROOT, Asked, node_facts, sources_digest
from controller.cluster.probe import Probe
from controller.cluster.survey import offset


def test_digest_changes_with_any_source_and_with_nothing_else(tmp_path: Path) -> None:
    for package in PACKAGES:
        (tmp_path / package).mkdir()
        shutil.copy(ROOT / package / "__init__.py", tmp_path / package)
    before = sources_digest(tmp_path)
    (tmp_path / "buffer" / "notes.txt").write_text("no source")
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_it.py").write_text("not run by a run")
    (tmp_path / "buffer" / ".#types.py").symlink_to("somebody@host.1")  # of an open editor
    (tmp_path / "buffer" / ".cache").mkdir()
    (tmp_path / "buffer" / ".cache" / "kept.py").write_text("pass")
    (tmp_path / "buffer" / "folder.py").mkdir()
    assert sources_digest(tmp_path) == before
    (tmp_path / "buffer" / "push.lua").write_text("return 1")
    changed = sources_digest(tmp_path)
    (tmp_path / "buffer" / "push.lua").rename(tmp_path / "buffer" / "pull.lua")
    assert len({before, changed, sources_digest(tmp_path)}) == 3


def test_digest_covers_all_packages() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert {f"{name}*" for name in PACKAGES} == {
        *project["tool"]["setuptools"]["packages"]["find"]["include"]
    }


def test_facts_on_this_machine_are_found(tmp_path: Path) -> None:
    new, marker = tmp_path / "runs" / "new", tmp_path / "marker"
    asked = Asked(run_dir=str(new), stage_dir=str(tmp_path), marker=str(marker))
    facts = node_facts(asked, "127.0.0.1", 4, 0)
    assert (facts.name, facts.interface, facts.towards) == (socket.gethostname(), "lo", "127.0.0.1")
    assert facts.versions["torch"] and facts.versions["Ray"] and facts.versions["sglang"]
    assert str(facts.versions["Leash"]).endswith(f"({sources_digest()})")
    assert facts.run_dir_free > 0 and facts.stage_free > 0 and facts.gpu_problem is None
    assert not facts.sees_run_dir and not new.exists()
    marker.touch()
    assert node_facts(asked, "127.0.0.1", 4, 0).sees_run_dir


def test_address_that_this_machine_has_not_is_refused() -> None:
    with pytest.raises(OSError, match=r"no network interface .* has the address 192\.0\.2\.1"):
        node_facts(Asked(run_dir="/tmp", stage_dir=None), "192.0.2.1", 4, 0)


def test_clock_is_read_in_the_middle_of_the_shortest_round_trip() -> None:
    ahead, error = offset([(10.0, 17.0, 14.0), (20.0, 25.5, 21.0), (30.0, 36.0, 32.0)])
    assert (ahead, error) == (5.0, 0.5)


def test_probe_says_whom_it_cannot_reach_and_how_fast_it_sends() -> None:
    probe = Probe()
    port = probe.open_port("127.0.0.1")
    rate = probe.send(("127.0.0.1", port))
    assert rate is not None and rate > 2**20
    with socket.socket() as closed:  # it has the port, and does not listen
        closed.bind(("127.0.0.1", 0))
        assert probe.unreached([("127.0.0.1", port), closed.getsockname()]) == [1]
        assert probe.send(closed.getsockname()) is None


def test_speed_of_a_link_that_stands_still_is_what_it_took(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("controller.cluster.probe.SILENCE_S", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as never_reads:
        rate = Probe().send(never_reads.getsockname())
    assert rate is not None and rate > 0
