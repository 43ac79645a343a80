"""Fork servers with programs of the standard library, and what becomes of what they fork."""

from __future__ import annotations

import json
import os
import resource
import selectors
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from configs.environment import FORK_SERVERS_VARIABLE, RUN_VARIABLE
from processes import fork_server
from processes.child import Child
from processes.fork_server import UNKNOWN_EXIT_CODE, Kind
from processes.runs import run_processes

REPORT = """
import json, os, random, resource, sys
import numpy, torch
print(json.dumps({
    "argv": sys.argv, "name": __name__, "folder": os.getcwd(), "umask": os.umask(0),
    "variables": dict(os.environ), "session": os.getsid(0) == os.getpid(),
    "line": sys.stdin.readline(), "imported": "colorsys" in sys.modules,
    "numbers": [random.random(), numpy.random.random()], "threads": torch.get_num_threads(),
    "niceness": os.nice(0), "cores": sorted(os.sched_getaffinity(0)),
    "files": resource.getrlimit(resource.RLIMIT_NOFILE),
    "seekable": sys.stdout.seekable(),
    "line_buffering": [sys.stdout.line_buffering, sys.stderr.line_buffering],
    "descriptors": len(os.listdir("/proc/self/fd")),
    "blocked": [
        line.split()[1]
        for thread in os.listdir("/proc/self/task") if int(thread) != os.getpid()
        for line in open(f"/proc/self/task/{thread}/status") if line.startswith("SigBlk")
    ],
}))
sys.exit(7)
"""
WAIT = "import sys; print('waits', flush=True); sys.stdin.read()"
END = "import atexit, sys; atexit.register(print, 'called'); exec(sys.argv[1])"
LATE = "import os; open(os.path.dirname(__file__) + '/gate').readline()"
"""A module whose import waits for a line."""


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    scripts = tmp_path_factory.mktemp("scripts")
    (scripts / "report.py").write_text(REPORT)
    (scripts / "wait.py").write_text(WAIT)
    (scripts / "end.py").write_text(END)
    (scripts / "late_import.py").write_text(LATE)
    (scripts / "leave_a_file.py").write_text("import sys; open(sys.argv[1], 'w').close()")
    os.mkfifo(scripts / "gate")
    return scripts


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, scripts: Path) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("fork")
    kinds = [
        Kind(programs=["leave_a_file.py"], imports=["late_import"]),
        Kind(programs=["report.py", "wait.py", "end.py"], imports=["colorsys", "numpy"]),
        Kind(programs=["breaks.py"], imports=["no.such.module"]),
        Kind(programs=["platform"], imports=[]),
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(scripts))
        servers, kept = fork_server.start(folder, kinds, folder / "log")
    gate = os.open(scripts / "gate", os.O_RDWR)
    yield folder
    os.close(gate)
    os.close(kept)
    assert servers.wait(60) == 0
    assert not folder.exists()


def environment(folder: Path) -> dict[str, str]:
    return {**os.environ, FORK_SERVERS_VARIABLE: str(folder)}


def report(folder: Path, scripts: Path, **more: str) -> tuple[dict[str, object], int]:
    reading, writing = os.pipe()
    ours, its = os.pipe()
    command = [sys.executable, str(scripts / "report.py"), "some", "words"]
    process = fork_server.fork(command, {**environment(folder), **more}, (reading, its, 2))
    assert process is not None
    os.close(reading)
    os.close(its)
    os.write(writing, b"a line\n")
    os.close(writing)
    with open(ours) as output:
        return json.load(output), process.wait()


def test_forked_program_has_what_an_executed_one_would_have(
    folder: Path, scripts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    umask, cores = os.umask(0o027), os.sched_getaffinity(0)
    files = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        os.sched_setaffinity(0, {max(cores)})
        resource.setrlimit(resource.RLIMIT_NOFILE, (files[0] - 1, files[1]))
        seen, exit_code = report(folder, scripts, WORD="a word", OMP_NUM_THREADS="3")
    finally:
        os.umask(umask)
        os.sched_setaffinity(0, cores)
        resource.setrlimit(resource.RLIMIT_NOFILE, files)
    assert exit_code == 7
    assert seen["argv"] == [str(scripts / "report.py"), "some", "words"]
    assert seen["cores"] == [max(cores)] and seen["files"] == [files[0] - 1, files[1]]
    assert seen["niceness"] == os.nice(0)
    assert seen["name"] == "__main__" and seen["line"] == "a line\n"
    assert seen["folder"] == str(tmp_path) and seen["umask"] == 0o027
    expected = {**environment(folder), "WORD": "a word", "OMP_NUM_THREADS": "3"}
    assert seen["variables"] == expected
    assert seen["session"] and seen["imported"] and seen["threads"] == 3
    assert not seen["seekable"] and seen["line_buffering"] == [False, True]
    # A signal goes to any thread that does not block it, and the guard of a launch reads its own.
    stops = sum(1 << (number - 1) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP))
    masks = seen["blocked"]
    assert isinstance(masks, list) and all(int(mask, 16) & stops == stops for mask in masks)
    # One that blocks its own fault ends without faulthandler's stack.
    faults = sum(1 << (number - 1) for number in (signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT))
    assert masks and not any(int(mask, 16) & faults for mask in masks)
    assert seen["descriptors"] == 4  # the streams, and the folder that is being listed


