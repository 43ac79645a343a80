"""A server bounds clients that are slow, silent, too many, or send too much."""

from __future__ import annotations

import asyncio
import os
import resource
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from host import http_server
from host.http_server import HttpLimits, ServerConfig, has_more_values, read_body

WAIT_S = 300.0
TCP_REPAIR = 19
Open = Callable[[], Awaitable[tuple[asyncio.StreamReader, asyncio.StreamWriter]]]


async def unread(request: Request) -> Response:
    return PlainTextResponse("no key", 401)


@asynccontextmanager
async def serving(**limits: float) -> AsyncIterator[tuple[Open, list[str]]]:
    """A way to connect, and what has happened in the app."""
    noted: list[str] = []

    async def echo(request: Request) -> Response:
        noted.append("asked")
        return PlainTextResponse(await read_body(request, 1000))

    async def large(request: Request) -> Response:
        return PlainTextResponse("x" * 2**15)

    async def waiting(request: Request) -> Response:
        noted.append("waits")
        while not await request.is_disconnected():
            await asyncio.sleep(0.01)
        noted.append("left")
        return PlainTextResponse("nobody is there")

    async def endless(request: Request) -> Response:
        async def chunks() -> AsyncIterator[bytes]:
            try:
                while True:
                    yield b"x" * 2**20
                    await asyncio.sleep(0)
            finally:
                noted.append("ended")

        return StreamingResponse(chunks())

    app = Starlette(
        routes=[
            Route("/echo", echo, methods=["POST"]),
            Route("/unread", unread, methods=["POST"]),
            Route("/endless", endless),
            Route("/large", large),
            Route("/waiting", waiting),
        ]
    )
    listener = socket.create_server(("127.0.0.1", 0))
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)  # its connections' too
    server = uvicorn.Server(ServerConfig(app, HttpLimits(**limits), close_s=1))  # type: ignore[arg-type]
    task = asyncio.create_task(server._serve([listener]))
    port = listener.getsockname()[1]
    writers: list[asyncio.StreamWriter] = []

    async def connect() -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writers.append(writer)
        return reader, writer

    try:
        async with asyncio.timeout(WAIT_S):
            yield connect, noted
    finally:
        for writer in writers:
            writer.close()
        server.should_exit = True
        await asyncio.wait_for(task, WAIT_S)


def post(path: str, length: int, body: bytes = b"") -> bytes:
    return f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {length}\r\n\r\n".encode() + body


async def answer_to(reader: asyncio.StreamReader) -> tuple[bytes, bytes]:
    head = await reader.readuntil(b"\r\n\r\n")
    [length] = [line for line in head.split(b"\r\n") if line.startswith(b"content-length")]
    return head.split(b"\r\n")[0], await reader.readexactly(int(length.split(b":")[1]))


async def test_head_that_trickles_in_ends_and_silence_does() -> None:
    async with serving(head_s=0.3) as (connect, _):
        silent, _ = await connect()
        reader, writer = await connect()

        async def trickle() -> None:
            for byte in post("/echo", 0):
                writer.write(bytes([byte]))
                await asyncio.sleep(0.1)

        trickling = asyncio.create_task(trickle())
        said = await reader.read()
        assert b" 408 " in said and b"head did not arrive within 0.3 s" in said
        assert await silent.read() == b""
        trickling.cancel()
        await asyncio.wait([trickling])


@pytest.mark.parametrize(
    ("body", "is_more"),
    [
        (b'{"a": [1, 2, {"b": null}]}', False),
        (b'[1, 2, 3, "[[[[,,,,"]', False),
        (rb'["\"[[[[\\", "]]]]{{{{,,,,"]', False),
        (b"[" + b"1," * 9 + b"1]", True),
        (b"[[[[[[[[[[]]]]]]]]]]", True),
        (b'["' + b'","' * 9 + b'"]', True),
    ],
)
def test_values_of_json_are_counted_outside_of_strings(body: bytes, is_more: bool) -> None:
    assert has_more_values(body, 9) == is_more


async def test_body_that_trickles_in_ends() -> None:
    async with serving(body_s=0.3) as (connect, _):
        reader, writer = await connect()
        writer.write(post("/echo", 100, b"x"))
        said = await reader.read()
        assert b" 408 " in said and b"body did not arrive within 0.3 s" in said


async def test_further_requests_have_their_own_time(advance_clock: Callable[[float], None]) -> None:
    async with serving(head_s=60.0, body_s=60.0, keep_alive_s=600) as (connect, noted):
        reader, writer = await connect()
        for number in range(4):
            writer.write(post("/echo", 2, b"x"))
            while len(noted) <= number:
                await asyncio.sleep(0.01)
            advance_clock(20.0)
            writer.write(b"y")
            assert await answer_to(reader) == (b"HTTP/1.1 200 OK", b"xy")
        advance_clock(61.0)  # idle, which is no head under way
        writer.write(post("/echo", 1, b"z"))
        assert await answer_to(reader) == (b"HTTP/1.1 200 OK", b"z")


