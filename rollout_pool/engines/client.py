"""Client of SGLang's HTTP API.

One client per process and engine. `batching` decides how samples share a call to /generate, and
knows the format of that call.
"""

from __future__ import annotations

import asyncio
import json
import time
import zlib
from collections.abc import AsyncGenerator, Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any, cast

import httpx

from configs.choices import PauseMode
from rollout_pool.engines.batching import STREAM_INTERVAL, CallRefused, GenerateCalls, read_version
from rollout_pool.sampling.engine_client import EngineError, EngineLoad
from weight_sync.types import GroupSpec, TensorSpec

GENERATE_PATH = "/generate"
CONNECT_TIMEOUT_S = 10.0
CONTROL_TIMEOUT_S = 60.0
"""For calls that a healthy engine answers at once."""
ABORT_TIMEOUT_S = 5.0
ABORTS_AT_ONCE = 4
"""A connection each: a hundred new ones take longer than a hundred calls."""
LOAD_TIMEOUT_S = 5.0
STEPS_TO_END = 2
"""Steps of the scheduler until an aborted request has ended: the one under way, and the one that
sees the abort."""
MAX_FLUSHES = 20
_ALL = {"abort_all": True}
_FROM_DISK = "/update_weights_from_disk"
_FROM_IPC = "/update_weights_from_ipc"
_BEGIN_UPDATE = "/begin_weight_update"


