"""Containers of a service on the wire of SandboxFusion, or of E2B.

SandboxFusion keeps nothing, so the folder travels with each command, as an archive, and comes back.
E2B keeps a sandbox for each episode:

    POST /sandboxes ──► [ POST /files (standard input) ──► POST /process.Process/Start ] ──► DELETE
"""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import os
import re
import secrets
import shlex
import ssl
import struct
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from functools import cache
from typing import Any

import httpx

from configs.choices import ContainerKind
from configs.container_schema import ContainerConfig
from rollout_pool.sandbox.containers import (
    GRACE_S,
    MAX_OUTPUT_BYTES,
    START_S,
    Container,
    ContainerError,
    Printed,
    Ran,
    label,
)

log = logging.getLogger(__name__)

MAX_RESPONSE_BYTES = 16 * 2**20
_SCRIPT = """\
mkdir work && cd work && {{ [ ! -s ../folder.tar ] || tar -xf ../folder.tar; }} || exit 1
timeout -s KILL {timeout_s:g} sh -c {command} <../stdin 2>&1; code=$?
tar -cf ../folder.tar .; exit $code"""


class RemoteContainer(Container):
    """A folder at the service at task.container.url."""

    def __init__(self, config: ContainerConfig) -> None:
        """Raises ContainerError if the key is missing."""
        self._config, self._folder = config, b""
        self._kind = f"task.container.url={config.url!r}"
        self._headers = {"Accept-Encoding": "identity"}
        if config.api_key_env is not None:
            self._headers["Authorization"] = f"Bearer {_key(config.api_key_env)}"

    async def run(self, command: str, stdin: bytes = b"") -> Ran:
        timeout_s, files = self._config.timeout_s, {"folder.tar": self._folder, "stdin": stdin}
        body = {
            "code": _SCRIPT.format(timeout_s=timeout_s, command=shlex.quote(command)),
            "language": "bash",
            "run_timeout": timeout_s + GRACE_S,
            "memory_limit_MB": self._config.memory_bytes // 2**20,
            "files": await asyncio.to_thread(_encoded, files),
            "fetch_files": ["folder.tar"],
        }
        try:
            async with asyncio.timeout(timeout_s + 2 * GRACE_S):
                response = json.loads(await self._post(body))
            result = response["run_result"]
            output, code = str(result["stdout"] or "").encode(), int(result["return_code"])
            folder = response["files"]["folder.tar"]
            self._folder = await asyncio.to_thread(base64.b64decode, folder)
        except (httpx.HTTPError, TimeoutError, ValueError, LookupError, TypeError) as error:
            raise ContainerError(f"{self._kind}: {type(error).__name__}: {error}") from error
        return Ran(output[-MAX_OUTPUT_BYTES:], code, len(output) <= MAX_OUTPUT_BYTES)

    async def _post(self, body: dict[str, object]) -> bytes:
        url = f"{str(self._config.url).rstrip('/')}/run_code"
        async with (
            httpx.AsyncClient(headers=self._headers, timeout=None, verify=_tls()) as client,
            client.stream("POST", url, json=body) as response,
        ):
            response.raise_for_status()
            return await _whole(response, "the folder is too large for it")

    async def _do(self, verb: str, limit_s: float) -> Ran:
        return Ran(b"", 0, True)  # there is nothing to start or to remove


LEASE_S = 3600
"""A sandbox of E2B ends by itself about so long after its last command, or its creation."""
_PROLONG_S = 60
_PORT = 49983
_ROOT = {"Authorization": "Basic cm9vdDo="}
"""The user `root` of a sandbox, who may make task.container.workdir."""
_ENVELOPE = struct.Struct(">BI")
_ODD_JSON = (TypeError, AttributeError)
_COMPRESSED, _END = 1, 2
"""Flags of an envelope, in which Connect sends each message of a stream."""


