"""Constrained completions: a grammar that they follow, a least length, tokens that never occur.

    the engine samples freely     {  0.1    Sure  0.7    [  0.2     among its candidates (top_k)
    the grammar allows            {                      [          after the tokens so far
    the token is drawn from       {  1/3                 [  2/3     these are its candidates now

Engines get no grammar: they run without a tokenizer, an interrupted completion continues at another
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

from array import array
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from random import Random

import numpy as np
from numpy.typing import NDArray

from rollout_pool.sampling.grammars import STEP_TOKENS, Following, Grammars
from rollout_pool.sampling.sample import Guidance, Sample

FEW = 4
"""Tokens of the request after a refusal, twice as many of the one after that, and so on: a policy
that is refused once is often refused again, and what it says behind that is wasted."""
FOLLOWED_AT_ONCE = 32
"""Tokens of one request to the grammar's process, whose time is limited."""


@dataclass(kw_only=True, slots=True, frozen=True)
class _Correction:
    """Takes the place of a refused token: one that was drawn, or a probe."""

    place: int
    token: int | None = None
    """None for a probe."""
    logprob: float = 0.0
    candidates: Sequence[int] = ()


class Guide:
    """Makes one sample follow its constraint, from one call of `Sampler.complete` to its end.

    Example: the sample has [a b], and [c d e] arrive, of which d is not allowed.

        await guide.follow(sample)      # sample.ends_at = 3: the request is stopped
        guide.correct(sample)           # [a b c x], x drawn from the allowed candidates of d
        await guide.extend(sample)      # [a b c x y z], if only y and z can follow
    """

    @classmethod
    async def of(cls, sample: Sample, grammars: Grammars) -> Guide:
        """Raises ConstraintFailed. May take seconds: a grammar is compiled."""
        assert sample.constraint is not None
        sample.cut(len(sample.output_ids) - len(sample.guidance.alternatives))
        sample.guidance = replace(sample.guidance, alternatives=[], is_probe=False)
        following = await grammars.open(sample.constraint)
        try:
            await following.accept(sample.output_ids)  # of an earlier call, all of them allowed
        except BaseException:
            following.close()
            raise
        return cls(sample, following, grammars.end_tokens)

    def __init__(self, sample: Sample, following: Following, end_tokens: Collection[int]) -> None:
        self._following = following
        self._end_tokens = end_tokens
        self._random = Random(f"{sample.sample_id}.{sample.num_attempts}")
        self._correction: _Correction | None = None
        self._drawn: int | None = None
        """Was put into the sample, and may force the tokens behind it."""
        self._is_forcing = False

    def close(self) -> None:
        self._following.close()

    async def follow(self, sample: Sample) -> None:
        """Looks at some of the tokens that have arrived; sets `ends_at` before the first that must
        not stay. Raises ConstraintFailed."""
        if sample.ends_at is not None:
            return  # they will be cut off
        start, known_of = sample.num_ready, sample.guidance.alternatives[:FOLLOWED_AT_ONCE]
        arrived = list(zip(sample.output_ids[start : start + len(known_of)], known_of, strict=True))
        stays = [
            not (sample.guidance.is_probe or (sample.has_candidates and token not in known.ids))
            for token, known in arrived
        ]
        last_stays = all(stays)
        del arrived[len(stays) if last_stays else stays.index(False) + 1 :]
        verdict = await self._following.follow(
            [token for token, _ in arrived],
            [known.ids.tolist() for _, known in arrived],
            last_stays=last_stays,
        )
        num_followed = len(verdict.allowed)
        refused = start + num_followed - 1 if verdict.is_refused else None
        for place, allowed in enumerate(verdict.allowed, start):
            token, known = arrived[place - start]
            ids, logprobs = known.ids[allowed], known.logprobs[allowed]
            if place == refused:
                self._correction = self._draw(sample, place, verdict.first, ids, logprobs)
                sample.ends_at = place
            elif sample.has_candidates:
                logprob = logprobs[ids == token].item() - float(np.logaddexp.reduce(logprobs))
                sample.logprobs[place] = min(0.0, logprob)
                sample.candidates[place] = array("i", ids.tolist())
        del sample.guidance.alternatives[:num_followed]

    def forget(self) -> None:
        """The sample ends before the refused token."""
        self._correction = None

    def correct(self, sample: Sample) -> bool:
        """Puts the drawn token in the place of the refused one. Call when the engine has ended a
        request and all its tokens were followed. Returns whether there was one to refuse; if not,
        the next request may ask for twice as many tokens."""
        correction, self._correction = self._correction, None
        if correction is None:
            if sample.guidance.max_asked is not None:
                sample.guidance.max_asked *= 2
            return False
        place, sample.ends_at, sample.finish_reason = correction.place, None, None
        if correction.token is None:
            sample.guidance = Guidance(max_asked=1, is_probe=True)
            sample.cut(place)
            return True
        sample.guidance = Guidance(max_asked=FEW)
        sample.cut(place + 1)
        sample.put_last(correction.token, correction.logprob, correction.candidates)
        self._note_end(sample)
        self._drawn = correction.token
        return True

    async def extend(self, sample: Sample) -> bool:
        """Adds tokens behind the drawn one, of which each is the only one that may come there.
        Returns whether there were any; then call it again. Raises ConstraintFailed."""
        after = [] if self._drawn is None else [self._drawn]
        if sample.finish_reason is not None or not (after or self._is_forcing):
            return False
        most, self._drawn = min(sample.num_left, STEP_TOKENS), None
        forced = await self._following.force(after, most)
        self._is_forcing = len(forced) == most
        if forced:
            sample.extend_last(forced)
            self._note_end(sample)
        return bool(forced)

    def _note_end(self, sample: Sample) -> None:
        if sample.output_ids[-1] in self._end_tokens:
            sample.finish_reason = "stop"
        elif sample.num_left <= 0:
            sample.finish_reason = "length"

    def _draw(
        self,
        sample: Sample,
        place: int,
        first: Sequence[int],
        ids: NDArray[np.int32],
        logprobs: NDArray[np.float64],
    ) -> _Correction:
        """`first`: the first two tokens that are allowed, or the only one."""
        if not len(ids):
            if len(first) > 1 and not sample.guidance.is_probe:
                return _Correction(place=place)
            return _Correction(place=place, token=first[0], candidates=first[:1])
        most = sample.sampling.top_k if sample.has_candidates else len(ids)
        best = np.sort(np.argsort(-logprobs, kind="stable")[:most])
        ids, logprobs = ids[best], logprobs[best]  # a probe may have found more
        shares = logprobs - np.logaddexp.reduce(logprobs)
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
