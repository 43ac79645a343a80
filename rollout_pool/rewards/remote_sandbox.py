"""Runs the model's programs at a sandbox service.

The wire is that of SandboxFusion, POST URL/run_code for each program and input:

    {"code": "print(2 * int(input()))", "language": "python", "stdin": "21",
     "run_timeout": 10, "compile_timeout": 10, "memory_limit_MB": 512}
    -> {"status": "Success", "run_result": {"status": "Finished", "return_code": 0,
        "stdout": "42\n", "stderr": "", "execution_time": 0.05}, "compile_result": null}

Statements that test a program follow its code, and then print a word that the program does not
know. `statements_at`, which SandboxFusion ignores, is where they begin: our own service runs them
in a process of their own.
"""

from __future__ import annotations

import dataclasses
import math
import secrets
import signal
from dataclasses import dataclass
from typing import Any, Literal

import httpx
from msgspec import ValidationError, convert

from configs.rollout_schema import RewardConfig
from rollout_pool.rewards.service import Refused, RemoteFailure, ServiceClient
from rollout_pool.sandbox.run import SandboxLimits, SandboxResult

PATH = "/run_code"


@dataclass(kw_only=True, slots=True, frozen=True)
class _Command:
    status: str
    """Finished, TimeLimitExceeded or Error."""
    return_code: int | None = None
    execution_time: float | None = None
    """In seconds."""
    stdout: str | None = None
    stderr: str | None = None

    @property
    def has_succeeded(self) -> bool:
        return self.status == "Finished" and not self.return_code


@dataclass(kw_only=True, slots=True, frozen=True)
class _Response:
    status: Literal["Success", "Failed"]
    compile_result: _Command | None = None
    run_result: _Command | None = None


class RemoteSandbox(ServiceClient):
    """A `Sandbox`: the service of one reward part."""

    def __init__(self, part: str, config: RewardConfig) -> None:
        assert config.url is not None, part
        super().__init__(part, config, path="" if config.url.endswith(PATH) else PATH)
        self._setting = f"task.rewards.{part}"
        self._language = config.languages[0] if config.languages else "python"

    async def run(
        self, code: str, *, limits: SandboxLimits, stdin: str = "", statements: str | None = None
    ) -> SandboxResult:
        """Raises RemoteFailure."""
        body: dict[str, Any] = {
            "code": code,
            "language": self._language,
            "stdin": stdin,
            "run_timeout": limits.wall_time_s,
            "compile_timeout": self.config.compile_time_s,
            "memory_limit_MB": math.ceil(limits.memory_bytes / 2**20),
        }
        word = secrets.token_hex(16)
        if statements is not None:
            printing = f"import sys; sys.stdout.write({word!r})"
            body |= {"code": f"{code}\n\n{statements}\n{printing}", "statements_at": len(code)}
        # Code from a model may contain lone surrogates, which JSON readers refuse.
        body["code"] = body["code"].encode("utf-8", "replace").decode()
        try:
            result = _result(await self.ask(body, secrets.token_hex(16)), limits)
        except RemoteFailure as error:
            raise RemoteFailure(
                f"{self._setting}.url: {error}; start the sandbox there (make sandbox), or correct "
                f"{self._setting}.url, api_key_env or languages"
            ) from error
        return dataclasses.replace(result, held=statements is not None and word in result.stdout)

    def checked(self, response: httpx.Response, content: bytes) -> dict[str, Any]:
        parsed = super().checked(response, content)
        if parsed.get("status") == "SandboxError":
            raise Refused(f"SandboxError: {str(parsed.get('message'))[:200]}")
        return parsed


def _result(response: dict[str, Any], limits: SandboxLimits) -> SandboxResult:
    """Raises RemoteFailure for a response of another form."""
    try:
        read = convert(response, _Response)
    except ValidationError as error:
        raise RemoteFailure(f"the response is not that of a sandbox: {error}") from error
    compiled, ran = read.compile_result, read.run_result
    does_compile = compiled is None or compiled.has_succeeded
    last = ran if does_compile else compiled
    if last is None:
        raise RemoteFailure("the response has no run_result")
    reason = None if read.status == "Success" and last.has_succeeded else "exit"
    if not does_compile:
        reason = "compile"
    elif last.status == "TimeLimitExceeded":
        reason = "wall_time"
    seconds = [one.execution_time or 0.0 for one in (compiled, ran) if one is not None]
    return SandboxResult(
        stdout=last.stdout or "",
        stderr=last.stderr or "",
        exit_code=-signal.SIGKILL if reason == "wall_time" else last.return_code or 0,
        reason=reason,
        seconds=max(sum(seconds), limits.wall_time_s if reason == "wall_time" else 0.0),
        layers=(),
    )


async def check_remote_sandbox(part: str, config: RewardConfig, limits: SandboxLimits) -> None:
    """Raises ValueError for a service that is not there or runs no programs with such settings."""
    sandbox = RemoteSandbox(part, config)
    try:
        result = await sandbox.run("", limits=limits)
    except RemoteFailure as error:
        raise ValueError(str(error)) from error
    finally:
        await sandbox.close()
    # In another language an empty program may be an error.
    if result.reason is not None and not config.languages:
        raise ValueError(
            f"task.rewards.{part}.url={config.url!r}: an empty program fails there: "
            f"{result.explanation}; give it more (task.rewards.{part}.memory_bytes, wall_time_s), "
            "or correct the service"
        )
