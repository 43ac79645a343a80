"""Engines with the service times of an H100.

    python -m benchmarks.rollouts.gpu_engine <speed> <places> [<model> <engines>]

It prints a port for each and speaks SGLang's HTTP as far as worker, router and commits use it. It
computes nothing; it sleeps as long as the model would take, `speed` times faster. Neither a prefix
cache nor preemption is emulated: the work of the benchmark needs neither.

    arrive ──► waiting ──► prefill ──► running, one token a step ──► ended, aborted
                  ▲                       │ pause_generation(retract): the KV is lost
                  └───────────────────────┘

Time moves from event to event (an end, an arrival, an abort), not from step to step, so that the
emulator leaves the processor to what is measured. A token says where it belongs: see `token_at` and
`logprob_at`.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from benchmarks.rollouts.stub_engine import serve

NUM_PROMPT = 16
"""Tokens of a prompt of the benchmark."""
MOST_STEPS = 16
"""Steps between two looks at who has a part to send."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Roofline:
    """Seconds of a step: Llama 3 8B in bf16 on one H100 SXM. Sources: docs/performance.md."""

    parameters: float = 8.03e9
    kv_bytes: int = 2 * 32 * 8 * 128 * 2
    """Per token: keys and values of 32 layers with 8 heads of 128, two bytes each."""
    bytes_per_s: float = 0.8 * 3.35e12
    """The memory bandwidth that kernels reach."""
    flops_per_s: float = 0.6 * 989e12
    overhead_s: float = 0.8e-3
    """Launch, sampling and scheduling of a step."""
    load_s: float = 0.5
    """16 GB from host memory at 32 GB/s."""
    capacity: int = 390_000
    """Tokens of KV cache in 85% of 80 GB, without the weights."""
    tokens: int = 1
    requests: int = 1
    """Tokens, and requests, of the GPU for which one of the emulation stands; its capacity is in
    tokens of the emulation."""

    def step_s(self, num_running: float, num_tokens: float) -> float:
        """One token for each of `num_running` requests, which have `num_tokens` in all."""
        weights = 2 * self.parameters / self.bytes_per_s
        cache = self.tokens * self.requests * num_tokens * self.kv_bytes / self.bytes_per_s
        compute = self._compute_s(num_running) / self.tokens
        return self.tokens * (max(weights, compute) + cache + self.overhead_s)

    def prefill_s(self, num_tokens: int) -> float:
        return self._compute_s(num_tokens) + self.overhead_s if num_tokens else 0.0

    def _compute_s(self, num_tokens: float) -> float:
        stands_for = self.tokens * self.requests * num_tokens
        return 2 * self.parameters * stands_for / self.flops_per_s


ROOFLINES = {
    "8b": Roofline(),
    # Qwen2.5 1.5B: 28 layers, 2 heads of 128. An answer of 31,744 tokens is one of 248 here.
    "1.5b": Roofline(
        parameters=1.54e9, kv_bytes=2 * 28 * 2 * 128 * 2, load_s=0.1,
        capacity=2_260_000 // (128 * 4), tokens=128, requests=4,
    ),
}  # fmt: skip


def token_at(position: int) -> int:
    """The token at this position of prompt and completion together."""
    return 32 + position % 90


def logprob_at(position: int, version: int) -> float:
    """Exact in float32. It tells the version that sampled the token."""
    return -(version + 1) - (position % 4096) / 8192


@dataclass(slots=True, eq=False)
class Running:
    """One request."""

    rid: str
    num_prompt: int
    most: int
    interval: int
    scale: int
    """Tokens of the answer for which one of the emulation stands; the prompt is as long as it is,
    but for what an answer's earlier turns or requests have added to it."""
    send: Callable[[dict[str, Any] | None], None]
    """Hands a piece to the request's call; None when the request has ended."""
    num_done: int = 0
    num_sent: int = 0
    num_retractions: int = 0
    spans: list[list[int]] = field(default_factory=list)
    """[version, start, end]."""

    @property
    def num_tokens(self) -> int:
        return NUM_PROMPT // self.scale + max(0, self.num_prompt - NUM_PROMPT) + self.num_done

    def advance(self, steps: int, version: int) -> None:
        if self.spans and self.spans[-1][0] == version:
            self.spans[-1][2] += steps
        else:
            self.spans.append([version, self.num_done, self.num_done + steps])
        self.num_done += steps

    def report(self, version: int, reason: dict[str, Any] | None) -> None:
        """Sends what is new."""
        new = range(self.num_sent, self.num_done)
        self.num_sent = self.num_done
        spans = [(v, max(a, new.start), b) for v, a, b in self.spans if b > new.start]
        first = self.num_prompt
        pairs = [
            (logprob_at(first + p, v), token_at(first + p), None)
            for v, start, end in spans
            for p in range(start, end)
        ]
        meta: dict[str, Any] = {
            "id": self.rid,
            "finish_reason": reason,
            "prompt_tokens": self.num_prompt,
            "cached_tokens": 0,
            "completion_tokens": self.num_done,
            "output_token_logprobs": pairs,
            "weight_version": str(version),
            "num_retractions": self.num_retractions,
        }
        if reason is not None:
            meta["weight_versions"] = [
                {"version": str(v), "start": start, "end": end} for v, start, end in self.spans
            ]
        self.send({"output_ids": [token for _, token, _ in pairs], "meta_info": meta})
        if reason is not None:
            self.send(None)


