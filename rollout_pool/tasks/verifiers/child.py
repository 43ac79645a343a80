"""An environment of the verifiers library: the program that runs with that library's interpreter.

    python -P child.py <descriptor of its socket>

It needs the standard library and verifiers only. Each message is one line of JSON:

    it reads                                      it writes
    {"environment": {...}, "rows": true}     ──►  {"row": {...}} for each, {"is_ready": true}; ends
    {"environment": {...}, "rows": false}    ──►  {"is_ready": true}
    {"id": 3, "row": {...}, "base_url": ...} ──►  {"id": 3, "reward": 1.0, "metrics": {...}}
                                              or  {"id": 3, "error": "reason"}
    {"cancel": 3}                            ──►  {"cancelled": 3}

Episodes run side by side. It ends when its input does, and soon after its parent in any case.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterable
from contextlib import AsyncExitStack
from statistics import fmean
from typing import Any

LINE_LIMIT = 2**28  # bytes; a row may hold images
SESSION = "LEASH_SESSION"
"""Marks the run's endpoint among the clients of an environment. No variable has this name: the key
is part of the address."""
ORPHAN_S = 10.0
"""Time to end in good order after its parent."""
CHAT = "leash_chat"
"""Id of the harness below."""

_socket = socket.socket(fileno=int(sys.argv[1]))
_socket.set_inheritable(False)  # not for programs and tool servers that an environment starts


def _line(message: dict[str, Any]) -> bytes:
    return json.dumps(message).encode() + b"\n"


try:
    import httpx
    import verifiers.v1 as vf
    from openai import APIStatusError, AsyncOpenAI
    from pydantic import ValidationError
    from verifiers.v1.clients.eval import EvalClient
    from verifiers.v1.dialects.chat import message_to_wire
    from verifiers.v1.harnesses.utils.compaction import is_context_overflow
    from verifiers.v1.harnesses.utils.mcp import call_mcp, connect_mcp
    from verifiers.v1.interception.server import InterceptionServer
except ImportError as error:
    _socket.sendall(_line({"error": str(error), "is_missing": True}))
    sys.exit(1)

__all__ = ["Chat"]


class Chat(vf.Harness[vf.HarnessConfig]):  # type: ignore[misc]
    """Lets the model write, and call the environment's tools, until it calls none. It executes
    nothing itself, and is no process of its own, unlike the library's harnesses."""

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_MCP = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: Any,
        trace: Any,
        runtime: Any,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: Any,
    ) -> Any:
        messages = _opening(*self.resolve_prompt(data))
        servers = {name: {"url": url} for name, url in mcp_urls.items()}
        async with AsyncExitStack() as stack:
            tools, *called = await connect_mcp({"mcpServers": servers}, stack)
            transport = httpx.AsyncClient(timeout=None, trust_env=False)  # it is on this machine
            client = await stack.enter_async_context(
                AsyncOpenAI(base_url=endpoint, api_key=secret, max_retries=0, http_client=transport)
            )
            more = {"tools": tools} if tools else {}
            try:
                while calls := await self._turn(client, ctx.model, messages, more):
                    for call in calls:
                        messages.append(await _call(call, *called))
            except APIStatusError as error:
                if not is_context_overflow(error):  # else scored as far as it came
                    raise
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")

    async def _turn(
        self, client: Any, model: str, messages: list[Any], more: dict[str, Any]
    ) -> list[Any]:
        """Appends the model's message; returns its calls of tools."""
        reply = await client.chat.completions.create(model=model, messages=messages, **more)
        message = reply.choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        return message.tool_calls or []


def _opening(system: str | None, prompt: Any) -> list[dict[str, Any]]:
    messages = [{"role": "system", "content": system}] if system else []
    if isinstance(prompt, str):
        return [*messages, {"role": "user", "content": prompt}]
    return [*messages, *map(message_to_wire, prompt or [])]


