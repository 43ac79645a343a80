"""Updates that would do harm are left out, and a run in which most are is ended.

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
"""Norms of which the median is the usual one."""
FEWEST = 10
"""With fewer norms there is no usual one yet."""


class LeftOut(Enum):
    """Why an update was left out."""

    not_finite = "its gradient was not finite"
    spike = "its gradient norm was far above the usual"
    low_ess = "its effective sample size was low"


class Update(NamedTuple):
    norm: float | None
    """Of the gradient before clipping; None if it was not finite."""
    left_out: LeftOut | None = None


class EffectiveSampleSize(NamedTuple):
    """(sum of w)^2 / (N sum of w^2) over the N tokens of an update, w = proximal / rollout."""

    num_tokens: int
    share: float
    lowest_bucket: str
    """Of staleness."""


class UpdateGuard:
    """Judges the updates of a run, one after the other. All ranks see the same numbers.

    limit = guard.norm_limit                          before the update
    guard.note(update)                                after it; raises RuntimeError
    """

    def __init__(self, config: TrainerConfig) -> None:
        self._config = config
        self._norms: deque[float] = deque(maxlen=WINDOW)
        self._in_a_row: Counter[LeftOut] = Counter()

    @property
    def watches_ess(self) -> bool:
        return self._config.min_ess > 0

    def is_carried_by_few(self, found: EffectiveSampleSize) -> bool:
        if found.share >= self._config.min_ess or not found.num_tokens:
            return False
        log.warning(
            "an update is left out: its effective sample size is %.3f of its %d tokens, below "
            "trainer.min_ess=%g; it is lowest at staleness %s",
            *(found.share, found.num_tokens, self._config.min_ess, found.lowest_bucket),
        )
        return True

    @property
    def norm_limit(self) -> float | None:
        """The largest gradient norm with which an update is made."""
        factor = self._config.max_grad_spike
        if factor is None or len(self._norms) < FEWEST:
            return None
        return factor * statistics.median(self._norms)

    def note(self, update: Update) -> None:
        """Raises RuntimeError if `trainer.max_skipped_updates` in a row have been left out."""
        norm, left_out = update
        if left_out is None:
            if norm:  # 0: nothing to learn, which says nothing of the usual norm
                self._norms.append(norm)
            self._in_a_row.clear()
            return
        if left_out is LeftOut.spike:
            log.warning(
                "an update is left out: its gradient norm is %.3g, more than "
                "trainer.max_grad_spike=%g times the usual %.3g",
                *(norm, self._config.max_grad_spike, statistics.median(self._norms)),
            )
        self._in_a_row[left_out] += 1
        most = self._config.max_skipped_updates
        if most is not None and self._in_a_row.total() >= most:
            why = ", ".join(f"{reason.value} ({n})" for reason, n in self._in_a_row.items())
            raise RuntimeError(
                f"trainer.max_skipped_updates={most}: so many updates in a row were left out: "
                f"{why}. Training has become unstable: lower trainer.learning_rate or "
                "buffer.max_staleness, or choose a correction that bounds the weights; then `make "
                "resume` goes on from the last checkpoint"
            )
