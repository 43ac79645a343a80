"""Tasks of the verifiers library on the environments beside this file, and a model for them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from configs.choices import TaskKind
from configs.rollout_schema import TaskConfig
from rollout_pool.tasks.registry import build_task
from rollout_pool.tasks.verifiers.adapter import VerifiersTask

FOLDER = str(Path(__file__).parent / "environments")


@dataclass
class Model:
    """An OpenAI-compatible server that says what it is told to, and never answers "wait"."""

    url: str
    says: list[Any] = field(default_factory=list)
    """Texts, or calls of tools; the last one again and again."""
    asked: list[dict[str, Any]] = field(default_factory=list)
    waiting: asyncio.Event = field(default_factory=asyncio.Event)
    model: str = "policy"

    @property
    def keyed_url(self) -> str:
        return f"{self.url}/sessions/the-key/v1"

    async def answer(self, request: Request) -> Response:
        assert request.path_params["key"] == "the-key"
        self.asked.append(json.loads(await request.body()))
        said = self.says.pop(0) if len(self.says) > 1 else self.says[0]
        if said == "wait":
            self.waiting.set()
            await asyncio.sleep(600)
        if said == "refuse":
            return JSONResponse({"error": {"message": "no such thing"}}, 400)
        message: dict[str, Any] = {"role": "assistant", "content": said}
        if isinstance(said, dict):
            call = {"id": "call-1", "type": "function", "function": said}
            message |= {"content": None, "tool_calls": [call]}
        return JSONResponse(
            {
                "id": "1",
                "object": "chat.completion",
                "created": 0,
                "model": "policy",
                "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
                "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
            }
        )


@asynccontextmanager
async def serving(*says: Any) -> AsyncIterator[Model]:
    model = Model(url="", says=list(says))
    routes = [Route("/sessions/{key}/v1/chat/completions", model.answer, methods=["POST"])]
    config = uvicorn.Config(
        Starlette(routes=routes), port=0, log_level="critical", timeout_graceful_shutdown=0
    )
    server = uvicorn.Server(config)
    running = asyncio.create_task(server.serve())
    async with asyncio.timeout(60):
        while not server.started:
            await asyncio.sleep(0.01)
    model.url = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    yield model
    server.should_exit = True
    async with asyncio.timeout(60):
        await running


def config_of(**changes: Any) -> TaskConfig:
    return TaskConfig(
        **{
            "kind": TaskKind.verifiers,
            "name": "adding",
            "path": FOLDER,
            "eval_size": 2,
            **changes,
        }
    )


@asynccontextmanager
async def task_of(**changes: Any) -> AsyncIterator[VerifiersTask]:
    task = await asyncio.to_thread(build_task, config_of(**changes))
    assert isinstance(task, VerifiersTask)
    try:
        yield task
    finally:
        async with asyncio.timeout(60):
            await task.close()


async def run(task: VerifiersTask, model: Model, index: int = 0) -> tuple[float, dict[str, float]]:
    async with asyncio.timeout(120):
        return await task.run_agent(model, task.example(index))
