from __future__ import annotations

import errno
import grp
import os
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from controller.commands.stop import stop_run
from controller.run_dir import RunDir, RunDirError
from processes.child import started_at
from processes.leftovers import list_path, write_list


def new_run(folder: Path, name: str | None = "a", group: str | None = None) -> RunDir:
    return RunDir.create(str(folder), name, "quickstart", group)


def test_new_run_is_found_by_name_and_as_the_newest(tmp_path: Path) -> None:
    first = new_run(tmp_path, "first")
    second = new_run(tmp_path, None)
    assert second.name.startswith("quickstart-2")
    assert RunDir.find(str(tmp_path), "first") == first
    assert RunDir.find(str(tmp_path), None) == second
    assert first.read_record().state == "running" and first.read_record().is_alive
    first.end("stopped")
    first.reopen(lambda: None)
    assert RunDir.find(str(tmp_path), None) == first, "it went on last"
    first.adopt()
    assert RunDir.find(str(tmp_path), None) == first


@pytest.mark.parametrize("name", ["a b", "../up", "a:b", "{x}", "-x"])
def test_name_unfit_for_redis_keys_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(RunDirError, match=r"run\.name="):
        new_run(tmp_path, name)


def test_folder_in_use_or_that_cannot_be_created_is_refused_with_the_fix(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    precious = tmp_path / "mine" / "precious"
    precious.write_text("x")
    with pytest.raises(RunDirError, match=r"run\.name='mine': .* is in use; choose another"):
        new_run(tmp_path, "mine")
    assert precious.read_text() == "x"
    with pytest.raises(RunDirError, match=r"run\.dir='.*': cannot make .* choose a folder"):
        new_run(precious)
    with pytest.raises(RunDirError, match=r"run\.group='no-such-group': cannot open .*id -Gn"):
        new_run(tmp_path, group="no-such-group")
    assert not (tmp_path / "a").exists()


def test_folder_that_has_no_room_for_its_record_is_refused_and_not_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(RunDir, "write_record", refuse)
    with pytest.raises(RunDirError, match=r"run\.dir='.*': cannot make .* \(No space left"):
        new_run(tmp_path, "full")
    assert list(tmp_path.iterdir()) == []


def test_run_whose_process_is_gone_is_not_alive_even_if_its_pid_is_reused(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    record = run.read_record()
    assert not replace(record, process_started=record.process_started - 60).is_alive
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        started = started_at(child.pid)
        living = replace(record, pid=child.pid, process_started=started)
        assert living.is_alive
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert not living.is_alive  # although nobody has waited for it
    assert not living.is_alive


def test_run_is_alive_after_the_clock_was_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = new_run(tmp_path).read_record()
    began = psutil.boot_time()  # the kernel counts it back from the clock
    monkeypatch.setattr("psutil._pslinux.boot_time", lambda: began + 1.0)
    assert record.is_alive


def test_unknown_run_is_an_error_that_lists_the_others(tmp_path: Path) -> None:
    with pytest.raises(RunDirError, match="no run below"):
        RunDir.find(str(tmp_path), None)
    new_run(tmp_path)
    with pytest.raises(RunDirError, match=r"RUN='b': no such run .*there are: a"):
        RunDir.find(str(tmp_path), "b")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        "[" * 100_000,
        "\xff\xfe",
        '{"name": "a", "pid": "7"}',
        '{"name": "a", "pid": -7, "process_started": 1.0, "started": 1.0, "state": "running"}',
        '{"name": "a", "pid": 7, "process_started": 1e999, "started": 1.0, "state": "running"}',
        '{"name": "a", "pid": 7, "process_started": 1.0, "started": 1.0, "state": "runing"}',
    ],
)
def test_damaged_record_is_an_error_that_names_it(tmp_path: Path, text: str) -> None:
    run = new_run(tmp_path)
    path = run.path / "run.json"
    path.write_text(text, encoding="latin-1")
    with pytest.raises(RunDirError, match=f"{path} is damaged: .*; restore it, or remove"):
        run.read_record()
    with pytest.raises(RunDirError, match=f"{path} is damaged: .*; or name another run by RUN="):
        RunDir.find(str(tmp_path), None)


