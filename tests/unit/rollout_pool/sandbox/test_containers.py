"""Containers: bubblewrap's as they are, the others by a program that stands for theirs."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import signal
import ssl
import struct
import subprocess
import sys
import tempfile
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qsl, urlsplit

import psutil
import pytest

from configs.choices import ContainerKind
from configs.container_schema import ContainerConfig
from configs.environment import PROCESS_VARIABLE, RUN_VARIABLE
from rollout_pool.cancelling import end_tasks
from rollout_pool.sandbox import remote_container
from rollout_pool.sandbox.containers import (
    MAX_OUTPUT_BYTES,
    Container,
    ContainerError,
    wait_removed,
)
from rollout_pool.sandbox.remote_container import make_container
from tests.support.repository import ROOT
from tests.support.rollout import until

STUBBED = [ContainerKind.docker, ContainerKind.podman, ContainerKind.kubernetes]


@pytest.fixture
def programs(tmp_path, monkeypatch) -> Path:
    """Stand-ins of docker, podman and kubectl on PATH; their containers and their log."""
    for name in ("docker", "podman", "kubectl"):
        (tmp_path / name).symlink_to(ROOT / "tests" / "support" / "container_program.sh")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    containers = tmp_path / "containers"
    containers.mkdir()
    monkeypatch.setenv("CONTAINERS", str(containers))
    return containers


@asynccontextmanager
async def started(**settings: object) -> AsyncIterator[Container]:
    container = Container(ContainerConfig(**settings), "some-image")
    await container.start()
    try:
        yield container
    finally:
        await container.close()


async def test_commands_share_a_folder_that_is_removed_with_what_they_locked(bubblewrap_folder):
    async with started() as container:
        assert (await container.run("cat >x; echo err >&2; exit 3", b"hello")).output == b"err\n"
        ran = await container.run("cat x; pwd; mkdir -p a/b; chmod 000 a; exit 3")
        assert (ran.text, ran.exit_code, ran.is_whole) == ("hello/work\n", 3, True)
        [own] = bubblewrap_folder.iterdir()
        assert own.stat().st_mode & 0o077 == 0
    assert list(bubblewrap_folder.iterdir()) == []


async def test_command_sees_neither_the_machine_nor_its_secrets_nor_a_network(
    monkeypatch, bubblewrap_folder
):
    monkeypatch.setenv("SECRET_KEY", "hidden-word")
    script = "env; cat /proc/*/environ; ls / /etc /tmp; cat /proc/net/dev; ls /proc/self/fd"
    async with started() as container:
        seen = (await container.run(script)).text
        assert "hidden-word" not in seen and "LEASH" not in seen and "passwd" not in seen
        assert str(os.getpid()) not in (await container.run("ls /proc")).text.split()
        devices = [line.split(":")[0].strip() for line in seen.splitlines() if ":" in line]
        assert "lo" in devices and "eth0" not in devices
        assert not {"root", "home", "var"} & set((await container.run("ls /")).text.split())
        for forbidden in ("touch /usr/x", "touch /x", "unshare --mount true", "mount -t tmpfs x /"):
            assert (await container.run(forbidden)).exit_code != 0, forbidden
        assert (await container.run("grep CapEff /proc/self/status")).text.split()[1] == "0" * 16


def is_running(word: str) -> bool:
    return any(word in (p.info["cmdline"] or []) for p in psutil.process_iter(["cmdline"]))


async def test_command_ends_at_its_time_with_all_that_it_started(bubblewrap_folder):
    marker = "98765.4321"
    async with started(timeout_s=3) as container:
        assert (await container.run(f"setsid sleep {marker} & sleep {marker}")).exit_code == 137
    async with started() as container:
        assert (await container.run(f"(sleep {marker} >/dev/null 2>&1 &); true")).exit_code == 0
    await until(lambda: not is_running(marker))


async def test_output_memory_and_processes_are_bounded(bubblewrap_folder):
    async with started(processes=16, memory_bytes=2**27) as container:
        ran = await container.run("echo first; head -c 1000000 /dev/zero; echo last")
        assert not ran.is_whole and len(ran.output) < MAX_OUTPUT_BYTES + 100
        assert ran.text.startswith("first") and ran.text.endswith("last\n")
        assert "934475 bytes left out" in ran.text
        assert (await container.run("head -c 300000000 /dev/zero | tail -c 250000000")).exit_code
        assert "ork" in (await container.run("for i in $(seq 40); do sleep 5 & done")).text
        assert (await container.run("echo still")).text == "still\n"


async def test_container_is_removed_though_its_episode_is_cancelled_meanwhile(bubblewrap_folder):
    container = Container(ContainerConfig())
    await container.start()
    closing = asyncio.create_task(container.close())
    await asyncio.sleep(0)  # it begins
    await end_tasks([closing], again_s=0.001)
    await wait_removed()
    assert list(bubblewrap_folder.iterdir()) == []


async def test_container_whose_start_is_cancelled_is_removed_once_it_has_started(
    programs, tmp_path
):
    begun = tmp_path / "begun"
    own = {"start": f"sh -c 'touch {begun}; sleep 0.3; docker run --name $0 image' {{name}}"}
    container = Container(ContainerConfig(kind=ContainerKind.docker, commands=own), "image")
    starting = asyncio.create_task(container.start())
    async with asyncio.timeout(60):
        while not begun.exists():
            await asyncio.sleep(0.01)
    await end_tasks([starting])
    await container.close()
    ran = [line.split()[1] for line in (programs / "log").read_text().splitlines()]
    assert ran == ["run", "rm"] and not [p for p in programs.iterdir() if p.is_dir()]


WORKER = """
import asyncio, sys, tempfile
from configs.container_schema import ContainerConfig
from rollout_pool.sandbox.containers import Container
tempfile.tempdir = sys.argv[1]
async def main():
    container = Container(ContainerConfig())
    await container.start()
    print("started", flush=True)
    await container.run("sleep 54321.9876")