async def _call(call: Any, dispatch: dict[str, Any], servers: dict[str, Any]) -> dict[str, Any]:
    """The result of a tool, or the error that the model can mend, as a message."""
    name, content = call.function.name, ""
    try:
        arguments = json.loads(call.function.arguments or "{}")
    except json.JSONDecodeError as error:
        content = f"error: the arguments are not JSON: {error}"
    else:
        if name not in dispatch:
            content = f"error: there is no tool {name!r}"
        elif not isinstance(arguments, dict):
            content = "error: the arguments must be a JSON object"
        else:
            content = await call_mcp(servers, dispatch, name, arguments)
    return {"role": "tool", "tool_call_id": call.id, "content": content}


class _SessionClient(EvalClient):  # type: ignore[misc]
    """Forwards to the endpoint of the run. All share one pool of connections."""

    def __init__(self, config: Any, client: httpx.AsyncClient) -> None:
        self.base_url, self.api_key, self.client = config.base_url, "none", client
        self.headers: dict[str, str] = {}


def _share_connections(client: httpx.AsyncClient) -> None:
    # The library keeps a client of its own, with a pool of connections, for each address until the
    # environment ends, and each episode has its own address.
    client_of = InterceptionServer._client

    def find(server: Any, config: Any) -> Any:
        if config.api_key_var == SESSION:
            return _SessionClient(config, client)
        return client_of(server, config)

    InterceptionServer._client = find


def load(settings: dict[str, Any]) -> tuple[Any, Any]:
    """The environment with these settings, and its tasks. Raises whatever it raises."""
    # The library finds a harness by the name of its module.
    sys.modules[CHAT] = sys.modules[__name__]
    select = vf.SelectConfig.model_validate(settings.pop("select", {}))
    kind = vf.env_config_type(settings["taskset"]["id"], settings.get("id", ""))
    own_harness = vf.default_harness_id(settings["taskset"]["id"])
    for role, field in kind.model_fields.items():
        if isinstance(field.default, vf.AgentConfig):
            _complete(role, settings.setdefault(role, {}), field.default, own_harness)
    environment = vf.load_environment(kind.model_validate(settings))
    tasks = environment.taskset.select(select)
    if not tasks.bounded:
        raise ValueError("it has tasks without end; set task.params.select.limit")
    return environment, tasks


def _complete(role: str, settings: dict[str, Any], default: Any, own_harness: str) -> None:
    """Fills in the harness and the place of an agent where neither the settings nor the environment
    say which. The library's are a shell, in a sandbox of a service."""
    if default.harness is None and own_harness == "bash":
        settings.setdefault("harness", {"id": CHAT})
    if "runtime" in settings or "runtime" in default.model_fields_set:
        return
    harness = settings.get("harness") or {"id": own_harness}
    if default.harness is not None and "harness" not in settings:
        harness = {"id": default.harness.id}
    if vf.load_harness(vf.harness_config_type(harness["id"])(**harness)).EXECUTES_CODE:
        raise ValueError(
            f"the harness {harness['id']!r} of {role!r} runs programs for the model; say where with"
            f" task.params.{role}.runtime, as {{type: docker}}, or {{type: subprocess}} to run them"
            " unprotected on this machine"
        )
    settings["runtime"] = {"type": "subprocess"}


def rows(environment: Any, tasks: Iterable[Any]) -> Iterable[dict[str, Any]]:
    """The tasks, with their conversations as `opening`. Raises ValueError for one without."""
    for task in tasks:
        data = task.data
        if data.prompt is None and isinstance(environment, vf.SingleAgentEnv):
            raise ValueError(f"its task {data.idx} has no prompt")
        opening = _opening(data.system_prompt, data.prompt)
        yield {"task": data.model_dump(mode="json"), "opening": opening}


