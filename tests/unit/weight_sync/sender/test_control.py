"""Rank 0's word to the other ranks, over real gloo between real processes."""

from __future__ import annotations

import contextlib
import multiprocessing
import time
from collections.abc import Iterator

import pytest

from tests.support.weights import control_rank
from weight_sync.group import open_store
from weight_sync.sender.control import ControlError, ControlGroup

NUM_RANKS = 3
LIMIT_S = 60.0


class Ranks:
    """Rank 0 here, the others as processes."""

    def __init__(self, timeout_s: float) -> None:
        self._store = open_store("127.0.0.1", LIMIT_S)
        # Forks of one process that has imported torch: a start takes milliseconds.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([control_rank.__name__])
        self.words, word = context.Pipe(duplex=False)
        self.others = [
            context.Process(
                target=control_rank.serve,
                args=(rank, NUM_RANKS, self._store.port, timeout_s, word),
                daemon=True,
            )
            for rank in range(1, NUM_RANKS)
        ]
        for process in self.others:
            process.start()
        word.close()
        self.group = ControlGroup(
            self._store,
            "test",
            rank=0,
            num_ranks=NUM_RANKS,
            address="127.0.0.1",
            timeout_s=LIMIT_S,
        )

    def wait(self) -> list[int | None]:
        for process in self.others:
            process.join(LIMIT_S)
        return [process.exitcode for process in self.others]

    def close(self) -> None:
        self.group.close()
        for process in self.others:
            process.kill()
            process.join()
        self.words.close()


@contextlib.contextmanager
def ranks(timeout_s: float = LIMIT_S) -> Iterator[Ranks]:
    made = Ranks(timeout_s)
    try:
        yield made
    finally:
        made.close()


def test_call_returns_replies_in_rank_order() -> None:
    with ranks() as made:
        for length in (0, 10, 10**6):
            message = {"do": "this", "what": "é" * length, "numbers": [1, None, 2.5, 2**60]}
            replies = made.group.call(message, LIMIT_S)
            assert replies == [{"rank": rank, "heard": message} for rank in (1, 2)]
        made.group.broadcast({"do": "close"})
        assert made.wait() == [0, 0]


def test_rank_that_dies_is_named_at_once() -> None:
    with ranks() as made:
        start = time.monotonic()
        with pytest.raises(ControlError, match="receiving from rank 2: it is gone, or was silent"):
            made.group.call({"do": "this", "dying": [2]}, LIMIT_S)
        assert time.monotonic() - start < LIMIT_S / 2


def test_rank_that_does_not_answer_is_named_when_its_time_is_over() -> None:
    with ranks() as made:
        with pytest.raises(ControlError, match=r"receiving from rank 1: .* silent for 0"):
            made.group.call({"do": "this", "sleeping": [1]}, 0.5)
        with pytest.raises(ControlError):  # the group is of no use any more
            made.group.call({"do": "this"}, 0.5)


def test_silence_of_rank_0_is_noticed_by_the_others() -> None:
    with ranks(timeout_s=10.0) as made:  # they have to meet within that time, too
        assert made.wait() == [3, 3]
        assert "receiving from rank 0: it is gone, or was silent for 10 s" in made.words.recv()


def test_missing_rank_is_an_error() -> None:
    store = open_store("127.0.0.1", LIMIT_S)
    with pytest.raises(ControlError, match="the 2 trainer ranks did not meet within 1 s"):
        ControlGroup(store, "test", rank=0, num_ranks=2, address="127.0.0.1", timeout_s=1.0)