asyncio.run(main())
"""


async def test_worker_removes_what_a_killed_one_of_its_name_has_left(
    bubblewrap_folder, monkeypatch
):
    marks = {RUN_VARIABLE: "/runs/a", PROCESS_VARIABLE: "rollout-0"}
    command = [sys.executable, "-c", WORKER, str(bubblewrap_folder)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, env=os.environ | marks, cwd=ROOT, text=True
    ) as worker:
        assert worker.stdout is not None and worker.stdout.readline() == "started\n"
        worker.send_signal(signal.SIGKILL)
    assert len(list(bubblewrap_folder.iterdir())) == 1
    monkeypatch.setenv(RUN_VARIABLE, "/runs/a")
    monkeypatch.setenv(PROCESS_VARIABLE, "rollout-1")
    await Container(ContainerConfig()).sweep()
    assert len(list(bubblewrap_folder.iterdir())) == 1  # another worker's
    monkeypatch.setenv(PROCESS_VARIABLE, "rollout-0")
    await Container(ContainerConfig()).sweep()
    assert list(bubblewrap_folder.iterdir()) == []
    await until(lambda: not is_running("54321.9876"))


@pytest.mark.parametrize("kind", STUBBED)
async def test_container_of_a_program_is_started_used_swept_and_removed(programs, kind):
    async with started(kind=kind, network=kind is ContainerKind.kubernetes) as container:
        assert (await container.run("cat >x; cat x; exit 3", b"hello"))[:2] == (b"hello", 3)
        assert (programs / "log").read_text().count("timeout -s KILL 60 sh -c") == 2
        [name] = [path.name for path in programs.iterdir() if path.is_dir()]
        (programs / "another").mkdir()
        await container.sweep()
        assert not (programs / name).exists() and (programs / "another").exists()
        (programs / name).mkdir()
    assert not (programs / name).exists()
    first = (programs / "log").read_text().splitlines()[0]
    limits = {"docker": "--network none --memory 1073741824 --memory-swap 1073741824 --pids-limit "}
    limits["kubernetes"] = f'"name":"{name}","workingDir":"/work","resources":{{"limits":{{"memory"'
    assert limits.get(kind.name, limits["docker"]) in first and "some-image" in first


async def test_commands_of_the_settings_take_the_place_of_the_kinds(programs):
    own = {"start": "sh -c 'docker run --name $0 image' {name}"}
    async with started(kind=ContainerKind.docker, commands=own) as container:
        assert (await container.run("echo here")).text == "here\n"
    assert (programs / "log").read_text().startswith("docker run --name leash-")


@pytest.mark.parametrize("kind", STUBBED)
async def test_container_without_its_image_is_an_error_that_says_so(programs, kind, caplog):
    container = Container(ContainerConfig(kind=kind, network=True), "absent")
    with pytest.raises(ContainerError, match=r"ended with code 125: no image .*absent; correct"):
        await container.start()
    await container.close()
    is_told = "a container was not removed" in caplog.text
    assert is_told == (kind is not ContainerKind.kubernetes)  # which ignores that there is none


async def test_container_without_a_shell_is_an_error_that_says_so(programs):
    own = {"exec": "env sh -c 'echo no shell; exit 126'"}
    container = Container(ContainerConfig(kind=ContainerKind.docker, commands=own), "image")
    with pytest.raises(ContainerError, match="it runs no command: no shell; an image needs sh"):
        await container.start()


class Service(BaseHTTPRequestHandler):
    """Does what SandboxFusion does with a program in bash, and keeps nothing."""

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert (self.path, body["language"]) == ("/run_code", "bash")
        if self.headers["Authorization"] != "Bearer right":
            self.send_error(401)
            return
        with tempfile.TemporaryDirectory() as name:
            for file, content in body["files"].items():
                (Path(name) / file).write_bytes(base64.b64decode(content))
            ran = subprocess.run(["bash", "-c", body["code"]], cwd=name, stdout=subprocess.PIPE)
            fetched = {file: (Path(name) / file).read_bytes() for file in body["fetch_files"]}
        files = {file: base64.b64encode(content).decode() for file, content in fetched.items()}
        result = {
            "status": "Finished",
            "return_code": ran.returncode,
            "stdout": ran.stdout.decode(),
        }
        content = json.dumps({"status": "Success", "run_result": result, "files": files}).encode()
        self.send_response(200)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def at_service() -> ContainerConfig:
    with ThreadingHTTPServer(("127.0.0.1", 0), Service) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        url = f"http://127.0.0.1:{server.server_port}"
        kind = ContainerKind.sandbox_fusion
        yield ContainerConfig(kind=kind, url=url, network=True, api_key_env="KEY", timeout_s=2)
        server.shutdown()
        thread.join()


async def test_service_gets_the_folder_with_each_command(at_service, monkeypatch):
    monkeypatch.setenv("KEY", "right")
    container = make_container(at_service)
    await container.sweep()
    await container.start()
    assert (await container.run("cat >x; echo err >&2; exit 3", b"h\xff"))[:2] == (b"err\n", 3)
    assert (await container.run("wc -c <x; mkdir a; echo b >'a/it''s'")).text.strip() == "2"
    assert (await container.run("cat a/*; sleep 60"))[:2] == (b"b\n", 137)
    ran = await container.run("head -c 100000 /dev/zero")
    assert (len(ran.output), ran.is_whole) == (MAX_OUTPUT_BYTES, False)
    await container.close()


async def test_service_that_refuses_or_is_gone_is_an_error_that_names_it(at_service, monkeypatch):
    with pytest.raises(ContainerError, match=r"api_key_env='KEY': this environment variable is no"):
        make_container(at_service)
    monkeypatch.setenv("KEY", "wrong")
    with pytest.raises(ContainerError, match=r"task.container.url='http://127.*401"):
        await make_container(at_service).start()
    monkeypatch.setenv("KEY", "right")
    with pytest.raises(ContainerError, match=r"task.container.url='http://127.0.0.1:1': Connect"):
        await make_container(replace(at_service, url="http://127.0.0.1:1")).start()


class E2b(BaseHTTPRequestHandler):
    """Does what E2B does with these requests, in folders of this machine."""

    def do_GET(self) -> None:
        self.do_POST()

    def do_DELETE(self) -> None:
        self.do_POST()

    def do_POST(self) -> None:
        address = urlsplit(self.path)
        page, query = address.path, dict(parse_qsl(address.query))
        body = self.rfile.read(int(self.headers["Content-Length"] or 0))
        alive, log = self.server.alive, self.server.log
        if page in ("/files", "/process.Process/Start"):
            assert alive[self.headers["E2b-Sandbox-Id"]] and "X-API-Key" not in self.headers
            assert self.headers["X-Access-Token"] == "a-token"
            if page == "/files":
                return self.write(query, body)
            assert base64.b64decode(self.headers["Authorization"].split()[1]) == b"root:"
            return self.start(body)
        log.append(f"{self.command} {page}")
        if self.headers["X-API-Key"] != "right":
            return self.reply({"code": 401, "message": f"no key {self.headers['X-API-Key']}"}, 401)
        if page in self.server.refused:
            return self.reply("busy", 500)
        if page == "/sandboxes":
            made = json.loads(body)
            if made["templateID"] == "endless":
                return self.say_much()
            if made["templateID"] != "base":
                return self.reply({"code": 404, "message": "template not found"}, 404)
            name = f"i{len(alive)}"
            alive[name] = made
            about = {"templateID": "base", "clientID": "c", "envdVersion": "0.2.0"}
            return self.reply({"sandboxID": name, "envdAccessToken": "a-token", **about}, 201)
        if page == "/v2/sandboxes":
            key, _, value = query["metadata"].partition("=")
            mine = [n for n, m in alive.items() if m and m["metadata"].get(key) == value]
            return self.reply([{"sandboxID": name} for name in mine[:2]])
        name = page.split("/")[2]
        if not alive.get(name):
            return self.reply({"code": 404, "message": "sandbox not found"}, 404)
        if self.command == "DELETE":
            alive[name] = None
        else:
            assert json.loads(body) == {"timeout": 3600}
        return self.reply(None, 204)

    def say_much(self) -> None:
        self.send_response(400)
        self.end_headers()
        try:
            for _ in range(64):
                self.wfile.write(b"a" * 2**20)
            self.server.log.append("whole")
        except OSError:
            self.server.log.append("cut")

    def write(self, query: dict[str, str], body: bytes) -> None:
        boundary = self.headers["Content-Type"].partition("boundary=")[2].encode()
        part = body.split(b"--" + boundary)[1].partition(b"\r\n\r\n")[2]
        assert query["username"] == "root"
        Path(query["path"]).write_bytes(part.removesuffix(b"\r\n"))
        self.reply([{"path": query["path"], "name": Path(query["path"]).name, "type": "file"}])

    def start(self, body: bytes) -> None:
        flags, length = struct.unpack_from(">BI", body)
        assert (flags, length) == (0, len(body) - 5)
        asked = json.loads(body[5:])["process"]
        ran = subprocess.run(
            [asked["cmd"], *asked["args"]], cwd=asked["cwd"], stdout=subprocess.PIPE
        )
        end = {"exited": ran.returncode >= 0, "exitCode": ran.returncode}
        said = [{"start": {"pid": 7}}, {"keepalive": {}}]
        for start in range(0, len(ran.stdout), 3000):
            said.append({"data": {"stdout": base64.b64encode(ran.stdout[start:][:3000]).decode()}})
        stream = [(0, {"event": one}) for one in [*said, {"end": end}]] + [(2, {})]
        if b"cut" in ran.stdout:
            stream[-2:] = [(2, {"error": {"code": "unavailable", "message": "it was killed"}})]
        self.send_response(200)
        self.send_header("Content-Type", "application/connect+json")
        self.end_headers()
        for flags, one in stream:
            message = json.dumps(one).encode()
            self.wfile.write(struct.pack(">BI", flags, len(message)) + message)

    def reply(self, body: object, status: int = 200) -> None:
        self.send_response(status)
        self.end_headers()
        self.wfile.write(b"" if body is None else json.dumps(body).encode())

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def at_e2b(tmp_path, monkeypatch):
    monkeypatch.setenv("KEY", "right")
    with ThreadingHTTPServer(("127.0.0.1", 0), E2b) as server:
        server.alive, server.log, server.refused = {}, [], set()
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        url, kind = f"http://127.0.0.1:{server.server_port}", ContainerKind.e2b
        workdir, more = str(tmp_path / "work"), {"api_key_env": "KEY", "timeout_s": 10}
        yield server, ContainerConfig(kind=kind, url=url, workdir=workdir, **more)
        server.shutdown()
        thread.join()


async def test_sandbox_of_e2b_keeps_its_files_between_commands(at_e2b):
    server, config = at_e2b
    container = make_container(config, "base")
    await container.start()
    assert server.alive["i0"]["allow_internet_access"] is False
    assert (await container.run("cat >x; echo err >&2; exit 3", b"h\xff"))[:2] == (b"err\n", 3)
    assert (await container.run("wc -c <x; cat; mkdir a; echo b >a/c")).text.strip() == "2"
    container._config = replace(config, timeout_s=2)
    assert (await container.run("cat a/*; sleep 60"))[:2] == (b"b\n", 137)
    container._config = config
    ran = await container.run("head -c 100000 /dev/zero")
    assert b"34464 bytes left out" in ran.output and not ran.is_whole
    with pytest.raises(ContainerError, match=r"url='http://127.*it was killed"):
        await container.run("echo cut")
    await container.close()
    assert server.log == ["POST /sandboxes", "DELETE /sandboxes/i0"]


async def test_lease_of_a_sandbox_is_prolonged_and_those_left_are_swept(at_e2b):
    server, config = at_e2b
    first, second = (make_container(config, "base") for _ in range(2))
    await first.start()
    await second.start()
    first._prolonged -= remote_container._PROLONG_S
    server.refused.add("/sandboxes/i0/timeout")
    with pytest.raises(ContainerError, match=r"i0/timeout got 500: .busy"):
        await first.run("echo no")
    server.refused.clear()
    for _ in range(2):
        assert (await first.run("echo yes")).output == b"yes\n"
    await make_container(config).sweep()
    assert server.alive == {"i0": None, "i1": None}
    await second.close()  # it is gone already
    assert server.log[2:5] == 2 * ["POST /sandboxes/i0/timeout"] + ["GET /v2/sandboxes"]


async def test_sweep_goes_on_past_the_first_reply_and_past_what_is_refused(at_e2b, caplog):
    server, config = at_e2b
    for _ in range(5):
        await make_container(config, "base").start()
    server.refused.add("/sandboxes/i1")
    await make_container(config).sweep()
    assert [name for name, made in server.alive.items() if made] == ["i1"]
    assert (
        "a sandbox was not removed" in caplog.text and "DELETE /sandboxes/i1 got 500" in caplog.text
    )


async def test_of_what_a_refusal_says_only_the_beginning_is_read(at_e2b):
    server, config = at_e2b
    with pytest.raises(ContainerError, match="got 400: aaaa"):
        await make_container(config, "endless").start()
    await until(lambda: server.log[-1] != "POST /sandboxes")
    assert server.log[-1] == "cut"


async def test_certificates_are_loaded_once(at_e2b, monkeypatch):
    _, config = at_e2b
    remote_container._tls()
    monkeypatch.setattr(ssl.SSLContext, "load_verify_locations", None)
    await make_container(config, "base").start()


async def test_workdir_that_cannot_be_made_is_named(at_e2b, tmp_path):
    _, config = at_e2b
    (tmp_path / "file").touch()
    config = replace(config, workdir=str(tmp_path / "file" / "work"))
    with pytest.raises(ContainerError, match=r"task.container.workdir='.*cannot make it: mkdir"):
        await make_container(config, "base").start()


async def test_e2b_that_refuses_is_an_error_that_names_it_without_the_key(at_e2b, monkeypatch):
    _, config = at_e2b
    with pytest.raises(ContainerError, match=r"POST /sandboxes got 404: .*template not found.*"):
        await make_container(config, "none").start()
    monkeypatch.setenv("KEY", "sk-wrong")
    with pytest.raises(ContainerError, match=r"got 401: .*no key KEY.*container.api_key_env"):
        await make_container(config, "base").start()
    monkeypatch.delenv("KEY")
    with pytest.raises(ContainerError, match=r"api_key_env='KEY': this environment variable is no"):
        make_container(config)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (ContainerKind.docker, r"kind=docker: there is no program 'docker' on PATH; install it"),
        (ContainerKind.kubernetes, r"there is no program 'sh' on PATH"),
    ],
)
def test_missing_program_is_named(kind, message, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ContainerError, match=message):
        Container(ContainerConfig(kind=kind, network=True))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kind": ContainerKind.kubernetes}, r"task.container.network=False: close the network"),
        ({"commands": {"start": "x"}}, r"task.container.commands=.*kind=bubblewrap has no comm"),
        (
            {"kind": ContainerKind.docker, "commands": {"begin": "x"}},
            r"commands={'begin': 'x'}: kind=docker has start, exec, stop, names; correct",
        ),
        ({"kind": ContainerKind.sandbox_fusion}, r"task.container.url=None: .* needs its address"),
        ({"url": "http://a"}, r"container.url='http://a': kind=bubblewrap: .* no other has one"),
        ({"workdir": "work"}, r"task.container.workdir='work': must be an absolute path"),
    ],
)
def test_bad_setting_is_named(settings, message):
    with pytest.raises(ValueError, match=message):
        ContainerConfig(**settings)
