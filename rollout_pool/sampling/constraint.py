"""Constrained answers: a grammar that they follow, a least length, tokens that never occur.

    the engine samples freely     {  0.1    Sure  0.7    [  0.2     among its candidates (top_k)
    the grammar allows            {                      [          after the tokens so far
    the token is drawn from       {  1/3                 [  2/3     these are its candidates now

Engines get no grammar: they run without a tokenizer, an interrupted answer continues at another
engine, and the trainer needs the set from which each token was drawn. So the worker follows what
arrives. A token that is allowed stays, and is a draw from its allowed candidates, for it was drawn
from all candidates and kept because it is allowed. In the place of the first that is not, the
worker draws another from the allowed ones, and the engine continues after that. The trainer gets
the allowed candidates of every token, as with any truncated sampling.

If none of the candidates is allowed, but several other tokens, an engine is asked for many more
alternatives: a probe. If none of these is allowed either, the first token that is counts as the
only one, which is exact, too: the policy has no choice then, and nothing to learn.
"""

from __future__ import annotations

import math
import threading
from array import array
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property, lru_cache
from random import Random
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLTokenizer
from llguidance.hf import from_tokenizer
from numpy.typing import NDArray

from rollout_pool.sampling.sample import Constraint, Sample, SampleFailed

FEW = 4
"""Tokens of the request after a refusal, twice as many of the one after that, and so on: a policy
that is refused once is often refused again, and what it says behind that is wasted."""
GRAMMARS_KEPT = 64
"""Compiled ones, by worker."""
MAX_GRAMMAR = 2**18
"""In characters: larger ones take tens of seconds to compile."""
_DEEP_STACK_BYTES = 2**29
"""llguidance calls itself for each rule within a rule; with the usual stack it dies of some
thousands, and the worker with it. Reserved, but not used by other grammars."""


class Grammars:
    """Compiles constraints for one tokenizer."""

    def __init__(self, tokenizer: Any, num_embeddings: int, end_tokens: Collection[int]) -> None:
        """`tokenizer`: of Hugging Face, a fast one. `end_tokens`: see SGLangClient."""
        self._hf_tokenizer = tokenizer
        self._num_embeddings = num_embeddings
        self._end_tokens = sorted(end_tokens)
        # Once: making them takes milliseconds with a large vocabulary.
        self._all = _as_bits(range(num_embeddings), num_embeddings)
        self._ends = _as_bits(self._end_tokens, num_embeddings)
        self._compiled = lru_cache(maxsize=GRAMMARS_KEPT)(self._compile)

    @cached_property
    def _tokenizer(self) -> LLTokenizer:
        """Takes a second with a large vocabulary, and is needed by few runs."""
        return from_tokenizer(
            self._hf_tokenizer, n_vocab=self._num_embeddings, eos_token=self._end_tokens
        )

    def check(self, constraint: Constraint) -> None:
        """Raises ValueError if its grammar can't be compiled, ConstraintFailed if no answer can
        begin. May take some seconds."""
        self._rules(constraint).allowed()

    def guide(self, sample: Sample) -> Guide:
        """What makes `sample` follow its constraint. Raises ConstraintFailed. May take as long."""
        assert sample.constraint is not None
        try:
            return Guide(sample, self._rules(sample.constraint))
        except ValueError as error:
            raise ConstraintFailed(f"{sample.sample_id}: {error}") from error

    def _rules(self, constraint: Constraint) -> _Rules:
        grammar = constraint.grammar
        matcher = self._compiled(grammar).deep_copy() if grammar else None
        banned = _as_bits(constraint.banned, self._num_embeddings)
        return _Rules(
            matcher,
            constraint.min_tokens,
            vocabulary=self._all,
            ends=self._ends,
            banned=banned,
            end_tokens=self._end_tokens,
        )

    def _compile(self, grammar: str) -> LLMatcher:
        if not self._end_tokens:
            raise ValueError("the model has no token that ends an answer")
        if len(grammar) > MAX_GRAMMAR:
            raise ValueError(f"it has {len(grammar)} characters, and may have {MAX_GRAMMAR}")
        tokenizer = self._tokenizer
        with ThreadPoolExecutor(1) as executor:
            usual = threading.stack_size(_DEEP_STACK_BYTES)
            try:
                compiling = executor.submit(_make_matcher, tokenizer, grammar)
            finally:
                threading.stack_size(usual)
            return compiling.result()