class GpuEngine:
    """Continuous batching under a roofline. Used in one event loop."""

    def __init__(self, speed: float, places: int, roofline: Roofline | None = None) -> None:
        self._speed = speed
        self._places = places
        self._roofline = roofline or Roofline()
        self._waiting: list[Running] = []
        self._running: list[Running] = []
        self._is_paused = self._is_loading = False
        self._changed = asyncio.Event()
        self._clock = 0.0
        """Time of the loop up to which all steps are done; ahead of it during a prefill."""
        self._step_s = 1.0
        self._begun_s = 0.0
        """Part of a step that was done before a pause."""
        self._version = 0
        self.num_prompt_tokens = self.num_samples = self.num_bytes = 0

    # Time -----------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Never returns."""
        while True:
            self._changed.clear()
            if self._is_idle:
                await self._changed.wait()
                continue
            self._admit()
            steps = min(MOST_STEPS, *(r.most - r.num_done for r in self._running))
            number, tokens = len(self._running), sum(r.num_tokens for r in self._running)
            middle = tokens + number * steps / 2
            self._step_s = self._roofline.step_s(number, middle) / self._speed
            with suppress(TimeoutError):
                async with asyncio.timeout_at(self._clock + steps * self._step_s):
                    await self._changed.wait()
            self._catch_up()

    @property
    def _is_idle(self) -> bool:
        return self._is_paused or self._is_loading or not (self._running or self._waiting)

    def _admit(self) -> None:
        """The first to come that there is room for. Their prefill holds the others up."""
        tokens = sum(request.num_tokens for request in self._running)
        new = 0
        while self._waiting and len(self._running) < self._places:
            size = self._waiting[0].num_tokens
            if self._running and tokens + new + size > self._roofline.capacity:
                break
            new += size
            self._running.append(self._waiting.pop(0))
        self._clock += self._roofline.prefill_s(new) / self._speed

    def _catch_up(self) -> None:
        """Does the steps whose time is over. Called before anything changes."""
        now = asyncio.get_running_loop().time()
        if self._is_paused or self._is_loading or not self._running:
            self._clock = max(self._clock, now)
            return
        left = min(request.most - request.num_done for request in self._running)
        steps = min(left, int((now - self._clock) / self._step_s + 1e-6))
        if steps <= 0:
            return
        self._clock += steps * self._step_s
        for request in list(self._running):
            request.advance(steps, self._version)
            if request.num_done == request.most:
                self._running.remove(request)
                request.report(self._version, {"type": "length", "length": request.most})
            elif not request.num_sent or request.num_done - request.num_sent >= request.interval:
                request.report(self._version, None)

    # Requests -------------------------------------------------------------------------------------

    def add(self, request: Running) -> None:
        self._catch_up()
        self._waiting.append(request)
        self._changed.set()

    async def generate(self, request: Request) -> Response:
        text = await request.body()
        body = json.loads(text)
        self.num_bytes += len(text)
        parts: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
        for rid, ids, params in zip(
            body["rid"], body["input_ids"], body["sampling_params"], strict=True
        ):
            self.num_samples += 1
            self.num_prompt_tokens += len(ids)
            most, interval = params["max_new_tokens"], params["stream_interval"]
            scale = self._roofline.tokens
            running = Running(rid, len(ids), most, interval, scale, parts.put_nowait)
            self.add(running)
        return StreamingResponse(_events(parts, len(body["rid"])), media_type="text/event-stream")

    async def abort(self, request: Request) -> Response:
        body = await request.json()
        self.end("" if body.get("abort_all") else body["rid"])
        return JSONResponse({})

    def end(self, start: str) -> None:
        """Aborts the requests whose ids begin so."""
        self._catch_up()
        for requests in (self._waiting, self._running):
            for ended in [r for r in requests if r.rid.startswith(start)]:
                requests.remove(ended)
                # As SGLang: one that runs has its next token too, one that waits says less.
                if requests is self._running:
                    ended.advance(1, self._version)
                else:
                    ended.num_retractions = 0
                ended.report(self._version, {"type": "abort", "message": "aborted"})
        self._changed.set()

    # Commits --------------------------------------------------------------------------------------

    async def pause(self, request: Request) -> Response:
        self.hold(retracts=(await request.json())["mode"] == "retract")
        return JSONResponse({})

    def hold(self, *, retracts: bool) -> None:
        self._catch_up()
        if not self._is_paused:
            # A step may stand for many of the GPU, which does not do all of these again.
            self._begun_s = max(0.0, asyncio.get_running_loop().time() - self._clock)
        self._is_paused = True
        if retracts:
            for running in self._running:
                running.num_retractions += 1
            self._waiting, self._running = [*self._running, *self._waiting], []

    async def resume(self, request: Request) -> Response:
        self.go_on()
        return JSONResponse({})

    def go_on(self) -> None:
        self._catch_up()
        if self._is_paused:
            self._clock -= self._begun_s
        self._is_paused = False
        self._changed.set()

    async def update(self, request: Request) -> Response:
        await self.load_version(int((await request.json())["weight_version"]))
        return JSONResponse({"success": True})

    async def load_version(self, version: int) -> None:
        self._catch_up()
        self._is_loading = True
        await asyncio.sleep(self._roofline.load_s / self._speed)
        self._catch_up()
        self._version, self._is_loading = version, False
        self._changed.set()

    async def flush(self, request: Request) -> Response:
        is_empty = not (self._running or self._waiting)
        return JSONResponse({}, status_code=200 if is_empty else 400)

    # Reports --------------------------------------------------------------------------------------

    async def loads(self, request: Request) -> Response:
        tokens = sum(running.num_tokens for running in self._running)
        load = {
            "num_running_reqs": len(self._running),
            "num_waiting_reqs": len(self._waiting),
            "num_total_tokens": tokens,
            "max_total_num_tokens": self._roofline.capacity,
            "token_usage": tokens / self._roofline.capacity,
        }
        return JSONResponse({"loads": [load]})

    async def counts(self, request: Request) -> Response:
        return JSONResponse(
            {
                "num_samples": self.num_samples,
                "num_prompt_tokens": self.num_prompt_tokens,
                "num_bytes": self.num_bytes,
            }
        )

    async def info(self, request: Request) -> Response:
        return JSONResponse({"weight_version": str(self._version), "served_model_name": "gpu"})


