"""Tools of real MCP servers."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import psutil
import pytest
import uvloop

from configs.load import load_config
from rollout_pool.episodes import mcp_tools as module
from rollout_pool.episodes.conversation import ToolError
from rollout_pool.tasks.env_episodes import load_tools
from tests.support.repository import ROOT

SERVER = ROOT / "tests" / "support" / "mcp_server.py"
COMMAND = f"mcp:{sys.executable} {SERVER}"


async def test_tools_of_a_command_are_described_and_called():
    price, place = load_tools([COMMAND])
    assert (price.spec.name, price.spec.description) == ("price", "Tells what one fruit costs.")
    assert price.spec.parameters["properties"]["fruit"]["type"] == "string"
    answers = await asyncio.gather(*(price.run({"fruit": one}) for one in ("apple", "pear")))
    assert answers == ["3", "5"]
    pids = set(await asyncio.gather(*(place.run({}) for _ in range(8))))
    assert len(pids) == 1, "one server for all episodes of the worker"
    assert psutil.Process(int(pids.pop())).ppid() == os.getpid()
    for arguments, words in (({"fruit": "plum"}, "there is no plum"), ({}, "fruit")):
        with pytest.raises(ToolError, match=words):
            await price.run(arguments)
    assert await price.run({"fruit": "pear"}) == "5"


async def test_server_that_died_is_started_again_by_the_next_call():
    _, place = load_tools([COMMAND])
    first = int(await place.run({}))
    server = place.run.func.__self__
    lost = await server._connected()
    process = psutil.Process(first)  # asked for before: the event loop may reap it at once
    process.kill()
    await asyncio.to_thread(process.wait, 60)
    async with asyncio.timeout(60):
        while True:
            try:
                second = int(await place.run({}))
                break
            except ToolError as error:  # what was in progress when it died is told to the model
                assert "place: " in str(error)
    assert second != first
    # A call over the lost connection that fails only now does not end the new one.
    server._drop(lost, RuntimeError("late"))
    assert int(await place.run({})) == second


async def test_server_ends_with_its_worker():
    code = (
        "import asyncio\n"
        "from rollout_pool.tasks.env_episodes import load_tools\n"
        "async def main():\n"
        f"    _, place = load_tools([{COMMAND!r}])\n"
        "    print(await place.run({}), flush=True)\n"
        "    await asyncio.Event().wait()\n"
        "asyncio.run(main())\n"
    )
    worker = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert worker.stdout is not None
    server = psutil.Process(int(await asyncio.to_thread(worker.stdout.readline)))
    worker.kill()
    worker.communicate()
    await asyncio.to_thread(server.wait, 60)


@pytest.mark.parametrize("new_event_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_server_inherits_nothing_that_its_worker_has_open(new_event_loop, tmp_path):
    async def opened(descriptor: int) -> set[str]:
        os.set_inheritable(descriptor, True)  # as those of Ray's native code are
        _, place = load_tools([COMMAND])
        folder = Path("/proc", await place.run({}), "fd")
        return {os.path.realpath(descriptor) for descriptor in folder.iterdir()}

    path = tmp_path / "private"
    with path.open("w") as file, asyncio.Runner(loop_factory=new_event_loop) as runner:
        assert str(path) not in runner.run(opened(file.fileno()))


async def test_tools_of_a_url_are_called():
    command = [sys.executable, str(SERVER), "http"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        try:
            said = (re.search(r"running on (http://\S+)", line) for line in server.stderr)
            url = next(filter(None, said))[1]
            price, place = load_tools([f"mcp:{url}/mcp"])
            assert await price.run({"fruit": "apple"}) == "3"
            assert int(await place.run({})) == server.pid
        finally:
            server.kill()
    with pytest.raises(ToolError, match="price: "):
        await price.run({"fruit": "apple"})


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("no-such-program --port 3", "there is no program 'no-such-program'"),
        (f"{sys.executable} -c pass", "closed"),
        ("http://127.0.0.1:9/mcp", "ConnectError"),
    ],
)
def test_server_that_tells_no_tools_is_an_error_of_the_setting(address, words):
    with pytest.raises(
        ValueError, match=f"'mcp:.*lists no tools: .*{words}.*; give mcp: and a URL"
    ):
        load_tools([f"mcp:{address}"])


def test_server_that_says_nothing_is_given_up(monkeypatch):
    monkeypatch.setattr(module, "CONNECT_S", 0.5)
    with pytest.raises(ValueError, match=r"no answer within 0\.5 s"):
        load_tools(["mcp:sleep 60"])


@pytest.mark.parametrize("printed", ["yes garbage", "sh -c \"tr '\\\\0' x < /dev/zero\""])
def test_command_that_prints_no_messages_is_not_read_on(printed, monkeypatch, caplog):
    monkeypatch.setattr(module, "MAX_MESSAGE_BYTES", 2**16)
    with pytest.raises(ValueError, match=r"lists no tools: .*closed"):
        load_tools([f"mcp:{printed}"])
    assert "the command's output is not read on" in caplog.text


def test_response_of_a_url_is_bounded(monkeypatch):
    monkeypatch.setattr(module, "MAX_MESSAGE_BYTES", 2**16)

    class Endless(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.end_headers()
            with contextlib.suppress(ConnectionError):
                while True:
                    self.wfile.write(b"x" * 2**16)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Endless) as server:
        threading.Thread(target=server.serve_forever).start()
        try:
            with pytest.raises(ValueError, match="a response of more than 65536 bytes"):
                load_tools([f"mcp:http://127.0.0.1:{server.server_port}/mcp"])
        finally:
            server.shutdown()


CARELESS = """
import json, os, sys
tool = {"name": "place", "inputSchema": {"type": "object"}, "outputSchema": {"type": "object"}}
print("Listening on standard input")
for line in sys.stdin:
    asked = json.loads(line)
    if "id" not in asked:
        continue
    result = {
        "initialize": {
            "protocolVersion": "2025-06-18",
            "capabilities": {"tools": {}},
            "serverInfo": {"name": "careless", "version": "1"},
        },
        "tools/list": {"tools": [tool]},
        "tools/call": {"content": [{"type": "text", "text": str(os.getpid())}]},
    }.get(asked["method"])
    error = {"code": -32601, "message": "no such method"}
    answer = {"error": error} if result is None else {"result": result}
    if (asked.get("params") or {}).get("arguments"):
        answer = {"result": {"content": 5}}
    print(json.dumps({"jsonrpc": "2.0", "id": asked["id"], **answer}), flush=True)
"""


async def test_result_that_cannot_be_used_does_not_cost_the_others_their_connection(tmp_path):
    (tmp_path / "careless.py").write_text(CARELESS)
    [place] = load_tools([f"mcp:{sys.executable} {tmp_path}/careless.py"])
    client = await place.run.func.__self__._connected()
    for arguments in ({}, {"what": 1}):  # without the structure that it promised; of no valid form
        with pytest.raises(ToolError, match="place: its server's result cannot be used"):
            await place.run(arguments)
    assert await place.run.func.__self__._connected() is client


def test_files_of_a_command_are_made_absolute(tmp_path, monkeypatch):
    (tmp_path / "my server.py").write_text("")
    monkeypatch.chdir(tmp_path)
    config = load_config(
        [
            "task.chat_template=true",
            'task.tools=["mcp:python \'my server.py\' -v","mcp:http://h/mcp"]',
        ]
    )
    assert config.task.tools == [f"mcp:python '{tmp_path}/my server.py' -v", "mcp:http://h/mcp"]