def _make_matcher(tokenizer: LLTokenizer, grammar: str) -> LLMatcher:
    matcher = LLMatcher(tokenizer, grammar, log_level=0)
    if not matcher.is_error():
        matcher.compute_bitmask()  # finds that no text follows the grammar
    if matcher.is_error():
        raise ValueError(matcher.get_error().strip().partition("\n<state>")[0])
    return matcher


class _Rules:
    """Which tokens may come next."""

    def __init__(
        self,
        matcher: LLMatcher | None,
        min_tokens: int,
        *,
        vocabulary: NDArray[np.uint8],
        ends: NDArray[np.uint8],
        banned: NDArray[np.uint8],
        end_tokens: Sequence[int],
    ) -> None:
        """`vocabulary`, `ends`, `banned`: a bit for each token."""
        self.end_tokens = end_tokens
        self._matcher = matcher
        self._min_tokens = min_tokens
        self._all, self._ends, self._banned = vocabulary, ends, banned
        self._length = 0

    def allowed(self) -> _Allowed:
        """Raises ConstraintFailed if there is none."""
        if self._matcher is None:
            bits = self._all
        elif self._matcher.is_stopped():
            bits = self._ends
        else:
            bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)[: len(self._all)]
        if self._matcher is not None and self._matcher.is_error():  # it counts as stopped, too
            bits = np.zeros_like(self._all)
        bits = bits & ~self._banned
        if self._length < self._min_tokens:
            bits &= ~self._ends
        if not bits.any():
            problem = "" if self._matcher is None else self._matcher.get_error().strip()
            raise ConstraintFailed(
                problem.partition("\n")[0] or "no token may follow; allow one of those left out"
            )
        return _Allowed(bits)

    def accept(self, token: int) -> None:
        self._length += 1
        if self._matcher is not None and not self._matcher.is_stopped():
            self._matcher.consume_token(token)