class E2bContainer(Container):
    """A sandbox of E2B, made by the API at task.container.url."""

    def __init__(self, config: ContainerConfig, image: str = "") -> None:
        """Raises ContainerError if the key is missing."""
        self._config, self._image, self._api = config, image, str(config.url).rstrip("/")
        self._kind = f"task.container.url={config.url!r}"
        self._key = _key(str(config.api_key_env))
        self._sandbox, self._at, self._headers = "", "", dict[str, str]()
        self._prolonged = 0.0

    async def run(self, command: str, stdin: bytes = b"") -> Ran:
        async with self._limited(self._config.timeout_s + 2 * GRACE_S):
            return await self._run(command, stdin, self._config.workdir)

    async def sweep(self) -> None:
        query = {"metadata": f"leash={label()}", "state": "running,paused"}
        removed = set[str]()
        async with self._limited(START_S):
            while True:  # a reply has the first ones alone
                found = json.loads(await self._ask("GET", "/v2/sandboxes", params=query))
                left = {_name(one["sandboxID"]) for one in found} - removed
                if not (gone := {name for name in left if await self._is_removed(name)}):
                    return
                removed |= gone

    async def _is_removed(self, sandbox: str) -> bool:
        try:
            await self._ask("DELETE", f"/sandboxes/{sandbox}")
        except ContainerError as error:
            log.warning("a sandbox was not removed: %s", error)
            return False
        return True

    async def _do(self, verb: str, limit_s: float) -> Ran:
        async with self._limited(limit_s):
            if verb == "start":
                await self._create()
            elif self._sandbox:
                await self._ask("DELETE", f"/sandboxes/{self._sandbox}")
        return Ran(b"", 0, True)

    async def _create(self) -> None:
        body = {
            "templateID": self._image,
            "timeout": LEASE_S,
            "secure": True,
            "allow_internet_access": self._config.network,
            "metadata": {"leash": label()},
        }
        made, self._prolonged = await self._ask("POST", "/sandboxes", json=body), time.monotonic()
        reply = json.loads(made)
        self._sandbox = _name(reply["sandboxID"])
        scheme, _, host = self._api.partition("://")
        domain = reply.get("domain") or host.removeprefix("api.") * host.startswith("api.")
        # A service of one address finds the sandbox by the headers.
        self._at = f"{scheme}://{_PORT}-{self._sandbox}.{domain}" if domain else self._api
        token = reply.get("envdAccessToken")
        self._headers = _ROOT | ({"X-Access-Token": token} if token else {})
        self._headers |= {"E2b-Sandbox-Id": self._sandbox, "E2b-Sandbox-Port": str(_PORT)}
        ran = await self._run(f"mkdir -p {shlex.quote(self._config.workdir)}", b"", "/")
        if ran.exit_code:
            raise ContainerError(
                f"task.container.workdir={self._config.workdir!r}: {self._kind} cannot make it: "
                f"{ran.text.strip()[:500]}; set a folder that can be made in the template"
            )

    async def _run(self, command: str, stdin: bytes, folder: str) -> Ran:
        now = time.monotonic()
        if now - self._prolonged > _PROLONG_S:
            path = f"/sandboxes/{self._sandbox}/timeout"
            await self._ask("POST", path, json={"timeout": LEASE_S})
            self._prolonged = now
        given = "</dev/null"
        if stdin:
            path = f"/tmp/.stdin-{secrets.token_hex(8)}"
            params, given = {"path": path, "username": "root"}, f"<{path} && rm -f {path}"
            await self._ask("POST", f"{self._at}/files", params=params, files={"file": stdin})
        # In the sandbox: there it would go on if only the request were cut.
        line = f'exec 2>&1 {given}; exec timeout -s KILL "$0" sh -c "$1"'
        words = ["-c", line, f"{self._config.timeout_s:g}", command]
        process = {"cmd": "/bin/sh", "args": words, "cwd": folder}
        message = json.dumps({"process": process, "stdin": False}).encode()
        headers = {"Content-Type": "application/connect+json", "Connect-Protocol-Version": "1"}
        headers["Keepalive-Ping-Interval"] = "50"  # a proxy between would cut a quiet stream
        headers["Connect-Timeout-Ms"] = str(int(1000 * (self._config.timeout_s + GRACE_S)))
        content, printed, exit_code = _ENVELOPE.pack(0, len(message)) + message, Printed(), None
        url = f"{self._at}/process.Process/Start"
        async with self._asked("POST", url, headers, content=content) as response:
            async for said in _messages(response):
                event = said.get("event", {})
                data, end = event.get("data", {}), event.get("end")
                for stream in ("stdout", "stderr"):
                    printed.add(base64.b64decode(data.get(stream, "")))
                if end is not None:
                    exit_code = int(end.get("exitCode", 0)) if end.get("exited") else 137
        if exit_code is None:
            raise httpx.ReadError("the stream of the command ended before the command")
        return printed.ran(exit_code)

    async def _ask(self, method: str, url: str, **request: Any) -> bytes:
        async with self._asked(method, url, **request) as response:
            return await _whole(response, f"from {url}")

    @asynccontextmanager
    async def _asked(
        self, method: str, url: str, headers: Mapping[str, str] | None = None, **request: Any
    ) -> AsyncIterator[httpx.Response]:
        """A path is the API's, which alone gets the key; another URL is the sandbox's."""
        of_api = url.startswith("/")
        own = {"X-API-Key": self._key} if of_api else self._headers
        every = {"Accept-Encoding": "identity", **own, **(headers or {})}
        async with (
            httpx.AsyncClient(headers=every, timeout=None, verify=_tls()) as client,
            client.stream(method, self._api * of_api + url, **request) as response,
        ):
            is_gone = method == "DELETE" and response.status_code == httpx.codes.NOT_FOUND
            if not (response.is_success or is_gone):
                said = await anext(response.aiter_raw(2**10), b"")  # and no more of it
                why = said.decode("utf-8", "replace").strip()[:500].replace(self._key, "KEY")
                raise ContainerError(
                    f"{self._kind}: {method} {url} got {response.status_code}: {why}; correct it, "
                    "the key in task.container.api_key_env, or task.container.image, the template"
                )
            yield response

    @asynccontextmanager
    async def _limited(self, limit_s: float) -> AsyncIterator[None]:
        """Every other failure as a ContainerError that names the service."""
        try:
            async with asyncio.timeout(limit_s):
                yield
        except ContainerError:
            raise
        except (httpx.HTTPError, TimeoutError, ValueError, LookupError, *_ODD_JSON) as error:
            why = f"{type(error).__name__}: {error}".replace(self._key, "KEY")
            raise ContainerError(f"{self._kind}: {why}") from error


