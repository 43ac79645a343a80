"""The shorter way of streams, before applications and managers that stand for SGLang's."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace

import pytest
from starlette.requests import Request

from rollout_pool.engines.sglang.generate_route import GenerateRoute

STREAM = {"stream": True, "rid": ["a", "b"]}


class Server:
    """In the place of SGLang's module; `responses` is what its manager generates."""

    ORJSONRequest = Request

    def __init__(self, responses):
        self.responses = responses

    def get_global_state(self):
        return SimpleNamespace(tokenizer_manager=self)

    def generate_request(self, asked, call):
        assert asked.rid == ["a", "b"]
        return self.responses()

    def create_abort_task(self, asked):
        return None

    @staticmethod
    def dumps_json(part):
        return json.dumps(part).encode()


def validate(body, values, loc):
    assert (values, loc) == ({}, ("body",))
    if set(body) <= {"stream", "rid"}:
        return SimpleNamespace(**{"stream": False, **body}), []
    return None, ["unknown field"]


async def own_route(scope, receive, send):
    """Echoes the body, as SGLang's route would read it."""
    body = await Request(scope, receive).body()
    await send({"type": "http.response.start", "status": 299, "headers": []})
    await send({"type": "http.response.body", "body": body})


async def reply(responses, body, *, gone=None, **scope):
    """Status and bodies of what is sent; the client goes when `gone` is set."""
    sent, halves = [], [body[:5], body[5:]]

    async def receive():
        if halves:
            half = halves.pop(0)
            return {"type": "http.request", "body": half, "more_body": bool(halves)}
        await (gone or asyncio.Event()).wait()
        return {"type": "http.disconnect"}

    async def send(message):
        sent.append(message)

    headers = [(b"content-type", b"application/json"), *scope.pop("headers", [])]
    scope = {"type": "http", "method": "POST", "path": "/generate", "headers": headers, **scope}
    route = SimpleNamespace(path="/generate", body_field=SimpleNamespace(validate=validate))
    await GenerateRoute(own_route, Server(responses), route)(scope, receive, send)
    return sent[0]["status"] if sent else None, [
        message["body"] for message in sent[1:] if message["body"]
    ]


async def nothing():
    raise AssertionError("the shorter way was taken")
    yield


@pytest.mark.parametrize(
    ("body", "scope"),
    [
        (b'{"stream": false}', {}),
        (b'{"rid": ["a", "b"]}', {}),
        (b'{"stream": true, "rids": 1}', {}),
        (b'{"stream": true', {}),
        (json.dumps(STREAM).encode(), {"method": "PUT"}),
        (json.dumps(STREAM).encode(), {"path": "/encode"}),
        (json.dumps(STREAM).encode(), {"headers": [(b"origin", b"http://page")]}),
        (json.dumps(STREAM).encode(), {"headers": [(b"content-encoding", b"gzip")]}),
        (json.dumps(STREAM).encode(), {"headers": [(b"content-type", b"text/plain")]}),
    ],
)
async def test_all_but_streams_reach_the_servers_own_route_with_their_body(body, scope):
    assert await reply(nothing, body, **scope) == (299, [body])


async def test_parts_that_come_together_are_sent_at_once():
    async def responses():
        yield [{"index": 0}, {"index": 1}]
        yield {"index": 0}

    status, bodies = await reply(responses, json.dumps(STREAM).encode())
    assert status == 200
    both = b'data: {"index": 0}\n\ndata: {"index": 1}\n\n'
    assert bodies == [both, b'data: {"index": 0}\n\n', b"data: [DONE]\n\n"]


async def test_refusal_within_a_stream_is_a_part_of_it():
    async def responses():
        yield {"index": 0}
        raise ValueError("too long")

    status, bodies = await reply(responses, json.dumps(STREAM).encode())
    assert status == 200 and bodies[2:] == [b"data: [DONE]\n\n"]
    error = json.loads(bodies[1][len(b"data: ") :])["error"]
    assert error == {
        "message": "too long",
        "type": "invalid_request_error",
        "code": 400,
        "retryable": False,
    }


async def test_failure_of_the_server_reaches_whoever_runs_it():
    async def responses():
        yield {"index": 0}
        raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken"):
        await reply(responses, json.dumps(STREAM).encode())


async def test_client_that_goes_ends_its_generation_at_once():
    gone, ended = asyncio.Event(), asyncio.Event()

    async def responses():
        try:
            yield {"index": 0}
            gone.set()
            await asyncio.Event().wait()
        finally:
            ended.set()

    async with asyncio.timeout(60):
        status, bodies = await reply(responses, json.dumps(STREAM).encode(), gone=gone)
    assert ended.is_set()
    assert (status, len(bodies)) == (200, 1)


async def test_server_that_is_cancelled_ends_its_generations():
    begun, ended = asyncio.Event(), asyncio.Event()

    async def responses():
        try:
            begun.set()
            await asyncio.Event().wait()
            yield {}
        finally:
            ended.set()

    replying = asyncio.create_task(reply(responses, json.dumps(STREAM).encode()))
    async with asyncio.timeout(60):
        await begun.wait()
        replying.cancel()
        with pytest.raises(asyncio.CancelledError):
            await replying
        await ended.wait()