def test_forked_programs_draw_different_random_numbers(folder: Path, scripts: Path) -> None:
    first, second = (report(folder, scripts)[0]["numbers"] for _ in range(2))
    assert isinstance(first, list) and isinstance(second, list)
    assert first[0] != second[0] and first[1] != second[1]


def test_forked_program_is_shown_with_its_command_and_its_run(
    folder: Path, scripts: Path, tmp_path: Path
) -> None:
    process, writing = waiting(folder, scripts, {RUN_VARIABLE: str(tmp_path)})
    words = " ".join(psutil.Process(process.pid).cmdline())
    assert words.strip() == f"{sys.executable} {scripts}/wait.py"
    assert [found.pid for found in run_processes(str(tmp_path))] == [process.pid]
    os.close(writing)
    assert process.wait() == 0


def waiting(
    folder: Path, scripts: Path, more: dict[str, str] | None = None
) -> tuple[fork_server.Forked, int]:
    """A program that waits for the end of its input, and the end that closes it."""
    reading, writing = os.pipe()
    ours, its = os.pipe()
    command = [sys.executable, str(scripts / "wait.py")]
    process = fork_server.fork(command, {**environment(folder), **(more or {})}, (reading, its, 2))
    assert process is not None
    os.close(reading)
    os.close(its)
    with open(ours) as output:
        assert output.readline() == "waits\n"
    return process, writing


def test_exit_code_names_the_signal_that_killed_a_forked_program(
    folder: Path, scripts: Path
) -> None:
    process, writing = waiting(folder, scripts)
    process.kill()
    assert process.wait() == -signal.SIGKILL
    process.terminate()  # it is gone: no other process is hit
    os.close(writing)


@pytest.mark.parametrize(
    ("code", "exit_code"),
    [
        ("pass", 0),
        ("sys.exit()", 0),
        ("sys.exit(-1)", 255),
        ("sys.exit('why')", 1),
        ("sys.log = open('/dev/stdout', 'a'); sys.log.write('why')", 0),
        ("raise ValueError('why')", 1),
        ("raise KeyboardInterrupt", -signal.SIGINT),
    ],
)
def test_forked_program_ends_as_an_executed_one(
    folder: Path, scripts: Path, tmp_path: Path, code: str, exit_code: int
) -> None:
    command = [sys.executable, str(scripts / "end.py"), code]
    with (tmp_path / "output").open("a") as output:
        process = fork_server.fork(command, environment(folder), (0, *[output.fileno()] * 2))
    assert process is not None and process.wait() == exit_code
    said = (tmp_path / "output").read_text()
    assert "called" in said and ("why" in said) == ("why" in code)


def test_child_of_a_fork_server_speaks_hears_and_ends_as_another(
    folder: Path, tmp_path: Path
) -> None:
    child = Child(
        [sys.executable, "-m", "platform"],
        tmp_path / "log",
        secret="none",
        environment={FORK_SERVERS_VARIABLE: str(folder)},
    )
    assert child.wait(60) == 0
    child.stop(1)
    assert "Linux" in (tmp_path / "log").read_text()


def test_forked_child_that_outlives_has_no_input_and_a_signal_stops_it(
    folder: Path, scripts: Path, tmp_path: Path
) -> None:
    child = Child(
        [
            sys.executable,
            str(scripts / "end.py"),
            "import signal, sys; sys.stdin.read(); signal.pause()",
        ],
        tmp_path / "log",
        outlives=True,
        environment={FORK_SERVERS_VARIABLE: str(folder)},
    )
    assert isinstance(child._process, fork_server.Forked)
    assert child.stop(60) == -signal.SIGTERM