async def _events(
    parts: asyncio.Queue[dict[str, Any] | None], num_requests: int
) -> AsyncIterator[bytes]:
    while num_requests:
        if (part := await parts.get()) is None:
            num_requests -= 1
        else:
            yield b"data: " + json.dumps(part).encode() + b"\n\n"
    yield b"data: [DONE]\n\n"


POSTS = {
    "/generate": "generate",
    "/abort_request": "abort",
    "/pause_generation": "pause",
    "/continue_generation": "resume",
    "/update_weights_from_disk": "update",
    "/flush_cache": "flush",
}
GETS = {"/v1/loads": "loads", "/counts": "counts", "/model_info": "info", "/ready": "info"}


async def _run(make: Callable[[], GpuEngine], num_engines: int) -> None:
    """An engine at each port. Never returns."""
    engines: dict[int, GpuEngine] = {}
    async with asyncio.TaskGroup() as tasks:

        async def answer(request: Request) -> Response:
            port, path = request.scope["server"][1], request.url.path
            if port not in engines:
                engines[port] = make()
                tasks.create_task(engines[port].run())
            response: Response = await getattr(engines[port], (POSTS | GETS)[path])(request)
            return response

        async def take(request: Request) -> Response:
            """All engines stop, or take a version, as by receivers beside them: a worker that told
            each of them would pay for it. With `port` it is one of them."""
            body = await request.json()
            chosen = [one for port, one in engines.items() if body["port"] in (None, port)]
            for engine in chosen:
                engine.hold(retracts=body["retracts"])
            if (version := body["version"]) is not None:
                await asyncio.gather(*(engine.load_version(version) for engine in chosen))
                for engine in chosen:
                    engine.go_on()
            return JSONResponse({})

        routes = [Route(path, answer, methods=["POST"]) for path in POSTS]
        routes += [Route("/take", take, methods=["POST"]), *(Route(path, answer) for path in GETS)]
        tasks.create_task(serve(Starlette(routes=routes), num_engines))


def main(argv: Sequence[str]) -> None:
    speed, places, model, num_engines = (*argv, "8b", "1")[:4]
    make = partial(GpuEngine, float(speed), int(places), ROOFLINES[model])
    asyncio.run(_run(make, int(num_engines)))


if __name__ == "__main__":
    main(sys.argv[1:])
