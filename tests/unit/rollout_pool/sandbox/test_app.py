"""The sandbox of this machine as an HTTP service."""

from __future__ import annotations

import asyncio
import json

import httpx
import pytest

from rollout_pool.sandbox import app as module
from rollout_pool.sandbox.app import Language, make_app
from rollout_pool.sandbox.run import LocalSandbox, SandboxError, SandboxLimits, SandboxResult

LIMITS = SandboxLimits(wall_time_s=30.0, memory_bytes=128 * 2**20)
KEY = "k"


class Waiting:
    """A `Sandbox` whose programs end when they may."""

    def __init__(self) -> None:
        self.is_running, self.may_end = asyncio.Event(), asyncio.Event()

    async def run(self, code: str, **settings) -> SandboxResult:
        self.is_running.set()
        await self.may_end.wait()
        raise SandboxError("this machine is unsafe")


@pytest.fixture
def waiting():
    return Waiting()


@pytest.fixture
async def client(waiting):
    languages = {
        "python": Language(sandbox=LocalSandbox(), limits=LIMITS),
        "slow": Language(sandbox=waiting, limits=LIMITS),
    }
    transport = httpx.ASGITransport(make_app(languages, KEY, max_open=1))
    headers = {"Authorization": f"Bearer {KEY}"}
    async with httpx.AsyncClient(
        transport=transport, base_url="http://here", headers=headers
    ) as client:
        yield client


def program(code: str = "print(2 * int(input()))", **fields) -> dict:
    return {"code": code, "language": "python", "stdin": "21", **fields}


async def test_program_runs_with_its_input(client):
    answer = (await client.post("/run_code", json=program(files={}, fetch_files=[]))).json()
    seconds = answer["run_result"].pop("execution_time")
    assert 0 < seconds < 30
    assert answer == {
        "status": "Success",
        "message": "",
        "compile_result": None,
        "run_result": {"status": "Finished", "return_code": 0, "stdout": "42\n", "stderr": ""},
    }


@pytest.mark.parametrize(
    ("code", "status", "message"),
    [
        ("raise ValueError(3)", "Finished", "it ended with an error (exit code 1): ValueError: 3"),
        ("import os; os.fork()", "Finished", "it tried to start or signal a process"),
        ("while True: pass", "TimeLimitExceeded", "it took too long"),
        ("while True: print(1)", "Finished", "it printed too much"),
        ("x = bytes(10**9)", "Finished", "it exceeded its memory"),
    ],
)
async def test_program_that_fails_is_answered_with_the_reason(client, code, status, message):
    limits = {"run_timeout": 1} if status == "TimeLimitExceeded" else {"memory_limit_MB": 64}
    answer = (await client.post("/run_code", json=program(code, **limits))).json()
    assert (answer["status"], answer["run_result"]["status"]) == ("Failed", status)
    assert answer["message"].startswith(message) and answer["run_result"]["return_code"] != 0


async def test_statements_run_in_a_process_of_their_own(client):
    statements = "assert f(1) == 2\nprint('held')"
    for code, status, message in (
        ("def f(x): return 2 * x\n", "Success", ""),
        ("def f(x): return 3 * x\n", "Failed", "it ended with an error (exit code 1)"),
        ("import os; os._exit(0)\n", "Failed", "it ended before its tests (exit code 0)"),
        ("import os\ndef f(x): os._exit(0)\n", "Failed", "it ended before its tests (exit code 0)"),
        ("raise SystemExit\n", "Failed", "it ended before its tests (exit code 0)"),
        (
            "import sys\nclass E:\n    def __eq__(self, o): return True\ndef f(x): return E()\n",
            "Failed",
            "it ended with an error (exit code 1)",
        ),
    ):
        body = program(code + statements, statements_at=len(code))
        answer = (await client.post("/run_code", json=body)).json()
        assert (answer["status"], answer["message"].partition(":")[0]) == (status, message)
        ran, has_passed = answer["run_result"], status == "Success"
        assert ("held" in ran["stdout"], ran["return_code"] == 0) == (has_passed, has_passed)


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (program(language="rust"), "language='rust': there is none here but python, slow"),
        (program(run_timeout=31), "run_timeout=31: at most 30 s are allowed here"),
        (program(run_timeout=0), "run_timeout=0: at most 30 s"),
        (program(memory_limit_MB=129), "memory_limit_MB=129: at most 128 are allowed here"),
        (program(statements_at=-1), "the request cannot be read: Expected `int` >= 0"),
        (program(files={"a": "aGk="}), "files: this service gives programs no files"),
        ({"language": "python"}, "the request cannot be read: Object missing required field"),
        ([], "the request cannot be read"),
        (program(ignored=[[]] * 1000), "the request holds more than 1000 values"),
    ],
)
async def test_request_that_cannot_be_met_is_refused(client, body, why):
    answer = await client.post("/run_code", json=body)
    assert answer.status_code == 422 and answer.text.startswith(why)


