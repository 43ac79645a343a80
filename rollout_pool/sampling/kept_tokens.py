"""Keeps the tokens of groups in flight in the buffer, so that they outlive their worker.

    a sample has grown by rollout.keep_every_tokens ──► what is new of its whole group is kept
    the worker stops                                ──► what is new of all its groups is kept
    a worker died, or stopped ──► its prompts run again: a sample with the same prompt begins with
                                  the tokens that are kept, an ended one is not sampled again

Episodes are played again from their start: to the same completions an environment says the same,
so the samples of later turns find their tokens too. If it says something else, they are sampled.

A sample is kept in parts, each named by its first token:

    0.0.0        sample 0 of episode 0, tokens 0 to 1024
    0.0.1024     its next tokens
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from array import array
from collections.abc import Iterator, Mapping
from dataclasses import astuple, dataclass, field
from functools import lru_cache
from hashlib import blake2b

import numpy as np
from msgspec import MsgspecError, Struct, msgpack

from buffer.staleness import Leash
from buffer.types import SamplingParams, VersionSpan, digest_of
from rollout_pool.sampling.sample import Constraint, Sample, merge_spans

log = logging.getLogger(__name__)

LOOK_EVERY_S = 1.0
"""Between two looks at how far the samples have grown."""


class Part(Struct, frozen=True, forbid_unknown_fields=True):
    """Consecutive tokens of a sample, in the buffer as MessagePack."""

    prompt: bytes
    """Digest of what the sample's distribution depends on besides the weights."""
    chain: str
    """The same in parts that continue each other: a sample may have begun again."""
    start: int
    tokens: bytes
    """int32[n], little-endian."""
    logprobs: bytes
    """float32[n], little-endian."""
    versions: tuple[tuple[int, int], ...]
    """Pairs of version and number of tokens."""
    end: str
    """The finish reason, if these are the last tokens."""
    candidates: tuple[bytes, ...] = ()
    """int32[], little-endian, of each token, if the sampling is truncated."""


@dataclass(kw_only=True, slots=True)
class KeptSample:
    """A sample as far as it is kept; see Sample for its columns."""

    prompt: bytes
    chain: str
    """Empty if the parts in the buffer have more tokens than this."""
    output_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    candidates: list[array[int]] = field(default_factory=list)
    version_spans: list[VersionSpan] = field(default_factory=list)
    end: str = ""

    def add(self, part: Part) -> None:
        """Raises ValueError if the part's columns do not fit each other."""
        tokens, logprobs = np.frombuffer(part.tokens, "<i4"), np.frombuffer(part.logprobs, "<f4")
        if not len(tokens) == len(logprobs) == sum(number for _, number in part.versions):
            raise ValueError(f"its columns have {len(tokens)} and {len(logprobs)} tokens")
        if not np.isfinite(logprobs).all():
            raise ValueError("a log-probability is not finite")
        if part.candidates and len(part.candidates) != len(tokens):
            raise ValueError(f"{len(part.candidates)} of its {len(tokens)} tokens have candidates")
        spans, start = [], part.start
        for version, number in part.versions:
            if version < 0 or number < 1:
                raise ValueError(f"{number} tokens are of version {version}")
            spans.append(VersionSpan(version=version, start=start, end=start + number))
            start += number
        self.output_ids += tokens.tolist()
        self.logprobs += logprobs.tolist()
        self.candidates += [array("i", np.frombuffer(ids, "<i4")) for ids in part.candidates]
        self.version_spans = merge_spans([*self.version_spans, *spans])
        self.end = part.end

    def cut(self, leash: Leash) -> None:
        """Removes tokens of a version that is gone, and all after them."""
        for place, span in enumerate(self.version_spans):
            if leash.current(span.version) is None:
                for column in (self.output_ids, self.logprobs, self.candidates):
                    del column[span.start :]
                del self.version_spans[place:]
                self.chain = self.end = ""
                return


def read_kept(
    parts: Mapping[str, bytes], leash: Leash, version: int, *, drops_stale: bool
) -> dict[str, KeptSample]:
    """The kept samples of a group by name, without tokens that can't be trained any more.

    `drops_stale`: a sample whose oldest token is too stale for a step at `version` is left out.
    """
    by_sample: dict[str, dict[int, Part]] = {}
    for name, data in parts.items():
        try:
            part = msgpack.decode(data, type=Part)
        except MsgspecError as error:
            log.warning("kept tokens %s cannot be read and are sampled again: %s", name, error)
            continue
        by_sample.setdefault(name.rpartition(".")[0], {})[part.start] = part
    found = {}
    for name, by_start in by_sample.items():
        try:
            sample = _joined(by_start)
        except ValueError as error:
            log.warning("kept tokens of %s are sampled again: %s", name, error)
            continue
        sample.cut(leash)
        oldest = min((span.version for span in sample.version_spans), default=None)
        if oldest is None or (drops_stale and not leash.is_fresh(version, oldest)):
            continue
        found[name] = sample
    return found


def _joined(by_start: Mapping[int, Part]) -> KeptSample:
    if (part := by_start.get(0)) is None:
        raise ValueError("their beginning is missing")
    sample = KeptSample(prompt=part.prompt, chain=part.chain)
    while part is not None and part.chain == sample.chain and not sample.end:
        before = len(sample.output_ids)
        sample.add(part)
        after = len(sample.output_ids)
        part = by_start.get(after) if after > before else None
    return sample