class Episodes:
    """Runs the episodes of an environment."""

    def __init__(self, environment: Any, writer: asyncio.StreamWriter) -> None:
        self._environment = environment
        self._writer = writer
        self._running: dict[int, asyncio.Task[None]] = {}

    async def serve(self, reader: asyncio.StreamReader) -> None:
        """Returns when its input has ended."""
        try:
            while line := await reader.readline():
                message = json.loads(line)
                if "cancel" in message:
                    self._cancel(message["cancel"])
                else:
                    task = asyncio.create_task(self._play(message))
                    self._running[message["id"]] = task
        finally:
            left = list(self._running.values())
            for task in left:
                task.cancel()
            await asyncio.gather(*left, return_exceptions=True)

    def _cancel(self, number: int) -> None:
        if task := self._running.get(number):
            task.cancel()
        self._writer.write(_line({"cancelled": number}))

    async def _play(self, request: dict[str, Any]) -> None:
        number = request["id"]
        try:
            reply = _line({"id": number, **await self._run(request)})
        except (Exception, SystemExit) as error:
            reply = _line({"id": number, "error": f"{type(error).__name__}: {error}"})
        finally:
            del self._running[number]
        self._writer.write(reply)

    async def _run(self, request: dict[str, Any]) -> dict[str, Any]:
        environment = self._environment
        kind = type(environment.taskset).task_type()
        data = kind.data_type().model_validate(request["row"])
        client = vf.EvalClientConfig(base_url=request["base_url"], api_key_var=SESSION)
        [slot] = environment.slots(kind(data, environment.config.taskset.task))
        episode = await environment.run_slot(
            slot, vf.ModelContext(model=request["model"], client=client), on_trace=_check_role
        )
        if not episode.ok:
            errors = [*episode.errors, *(e for trace in episode.traces for e in trace.errors)]
            return {"error": "; ".join(f"{e.type}: {e.message}" for e in errors) or "no reason"}
        traces = [trace for trace in episode.traces if _is_policy(trace)]
        if not traces:
            return {"error": "none of its agents is the run's model"}
        metrics: dict[str, list[float]] = {}
        for trace in traces:
            parts = {name: r.score for name, r in trace.rewards.items() if r is not None}
            for name, value in (parts | trace.metrics).items():
                if value is not None:
                    metrics.setdefault(name, []).append(float(value))
        return {
            "reward": fmean(trace.reward for trace in traces),
            "metrics": {name: fmean(values) for name, values in metrics.items()},
        }


def _is_policy(trace: Any) -> bool:
    client = trace.agent.config.client
    return client is not None and client.api_key_var == SESSION


def _check_role(trace: Any) -> None:
    if _is_policy(trace) and not trace.agent.trainable:
        role = trace.agent.name
        raise ValueError(
            f"its agent {role!r} must not be trained, and all that the run's model says is; give "
            f"it another one with task.params.{role}.model and task.params.{role}.client"
        )


async def _serve(environment: Any) -> None:
    reader, writer = await asyncio.open_connection(sock=_socket, limit=LINE_LIMIT)
    async with (
        httpx.AsyncClient(
            timeout=None, trust_env=False, limits=httpx.Limits(max_connections=None)
        ) as client,
        environment.serving(),
    ):
        _share_connections(client)
        episodes = Episodes(environment, writer)
        serving = asyncio.create_task(episodes.serve(reader))
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, serving.cancel)
        writer.write(_line({"is_ready": True}))
        await asyncio.wait([serving])
    writer.close()


def _end_with(parent: int) -> None:
    """Kills this process and the tool servers in its group if `parent` has ended and code of the
    environment blocks the event loop, which then sees neither the signal nor the end of input."""
    select.select([parent], [], [])
    time.sleep(ORPHAN_S)
    os.killpg(0, signal.SIGKILL)


def _words(error: BaseException) -> str:
    if isinstance(error, ValidationError):  # its own text has several lines
        places = [(".".join(map(str, one["loc"])), one["msg"]) for one in error.errors()]
        return "; ".join(f"{place}: {words}" for place, words in places)
    return f"{type(error).__name__}: {error}"


def main() -> None:
    parent = os.pidfd_open(os.getppid())
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    # Environments may print, and httpx would log addresses with keys in them.
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(message)s")
    os.dup2(2, 1)
    with _socket.makefile("rb") as requests:
        setup = json.loads(requests.readline())
    try:
        environment, tasks = load(setup["environment"])
        if setup["rows"]:
            with _socket.makefile("wb") as replies:
                for row in rows(environment, tasks):
                    replies.write(_line({"row": row}))
                replies.write(_line({"is_ready": True}))
            return
    except (Exception, SystemExit) as error:  # environments are third-party packages
        _socket.sendall(_line({"error": _words(error)}))
        return
    asyncio.run(_serve(environment))


if __name__ == "__main__":
    main()
