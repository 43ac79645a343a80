"""Batches samples into HTTP calls to one engine, and splits the responses.

    generate_tokens(sample) ─┐                             ┌─► part ─► its sample
    generate_tokens(sample) ─┼─ one turn of the loop ─► call ─► part ─► its sample ─► its end
    generate_tokens(sample) ─┘                             └─► ...

A sample's way to the server: `generate_tokens`, `_send_soon`, `_send`, `_run_call` here, then
`_post_generate` in client.py; back from there: `_receive`.

One call of n samples is much cheaper than n calls. Still, each sample ends when it is complete, can
be stopped alone, and fails alone unless the whole call fails. SGLang stops one request per call, or
all: those stopped in one turn of the loop share a call if nothing else runs at the engine.

Of a group's samples one goes ahead, and the others find their prompt in the engine's prefix cache.

A commit may end all requests of its engine (weight_sync.pause_mode=resubmit). The rest of each
sample is sent there again as soon as the new version is heard of.

The server streams disjoint parts. Every part but a sample's last has `weight_version`, the version
served at that moment; the last has `weight_versions`, exact spans over all tokens of the request.
(Source: SGLang 0.5.20.)
"""

from __future__ import annotations

import asyncio
import math
import re
from abc import ABC, abstractmethod
from array import array
from collections.abc import AsyncGenerator, Callable, Collection, Mapping, Sequence
from contextlib import aclosing
from dataclasses import KW_ONLY, asdict, dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from buffer.types import SamplingParams, VersionSpan
from rollout_pool.cancelling import BackgroundTasks
from rollout_pool.engines.sglang.pictures import add_pictures, misplaced, sampled_marks
from rollout_pool.engines.sglang.routes import read_routes
from rollout_pool.sampling.engine_client import (
    ROUNDING,
    BadLogprobs,
    EngineCounters,
    EngineError,
    SampleRefused,
)
from rollout_pool.sampling.sample import (
    ALTERNATIVES,
    Alternatives,
    Priority,
    Routes,
    Sample,
    merge_spans,
)
from rollout_pool.sampling.stop import STOP_STREAM_INTERVAL
from tensors.pictures import PictureTokens

STREAM_INTERVAL = 64
"""Tokens between two parts of a response. When an engine is killed, each of its samples loses half
of them on average, which takes a second or two to sample again. A larger interval saves little:
a part costs both processes about as much as a few hundred bytes."""
_VERSION = re.compile("[0-9]+")
LOWEST_LOGPROB = -1e30
"""SGLang has the lowest float in place of the log-probability of what was rounded to 0."""
MAX_SAMPLES = 32
"""Per call: the server's work per part grows with the number of samples in the call."""
CALL_GAP_S = 0.02
"""The first sample is sent at once; those that arrive within this time share the next call. Without
it, samples that start one by one as others end would each have their own call, which takes 2 ms of
the server's HTTP process, and prompts of their own passes of the model."""
LONGEST_GAP_S = 0.05
FEW_CALLS = 64
"""Above this the gap grows with the open calls, so that few samples do not make many."""
LONG_PREFIX = 128
"""Fewest tokens of a prompt for which one sample of a group goes ahead. Sent together, the engine
would compute the prompt for each of them; a shorter prompt costs less than the wait."""
HELD_S = 5.0
"""A sample whose request a commit ended is sent again when the new version is announced, or after
this time at the latest; then it waits inside the engine."""
MAX_COMMITS_PER_VERSION = 3
"""A commit may fail after it has ended all requests; after so many in a row its engine is restarted
(follower.MAX_FAILURES)."""
STOP_AGAIN_S = 1.0
"""A stop that overtakes its request is lost, so it is repeated until the sample has ended."""
STOP_TIMEOUT_S = 30.0
"""Longest wait for a stopped sample to end: a commit may come in between."""


class Tokens(NamedTuple):
    """Tokens of a sample: see its columns of the same names."""

    ids: list[int]
    logprobs: list[float]
    candidates: Sequence[array[int]] = ()
    alternatives: Sequence[Alternatives] = ()


