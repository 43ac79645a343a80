"""Skips updates that would do harm, and ends a run in which too many in a row are skipped.

gradient not finite           deepspeed skips the update
norm far above the usual      `trainer.max_grad_spike`
few tokens carry the update   `trainer.min_ess`: its effective sample size
"""

from __future__ import annotations

import logging
import statistics
from collections import Counter, deque
from enum import Enum
from typing import NamedTuple

from configs.schema import TrainerConfig

log = logging.getLogger(__name__)

WINDOW = 20
"""The usual norm is the median of that of so many updates."""
MIN_NORMS = 10
"""Updates without which there is no usual norm yet."""


class SkipReason(Enum):
    """Why an update changed nothing."""

    not_finite = "its gradient was not finite"
    spike = "its gradient norm was far above the usual"
    low_ess = "its effective sample size was low"


class Update(NamedTuple):
    """One update of a step, made or skipped."""

    norm: float | None
    """The gradient's, before clipping; None if it was not finite."""
    skipped: SkipReason | None = None


class EffectiveSampleSize(NamedTuple):
    """The tokens that would carry as much information at equal weights, as a share of an update's.

    share = (sum of w)^2 / (N sum of w^2) over its N tokens, with w = the policy at the start of the
    step / rollout (Kish 1965).
    """

    num_tokens: int
    share: float
    """0 to 1, of the tokens."""
    lowest_bucket: str
    """The bucket of staleness (`metrics.STALENESS_BUCKETS`) whose own share is the lowest."""


class UpdateGuard:
    """Judges the updates of a run, one after the other. All ranks see the same numbers.

    if guard.watches_ess and guard.is_ess_too_low(found): ...   before the update
    limit = guard.norm_limit                                    before the update
    guard.note(update)                                          after it; raises RuntimeError
    """

    def __init__(self, config: TrainerConfig) -> None:
        self._config = config
        self._norms: deque[float] = deque(maxlen=WINDOW)
        self._in_a_row: Counter[SkipReason] = Counter()
        self._lowest_bucket = ""
        """The bucket named by the last update whose effective sample size was too low."""

    @property
    def watches_ess(self) -> bool:
        return self._config.min_ess > 0

    def is_ess_too_low(self, found: EffectiveSampleSize) -> bool:
        """Returns whether the update must be skipped, and logs why."""
        # NaN: there is no token, or one has a NaN weight; then the gradient is not finite either.
        if not found.share < self._config.min_ess:
            return False
        self._lowest_bucket = found.lowest_bucket
        log.warning(
            "an update is skipped: its effective sample size is %.3f of its %d tokens, below "
            "trainer.min_ess=%g; it is lowest at staleness %s",
            *(found.share, found.num_tokens, self._config.min_ess, found.lowest_bucket),
        )
        return True

    @property
    def norm_limit(self) -> float | None:
        """The largest gradient norm with which an update is made; None: any."""
        factor = self._config.max_grad_spike
        if factor is None or len(self._norms) < MIN_NORMS:
            return None
        return factor * statistics.median(self._norms)

    def note(self, update: Update) -> None:
        """Raises RuntimeError if `trainer.max_skipped_updates` in a row have been skipped."""
        norm, skipped = update
        if skipped is None:
            if norm:  # 0: nothing to learn, which says nothing about the usual norm
                self._norms.append(norm)
            self._in_a_row.clear()
            return
        if skipped is SkipReason.spike:
            log.warning(
                "an update is skipped: its gradient norm is %.3g, more than "
                "trainer.max_grad_spike=%g times the usual %.3g",
                *(norm, self._config.max_grad_spike, statistics.median(self._norms)),
            )
            assert norm is not None
            self._norms.append(norm)  # if most are so large, they are the usual ones
        self._in_a_row[skipped] += 1
        most = self._config.max_skipped_updates
        if most is not None and self._in_a_row.total() >= most:
            where = {
                SkipReason.low_ess: f", in the last one lowest at staleness {self._lowest_bucket}",
                # The step that ends here has no record.
                SkipReason.not_finite: ", see not_finite_groups of earlier steps in metrics.jsonl",
            }
            why = ", ".join(
                f"{reason.value} ({n}{where.get(reason, '')})"
                for reason, n in self._in_a_row.items()
            )
            raise RuntimeError(
                f"trainer.max_skipped_updates={most}: that many updates in a row were skipped: "
                f"{why}. Training has become unstable: lower trainer.learning_rate or "
                "buffer.max_staleness, or choose a correction that bounds the weights; then `make "
                "resume` goes on from the last checkpoint"
            )