async def test_program_with_as_many_brackets_as_it_likes_is_run(client):
    code = 'x = [[], {"a": "\\\\"}, "\'"]\n' * 5000 + "print(len(x))"
    answer = (await client.post("/run_code", json=program(code))).json()
    assert answer["run_result"]["stdout"] == "3\n"


async def test_input_that_no_encoding_has_is_replaced(client):
    body = json.dumps(program("print(input())", stdin="\ud800"))
    answer = (await client.post("/run_code", content=body)).json()
    assert answer["run_result"]["stdout"] == "?\n"


async def test_program_of_a_client_that_has_gone_is_ended(waiting):
    """It would keep later ones waiting until its time is up."""
    app = make_app({"slow": Language(sandbox=waiting, limits=LIMITS)}, "")
    body = json.dumps(program(language="slow")).encode()
    arrived = [{"type": "http.request", "body": body, "more_body": False}]
    sent = []

    async def receive():
        if arrived:
            return arrived.pop()
        await waiting.is_running.wait()
        return {"type": "http.disconnect"}

    async def send(message):
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": "/run_code", "headers": []}
    async with asyncio.timeout(60):
        await app({**scope, "query_string": b"", "root_path": ""}, receive, send)
    assert sent[0]["status"] == 499


async def test_key_is_needed(client):
    for key in ("", "Bearer ", "Bearer no"):
        answer = await client.post("/run_code", json=program(), headers={"Authorization": key})
        assert answer.status_code == 401
    assert (await client.get("/v1/ping", headers={"Authorization": ""})).status_code == 200


async def test_number_of_open_requests_is_bounded(client, waiting):
    first = asyncio.create_task(client.post("/run_code", json=program(language="slow")))
    await asyncio.wait_for(waiting.is_running.wait(), 60)
    refused = await client.post("/run_code", json=program())
    assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
    waiting.may_end.set()
    answer = (await first).json()
    assert answer == {"status": "SandboxError", "message": "this machine is unsafe"}
    assert (await client.post("/run_code", json=program())).status_code == 200


async def test_bodies_beyond_what_may_be_open_are_not_read(waiting, monkeypatch):
    body = json.dumps(program(language="slow")).encode()
    monkeypatch.setattr(module, "MAX_OPEN_BYTES", len(body) + 1)
    app = make_app({"slow": Language(sandbox=waiting, limits=LIMITS)}, "")
    length = ("content-length", str(len(body)))
    scope = {"type": "http", "method": "POST", "path": "/run_code", "query_string": b""}
    scope |= {"root_path": "", "headers": [[text.encode() for text in length]]}
    happened = []

    async def ask(name):
        async def receive():
            if (name, "read") in happened:
                await asyncio.Event().wait()
            happened.append((name, "read"))
            return {"type": "http.request", "body": body, "more_body": False}

        async def send(message):
            happened.append((name, message["type"]))

        await app(dict(scope), receive, send)

    async with asyncio.timeout(60), asyncio.TaskGroup() as group:
        group.create_task(ask("first"))
        group.create_task(ask("second"))
        await waiting.is_running.wait()
        waiting.may_end.set()
    assert happened.index(("first", "http.response.start")) < happened.index(("second", "read"))