@dataclass(kw_only=True, slots=True)
class _Progress:
    sample: Sample
    chain: str
    num_kept: int = 0
    num_restarts: int = 0
    """The sample's, when it was last kept."""
    is_whole: bool = False
    """Its end is kept too."""

    @property
    def num_new(self) -> int:
        return self.sample.num_ready - self.num_kept

    def take_new(self) -> Part | None:
        """The tokens that the buffer does not have; they count as kept from now on."""
        sample = self.sample
        if sample.num_restarts != self.num_restarts or self.num_new < 0:
            self.chain, self.num_kept, self.is_whole = secrets.token_hex(4), 0, False
            self.num_restarts = sample.num_restarts
        start, end, new = self.num_kept, _end(sample), slice(self.num_kept, sample.num_ready)
        if not self.num_new and (self.is_whole or not end):
            return None
        self.num_kept, self.is_whole = sample.num_ready, bool(end)
        return Part(
            prompt=_digest(sample),
            chain=self.chain,
            start=start,
            # Arrays have the host's order, which is little-endian wherever torch runs.
            tokens=array("i", sample.output_ids[new]).tobytes(),
            logprobs=array("f", sample.logprobs[new]).tobytes(),
            versions=tuple(_versions_of(sample, new)),
            end=end,
            candidates=tuple(ids.tobytes() for ids in sample.candidates[new]),
        )


class GroupTokens:
    """Which tokens of a group's samples are kept, and which a sample begins with.

    Example, in a worker that follows one that died after 1024 tokens of sample 0 of episode 0:

        tokens = GroupTokens("0-7-ab12cd34", read_kept(parts, leash, 5, drops_stale=True))
        tokens.begin(sample)          # "0-7-ab12cd34.0.0" has 1024 tokens now
        ...                           # the engine goes on from there
        tokens.take_new()             # {"0.0.1024": ...}, for the buffer
    """

    def __init__(self, group_id: str, found: Mapping[str, KeptSample]) -> None:
        self._prefix = f"{group_id}."
        self._found = dict(found)
        self._running: dict[str, _Progress] = {}
        self._of_ended: dict[str, Part] = {}
        """New parts of samples that have ended. The samples are not held: prompts are long."""
        self.keeping = asyncio.Lock()
        """Held while new parts are sent, which must arrive in order."""
        self.num_restored = 0
        """Tokens that its samples began with."""

    def begin(self, sample: Sample) -> None:
        """Gives the sample its kept tokens, if it has the same prompt and sampling parameters."""
        name = sample.sample_id.removeprefix(self._prefix)
        progress = self._running[name] = _Progress(sample=sample, chain=secrets.token_hex(4))
        kept = self._found.pop(name, None)
        if kept is None or kept.prompt != _digest(sample):
            return
        if len(kept.output_ids) > sample.max_new_tokens:
            return
        if len(kept.candidates) != len(kept.output_ids) * sample.has_candidates:
            return
        sample.output_ids, sample.logprobs = kept.output_ids, kept.logprobs
        sample.candidates, sample.version_spans = kept.candidates, kept.version_spans
        sample.note_processed()  # experts are not kept: they come when a request ends
        self.num_restored += len(kept.output_ids)
        if kept.end and not (kept.end == "length" and sample.num_left):
            sample.finish_reason = kept.end
        if kept.chain:
            progress.chain, progress.num_kept = kept.chain, len(kept.output_ids)
            progress.is_whole = sample.finish_reason is not None

    def end(self, sample: Sample) -> None:
        """The sample will not change any more."""
        name = sample.sample_id.removeprefix(self._prefix)
        if (progress := self._running.pop(name, None)) is not None:
            self._add(self._of_ended, name, progress)

    def is_due(self, every: int) -> bool:
        """Returns whether a sample in progress has so many tokens that are not kept."""
        return any(progress.num_new >= every for progress in self._running.values())

    def take_new(self) -> dict[str, bytes]:
        """All that is not kept, by name; counts as kept from now on."""
        parts, self._of_ended = self._of_ended, {}
        for name, progress in self._running.items():
            self._add(parts, name, progress)
        return {name: msgpack.encode(part) for name, part in parts.items()}

    @staticmethod
    def _add(parts: dict[str, Part], name: str, progress: _Progress) -> None:
        if (part := progress.take_new()) is not None:
            parts[f"{name}.{part.start}"] = part


def _end(sample: Sample) -> str:
    """Its finish reason, but for one that its episode's time ended: it may have more time now. One
    that still has tokens behind its end has not ended."""
    if sample.finish_reason == "length" and sample.num_left:
        return ""
    if sample.num_ready < len(sample.output_ids):
        return ""
    return sample.finish_reason or ""


def _versions_of(sample: Sample, new: slice) -> Iterator[tuple[int, int]]:
    for span in sample.version_spans:
        if (number := min(span.end, new.stop) - max(span.start, new.start)) > 0:
            yield span.version, number


def _digest(sample: Sample) -> bytes:
    digest = blake2b(array("i", sample.prompt), digest_size=8)
    digest.update(_digested(sample.sampling, sample.constraint))
    for picture in sample.pictures:  # of one size they have the same tokens
        digest.update(digest_of(picture).encode())
    return digest.digest()


@lru_cache(maxsize=64)  # all samples of a task have the same
def _digested(sampling: SamplingParams, constraint: Constraint | None) -> bytes:
    return repr((astuple(sampling), constraint)).encode()
