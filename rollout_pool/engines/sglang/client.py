"""Client of SGLang's HTTP API.

One client per process and engine. `batching` decides how samples share a call to /generate, and
knows the format of that call.
"""

from __future__ import annotations

import asyncio
import json
import math
import time
import zlib
from collections.abc import AsyncGenerator, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, NamedTuple, cast

import aiohttp
import msgspec

from buffer.probes import Agreement, Probes
from configs.choices import PauseMode
from rollout_pool.engines.sglang.batching import BatchingClient, CallRefused, read_version
from rollout_pool.sampling.engine_client import EngineError, EngineLoad

GENERATE_PATH = "/generate"
LOADS_PATH = "/v1/loads?include=core"
FROM_DISK_PATH = "/update_weights_from_disk"
FROM_IPC_PATH = "/update_weights_from_ipc"
LOAD_ADAPTER_PATH = "/load_lora_adapter"
CONNECT_TIMEOUT_S = 10.0
IDLE_TIMEOUT_S = 30.0
"""How long an idle connection is kept. Nearly 2,000 engines are asked for their load meanwhile
(`engine_watch.ASKED_PER_S`), and so none of them by a new connection."""
CONTROL_TIMEOUT_S = 60.0
"""For calls that a healthy engine replies to at once."""
ABORT_TIMEOUT_S = 5.0
ABORTS_AT_ONCE = 4
"""A connection each: a hundred new ones take longer than a hundred calls."""
LOAD_TIMEOUT_S = 5.0
STEPS_TO_END = 2
"""Steps of the scheduler until an abort has taken effect: the one under way, and the next."""
MAX_FLUSHES = 20
_ALL: dict[str, object] = {"abort_all": True}
_OF_THE_CALL = (400, 413, 422)
"""Statuses of a call that any server would refuse."""


class Reply(NamedTuple):
    """A response that has been read to its end."""

    status: int
    body: bytes

    def json(self) -> Any:
        """Raises ValueError."""
        return _decode(self.body)

    @property
    def text(self) -> str:
        return self.body.decode(errors="replace")