def _as_bits(tokens: Collection[int], num_embeddings: int) -> NDArray[np.uint8]:
    mask = np.zeros(8 * ((num_embeddings + 31) // 32 * 4), np.uint8)
    mask[list(tokens)] = 1
    return np.packbits(mask, bitorder="little")


class _Allowed:
    """A set of tokens, with a bit for each of the vocabulary: a list would be slow to make."""

    def __init__(self, bits: NDArray[np.uint8]) -> None:
        self._bits = bits

    def has(self, ids: NDArray[np.int32]) -> NDArray[np.bool_]:
        """[K]: whether each of [K] ids is among them."""
        bits = self._bits[ids >> 3] >> (ids & 7).astype(np.uint8)
        found: NDArray[np.bool_] = (bits & 1).astype(np.bool_)
        return found

    def first_two(self) -> list[int]:
        """Or the only one."""
        places = np.flatnonzero(self._bits)[:2].tolist()
        return [8 * at + bit for at in places for bit in range(8) if self._bits[at] >> bit & 1][:2]


class ConstraintFailed(SampleFailed):
    """An answer can't go on within its constraint; the message says why."""


@dataclass(kw_only=True, slots=True, frozen=True)
class _Correction:
    """What comes in the place of a refused token: one that was drawn, or a probe."""

    place: int
    token: int | None = None
    logprob: float = 0.0
    candidates: Sequence[int] = ()
    is_probe: bool = False


class Guide:
    """Makes one sample follow its constraint, from one call of `Sampler.complete` to its end.

    Example: the sample has [a b], and [c d e] arrive, of which d is not allowed.

        guide.follow(sample)      # sample.ends_at = 3: the request is stopped
        guide.correct(sample)     # [a b c x], x drawn from the allowed candidates of d
    """

    def __init__(self, sample: Sample, rules: _Rules) -> None:
        self._rules = rules
        self._random = Random(f"{sample.sample_id}.{sample.num_attempts}")
        self._correction: _Correction | None = None
        sample.alternatives.clear()
        sample.is_probe = False
        for token in sample.output_ids:  # of an earlier call, all of them allowed
            rules.accept(token)

    def follow(self, sample: Sample) -> None:
        """Looks at the tokens that have arrived; sets `ends_at` before the first that must not
        stay. Raises ConstraintFailed."""
        arrived, sample.alternatives = sample.alternatives, []
        if sample.ends_at is not None:
            return  # they will be cut off
        start = len(sample.output_ids) - len(arrived)
        for place, known in enumerate(arrived, start):
            allowed, token = self._rules.allowed(), sample.output_ids[place]
            ids, logprobs = known.among(allowed.has(known.ids))
            is_allowed = allowed.has(np.array([token], np.int32)).item()
            if sample.is_probe or not is_allowed or (sample.has_candidates and token not in ids):
                self._correction = self._draw(sample, place, allowed, ids, logprobs)
                sample.ends_at = place
                return
            if sample.has_candidates:
                logprob = logprobs[ids == token].item() - _logsumexp(logprobs)
                sample.logprobs[place] = min(0.0, logprob)
                sample.candidates[place] = array("i", ids.tolist())
            self._rules.accept(token)

    def forget(self) -> None:
        """The sample ends before the refused token."""
        self._correction = None

    def correct(self, sample: Sample) -> bool:
        """Puts the drawn token in the place of the refused one, and those behind it that have no
        alternative. Call when the engine has ended a request. Whether there was one to refuse; if
        not, the next request may ask for twice as many tokens."""
        correction, self._correction = self._correction, None
        if correction is None:
            if sample.max_asked is not None:
                sample.max_asked *= 2
            return False
        place, sample.ends_at, sample.finish_reason = correction.place, None, None
        sample.max_asked = 1 if correction.is_probe else FEW
        sample.is_probe = correction.is_probe
        if correction.token is None:
            sample.cut(place)
            return True
        sample.cut(place + 1)
        sample.put_last(correction.token, correction.logprob, correction.candidates)
        self._note_last(sample)
        while sample.finish_reason is None:
            only, *others = self._rules.allowed().first_two()
            if others:
                break
            sample.extend_last(only)
            self._note_last(sample)
        return True

    def _note_last(self, sample: Sample) -> None:
        self._rules.accept(sample.output_ids[-1])
        if sample.output_ids[-1] in self._rules.end_tokens:
            sample.finish_reason = "stop"
        elif sample.num_left <= 0:
            sample.finish_reason = "length"

    def _draw(
        self,
        sample: Sample,
        place: int,
        allowed: _Allowed,
        ids: NDArray[np.int32],
        logprobs: NDArray[np.float64],
    ) -> _Correction:
        if not len(ids):
            first, *others = allowed.first_two()
            if others and not sample.is_probe:
                return _Correction(place=place, is_probe=True)
            return _Correction(place=place, token=first, candidates=[first])
        most = sample.sampling.top_k if sample.has_candidates else len(ids)
        best = np.sort(np.argsort(-logprobs, kind="stable")[:most])
        ids, logprobs = ids[best], logprobs[best]  # a probe may have found more
        shares = logprobs - _logsumexp(logprobs)
        if sample.sampling.temperature == 0:
            at = int(shares.argmax())
        else:
            [at] = self._random.choices(range(len(ids)), np.exp(shares).tolist())
        return _Correction(
            place=place,
            token=int(ids[at]),
            logprob=min(0.0, float(shares[at])),
            candidates=ids.tolist(),
        )


def _logsumexp(logprobs: NDArray[np.float64]) -> float:
    highest = logprobs.max()
    return float(highest) + math.log(np.exp(logprobs - highest).sum())