class CallRefused(EngineError):
    """The engine rejected a call and started none of its samples."""


class _Request:
    """One sample's request, until the engine has ended it.

    While it runs, its engine reports with each arrival only the version served at that moment. Only
    at the end does it report the version of each token:

        arrivals   [ a | b c d | e f g ]  labels 7, 7, 8      until then   (7, a..g)
        settled                           7 up to e, then 8   at the end   (7, a..e) (8, f..g)

    A request whose engine was killed has no such report, so the versions recorded until then must
    be safe.
    """

    def __init__(
        self, sample: Sample, request_id: str, on_arrival: Callable[[], None] | None
    ) -> None:
        self.sample = sample
        self.wire_id = request_id
        self.on_arrival = on_arrival
        self.served_before = 0
        """A lower bound of the versions of its tokens, known when it is sent."""
        loop = asyncio.get_running_loop()
        self.outcome: asyncio.Future[None] = loop.create_future()
        self.over: asyncio.Future[None] = loop.create_future()
        """Done when the engine has ended it, or is unreachable."""
        self.is_sent = False
        self.is_told: asyncio.Future[None] = loop.create_future()
        """Done when a first call to stop it is."""
        self.is_stopping = False
        self.followers: list[_Request] = []
        """Requests of its group, sent when its prompt is cached."""
        self.taken_back_at: int | None = None
        """The version at which the engine ended it for a commit: the rest is to be sent again."""
        self.routes_from = sample.next_route
        """The first token whose experts it brings."""
        self.call_routes_from = 0
        """The same for its call: SGLang takes one number for all of its samples."""
        self._start = len(sample.output_ids)
        self._spans_before = list(sample.version_spans)
        self._label: int | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens that it has added to its sample."""
        return len(self.sample.output_ids) - self._start

    def add(self, tokens: Tokens, label: int, spans: Sequence[VersionSpan]) -> None:
        """Tokens, and the version that was served when they arrived. `spans`: at the end, the exact
        versions of all tokens, counted from the request's first one.

        Versions only grow. So tokens with the same label as the arrival before are of that version.
        With another label they may be of both, and all count as the older one: staleness is then
        overestimated, which is safe, and log-probabilities are exact either way. The first token is
        sent by itself; if more come at once, as those of a short sample do, the same holds.
        """
        sample = self.sample
        start = len(sample.output_ids)
        sample.output_ids.extend(tokens.ids)
        sample.logprobs.extend(tokens.logprobs)
        sample.candidates.extend(tokens.candidates)
        sample.guidance.alternatives.extend(tokens.alternatives)
        sample.note_processed()
        if spans:
            if before := self._start:
                spans = [replace(s, start=before + s.start, end=before + s.end) for s in spans]
            sample.version_spans = merge_spans([*self._spans_before, *spans])
            return
        if self._label is None:
            version = label if len(tokens.ids) == 1 else min(label, self.served_before)
        else:
            version = min(label, self._label)
        self._label = label
        span = VersionSpan(version=version, start=start, end=len(sample.output_ids))
        sample.version_spans = merge_spans([*sample.version_spans, span])

    def routes(
        self, engine: str, meta: Mapping[str, Any], spans: Sequence[VersionSpan]
    ) -> list[Routes]:
        """The experts of its tokens, but those that were chosen again by newer weights than sampled
        the tokens; `spans`: the versions of all its tokens. Raises SampleRefused."""
        num_before, start = len(self.sample.prompt) + self._start, self.routes_from
        num_tokens = num_before + spans[-1].end - 1 - self.call_routes_from
        try:
            experts = read_routes(meta, num_tokens)
        except ValueError as error:
            raise SampleRefused(f"{engine} {error}") from None
        if experts is None:
            return []
        if meta["num_retractions"] and len(spans) > 1:
            start = max(start, num_before + spans[-1].start - 1)
        # Copied: a part alone would hold the memory of all.
        return [Routes(start, experts[start - self.call_routes_from :].copy())]

    def end(self, error: Exception | None = None) -> None:
        if self.outcome.done():
            return  # it was cancelled, or has failed already
        if error is None:
            self.outcome.set_result(None)
        else:
            self.outcome.set_exception(error)


@dataclass(eq=False, repr=False)
class BatchingClient(ABC):
    """An EngineClient without the HTTP part, which SGLangClient adds."""

    name: str
    url: str
    _: KW_ONLY
    has_prefix_cache: bool = False
    keys_prefix_by_version: bool = False
    """A commit leaves the prefix cache as it is: only prefixes of one version may be reused."""
    stream_interval: int = STREAM_INTERVAL
    """Tokens of a sample between two parts."""
    vocab_size: int | None = None
    """Tokens that the model has embeddings for; others are refused unsent. None: unknown."""
    end_tokens: Collection[int] = ()
    """Each ends a sample; needed where samples are interrupted or taken back."""
    is_only_client: bool = False
    """No other sends requests to this server."""
    returns_routes: bool = False
    """The server returns the experts that it has chosen for each token."""
    keeps_versions: bool = False
    """A request ends under the version that it began with, so that a commit retracts none."""
    pictures: PictureTokens | None = None
    """How they stand among the tokens of a model that takes some."""

    def __post_init__(self) -> None:
        self._latest_version = 0
        self._requests: dict[str, _Request] = {}
        self._to_stop: list[_Request] = []
        self._num_sweeps = 0
        """Calls on their way that stop all requests."""
        self._held: dict[_Request, int] = {}
        """Requests that wait for a version later than this."""
        self._unsent: list[_Request] = []
        self._leaders: dict[str, _Request | None] = {}
        """By group: the request whose first token is waited for, None when it has come. Of the
        latest version only."""
        self._flush: asyncio.TimerHandle | None = None
        self._next_flush = 0.0
        self._num_open = 0
        self._tasks = BackgroundTasks()
        self._is_closed = False
        self.counters = EngineCounters()

    @abstractmethod
    def _post_generate(self, body: Mapping[str, object]) -> AsyncGenerator[dict[str, Any]]:
        """Yields the parts of the response to one call. Raises EngineError."""

    @abstractmethod
    async def _post_abort(self, request_ids: Collection[str] | None) -> None:
        """Stops these requests; None: all of the engine. Takes a few seconds at most and never
        raises."""

    def note_version(self, version: int) -> None:
        """The engine serves `version` now: cached prefixes of older versions are not reused."""
        if version > self._latest_version:
            self._latest_version = version
            self._leaders = {group: one for group, one in self._leaders.items() if one is not None}
        for request in [held for held, taken_at in self._held.items() if version > taken_at]:
            self._let_go(request)

    async def generate_tokens(
        self, sample: Sample, request_id: str, on_arrival: Callable[[], None] | None = None
    ) -> None:
        self._check_tokens(sample)
        request = _Request(sample, request_id, on_arrival)
        assert request_id not in self._requests, request_id
        self._requests[request_id] = request
        self._send_soon(request)
        try:
            await request.outcome
            # A stop that came between the abort and now has nothing left to stop: it ends here.
            num_taken_back = 1
            while (taken_at := request.taken_back_at) is not None and not request.is_stopping:
                if num_taken_back > MAX_COMMITS_PER_VERSION:
                    raise EngineError(
                        f"{self.name} aborted a sample {num_taken_back} times at version {taken_at}"
                    )
                request = _Request(sample, f"from{len(sample.output_ids)}.{request_id}", on_arrival)
                self._requests[request_id] = request
                self._hold(request, taken_at)
                await request.outcome
                num_taken_back = num_taken_back + 1 if request.taken_back_at == taken_at else 1
        except asyncio.CancelledError:
            await self._give_up(request)
            raise
        finally:
            del self._requests[request_id]

    def stop(self, request_id: str) -> None:
        request = self._requests.get(request_id)
        if request is None or request.is_stopping:
            return
        request.is_stopping = True
        if not request.is_sent:
            request.end()
        else:
            self._stop_soon(request)

    async def close(self) -> None:
        """Ends all requests with EngineError, those that were not sent too."""
        self._is_closed = True  # calls that end would leave requests to be sent again
        if self._flush is not None:
            self._flush.cancel()
            self._flush = None
        await self._tasks.end()
        for request in self._requests.values():
            self._end_closed(request)

    def _end_closed(self, request: _Request) -> None:
        request.end(EngineError(f"the connection to {self.name} was closed"))
        _set(request.is_told)
        _set(request.over)

    def _check_tokens(self, sample: Sample) -> None:
        """Raises SampleRefused for ids without an embedding: SGLang does not check them, and its
        server would crash, and so would the next one that got the sample."""
        tokens = (*sample.prompt, *sample.output_ids)
        lowest, highest = min(tokens, default=0), max(tokens, default=0)
        if lowest < 0 or (self.vocab_size is not None and highest >= self.vocab_size):
            wrong = lowest if lowest < 0 else highest
            most = "" if self.vocab_size is None else f" of the {self.vocab_size}"
            raise SampleRefused(
                f"{self.name}: not sent: {sample.sample_id} has token {wrong}, which is not one"
                f"{most} that the model knows"
            )
        if self.pictures is not None and (problem := misplaced(sample, self.pictures)):
            raise SampleRefused(f"{self.name}: not sent: {sample.sample_id} has {problem}")

    # Sending --------------------------------------------------------------------------------------

    def _send_soon(self, request: _Request) -> None:
        if self._is_closed:
            return self._end_closed(request)
        self._unsent.append(request)
        if self._flush is None:
            loop = asyncio.get_running_loop()
            self._flush = loop.call_at(max(loop.time(), self._next_flush), self._send)

    def _hold(self, request: _Request, taken_at: int) -> None:
        """Sends it under a later version than that, or after a while, for the commit may fail.

        Sent at once it would be in the commit's way, or wait inside of the engine under a key that
        says too little.
        """
        self._held[request] = taken_at
        if self._latest_version > taken_at:
            self._let_go(request)
        else:
            asyncio.get_running_loop().call_later(HELD_S, self._let_go, request)

    def _let_go(self, request: _Request) -> None:
        if self._held.pop(request, None) is not None and not request.outcome.done():
            self._send_soon(request)

    def _send(self) -> None:
        self._flush = None
        if self._num_sweeps:
            return
        gap_s = min(LONGEST_GAP_S, CALL_GAP_S * max(1.0, self._num_open / FEW_CALLS))
        self._next_flush = asyncio.get_running_loop().time() + gap_s
        waiting = [r for r in self._unsent if not r.outcome.done() and not self._must_follow(r)]
        self._unsent = []
        for request in waiting:
            request.is_sent = True
        for start in range(0, len(waiting), MAX_SAMPLES):
            self._tasks.spawn(self._run_call(waiting[start : start + MAX_SAMPLES]))

    def _must_follow(self, request: _Request) -> bool:
        """Returns whether another request of its group computes their prompt and sends it then."""
        group = request.sample.group
        if not group or not self.has_prefix_cache or len(request.sample.prompt) < LONG_PREFIX:
            return False
        if group not in self._leaders:
            self._leaders[group] = request
            return False
        leader = self._leaders[group]
        if leader is not None:
            leader.followers.append(request)
        return leader is not None

    def _release_followers(self, leader: _Request, *, is_cached: bool) -> None:
        group = leader.sample.group
        if self._leaders.get(group) is leader:
            if is_cached:
                self._leaders[group] = None
            else:
                del self._leaders[group]
        for request in leader.followers:
            self._send_soon(request)
        leader.followers = []

    async def _run_call(self, requests: list[_Request]) -> None:
        """One call, until its last sample has ended."""
        pending = {request.wire_id: request for request in requests}
        for request in requests:
            request.served_before = self._latest_version
        error: Exception | None = None
        self._num_open += 1
        try:
            async with aclosing(self._post_generate(self._body(requests))) as parts:
                async for part in parts:
                    self._receive(part, pending)
        except CallRefused as refusal:
            if len(pending) > 1:
                self._ask_each(pending)
            error = SampleRefused(str(refusal))
        except EngineError as failure:
            error = failure
        except (KeyError, IndexError, TypeError, AttributeError, ValueError) as failure:
            error = EngineError(
                f"{self.name} gave a response that SGLang 0.5.20 does not give: {failure!r}"
            )
        finally:
            self._num_open -= 1
            early = f"{self.name} ended a response before {len(pending)} of its samples"
            for request in pending.values():
                self._lose(request, error or EngineError(early))

    def _body(self, requests: list[_Request]) -> dict[str, object]:
        samples = {request.wire_id: request.sample for request in requests}
        key = f"v{self._latest_version}" if self.keys_prefix_by_version else None
        leaders = [r.wire_id for r in requests if self._leaders.get(r.sample.group) is r]
        body = generate_body(samples, key, self.stream_interval, self.vocab_size, leaders)
        if self.pictures is not None:
            add_pictures(body, samples.values(), self.pictures)
        starts = [r.routes_from for r in requests if self._wants_routes(r.sample)]
        if starts:
            body |= {"return_routed_experts": True, "routed_experts_start_len": min(starts)}
            for request in requests:
                request.call_routes_from = min(starts)
        return body

    def _wants_routes(self, sample: Sample) -> bool:
        return self.returns_routes and sample.priority is Priority.rollout

    def _ask_each(self, pending: dict[str, _Request]) -> None:
        """Resends each sample in its own call, since one bad sample fails all in its call."""
        for request in pending.values():
            if request.outcome.done():
                self._release_followers(request, is_cached=False)
                _set(request.over)
            else:
                request.wire_id = f"alone.{request.wire_id}"
                self._tasks.spawn(self._run_call([request]))
        pending.clear()

    def _lose(self, request: _Request, error: Exception) -> None:
        """The engine will not end this request."""
        if request.num_tokens and not request.outcome.done():
            # Tokens since the last part are unknown: count their average number.
            interval = interval_of(request.sample, self.stream_interval)
            request.sample.num_wasted += min(interval // 2, request.sample.num_left)
        self._release_followers(request, is_cached=False)
        request.end(error)
        _set(request.over)

    # Receiving ------------------------------------------------------------------------------------

    def _receive(self, part: Mapping[str, Any], pending: dict[str, _Request]) -> None:
        meta = part["meta_info"]
        request = pending[meta["id"]]
        reason = meta["finish_reason"]
        self._release_followers(request, is_cached=bool(part["output_ids"]))
        if request.outcome.done():  # it was given up, and the engine has not stopped yet
            request.sample.num_wasted += len(part["output_ids"])
        else:
            try:
                self._add(request, part, reason)
            except (BadLogprobs, EngineError) as error:
                self._fail(request, error, is_over=reason is not None)
            else:
                self._report_arrival(request, is_over=reason is not None)
        if reason is not None:
            del pending[meta["id"]]
            # Before the counts: if they cannot be read, nothing else would end it.
            request.end()
            _set(request.over)
            self._count(request, meta)

    def _report_arrival(self, request: _Request, *, is_over: bool) -> None:
        if request.on_arrival is None:
            return
        try:
            request.on_arrival()
        except Exception as error:  # fails only this sample, not the others of its call
            self._fail(request, error, is_over=is_over)

    def _fail(self, request: _Request, error: Exception, *, is_over: bool) -> None:
        request.end(error)
        if not is_over:
            self._stop_soon(request)

    def _add(
        self, request: _Request, part: Mapping[str, Any], reason: Mapping[str, Any] | None
    ) -> None:
        sample = request.sample
        if reason is not None and reason["type"] == "abort" and reason.get("status_code"):
            # An error of the engine; tokens that come with it are not the sample's.
            raise SampleRefused(f"{self.name} aborted a sample: {reason.get('message')}")
        meta = part["meta_info"]
        spans, routes = list[VersionSpan](), list[Routes]()
        try:
            version = read_version(self.name, meta["weight_version"])
            self.counters.num_logprobs[version] += len(part["output_ids"])
            tokens = new_tokens(
                self.name, part, request.num_tokens, has_candidates=sample.has_candidates
            )
            if sample.constraint is not None:
                known = read_alternatives(tokens, meta, is_probe=sample.guidance.is_probe)
                tokens = tokens._replace(alternatives=known)
            if marks := sampled_marks(tokens.ids, self.pictures):
                raise SampleRefused(f"{self.name} sampled {marks}, marks of pictures")
            if len(tokens.ids) > sample.num_left:
                raise SampleRefused(
                    f"{self.name} returned more than the {sample.max_new_tokens} tokens requested"
                )
            length = request.num_tokens + len(tokens.ids)
            if reason is not None and length:
                spans = read_spans(self.name, meta.get("weight_versions") or [], length)
                if self._wants_routes(sample):
                    routes = request.routes(self.name, meta, spans)
            if tokens.ids or spans:
                request.add(tokens, version, spans)
        except (BadLogprobs, SampleRefused) as error:
            sample.num_wasted += len(part["output_ids"])
            if isinstance(error, BadLogprobs):
                pairs = meta.get("output_token_logprobs") or []
                self.counters.num_not_finite[version] += sum(
                    not _is_finite(pair[0]) for pair in pairs
                )
            raise
        if spans:
            self.note_version(spans[-1].version)
            sample.routes += routes
        if reason is not None:
            self._finish(request, reason, meta)

    def _finish(
        self, request: _Request, reason: Mapping[str, Any], meta: Mapping[str, Any]
    ) -> None:
        sample = request.sample
        if reason["type"] in ("stop", "length"):
            if not request.num_tokens:
                raise SampleRefused(f"{self.name} returned a sample without a token")
            if reason["type"] == "stop" or sample.num_left <= 0:
                sample.finish_reason = reason["type"]
        # SGLang does not look whether the last token of an aborted request ends it.
        elif sample.output_ids and sample.output_ids[-1] in self.end_tokens:
            sample.finish_reason = "stop"
        elif sample.num_left <= 0:
            sample.finish_reason = "length"
        elif not request.is_stopping:
            request.taken_back_at = read_version(self.name, meta["weight_version"])

    def _count(self, request: _Request, meta: Mapping[str, Any]) -> None:
        num_prompt = meta.get("prompt_tokens", 0)
        self.counters.num_prompt_tokens += num_prompt
        self.counters.num_prefilled += num_prompt - (meta.get("cached_tokens") or 0)
        # Only with --enable-metrics; negative for a request that was aborted in the queue.
        self.counters.queue_s += max(0.0, meta.get("queue_time") or 0.0)
        # Retractions by a commit's pause, at most one per new version, are no preemptions. Spans do
        # not show a commit before the first token, as in the middle of a long prompt.
        spans, commits = meta.get("weight_versions") or [], 0
        if not self.keeps_versions:
            # By the versions' numbers: a busy worker hears of several commits at once. Where the
            # engine skips versions this is too many, and a preempted request may not count.
            commits = max(len(spans) - 1, self._latest_version - request.served_before)
        self.counters.num_preemptions += max(0, meta.get("num_retractions", 0) - commits)

    # Stop -----------------------------------------------------------------------------------------

    def _stop_soon(self, request: _Request) -> None:
        if self._is_closed:
            return self._end_closed(request)
        self._to_stop.append(request)
        if len(self._to_stop) == 1:
            self._tasks.spawn(self._stop())

    async def _stop(self) -> None:
        """Stops the requests of one turn of the loop; returns when they have ended."""
        requests, self._to_stop = self._to_stop, []
        try:
            async with asyncio.timeout(STOP_TIMEOUT_S):
                while left := [request for request in requests if not request.over.done()]:
                    await self._abort_together(left)
                    for request in left:
                        _set(request.is_told)
                    await asyncio.wait([r.over for r in left], timeout=STOP_AGAIN_S)
        except TimeoutError:
            for request in left:
                request.end(EngineError(f"{self.name} did not stop in {STOP_TIMEOUT_S:g} s"))

    async def _abort_together(self, requests: list[_Request]) -> None:
        if len(requests) == 1 or not self.is_only_client or self._has_others:
            await self._post_abort([request.wire_id for request in requests])
            return
        # What is sent meanwhile would be ended, too.
        self._num_sweeps += 1
        try:
            await self._post_abort(None)
        finally:
            self._num_sweeps -= 1
        if self._unsent and self._flush is None:
            self._send()

    @property
    def _has_others(self) -> bool:
        """A request runs that is not to be stopped."""
        return any(
            request.is_sent
            and not (request.is_stopping or request.outcome.done() or request.over.done())
            for request in self._requests.values()
        )

    async def _give_up(self, request: _Request) -> None:
        """Stops a cancelled request at the engine; returns when the first stop was sent."""
        if request.is_sent and not request.over.done():
            self._stop_soon(request)
            marks = (request.is_told, request.over)
            await asyncio.wait(marks, return_when=asyncio.FIRST_COMPLETED)


def _set(mark: asyncio.Future[None]) -> None:
    if not mark.done():
        mark.set_result(None)


# Format of requests and responses -----------------------------------------------------------------


def interval_of(sample: Sample, stream_interval: int, *, is_leader: bool = False) -> int:
    """A sample of at most so many tokens comes in one part, two from 51 on (generate_route.py)."""
    if sample.stop or sample.constraint is not None:
        stream_interval = min(stream_interval, STOP_STREAM_INTERVAL)
    if is_leader or sample.on_tokens is not None:  # its first token is waited for
        return max(1, min(stream_interval, sample.num_asked - 1))
    return stream_interval


def generate_body(
    samples: Mapping[str, Sample],
    extra_key: str | None,
    stream_interval: int,
    vocab_size: int | None = None,
    leaders: Collection[str] = (),
) -> dict[str, object]:
    """One call for all samples, by request id; each has its own sampling parameters. `leaders`: ids
    whose first token others wait for."""
    body: dict[str, object] = {
        "rid": list(samples),
        "input_ids": [[*sample.prompt, *sample.output_ids] for sample in samples.values()],
        "sampling_params": [
            {
                **_settings(sample.sampling),
                "max_new_tokens": sample.num_asked,
                "stream_interval": interval_of(sample, stream_interval, is_leader=rid in leaders),
            }
            for rid, sample in samples.items()
        ],
        "return_logprob": True,
        "stream": True,
    }
    wants_candidates = [sample.has_candidates for sample in samples.values()]
    if any(wants_candidates):
        body["return_sampling_mask"] = wants_candidates
    if any(sample.constraint is not None for sample in samples.values()):
        # SGLang 0.5.20 crashes where it is asked for more than there are; and where a batch has
        # requests with and without token_ids_logprob, which would suit a probe better.
        most = vocab_size or ALTERNATIVES
        body["top_logprobs_num"] = [
            min(most, s.guidance.num_alternatives(s.sampling.top_k)) if s.constraint else 0
            for s in samples.values()
        ]
    if extra_key is not None:
        body["extra_key"] = extra_key
    return body


@lru_cache(maxsize=64)  # all samples of a task have the same
def _settings(sampling: SamplingParams) -> Mapping[str, object]:
    return asdict(sampling)


def new_tokens(
    engine: str, part: Mapping[str, Any], num_gathered: int, *, has_candidates: bool = False
) -> Tokens:
    """The new tokens of one part; with `has_candidates`, their log-probabilities are those among
    the candidates.

    `num_gathered` tokens of the request came before. Raises SampleRefused, BadLogprobs.
    """
    meta = part["meta_info"]
    output_ids: list[int] = part["output_ids"]
    pairs = meta.get("output_token_logprobs") or []
    number = meta["completion_tokens"] - num_gathered
    if _is_abort(meta) and len(pairs) > min(number, len(output_ids)) >= 0:
        # A request aborted while it is queued, as one that a pause retracted, repeats its last
        # token and all its log-probabilities at its end; some tokens may not have been sent before.
        pairs = pairs[len(pairs) - number :]
        output_ids = [pair[1] for pair in pairs]
    if len(output_ids) != number:
        raise SampleRefused(
            f"{engine}: {num_gathered} tokens and {len(output_ids)} more do not make the "
            f"{meta['completion_tokens']} that the sample has"
        )
    if [pair[1] for pair in pairs] != output_ids:
        raise BadLogprobs("the log-probabilities are of other tokens than those returned")
    if not has_candidates:
        return Tokens(output_ids, _floats([pair[0] for pair in pairs]))
    candidates = meta.get("output_token_sampling_mask") or []
    logprobs = meta.get("output_token_sampling_logprobs") or []
    # A request that was aborted in the queue has none for tokens that were not sent before.
    if not len(candidates) == len(logprobs) == len(output_ids):
        raise BadLogprobs(
            f"{len(output_ids)} tokens came with {len(candidates)} sets of candidates and "
            f"{len(logprobs)} log-probabilities among them"
        )
    for place, (token, ids) in enumerate(zip(output_ids, candidates, strict=True)):
        if not ids or token not in ids:
            raise BadLogprobs(f"token {place} is {token}, which is not among its candidates {ids}")
    # Arrays: as lists they would take ten times the memory until their group ends.
    return Tokens(output_ids, _floats(logprobs), [array("i", ids) for ids in candidates])


def read_alternatives(
    tokens: Tokens, meta: Mapping[str, Any], *, is_probe: bool
) -> list[Alternatives]:
    """Alternatives of each new token of one part; of a probe all, else its candidates alone.
    Raises BadLogprobs."""
    lists = meta.get("output_top_logprobs") or []
    if _is_abort(meta):  # it may repeat what came before, as for the log-probabilities
        lists = lists[len(lists) - len(tokens.ids) :]
    if len(lists) != len(tokens.ids) or not all(lists):
        raise BadLogprobs(f"{len(tokens.ids)} tokens came with {len(lists)} lists of likely ones")
    found = []
    for place, entries in enumerate(lists):
        logprobs = np.array([entry[0] for entry in entries], np.float64)
        ids = np.array([entry[1] for entry in entries], np.int32)
        chosen = logprobs > LOWEST_LOGPROB
        if tokens.candidates and not is_probe:
            chosen &= np.isin(ids, tokens.candidates[place])
        found.append(Alternatives(ids[chosen], logprobs[chosen]))
    return found


def _floats(logprobs: list[Any]) -> list[float]:
    """Raises BadLogprobs, naming the token, if one is missing, not finite or above 0."""
    try:
        if not logprobs or (math.isfinite(math.fsum(logprobs)) and max(logprobs) <= ROUNDING):
            return logprobs
    except (TypeError, ValueError, OverflowError):
        pass
    for place, value in enumerate(logprobs):
        if not _is_finite(value) or value > ROUNDING:
            raise BadLogprobs(f"log-probability of token {place} is {value!r}")
    return [float(value) for value in logprobs]


def _is_finite(value: object) -> bool:
    """SGLang's JSON has null for NaN and infinity."""
    return isinstance(value, float | int) and math.isfinite(value)


def _is_abort(meta: Mapping[str, Any]) -> bool:
    return meta["finish_reason"] is not None and meta["finish_reason"]["type"] == "abort"


def read_spans(engine: str, spans: Sequence[Mapping[str, Any]], length: int) -> list[VersionSpan]:
    """Spans over all `length` tokens of a request. Raises SampleRefused if they leave gaps."""
    end, parsed = 0, []
    for span in spans:
        if span["start"] != end or span["end"] <= end:
            break
        end = span["end"]
        version = read_version(engine, span["version"])
        parsed.append(VersionSpan(version=version, start=span["start"], end=end))
    if end != length:
        raise SampleRefused(
            f"{engine}: the version spans {list(spans)} do not cover {length} tokens"
        )
    return parsed


@lru_cache(maxsize=256)  # nearly all are of the latest version
def read_version(engine: str, text: str) -> int:
    """Raises SampleRefused if `text` is not a policy version."""
    if not _VERSION.fullmatch(text):
        raise SampleRefused(
            f"{engine} served weights of version {text!r}, which no trainer published"
        )
    return int(text)