@dataclass(kw_only=True, eq=False, repr=False)
class SGLangClient(BatchingClient):
    """Calls the server at `url`, from one event loop. Every method may raise EngineError."""

    key: str
    request_timeout_s: float
    """Bounds the time between two parts of a response, not the whole."""
    has_overlap_schedule: bool = True
    """The server returns a token one step later."""
    needs_seeds: bool = False
    """The server samples by a seed of each request, as deterministic inference does."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._headers = {"Authorization": f"Bearer {self.key}"}
        self._opened: aiohttp.ClientSession | None = None

    @property
    def _http(self) -> aiohttp.ClientSession:
        """Opened by the first call, in its loop."""
        if self._opened is None:
            connect_s = min(CONNECT_TIMEOUT_S, self.request_timeout_s)
            self._opened = aiohttp.ClientSession(
                self.url,
                headers={**self._headers, "Content-Type": "application/json"},
                timeout=aiohttp.ClientTimeout(
                    sock_connect=connect_s, sock_read=self.request_timeout_s
                ),
                # No limit: requests must queue at the engine, where the router can see them.
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE_TIMEOUT_S),
                cookie_jar=aiohttp.DummyCookieJar(),
            )
        return self._opened

    async def load(self) -> EngineLoad | None:
        response = await self._ask("GET", LOADS_PATH, None, LOAD_TIMEOUT_S)
        if response.status != HTTPStatus.OK:
            return None
        try:
            if not (loads := response.json()["loads"]):
                return None
            return EngineLoad(
                num_running=sum(load["num_running_reqs"] for load in loads),
                num_queued=sum(load["num_waiting_reqs"] for load in loads),
                num_tokens=sum(load["num_total_tokens"] for load in loads),
                capacity=sum(load["max_total_num_tokens"] for load in loads),
                kv_usage=max(load["token_usage"] for load in loads),
            )
        except (KeyError, TypeError, ValueError) as error:  # a program that got the engine's port
            raise EngineError(
                f"a server other than {self.name} answers at {self.url}{LOADS_PATH}: "
                f"{response.text[:500]}"
            ) from error

    async def _post_generate(self, body: Mapping[str, object]) -> AsyncGenerator[dict[str, Any]]:
        """The JSON objects of a server-sent event stream."""
        path = GENERATE_PATH
        if self.needs_seeds:
            # Without one all get the same, and the samples of a group would be equal.
            settings = cast("list[dict[str, object]]", body["sampling_params"])
            for rid, of_one in zip(cast("list[str]", body["rid"]), settings, strict=True):
                of_one["sampling_seed"] = zlib.crc32(rid.encode())
        try:
            # aiohttp's own limits leave out a server that does not read what it is sent.
            async with asyncio.timeout(CONNECT_TIMEOUT_S + self.request_timeout_s):
                response = await self._http.post(
                    path, data=msgspec.json.encode(body), allow_redirects=False
                )
            async with response:
                if response.status != HTTPStatus.OK:
                    error = self._refusal(path, response.status, await response.text())
                    raise CallRefused(str(error)) if response.status in _OF_THE_CALL else error
                async for line in _lines(response.content):
                    if line.startswith(b"data: {"):
                        part = _decode(line[len(b"data: ") :])
                        if "error" in part:
                            raise CallRefused(f"{self.name} refused {path}: {part['error']}")
                        yield part
        except (aiohttp.ClientError, TimeoutError) as failure:
            raise self._failure(path, failure) from failure

    async def _post_abort(self, request_ids: Collection[str] | None) -> None:
        """Best effort: a dead engine needs no abort."""
        each: list[dict[str, object]] = [{"rid": rid} for rid in request_ids or ()]
        bodies = iter([_ALL] if request_ids is None else each)

        async def send() -> None:
            with suppress(EngineError):
                for body in bodies:
                    await self._ask("POST", "/abort_request", body, ABORT_TIMEOUT_S)

        with suppress(TimeoutError):
            async with asyncio.timeout(ABORT_TIMEOUT_S):
                await asyncio.gather(*(send() for _ in range(ABORTS_AT_ONCE)))

    async def compare(self, probes: Probes) -> Agreement:
        texts, version = probes.texts, probes.version
        body = {
            "input_ids": [tokens for tokens, _ in texts],
            "sampling_params": [{"max_new_tokens": 1, "temperature": 1.0}] * len(texts),
            "return_logprob": True,
            "logprob_start_len": [start - 1 for _, start in texts],
            # A commit may have left prefixes of older weights in the cache.
            "extra_key": f"probes of {version}",
        }
        results = (await self._call("POST", GENERATE_PATH, body, self.request_timeout_s)).json()
        try:
            served = {result["meta_info"]["weight_version"] for result in results}
            # The first one is before those that are compared, and has none.
            found = [result["meta_info"]["input_token_logprobs"][1:] for result in results]
            scores = [[math.nan if lp is None else float(lp) for lp, *_ in one] for one in found]
        except (KeyError, TypeError, ValueError) as error:
            raise EngineError(f"{self.name} gave no log-probabilities of a prompt") from error
        if served != {str(version)}:
            raise EngineError(f"{self.name} serves {served} and not version {version}")
        if [len(tokens) - start for tokens, start in texts] != [len(one) for one in scores]:
            raise EngineError(f"{self.name} gave log-probabilities of other tokens of a prompt")
        return probes.compare(self.name, scores)

    # Weights -------------------------------------------------------------------------------------

    async def drain(self, limit_s: float) -> bool:
        deadline = time.monotonic() + limit_s
        while (left_s := deadline - time.monotonic()) > 0 and await self._flush_cache(left_s):
            # `retract` would compute requests that came in meanwhile again, and count them as lost
            # for lack of memory.
            await self._post("/pause_generation", {"mode": "in_place"}, CONTROL_TIMEOUT_S)
            if await self._flush_cache():
                return True
            await self.resume()  # some came in before the pause
        return False

    async def pause(self, mode: PauseMode) -> None:
        if mode in (PauseMode.retract, PauseMode.in_place):
            await self._post("/pause_generation", {"mode": mode.value}, CONTROL_TIMEOUT_S)
        else:
            await self._end_all()

    async def _end_all(self) -> None:
        """Ends all requests, and pauses without any and without a cached prefix."""
        await self._post("/abort_request", _ALL, CONTROL_TIMEOUT_S)
        # Those that run end with their next token, and return all so far. If they were paused
        # before, they would lose what they have not streamed yet. The scheduler replies once per
        # step, so this waits for the steps and not for requests that keep coming.
        for _ in range(STEPS_TO_END + self.has_overlap_schedule):
            if await self._flush_cache():
                break
        await self._post("/pause_generation", {"mode": "retract"}, CONTROL_TIMEOUT_S)
        for _ in range(MAX_FLUSHES):
            if await self._flush_cache():
                return
            # Some came in before the pause.
            await self._post("/abort_request", _ALL, CONTROL_TIMEOUT_S)
        raise EngineError(f"{self.name} still holds requests after {MAX_FLUSHES} aborts of all")

    async def _flush_cache(self, wait_s: float = 0.0) -> bool:
        """Empties the prefix cache, once the engine has no request. False if it still has some
        after `wait_s`, and keeps its cache."""
        path = f"/flush_cache?timeout={wait_s:g}"
        response = await self._ask("POST", path, None, wait_s + CONTROL_TIMEOUT_S)
        if response.status not in (HTTPStatus.OK, HTTPStatus.BAD_REQUEST):
            raise self._refusal(path, response.status, response.text)
        return response.status == HTTPStatus.OK

    async def resume(self) -> None:
        await self._post("/continue_generation", {}, CONTROL_TIMEOUT_S)

    async def served_version(self) -> int:
        info = await self._get("/model_info", CONTROL_TIMEOUT_S)
        return read_version(self.name, str(info["weight_version"]))

    async def weight_hashes(self, timeout_s: float) -> dict[str, list[str]]:
        response = await self._call("POST", "/weights_checker", {"action": "checksum"}, timeout_s)
        hashes: dict[str, list[str]] = {}
        for rank in response.json().get("ranks", ()):
            for name, value in rank["checksums"].items():
                hashes.setdefault(name, []).append(value)
        if not hashes:
            raise EngineError(f"{self.name} lists no parameters in /weights_checker")
        # Ranks of several groups (--dp-size) reply in any order.
        return {name: sorted(values) for name, values in hashes.items()}

    async def require(self, path: str, setting: str) -> None:
        """Raises ValueError, which names `setting`, if the server has no route to POST `path`."""
        response = await self._ask("GET", path, None, CONTROL_TIMEOUT_S)
        if response.status == HTTPStatus.NOT_FOUND:  # 405 where it is to be posted
            raise ValueError(f"{setting}: {self.name} has no {path}; install the locked SGLang")

    async def update_from_disk(self, folder: str, version: int, timeout_s: float) -> None:
        """Load the safetensors files of `folder`. An error may leave the weights torn."""
        body = {"model_path": folder, "load_format": "safetensors", **_update(version)}
        await self._post(FROM_DISK_PATH, body, timeout_s)

    async def update_from_ipc(
        self, zmq_handles: Mapping[str, str], version: int, timeout_s: float
    ) -> None:
        """Load from these sockets, one per GPU, by checkpoint-engine's protocol."""
        body = {
            "zmq_handles": dict(zmq_handles),
            "flush_cache": False,
            "weight_version": str(version),
        }
        await self._post(FROM_IPC_PATH, body, timeout_s)

    async def load_adapter(self, folder: str, version: int, timeout_s: float) -> None:
        """Load the adapter that peft or we wrote to `folder`, for all requests from now on. Those
        before keep theirs. An error leaves all as it was."""
        await self._post(
            LOAD_ADAPTER_PATH, {"lora_name": str(version), "lora_path": folder}, timeout_s
        )

    # The server itself ---------------------------------------------------------------------------

    async def is_ready(self, served_name: str, timeout_s: float) -> bool:
        """Returns whether the server named `served_name` takes requests. Raises EngineError if
        another responds at the address."""
        try:
            response = await self._ask("GET", "/ready", None, timeout_s)
            if response.status != HTTPStatus.OK:
                return False
            info = await self._get("/model_info", timeout_s)
        except EngineError:
            return False
        if info.get("served_model_name") != served_name:
            raise EngineError(f"a server other than {self.name} answers at {self.url}")
        return True

    async def num_kv_tokens(self) -> int:
        return int((await self._get("/server_info", CONTROL_TIMEOUT_S))["max_total_num_tokens"])

    async def freeze_garbage(self) -> None:
        """Keeps what the server holds now out of Python's garbage collections."""
        await self._post("/freeze_gc", {}, CONTROL_TIMEOUT_S)

    async def responds(self, timeout_s: float) -> bool:
        with suppress(EngineError, TimeoutError):
            async with asyncio.timeout(timeout_s):
                return bool(await self._get("/model_info", timeout_s))
        return False

    async def close(self) -> None:
        await super().close()
        if self._opened is not None:
            await self._opened.close()

    async def _get(self, path: str, timeout_s: float) -> dict[str, Any]:
        response = await self._call("GET", path, None, timeout_s)
        return cast(dict[str, Any], response.json())

    async def _post(self, path: str, body: Mapping[str, object], timeout_s: float) -> None:
        await self._call("POST", path, body, timeout_s)

    async def _call(
        self, method: str, path: str, body: Mapping[str, object] | None, timeout_s: float
    ) -> Reply:
        response = await self._ask(method, path, body, timeout_s)
        if response.status != HTTPStatus.OK:
            raise self._refusal(path, response.status, response.text)
        return response

    async def _ask(
        self, method: str, path: str, body: Mapping[str, object] | None, timeout_s: float
    ) -> Reply:
        """The response of any status."""
        data = None if body is None else msgspec.json.encode(body)
        limit = aiohttp.ClientTimeout(total=timeout_s, sock_connect=CONNECT_TIMEOUT_S)
        try:
            async with self._http.request(
                method, path, data=data, timeout=limit, allow_redirects=False
            ) as response:
                return Reply(response.status, await response.read())
        except (aiohttp.ClientError, TimeoutError) as error:
            raise self._failure(path, error) from error

    def _failure(self, path: str, error: Exception) -> EngineError:
        what = str(error) or type(error).__name__  # the message of a timeout is empty
        return EngineError(f"{self.name} did not answer {path}: {what}")

    def _refusal(self, path: str, status: int, text: str) -> EngineError:
        return EngineError(f"{self.name} refused {path} ({status}): {text[:500]}")


def _update(version: int) -> dict[str, object]:
    """Fields of every load. With requests pending a flush would crash the server (a failed
    assertion), and an abort would end requests that are to continue."""
    return {"flush_cache": False, "abort_all_requests": False, "weight_version": str(version)}


def _decode(text: bytes) -> Any:
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError:  # NaN, which fails one sample and not its call
        return json.loads(text)


async def _lines(content: aiohttp.StreamReader) -> AsyncGenerator[bytes]:
    """Lines of any length, without line ends."""
    rest = b""
    async for data in content.iter_any():
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            yield line
    yield rest
