"""The only place that knows SGLang's HTTP API.

One client a process and engine: connections are kept, and one call carries the samples of a whole
group as a stream, which costs a fraction of a call a sample and still tells each sample's end when
it comes.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing, suppress
from typing import Any, cast

import httpx

from buffer.types import VersionSpan
from configs.choices import PauseMode
from rollout_pool.generation import (
    BadLogprobs,
    EngineError,
    Event,
    FirstToken,
    Generation,
    Refused,
    SampleRequest,
    Sampling,
    check_logprobs,
    merge_spans,
)
from weight_sync.types import GroupSpec, TensorSpec

STREAM_INTERVAL = 2048
"""Tokens between two signs of life of a sample. Each repeats all that came before, so few are best;
without any, a long sample could not be told from a dead engine."""
CONNECT_TIMEOUT_S = 10.0
CONTROL_TIMEOUT_S = 60.0
"""For calls that an engine answers at once unless it is ill."""
ABORT_TIMEOUT_S = 5.0
_FROM_DISK = "/update_weights_from_disk"
_FROM_IPC = "/update_weights_from_ipc"
_BEGIN_UPDATE = "/begin_weight_update"
_VERSION = re.compile("[0-9]+")


class SGLangClient:
    """Calls one server at `url`, from one event loop. Every method may raise EngineError.

    `request_timeout_s` bounds the silence between two parts of an answer, not the whole of it.
    """

    def __init__(
        self,
        name: str,
        url: str,
        *,
        key: str,
        request_timeout_s: float,
        keys_prefix_by_version: bool,
    ) -> None:
        """`keys_prefix_by_version`: the server reuses prefixes, which must be of one version."""
        self._name = name
        self._keys_prefix = keys_prefix_by_version
        self._latest_version = 0
        self._http = httpx.AsyncClient(
            base_url=url,
            headers={"Authorization": f"Bearer {key}"},
            timeout=httpx.Timeout(
                request_timeout_s, connect=min(CONNECT_TIMEOUT_S, request_timeout_s), pool=None
            ),
            # The engine queues what it can't run; a queue here would hide that from the router.
            # Idle connections end before SGLang ends them (5 s), or a call could meet that.
            limits=httpx.Limits(
                max_connections=None, max_keepalive_connections=None, keepalive_expiry=2.0
            ),
            trust_env=False,  # a proxy of the environment is not for engines
        )

    @property
    def name(self) -> str:
        return self._name

    @property
    def url(self) -> str:
        return str(self._http.base_url)

    def note_version(self, version: int) -> None:
        """The engine serves `version` now, so prefixes of older ones are of no use."""
        self._latest_version = max(self._latest_version, version)

    # Generation ----------------------------------------------------------------------------------

    async def generate(
        self, requests: Sequence[SampleRequest], sampling: Sampling
    ) -> AsyncGenerator[Event]:
        """See `EngineClient.generate`."""
        unfinished = {request.request_id: index for index, request in enumerate(requests)}
        begun: set[int] = set()
        try:
            async with aclosing(self._stream(self._generate_body(requests, sampling))) as answers:
                async for answer in answers:
                    for event in self._events(answer, unfinished, begun):
                        yield event
        except httpx.HTTPError as error:
            raise self._failure("/generate", error) from error
        except (KeyError, IndexError, TypeError, json.JSONDecodeError) as error:
            raise EngineError(
                f"{self._name} answered /generate in a form that SGLang 0.5.20 does not have: "
                f"{error!r}"
            ) from error
        finally:
            if unfinished:
                await self._abort(unfinished)
        if unfinished:
            raise EngineError(
                f"{self._name} ended an answer before {len(unfinished)} of its samples"
            )

    def _generate_body(
        self, requests: Sequence[SampleRequest], sampling: Sampling
    ) -> dict[str, object]:
        body: dict[str, object] = {
            "rid": [request.request_id for request in requests],
            "input_ids": [list(request.tokens) for request in requests],
            "sampling_params": {
                "temperature": sampling.temperature,
                "max_new_tokens": sampling.max_new_tokens,
                "stream_interval": STREAM_INTERVAL,
            },
            "return_logprob": True,
            "stream": True,
        }
        if self._keys_prefix:
            body["extra_key"] = f"v{self._latest_version}"
        return body

    async def _stream(self, body: Mapping[str, object]) -> AsyncGenerator[dict[str, Any]]:
        """The JSON objects of a server-sent event stream."""
        async with self._http.stream("POST", "/generate", json=body) as response:
            if response.status_code != httpx.codes.OK:
                await response.aread()
                raise self._refusal("/generate", response)
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    yield cast(dict[str, Any], json.loads(line.removeprefix("data: ")))

    def _events(
        self, answer: Mapping[str, Any], unfinished: dict[str, int], begun: set[int]
    ) -> list[Event]:
        if "error" in answer:
            raise EngineError(f"{self._name} refused /generate: {answer['error']}")
        meta = answer["meta_info"]
        index = unfinished[meta["id"]]
        if meta["finish_reason"] is None:
            if index in begun or not _VERSION.fullmatch(meta["weight_version"]):
                return []  # a sign of life; a bad version is refused at the sample's end
            begun.add(index)
            return [FirstToken(index=index, version=int(meta["weight_version"]))]
        del unfinished[meta["id"]]
        try:
            generation = self._generation(index, answer)
        except (BadLogprobs, EngineError) as error:
            return [Refused(index=index, error=error)]
        self.note_version(generation.version_spans[-1].version)
        return [generation]

    def _generation(self, index: int, answer: Mapping[str, Any]) -> Generation:
        meta, output_ids = answer["meta_info"], answer["output_ids"]
        reason = meta["finish_reason"]
        if reason["type"] not in ("stop", "length"):
            raise EngineError(f"{self._name} gave a sample up: {reason.get('message') or reason}")
        if not output_ids:
            raise EngineError(f"{self._name} returned a sample without a token")
        pairs = meta.get("output_token_logprobs") or []
        if [pair[1] for pair in pairs] != output_ids:
            raise BadLogprobs("the log-probabilities are those of other tokens than were returned")
        return Generation(
            index=index,
            output_ids=tuple(output_ids),
            logprobs=check_logprobs([pair[0] for pair in pairs], len(output_ids)),
            version_spans=self._spans(meta.get("weight_versions") or [], len(output_ids)),
            finish_reason=reason["type"],
        )

    def _spans(self, spans: Sequence[Mapping[str, Any]], length: int) -> tuple[VersionSpan, ...]:
        end, parsed = 0, []
        for span in spans:
            if span["start"] != end or span["end"] <= end:
                break
            end = span["end"]
            version = self._version(span["version"])
            parsed.append(VersionSpan(version=version, start=span["start"], end=end))
        if end != length:
            raise EngineError(
                f"{self._name}: the version spans {list(spans)} do not cover {length} tokens"
            )
        return merge_spans(parsed)

    def _version(self, text: str) -> int:
        if not _VERSION.fullmatch(text):
            raise EngineError(
                f"{self._name} served weights of version {text!r}, which no trainer published"
            )
        return int(text)

    async def _abort(self, request_ids: Sequence[str] | Mapping[str, int]) -> None:
        """Frees the engine from samples that nobody waits for; a dead engine needs no abort."""
        calls = [
            self._http.post("/abort_request", json={"rid": rid}, timeout=ABORT_TIMEOUT_S)
            for rid in request_ids
        ]
        await asyncio.gather(*calls, return_exceptions=True)

    # Weights -------------------------------------------------------------------------------------

    async def can_update_from_disk(self) -> bool:
        return _FROM_DISK in await self._routes()

    async def can_update_from_ipc(self) -> bool:
        return _FROM_IPC in await self._routes()

    async def wants_update_session(self) -> bool:
        """Whether a broadcast must lie between `begin_update` and `end_update`."""
        return _BEGIN_UPDATE in await self._routes()

    async def pause(self, mode: PauseMode) -> None:
        """Stop decoding; running requests wait, and new ones are queued."""
        await self._post("/pause_generation", {"mode": mode.value}, CONTROL_TIMEOUT_S)

    async def resume(self) -> None:
        await self._post("/continue_generation", {}, CONTROL_TIMEOUT_S)

    async def served_version(self) -> int:
        """The version that the engine says it serves."""
        info = await self._model_info(CONTROL_TIMEOUT_S)
        return self._version(str(info["weight_version"]))

    async def update_from_disk(self, folder: str, version: int, timeout_s: float) -> None:
        """Load the safetensors files of `folder`. An error may leave the weights torn."""
        body = {"model_path": folder, "load_format": "safetensors", **_update(version)}
        await self._post(_FROM_DISK, body, timeout_s)

    async def update_from_ipc(
        self, zmq_handles: Mapping[str, str], version: int, timeout_s: float
    ) -> None:
        """Load what checkpoint-engine's protocol brings over these sockets, by GPU."""
        body = {
            "zmq_handles": dict(zmq_handles),
            "flush_cache": False,
            "weight_version": str(version),
        }
        await self._post(_FROM_IPC, body, timeout_s)

    async def join_broadcast(self, spec: GroupSpec) -> None:
        """Become the receivers of a group whose rank 0 sends. Returns when all have come."""
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
        """Take one broadcast of rank 0, these tensors one after the other, and load it."""
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
            raise EngineError(f"another server than {self._name} answers at {self._http.base_url}")
        return True

    async def answers(self, timeout_s: float) -> bool:
        """Whether the HTTP process does; the scheduler may be loading weights, or be paused."""
        with suppress(EngineError, TimeoutError):
            async with asyncio.timeout(timeout_s):
                return bool(await self._model_info(timeout_s))
        return False

    async def close(self) -> None:
        await self._http.aclose()

    async def _routes(self) -> Mapping[str, object]:
        """By path: what this version of the server offers."""
        description = await self._get("/openapi.json", CONTROL_TIMEOUT_S)
        if "paths" not in description:  # to take that for "offers nothing" would skip a step
            raise EngineError(f"{self._name} does not say in /openapi.json what it offers")
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
        what = str(error) or type(error).__name__  # a timeout's text is empty
        return EngineError(f"{self._name} did not answer {path}: {what}")

    def _refusal(self, path: str, response: httpx.Response) -> EngineError:
        text = response.text[:500]
        return EngineError(f"{self._name} refused {path} ({response.status_code}): {text}")


def _update(version: int) -> dict[str, object]:
    """What every load says. With requests pending a flush fails an assertion that ends the server.

    An abort would give up requests that are to go on.
    """
    return {"flush_cache": False, "abort_all_requests": False, "weight_version": str(version)}