async def test_body_after_the_refusal_is_not_listened_to_for_long() -> None:
    async with serving() as (connect, _):
        reader, writer = await connect()
        writer.write(post("/unread", 10**9))
        assert (await answer_to(reader))[0] == b"HTTP/1.1 401 Unauthorized"
        with pytest.raises(ConnectionError):
            while True:
                writer.write(b"x" * 1000)
                await writer.drain()
                await asyncio.sleep(0.05)


async def test_length_above_the_limit_is_refused_before_the_body_comes() -> None:
    async with serving() as (connect, _):
        for length in (1001, 10**15):
            reader, writer = await connect()
            writer.write(post("/echo", length))
            assert (await answer_to(reader))[0].startswith(b"HTTP/1.1 413 ")
        reader, writer = await connect()
        head = b"POST /echo HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
        writer.write(head + b"3e9\r\n" + b"x" * 1001 + b"\r\n")
        assert (await answer_to(reader))[0].startswith(b"HTTP/1.1 413 ")


async def test_reader_that_stops_ends_its_answer() -> None:
    async with serving(write_s=0.3) as (connect, noted):
        _, writer = await connect()
        writer.write(b"GET /endless HTTP/1.1\r\nHost: x\r\n\r\n")
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        while not noted:
            await asyncio.sleep(0.02)


async def test_response_whose_last_bytes_nobody_reads_keeps_no_connection() -> None:
    async with serving(write_s=0.3, keep_alive_s=1, max_connections=1) as (connect, _):
        port = (await connect())[1].get_extra_info("peername")[1]
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
            client.connect(("127.0.0.1", port))
            client.sendall(b"GET /large HTTP/1.1\r\nHost: x\r\n\r\n")
            while True:
                reader, writer = await connect()
                writer.write(post("/echo", 1, b"a"))
                if b" 200 " in await reader.readline():
                    break
                await asyncio.sleep(0.05)


async def test_burst_of_connections_leaves_the_process_files_to_open() -> None:
    problems: list[str] = []
    loop, limits = asyncio.get_running_loop(), resource.getrlimit(resource.RLIMIT_NOFILE)
    async with serving(max_connections=32) as (connect, noted):
        reader, writer = await connect()
        writer.write(post("/echo", 2, b"x"))
        while not noted:
            await asyncio.sleep(0.01)
        clients = [socket.socket() for _ in range(100)]
        for client in clients:
            client.setblocking(False)
            client.connect_ex(writer.get_extra_info("peername"))
        loop.set_exception_handler(lambda _, context: problems.append(context["message"]))
        try:
            most = max(client.fileno() for client in clients) + 50
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, limits[1]))
            await asyncio.sleep(0)
            writer.write(b"y")
            assert await answer_to(reader) == (b"HTTP/1.1 200 OK", b"xy")
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
            for client in clients:
                client.close()
    assert not problems


async def test_client_that_vanished_without_a_word_is_missed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL):
        monkeypatch.setitem(http_server._KEEPALIVE, option, 1)
    async with serving() as (connect, noted):
        _, writer = await connect()
        writer.write(b"GET /waiting HTTP/1.1\r\nHost: x\r\n\r\n")
        while not noted:
            await asyncio.sleep(0.01)
        client = socket.socket(fileno=os.dup(writer.get_extra_info("socket").fileno()))
        try:
            client.setsockopt(socket.IPPROTO_TCP, TCP_REPAIR, 1)  # it closes in silence then
        except PermissionError:
            pytest.skip("needs CAP_NET_ADMIN")
        writer.transport.abort()
        client.close()
        while "left" not in noted:
            await asyncio.sleep(0.05)


async def test_idle_connections_make_room_and_busy_ones_do_not() -> None:
    async with serving(max_connections=3) as (connect, noted):
        idle = [await connect() for _ in range(3)]
        reader, writer = await connect()
        writer.write(post("/echo", 1, b"a"))
        assert await answer_to(reader) == (b"HTTP/1.1 200 OK", b"a")
        for _, writer in idle:
            writer.close()
        busy = [await connect() for _ in range(3)]
        for _, writer in busy:
            writer.write(post("/echo", 2, b"x"))
        while noted.count("asked") < 1 + len(busy):
            await asyncio.sleep(0.01)
        refused, _ = await connect()
        assert b" 503 " in await refused.read()
        for reader, writer in busy:
            writer.write(b"y")
            assert await answer_to(reader) == (b"HTTP/1.1 200 OK", b"xy")
