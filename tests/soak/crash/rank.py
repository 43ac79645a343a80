"""One rank of the soak's trainer: lease, validate, step, consume, publish, checkpoint, ack.

    lease -- step -- consume -- checkpoint -- ack
          ^      ^          ^             ^      ^     `pause` may stop the process at any of these

It trusts nobody: whether a group may be trained it works out again, from the versions that its
tokens name and from the chain of optimizer steps that led to its own weights.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path

from buffer.results import Lease
from tests.soak.crash.checkpoints import Checkpoint, CheckpointChain
from tests.soak.crash.meeting import Seat
from tests.soak.crash.scenario import Scenario
from tests.soak.crash.synthetic import written_by
from tests.support.blocking import BlockingReplayBuffer

POINTS = ("leased", "stepped", "consumed", "checkpointed", "acked")
_NUM_DEPTHS = 64  # ancestors that a checkpoint names; staleness is far smaller

Pause = Callable[[str, int], None]
"""Called with a point of POINTS and the step."""


def no_pause(point: str, step: int) -> None:
    """The process goes on."""


def run_rank(
    scenario: Scenario, lineage: str, rank: int, meeting: Path, pause: Pause = no_pause
) -> None:
    buffer = scenario.blocking_buffer()
    try:
        Rank(scenario, lineage, rank, Seat(meeting, rank), buffer, pause).train()
    finally:
        buffer.close()


class Rank:
    def __init__(
        self,
        scenario: Scenario,
        lineage: str,
        rank: int,
        seat: Seat,
        buffer: BlockingReplayBuffer,
        pause: Pause,
    ) -> None:
        self._scenario, self._lineage, self._rank = scenario, lineage, rank
        self._seat, self._buffer, self._pause = seat, buffer, pause
        self._chain = CheckpointChain(scenario.folder)
        restored = self._chain.latest()
        self._step = restored.step
        self._depths = dict(restored.depths)
        self._unsaved: list[str] = []
        self._version = self._resume(restored)
        for alias in self._chain.aliases():
            self._depths[alias] = self._depths[restored.version]

    def train(self) -> None:
        """Runs until the meeting is over and no whole batch is left."""
        while (lease := self._lease_together()) is not None:
            kept = self._seat.share(sorted(self._validate(lease)) if self._is_lead else None)[0]
            if not kept:
                continue  # all of it went back or was dropped: lease the step again
            self._train_on(lease, frozenset(kept))
            if self._is_lead:
                self._hand_over(lease, kept)
            self._step += 1
            self._version += 1
            self._depths[self._version] = self._depths[self._version - 1] + 1
            self._unsaved += kept
            if self._step % self._scenario.checkpoint_every == 0:
                self._checkpoint()
        self._checkpoint()

    @property
    def _is_lead(self) -> bool:
        return self._rank == 0

    def _resume(self, restored: Checkpoint) -> int:
        """The version under which the restored weights are published, agreed with the buffer."""
        version = 0
        if self._is_lead:
            published = self._buffer.stats().trainer_version
            version = restored.version if published <= restored.version else published + 1
            self._chain.note_alias(version)
            self._buffer.reconcile(
                self._lineage,
                step=restored.step,
                version=restored.version,
                resume_version=version,
                consumed_group_ids=restored.consumed,
            )
        return int(self._seat.share(version)[0])

    def _lease_together(self) -> Lease | None:
        while True:
            lease = self._lease()
            words = self._seat.share(None if lease is None else lease.lease_token)
            if len(set(words)) == 1 and lease is not None:
                return lease
            # Not all have one, or one of them saw a batch that expired: ask again for the same.
            if self._seat.is_over and not any(words):
                return None

    def _lease(self) -> Lease | None:
        try:
            return self._buffer.lease(
                step=self._step + 1,
                version=self._version,
                num_groups=self._scenario.groups_per_step,
                share=self._rank,
                num_shares=self._scenario.num_ranks,
                timeout_s=self._scenario.batch_timeout_s,
            )
        except TimeoutError:
            return None

    def _validate(self, lease: Lease) -> frozenset[str]:
        self._pause("leased", self._step)
        return self._buffer.validate(lease, self._version)

    def _train_on(self, lease: Lease, kept: frozenset[str]) -> None:
        mine = [group for group in lease.groups if group.group_id in kept]
        for group in mine:
            self._check_age(group.group_id, written_by(group), group.min_version)
        time.sleep(random.expovariate(500))
        shares = self._seat.share([group.group_id for group in mine])
        trained = sorted(group_id for share in shares for group_id in share)
        assert trained == sorted(kept), f"ranks trained {trained}, validate gave {sorted(kept)}"

    def _check_age(self, group_id: str, versions: set[int], min_version: int) -> None:
        unknown = versions - set(self._depths)
        assert not unknown, (
            f"group {group_id} has tokens of versions {unknown}, no ancestors of {self._version}"
        )
        staleness = self._depths[self._version] - min(self._depths[v] for v in versions)
        assert staleness <= self._scenario.max_staleness, (
            f"group {group_id} is {staleness} steps old at version {self._version}: {versions}"
        )
        assert self._version - min_version == staleness, (
            f"group {group_id} of {versions} is {staleness} steps old; the buffer says that "
            f"its min_version is {min_version} at version {self._version}"
        )

    def _hand_over(self, lease: Lease, kept: list[str]) -> None:
        self._pause("stepped", self._step)
        num_consumed = self._buffer.consume(lease, kept)
        assert num_consumed == len(kept), f"{num_consumed} of {len(kept)} consumed: lease lost"
        self._buffer.announce_version(self._version + 1)
        self._pause("consumed", self._step + 1)

    def _checkpoint(self) -> None:
        if self._is_lead and self._unsaved:
            ancestors = sorted(self._depths.items())[-_NUM_DEPTHS:]
            self._chain.save(
                Checkpoint(
                    step=self._step,
                    version=self._version,
                    lineage=self._lineage,
                    consumed=tuple(self._unsaved),
                    depths=dict(ancestors),
                    parent=self._chain.latest_name(),
                )
            )
            self._pause("checkpointed", self._step)
            self._buffer.ack(self._step, self._lineage)
            self._pause("acked", self._step)
        self._seat.share("saved")
        self._unsaved.clear()
