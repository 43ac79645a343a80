"""Engines of fixed latency: `python -m benchmarks.rollouts.stub_engine SECONDS TOKENS [ENGINES]`.

It prints a port for each. It speaks as much of the real server's HTTP as a rollout worker uses, and
computes nothing: what is measured against it is the worker alone.
"""

from __future__ import annotations

import asyncio
import json
import socket
import sys
from collections.abc import AsyncIterator
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

VERSION = "0"


class StubEngine:
    """Answers every sample `latency_s` after it came with `num_tokens` tokens."""

    def __init__(self, latency_s: float, num_tokens: int) -> None:
        self._latency_s = latency_s
        self._tokens = list(range(10, 10 + num_tokens))
        self._logprobs = [[-1.0, token, None] for token in self._tokens]
        self.in_flight = self.most_in_flight = self.num_samples = 0

    async def generate(self, request: Request) -> Response:
        body = await request.json()
        rids = body["rid"] if isinstance(body["rid"], list) else [body["rid"]]
        return StreamingResponse(self._answers(rids), media_type="text/event-stream")

    async def _answers(self, rids: list[str]) -> AsyncIterator[bytes]:
        self.in_flight += len(rids)
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            await asyncio.sleep(self._latency_s)
            yield b"".join(b"data: " + json.dumps(self._end(r)).encode() + b"\n\n" for r in rids)
            yield b"data: [DONE]\n\n"
        finally:
            self.in_flight -= len(rids)
            self.num_samples += len(rids)

    def _end(self, rid: str) -> dict[str, Any]:
        length = len(self._tokens)
        return {
            "output_ids": self._tokens,
            "meta_info": {
                "id": rid,
                "finish_reason": {"type": "length", "length": length},
                "completion_tokens": length,
                "output_token_logprobs": self._logprobs,
                "weight_version": VERSION,
                "weight_versions": [{"version": VERSION, "start": 0, "end": length}],
                "num_retractions": 0,
            },
        }

    async def counts(self, request: Request) -> Response:
        most, self.most_in_flight = self.most_in_flight, self.in_flight
        return JSONResponse({"most_in_flight": most, "num_samples": self.num_samples})

    async def loads(self, request: Request) -> Response:
        return JSONResponse({"loads": []})

    async def okay(self, request: Request) -> Response:
        return JSONResponse({"weight_version": VERSION, "served_model_name": "stub"})


def main(argv: list[str]) -> None:
    engine = StubEngine(float(argv[0]), int(argv[1]))
    routes = [
        Route("/generate", engine.generate, methods=["POST"]),
        Route("/counts", engine.counts),
        Route("/v1/loads", engine.loads),
        Route("/model_info", engine.okay),
        Route("/ready", engine.okay),
        Route("/abort_request", engine.okay, methods=["POST"]),
    ]
    asyncio.run(serve(Starlette(routes=routes), *map(int, argv[2:])))


async def serve(app: Starlette, num_ports: int = 1) -> None:
    """Prints the ports; never returns."""
    config = uvicorn.Config(
        app, log_level="critical", lifespan="off", ws="none", timeout_keep_alive=60
    )
    server = uvicorn.Server(config)
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(num_ports)]
    serving = asyncio.create_task(server.serve(sockets))
    while not server.started:
        await asyncio.sleep(0.01)
    print(*(one.getsockname()[1] for one in sockets), flush=True)
    await serving


if __name__ == "__main__":
    main(sys.argv[1:])