def test_error_of_a_run_may_quote_any_text(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    run.end("failed", "worker-0 failed: half \ud83d of a pair")
    assert run.read_record().error == "worker-0 failed: half ? of a pair"


@pytest.mark.parametrize("name", ["run.json", "redis.url"])
def test_pipe_in_place_of_a_file_does_not_wait_for_a_writer(tmp_path: Path, name: str) -> None:
    run = new_run(tmp_path)
    (run.path / name).unlink(missing_ok=True)
    os.mkfifo(run.path / name)
    with pytest.raises(ValueError, match=rf"{run.path / name} is not a regular file"):
        run.read_record() if name == "run.json" else run.read_redis_url()


def test_controller_on_another_machine_counts_as_its_record_says(tmp_path: Path) -> None:
    """Process ids of another machine say nothing here."""
    run = new_run(tmp_path)
    record = run.read_record()
    assert record.is_here and record.host == socket.gethostname()
    elsewhere = replace(record, host="another-host", pid=2**30)
    assert not elsewhere.is_here and elsewhere.is_alive and elsewhere.is_running
    assert not replace(elsewhere, state="failed").is_alive
    assert replace(record, host="").is_here, "a record of an earlier version names none"


def test_stop_on_another_host_ends_only_what_is_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = new_run(tmp_path)
    run.write_record(replace(run.read_record(), host="another-host", pid=os.getpid()))
    run.write_redis_url("redis://192.0.2.1:1/0")
    rays = tmp_path / "ray-of-the-controller"
    rays.mkdir()
    (run.path / "ray").symlink_to(rays)
    staged, list_of_third = tmp_path / "staged", run.path / "leftovers" / "third" / "receiver-1"
    staged.mkdir()
    write_list(list_path(run.path, "receiver-0"), [staged])
    write_list(list_of_third, [tmp_path])
    environment = {**os.environ, "LEASH_RUN": run.run_id}
    command = [sys.executable, "-c", "import time; time.sleep(600)"]
    with subprocess.Popen(command, env=environment) as left:
        stop_run(run)
        left.wait(timeout=60)
    assert not staged.exists() and list_of_third.exists() and rays.exists()
    assert run.read_record().state == "running" and run.read_redis_url() is not None
    output = capsys.readouterr().out
    assert "nothing of a is left on this host; its controller is on another-host" in output
    assert f"third may still hold files of the run: `make stop RUN=a DIR={tmp_path}`" in output


def test_leftovers_of_another_host_outlive_the_controllers_end(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    other = run.path / "leftovers" / "another-host" / "receiver-0"
    write_list(other, ["/dev/shm/leash-a"])
    run.remove_temporary()
    assert other.read_text() == "/dev/shm/leash-a\n"
    (line,) = run.left_elsewhere()
    assert line.startswith("another-host may still hold files of the run: `make stop RUN=a")


def mode(path: Path) -> str:
    return oct(path.stat().st_mode & 0o7777)


def test_run_folder_is_private(tmp_path: Path) -> None:
    run = new_run(tmp_path / "runs")
    assert [mode(run.path), mode(run.logs)] == [oct(0o700)] * 2
    assert mode(run.path / "run.json") == oct(0o600)
    assert run.umask == 0o077


def test_run_folder_can_be_opened_to_a_group(tmp_path: Path) -> None:
    group = grp.getgrgid(os.getgid()).gr_name
    run = new_run(tmp_path, group=group)
    assert mode(run.path) == oct(0o2750) and run.umask == 0o027
    assert run.path.group() == group
    assert mode(run.path / "run.json") == oct(0o640)
    run.write_redis_url("redis://:secret@127.0.0.1:1/0")
    assert mode(run.path / "redis.url") == oct(0o600)
    assert run.read_redis_url() == "redis://:secret@127.0.0.1:1/0"
    run.forget_redis_url()
    assert run.read_redis_url() is None


def test_temporary_folder_is_private_and_removed_with_the_run(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    temporary = run.make_temporary()
    (temporary / "below").mkdir()
    assert mode(temporary) == oct(0o700) and run.temporary == temporary
    assert os.path.samefile(run.path / "ray", temporary)
    # The longest of Ray's socket paths below it, with a seven-digit process id.
    sockets = "ray/session_2026-01-01_00-00-00_000000_1234567/sockets/plasma_store"
    assert len(str(temporary / sockets)) <= 107
    run.remove_temporary()
    run.remove_temporary()
    assert not temporary.exists() and not (run.path / "ray").is_symlink()
