"""Stands in for SGLang where engines die by the dozen: `python stand_in_server.py <spec as JSON>`.

It starts in a second instead of half a minute and decodes nothing. Its loads are real: it reads the
staged file slowly, and notes in a log what it has read, from which version. As SGLang's launcher of
ours, it lives as long as its standard input, whose first line is the key of its requests.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import sys
import threading
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

_NUM_READS = 16


class StandIn:
    def __init__(self, spec: dict[str, Any], key: str) -> None:
        self._spec = spec
        self._key = key
        self._version = "default"
        self._is_paused = False

    def app(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/ready", self._ready),
                Route("/model_info", self._model_info),
                Route("/abort_request", self._nothing_to_end, methods=["POST"]),
                Route("/flush_cache", self._nothing_to_end, methods=["POST"]),
                Route("/freeze_gc", self._nothing_to_end, methods=["POST"]),
                Route("/pause_generation", self._pause, methods=["POST"]),
                Route("/continue_generation", self._go_on, methods=["POST"]),
                Route("/update_weights_from_disk", self._load, methods=["POST"]),
            ]
        )

    def _refusal(self, request: Request) -> Response | None:
        is_known = request.headers.get("authorization") == f"Bearer {self._key}"
        return None if is_known else Response(status_code=401)

    async def _ready(self, request: Request) -> Response:
        return self._refusal(request) or JSONResponse({})

    async def _model_info(self, request: Request) -> Response:
        info = {"served_model_name": self._spec["served_name"], "weight_version": self._version}
        return self._refusal(request) or JSONResponse(info)

    async def _nothing_to_end(self, request: Request) -> Response:
        return self._refusal(request) or JSONResponse({})

    async def _pause(self, request: Request) -> Response:
        self._is_paused = True
        return self._refusal(request) or JSONResponse({})

    async def _go_on(self, request: Request) -> Response:
        self._is_paused = False
        return self._refusal(request) or JSONResponse({})

    async def _load(self, request: Request) -> Response:
        body = await request.json()
        if not self._is_paused:
            return JSONResponse({"error": "a load while it decodes"}, 400)
        digest = hashlib.sha256()
        path = Path(body["model_path"]) / "model.safetensors"
        with path.open("rb") as file:
            length = -(-path.stat().st_size // _NUM_READS)
            while part := file.read(length):
                digest.update(part)
                await asyncio.sleep(self._spec["load_s"] / _NUM_READS)
        self._version = body["weight_version"]
        with Path(self._spec["seen"]).open("a") as file:
            file.write(json.dumps([int(self._version), digest.hexdigest()]) + "\n")
        return JSONResponse({"success": True})


def main() -> None:
    spec = json.loads(sys.argv[1])
    key = sys.stdin.readline().strip()
    threading.Thread(target=lambda: (sys.stdin.read(), os._exit(0)), daemon=True).start()
    config = uvicorn.Config(
        StandIn(spec, key).app(), spec["host"], spec["port"], log_level="warning"
    )
    uvicorn.Server(config).run()


if __name__ == "__main__":
    main()