class SGLangClient(GenerateCalls):
    """Calls one server at `url`, from one event loop. Every method may raise EngineError.

    `request_timeout_s` bounds the time between two parts of a response, not the whole.
    """

    def __init__(
        self,
        name: str,
        url: str,
        *,
        key: str,
        request_timeout_s: float,
        has_prefix_cache: bool = False,
        keys_prefix_by_version: bool = False,
        has_overlap_schedule: bool = True,
        stream_interval: int = STREAM_INTERVAL,
        vocab_size: int | None = None,
        end_tokens: Collection[int] = (),
        needs_seeds: bool = False,
        is_only_client: bool = False,
    ) -> None:
        """`keys_prefix_by_version`: a commit leaves the server's prefix cache as it is; only
        prefixes of the same version may be reused. `stream_interval`: tokens of a sample between
        two parts. `has_overlap_schedule`: the server returns a token one step later.
        `vocab_size`: tokens that the model has embeddings for; others are refused unsent.
        `end_tokens`: each ends a sample; needed where samples are interrupted or taken back.
        `needs_seeds`: the server samples by a seed of each request, as deterministic inference
        does. `is_only_client`: no other sends requests to this server."""
        super().__init__(
            name,
            has_prefix_cache=has_prefix_cache,
            keys_prefix_by_version=keys_prefix_by_version,
            stream_interval=stream_interval,
            vocab_size=vocab_size,
            end_tokens=end_tokens,
            is_only_client=is_only_client,
        )
        self._has_overlap = has_overlap_schedule
        self._needs_seeds = needs_seeds
        self._http = httpx.AsyncClient(
            base_url=url,
            headers={"Authorization": f"Bearer {key}"},
            timeout=httpx.Timeout(
                request_timeout_s, connect=min(CONNECT_TIMEOUT_S, request_timeout_s), pool=None
            ),
            # No limit: requests must queue at the engine, where the router can see them.
            # Close idle connections before SGLang does (5 s): a call could meet a closing one.
            limits=httpx.Limits(
                max_connections=None, max_keepalive_connections=None, keepalive_expiry=2.0
            ),
            trust_env=False,  # no proxy to engines
        )

    @property
    def url(self) -> str:
        return str(self._http.base_url)

    async def load(self) -> EngineLoad | None:
        """See `LoadSource.load`."""
        path = "/v1/loads"
        try:
            response = await self._http.get(
                path, params={"include": "core"}, timeout=LOAD_TIMEOUT_S
            )
        except httpx.HTTPError as error:
            raise self._failure(path, error) from error
        if response.status_code != httpx.codes.OK or not (loads := response.json()["loads"]):
            return None
        return EngineLoad(
            num_running=sum(load["num_running_reqs"] for load in loads),
            num_queued=sum(load["num_waiting_reqs"] for load in loads),
            num_tokens=sum(load["num_total_tokens"] for load in loads),
            capacity=sum(load["max_total_num_tokens"] for load in loads),
            kv_usage=max(load["token_usage"] for load in loads),
        )

    async def _stream(self, body: Mapping[str, object]) -> AsyncGenerator[dict[str, Any]]:
        """The JSON objects of a server-sent event stream."""
        path = GENERATE_PATH
        if self._needs_seeds:
            # Without one all get the same, and the samples of a group would be equal.
            settings = cast("list[dict[str, object]]", body["sampling_params"])
            for rid, of_one in zip(cast("list[str]", body["rid"]), settings, strict=True):
                of_one["sampling_seed"] = zlib.crc32(rid.encode())
        try:
            async with self._http.stream("POST", path, json=body) as response:
                if response.status_code != httpx.codes.OK:
                    await response.aread()
                    raise self._call_error(response)
                async for line in _lines(response):
                    if line.startswith(b"data: {"):
                        part = cast(dict[str, Any], json.loads(line[len(b"data: ") :]))
                        if "error" in part:
                            raise CallRefused(f"{self._name} refused {path}: {part['error']}")
                        yield part
        except httpx.HTTPError as error:
            raise self._failure(path, error) from error

    def _call_error(self, response: httpx.Response) -> EngineError:
        error = self._refusal(GENERATE_PATH, response)
        if response.status_code in (
            httpx.codes.BAD_REQUEST,
            httpx.codes.REQUEST_ENTITY_TOO_LARGE,
            httpx.codes.UNPROCESSABLE_ENTITY,
        ):
            return CallRefused(str(error))
        return error

    async def _abort(self, request_ids: Collection[str] | None) -> None:
        """Best effort: a dead engine needs no abort."""
        bodies = iter([_ALL] if request_ids is None else [{"rid": rid} for rid in request_ids])

        async def send() -> None:
            with suppress(httpx.HTTPError):
                for body in bodies:
                    await self._http.post("/abort_request", json=body)

        with suppress(TimeoutError):
            async with asyncio.timeout(ABORT_TIMEOUT_S):
                await asyncio.gather(*(send() for _ in range(ABORTS_AT_ONCE)))

    # Weights -------------------------------------------------------------------------------------

    async def can_update_from_disk(self) -> bool:
        return _FROM_DISK in await self._routes()

    async def can_update_from_ipc(self) -> bool:
        return _FROM_IPC in await self._routes()

    async def wants_update_session(self) -> bool:
        """Whether a broadcast must be wrapped in `begin_update` and `end_update`."""
        return _BEGIN_UPDATE in await self._routes()

    async def drain(self, limit_s: float) -> bool:
        """Waits until all requests have ended, and pauses the engine then: none is inside, and no
        cached prefix. False if some still run after `limit_s`. For an engine that is sent no new
        ones; any that were on their way end first, too."""
        deadline = time.monotonic() + limit_s
        # With --sleep-on-idle (on CPUs) SGLang answers up to a second after the last request's end.
        while (left_s := deadline - time.monotonic()) > 0 and await self._flush_cache(left_s):
            await self._post("/pause_generation", {"mode": "retract"}, CONTROL_TIMEOUT_S)
            if await self._flush_cache():
                return True
            await self.resume()  # some came in before the pause
        return False

    async def pause(self, mode: PauseMode) -> None:
        """Stops decoding: running requests pause, or end if they are to be sent again; new ones
        wait outside."""
        if mode in (PauseMode.resubmit, PauseMode.drain):
            await self._end_all()
        else:
            await self._post("/pause_generation", {"mode": mode.value}, CONTROL_TIMEOUT_S)

    async def _end_all(self) -> None:
        """Ends all requests, and pauses without any and without a cached prefix."""
        await self._post("/abort_request", _ALL, CONTROL_TIMEOUT_S)
        # Those that run end with their next token, and return all so far. If they were paused
        # before, they would lose what they have not streamed yet. The scheduler answers once per
        # step, so this waits for the steps and not for requests that keep coming.
        for _ in range(STEPS_TO_END + self._has_overlap):
            if await self._flush_cache():
                break
        await self._post("/pause_generation", {"mode": "retract"}, CONTROL_TIMEOUT_S)
        for _ in range(MAX_FLUSHES):
            if await self._flush_cache():
                return
            # Some came in before the pause.
            await self._post("/abort_request", _ALL, CONTROL_TIMEOUT_S)
        raise EngineError(f"{self._name} still holds requests after {MAX_FLUSHES} aborts of all")

    async def _flush_cache(self, wait_s: float = 0.0) -> bool:
        """Empties the prefix cache, once the engine has no request. False if it still has some
        after `wait_s`, and keeps its cache."""
        path = f"/flush_cache?timeout={wait_s:g}"
        try:
            response = await self._http.post(path, timeout=wait_s + CONTROL_TIMEOUT_S)
        except httpx.HTTPError as error:
            raise self._failure(path, error) from error
        if response.status_code not in (httpx.codes.OK, httpx.codes.BAD_REQUEST):
            raise self._refusal(path, response)
        return response.status_code == httpx.codes.OK

    async def resume(self) -> None:
        await self._post("/continue_generation", {}, CONTROL_TIMEOUT_S)

    async def served_version(self) -> int:
        info = await self._model_info(CONTROL_TIMEOUT_S)
        return read_version(self._name, str(info["weight_version"]))

    async def update_from_disk(self, folder: str, version: int, timeout_s: float) -> None:
        """Load the safetensors files of `folder`. An error may leave the weights torn."""
        body = {"model_path": folder, "load_format": "safetensors", **_update(version)}
        await self._post(_FROM_DISK, body, timeout_s)

    async def update_from_ipc(
        self, zmq_handles: Mapping[str, str], version: int, timeout_s: float
    ) -> None:
        """Load from these sockets, one per GPU, by checkpoint-engine's protocol."""
        body = {
            "zmq_handles": dict(zmq_handles),
            "flush_cache": False,
            "weight_version": str(version),
        }
        await self._post(_FROM_IPC, body, timeout_s)

    async def join_broadcast(self, spec: GroupSpec) -> None:
        """Join a group as receivers; rank 0 sends. Returns when all members have joined."""
        body = {
            "master_address": spec.host,
            "master_port": spec.port,
            "rank_offset": spec.num_senders,
            "world_size": spec.world_size,
            "group_name": spec.name,
            "backend": spec.backend,
        }
        await self._post("/init_weights_update_group", body, spec.timeout_s)

    async def begin_update(self) -> None:
        await self._post(_BEGIN_UPDATE, {}, CONTROL_TIMEOUT_S)

    async def receive(self, tensors: Sequence[TensorSpec], spec: GroupSpec, version: int) -> None:
        """Receive one broadcast of rank 0, the concatenated `tensors`, and load it."""
        body = {
            "names": [tensor.name for tensor in tensors],
            "dtypes": [tensor.dtype for tensor in tensors],
            "shapes": [list(tensor.shape) for tensor in tensors],
            "group_name": spec.name,
            "load_format": "flattened_bucket",
            **_update(version),
        }
        await self._post("/update_weights_from_distributed", body, spec.timeout_s)

    async def end_update(self) -> None:
        await self._post("/end_weight_update", {}, CONTROL_TIMEOUT_S)

    # The server itself ---------------------------------------------------------------------------

    async def is_ready(self, served_name: str, timeout_s: float) -> bool:
        """Whether the server named `served_name` takes requests.

        Raises EngineError if another server answers at the address.
        """
        try:
            response = await self._http.get("/ready", timeout=timeout_s)
            if response.status_code != httpx.codes.OK:
                return False
            info = await self._model_info(timeout_s)
        except (httpx.HTTPError, EngineError):
            return False
        if info.get("served_model_name") != served_name:
            raise EngineError(f"a server other than {self._name} answers at {self._http.base_url}")
        return True

    async def freeze_garbage(self) -> None:
        """Keeps what the server holds now out of Python's garbage collections."""
        await self._post("/freeze_gc", {}, CONTROL_TIMEOUT_S)

    async def answers(self, timeout_s: float) -> bool:
        """Whether the HTTP process answers; the scheduler may be loading weights or paused."""
        with suppress(EngineError, TimeoutError):
            async with asyncio.timeout(timeout_s):
                return bool(await self._model_info(timeout_s))
        return False

    async def close(self) -> None:
        await super().close()
        await self._http.aclose()

    async def _routes(self) -> Mapping[str, object]:
        description = await self._get("/openapi.json", CONTROL_TIMEOUT_S)
        if "paths" not in description:  # taking it for "no routes" would skip a step
            raise EngineError(f"{self._name} lists no routes in /openapi.json")
        return cast(Mapping[str, object], description["paths"])

    async def _model_info(self, timeout_s: float) -> dict[str, Any]:
        return await self._get("/model_info", timeout_s)

    async def _get(self, path: str, timeout_s: float) -> dict[str, Any]:
        response = await self._call("GET", path, None, timeout_s)
        return cast(dict[str, Any], response.json())

    async def _post(self, path: str, body: Mapping[str, object], timeout_s: float) -> None:
        await self._call("POST", path, body, timeout_s)

    async def _call(
        self, method: str, path: str, body: Mapping[str, object] | None, timeout_s: float
    ) -> httpx.Response:
        try:
            response = await self._http.request(method, path, json=body, timeout=timeout_s)
        except httpx.HTTPError as error:
            raise self._failure(path, error) from error
        if response.status_code != httpx.codes.OK:
            raise self._refusal(path, response)
        return response

    def _failure(self, path: str, error: httpx.HTTPError) -> EngineError:
        what = str(error) or type(error).__name__  # the message of a timeout is empty
        return EngineError(f"{self._name} did not answer {path}: {what}")

    def _refusal(self, path: str, response: httpx.Response) -> EngineError:
        text = response.text[:500]
        return EngineError(f"{self._name} refused {path} ({response.status_code}): {text}")


def _update(version: int) -> dict[str, object]:
    """Fields of every load. With requests pending a flush would crash the server (a failed
    assertion), and an abort would end requests that are to continue."""
    return {"flush_cache": False, "abort_all_requests": False, "weight_version": str(version)}


async def _lines(response: httpx.Response) -> AsyncGenerator[bytes]:
    """Lines without line ends; httpx's aiter_lines decodes each and is several times slower."""
    rest = b""
    async for data in response.aiter_bytes():
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            yield line
    yield rest
