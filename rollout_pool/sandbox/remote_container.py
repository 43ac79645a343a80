"""Containers of a service on the wire of SandboxFusion.

It keeps nothing, so the folder travels with each command, as an archive, and comes back.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import shlex

import httpx

from configs.container_schema import ContainerConfig
from rollout_pool.sandbox.containers import (
    GRACE_S,
    MAX_OUTPUT_BYTES,
    Container,
    ContainerError,
    Ran,
)

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
            if not (key := os.environ.get(config.api_key_env, "")):
                raise ContainerError(
                    f"task.container.api_key_env={config.api_key_env!r}: this environment variable "
                    "is not set for the rollout workers; set it before launching the run"
                )
            self._headers["Authorization"] = f"Bearer {key}"

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
        url, content = f"{str(self._config.url).rstrip('/')}/run_code", bytearray()
        async with (
            httpx.AsyncClient(headers=self._headers, timeout=None) as client,
            client.stream("POST", url, json=body) as response,
        ):
            response.raise_for_status()
            async for part in response.aiter_raw():
                content += part
                if len(content) > MAX_RESPONSE_BYTES:
                    raise httpx.ReadError(
                        f"more than {MAX_RESPONSE_BYTES} bytes: the folder is too large for it"
                    )
        return bytes(content)

    async def _do(self, verb: str, limit_s: float) -> Ran:
        return Ran(b"", 0, True)  # there is nothing to start or to remove


def _encoded(files: dict[str, bytes]) -> dict[str, str]:
    return {name: base64.b64encode(content).decode() for name, content in files.items()}


def make_container(config: ContainerConfig, image: str = "") -> Container:
    """A container of the kind. Raises ContainerError if its program or key is missing."""
    return RemoteContainer(config) if config.url else Container(config, image)
