"""Counters of a worker, whose sums over all ended groups go to the run every second."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Collection, Iterable

from buffer.run_state import RunState
from rollout_pool.sampling.group_samples import Answer

SEND_EVERY_S = 1.0
LENGTHS = ((256, "<=256"), (1024, "<=1k"), (4096, "<=4k"), (16384, "<=16k"), (65536, "<=64k"))
"""From 1k on the same buckets as for groups that the buffer drops."""
LONGER = ">64k"


def length_bucket(num_tokens: int) -> str:
    return next((name for most, name in LENGTHS if num_tokens <= most), LONGER)


def least_of_class(num_tokens: int) -> int:
    """The least length of an answer's class, of which a doubling has two: 1, 2, 3, 4, 6, 8, 12."""
    return math.ceil(2 ** (math.floor(2 * math.log2(max(1, num_tokens))) / 2))


def _episode_of(session: str) -> str:
    """`GROUP.3` of an agent's session `GROUP.3-a1b2c3`."""
    group, dot, place = session.rpartition(".")
    return group + dot + place.partition("-")[0]


class Counters:
    """Counts that have not been sent yet. Used in one event loop."""

    def __init__(self, state: RunState) -> None:
        self._state = state
        self._unsent: Counter[str] = Counter()
        self._sending: asyncio.Task[None] | None = None

    def add(self, name: str, amount: float = 1) -> None:
        if amount:
            self._unsent[name] += amount  # type: ignore[assignment]  # seconds are floats

    def add_answers(self, answers: Iterable[Answer], ended: Collection[str]) -> None:
        """Counts a group's answers by length, those of episodes outside `ended` as cut off.

        An answer is all that the model wrote in an episode.
        """
        episodes: dict[str, list[Answer]] = {}
        for answer in answers:
            episodes.setdefault(_episode_of(answer.session), []).append(answer)
        for episode, turns in episodes.items():
            num_tokens = sum(turn.num_tokens for turn in turns)
            length = least_of_class(num_tokens)
            if episode in ended:
                self.add(f"answers_ended:{length}")
                self.add(f"answer_tokens:{length}", num_tokens)
            else:
                self.add(f"answers_cut:{length}")
            if sampled := [turn for turn in turns if turn.num_tokens]:
                met = max(t.newest for t in sampled) - min(t.oldest for t in sampled)
                self.add("answer_versions", met)

    async def run(self) -> None:
        """Sends every second. Never returns."""
        while True:
            await asyncio.sleep(SEND_EVERY_S)
            await self.flush()

    async def flush(self) -> None:
        """Sends all counts so far. Counts that could not be sent stay for the next flush."""
        # When a flush is cancelled its sending still completes, so that nothing is sent twice; the
        # next flush waits for it.
        if self._sending is not None:
            await asyncio.wait([self._sending])
        self._sending = asyncio.create_task(self._send())
        await asyncio.shield(self._sending)

    async def _send(self) -> None:
        sent, self._unsent = self._unsent, Counter()
        try:
            await self._state.count_all(sent)
        except BaseException:
            self._unsent.update(sent)
            raise