@pytest.mark.parametrize("where", ["no folder", "no socket", "server that could not import"])
def test_program_that_nothing_can_fork_is_left_to_be_executed(folder: Path, where: str) -> None:
    variables, script = environment(folder), "other.py"
    if where == "no folder":
        del variables[FORK_SERVERS_VARIABLE]
    elif where == "server that could not import":
        script = "breaks.py"
    assert fork_server.fork([sys.executable, script], variables, (0, 1, 2)) is None


def test_host_without_a_process_to_spare_ends_no_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listener = fork_server._listen(tmp_path, ["wait.py"])
    server = fork_server._Server(listener.detach(), [])

    def serve() -> None:
        connection, _ = server._listener.accept()
        with pytest.MonkeyPatch.context() as patch, selectors.DefaultSelector() as selector:
            patch.setattr(os, "fork", lambda: os.listdir("/no process"))  # raises OSError
            replies.append(server._fork(connection, selector))

    replies = list[object]()
    serving = threading.Thread(target=serve)
    serving.start()
    assert fork_server.fork([sys.executable, "wait.py"], environment(tmp_path), (0, 1, 2)) is None
    serving.join(60)
    assert replies == [None]  # it goes on, and the program is executed
    server.close()


def test_program_that_was_asked_for_too_long_ago_is_not_forked_later(
    folder: Path, scripts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process that asked has executed it by then."""

    def ask(file: str) -> fork_server.Forked | None:
        command = [sys.executable, str(scripts / "leave_a_file.py"), str(tmp_path / file)]
        return fork_server.fork(command, environment(folder), (0, 1, 2))

    with monkeypatch.context() as patch:
        patch.setattr(fork_server, "IMPORTS_S", 0.1)
        assert ask("early") is None
    before = signal.signal(signal.SIGUSR1, signal.default_int_handler)
    with pytest.raises(KeyboardInterrupt) as stopped:  # whose traceback goes on
        # Started within the block: outside, where a busy machine may be, it would end all tests.
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGUSR1)).start()
        ask("stopped")
    signal.signal(signal.SIGUSR1, before)
    (scripts / "gate").write_text("\n")
    process = ask("late")
    assert process is not None
    server = psutil.Process(process.pid).parent()
    assert process.wait() == 0
    assert server is not None
    psutil.wait_procs(server.children(), timeout=60)
    assert os.listdir(tmp_path) == ["late"]
    del stopped


def test_forked_program_outlives_its_server_and_ends_with_an_unknown_code(
    scripts: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "servers"
    folder.mkdir()
    kinds = [Kind(programs=["wait.py"], imports=[])]
    servers, kept = fork_server.start(folder, kinds, tmp_path / "log", is_eager=False)
    process, writing = waiting(folder, scripts)
    os.close(kept)
    assert servers.wait(60) == 0
    assert psutil.pid_exists(process.pid)
    os.close(writing)
    assert process.wait() == UNKNOWN_EXIT_CODE


def test_servers_live_while_any_process_keeps_them(tmp_path: Path) -> None:
    folder = tmp_path / "servers"
    folder.mkdir()
    kinds = [Kind(programs=["platform"], imports=[])]
    servers, kept = fork_server.start(folder, kinds, tmp_path / "log", is_eager=False)
    another = fork_server.keep(folder)
    os.close(kept)
    with pytest.raises(subprocess.TimeoutExpired):
        servers.wait(0.5)
    os.close(another)
    assert servers.wait(60) == 0


def test_servers_that_are_told_to_end_leave_no_folder(tmp_path: Path) -> None:
    folder = tmp_path / "fork"
    folder.mkdir()
    kinds = [Kind(programs=["platform"], imports=[])]
    servers, kept = fork_server.start(folder, kinds, tmp_path / "log", is_eager=False)
    while "leash fork server" not in " ".join(psutil.Process(servers.pid).cmdline()):
        assert servers.poll() is None
    servers.terminate()
    assert servers.wait(60) == 0
    assert not folder.exists()
    os.close(kept)


def test_servers_of_a_run_import_neither_ray_nor_start_threads(tmp_path: Path) -> None:
    """Ray reads its environment when it is imported; a fork loses all threads but one. The servers
    of all tests import what those of a run do."""
    if FORK_SERVERS_VARIABLE not in os.environ:
        pytest.skip("a machine with a GPU has no fork servers")
    (tmp_path / "default_worker.py").write_text(
        "import os, sys\n"
        "assert 'ray' not in sys.modules\n"
        "assert len(os.listdir(f'/proc/{os.getppid()}/task')) == 1\n"
    )
    command = [sys.executable, str(tmp_path / "default_worker.py")]
    process = fork_server.fork(command, os.environ, (0, 1, 2))
    assert process is not None and process.wait() == 0