async def _whole(response: httpx.Response, what: str) -> bytes:
    """Raises ReadError for more than a reply may have."""
    content = bytearray()
    async for part in response.aiter_raw():
        content += part
        if len(content) > MAX_RESPONSE_BYTES:
            raise httpx.ReadError(f"more than {MAX_RESPONSE_BYTES} bytes: {what}")
    return bytes(content)


async def _messages(response: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    """The messages of a stream of Connect. Raises ReadError for the error that it may end with."""
    came = bytearray()
    async for part in response.aiter_raw():
        came += part
        while len(came) >= _ENVELOPE.size:
            flags, length = _ENVELOPE.unpack_from(came)
            if flags & _COMPRESSED or length > MAX_RESPONSE_BYTES:
                raise httpx.ReadError(f"a message of {length} bytes with flags {flags}")
            end = _ENVELOPE.size + length
            if len(came) < end:
                break
            said = json.loads(came[_ENVELOPE.size : end])
            del came[:end]
            if not flags & _END:
                yield said
            elif said.get("error"):
                raise httpx.ReadError(f"{said['error']}"[:500])


@cache
def _tls() -> ssl.SSLContext:
    """To load the certificates takes longer than ten requests."""
    return httpx.create_ssl_context()


def _name(sandbox: object) -> str:
    """Raises ValueError for what would lead elsewhere as a part of an address."""
    if not isinstance(sandbox, str) or not re.fullmatch(r"[A-Za-z0-9_-]{1,100}", sandbox):
        raise ValueError(f"sandboxID={sandbox!r:.100} is no name of a sandbox")
    return sandbox


def _key(variable: str) -> str:
    if key := os.environ.get(variable, ""):
        return key
    raise ContainerError(
        f"task.container.api_key_env={variable!r}: this environment variable is not set for the "
        "rollout workers; set it before launching the run"
    )


def _encoded(files: dict[str, bytes]) -> dict[str, str]:
    return {name: base64.b64encode(content).decode() for name, content in files.items()}


def make_container(config: ContainerConfig, image: str = "") -> Container:
    """A container of the kind. Raises ContainerError if its program or key is missing."""
    if config.kind is ContainerKind.e2b:
        return E2bContainer(config, image)
    return RemoteContainer(config) if config.url else Container(config, image)
