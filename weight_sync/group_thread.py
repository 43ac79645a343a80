"""A daemon thread that carries out one call after the other, for an event loop to await.

A process's place in one epoch after the other, which nothing that blocks can hold up.

NCCL blocks for as long as a peer is stopped: while a group connects, and at the first bucket that
two members exchange. It also keeps what a failed operation leaves half open, by thread. So a thread
of its own does everything with a group. One that fails, or does not come back in its time, is left
behind with its group; what comes next has a new one.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from functools import partial
from typing import TypeVar

from weight_sync.group import WeightGroup, epoch_name
from weight_sync.types import GroupSpec, WeightSyncError

T = TypeVar("T")


class Lane:
    """Unlike a ThreadPoolExecutor's, its thread never holds up the end of the process."""

    def __init__(self, name: str) -> None:
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, call: Callable[[], T]) -> Future[T]:
        future: Future[T] = Future()
        self._calls.put(partial(_carry_out, future, call))
        return future

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            call()
            del call  # what it holds must not live on while the lane waits

    def close(self, timeout_s: float) -> None:
        """End the thread after the calls so far; if they take longer, it is left behind."""
        self._calls.put(None)
        self._thread.join(timeout_s)


def _carry_out(future: Future[T], call: Callable[[], T]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(call())
    except BaseException as error:
        future.set_exception(error)
        del future, call  # the error's traceback holds this frame: they would keep each other alive


_LEAVE_S = 5.0
"""Longest wait for a group to be left; it is left behind then."""


class Membership:
    """Used by one thread at a time, but for `spec` and `leave`."""

    def __init__(self, name: str) -> None:
        """`name` is that of its thread."""
        self._name = name
        self._lane: Lane | None = None
        self._group: WeightGroup | None = None

    @property
    def spec(self) -> GroupSpec | None:
        """Of the epoch; None outside of any."""
        group = self._group
        return None if group is None else group.spec

    def join(self, spec: GroupSpec, meet: Callable[[], WeightGroup]) -> None:
        """Leave the last epoch and `meet` the members of `spec`: first each other, then NCCL's way.

        Raises WeightSyncError, at the latest after twice `spec.timeout_s`.
        """
        last, self._group = self._group, None

        def join() -> WeightGroup:
            if last is not None:
                last.close()
            return meet()

        self._group = self._carry_out(
            join,
            2 * spec.timeout_s,
            f"{epoch_name(spec)} did not form: all members came, but one stopped",
            too_late=_close_result,
        )

    def walk(self, steps: Callable[[WeightGroup], None], limit_s: float) -> None:
        """`WeightGroup.walk` of the epoch's group; after a failure this process is in none.

        Raises WeightSyncError, at the latest after `limit_s`, which is more than the waits inside
        `steps` may take together.
        """
        group = self._group
        assert group is not None, "join() comes first"
        try:
            self._carry_out(
                lambda: group.walk(steps),
                limit_s,
                f"{epoch_name(group.spec)} is given up: a member stopped",
            )
        except BaseException:
            self._group = None
            if group.is_open:  # the walk stands still: this ends what it stands in
                _close_aside(group, 0.0)
            raise

    def leave(self) -> None:
        """Leave the group, if in one; from any thread. The next `join` is as good as the first."""
        group, self._group = self._group, None
        lane, self._lane = self._lane, None
        if lane is not None:
            lane.close(0.0)
        if group is not None:
            _close_aside(group, _LEAVE_S)

    def _carry_out(
        self,
        call: Callable[[], T],
        limit_s: float,
        what_failed: str,
        too_late: Callable[[Future[T]], None] | None = None,
    ) -> T:
        """`too_late` gets what comes of a call that nobody waits for any more."""
        lane = self._lane = self._lane or Lane(self._name)
        future = lane.submit(call)
        try:
            if not wait([future], min(limit_s, threading.TIMEOUT_MAX)).done:
                if too_late is not None:
                    future.add_done_callback(too_late)
                raise WeightSyncError(f"{what_failed} ({self._name}, within {limit_s:g} s)")
            return future.result()
        except BaseException:
            self._lane = None
            lane.close(0.0)
            raise
        finally:
            del future, call  # an error's traceback holds this frame


def _close_result(future: Future[WeightGroup]) -> None:
    """A group that formed when nobody waited for it any more."""
    if not future.cancelled() and future.exception() is None:
        future.result().close()


def _close_aside(group: WeightGroup, wait_s: float) -> None:
    """NCCL's abort waits for whatever its communicator is doing, which may be for ever."""
    closing = threading.Thread(target=group.close, name="weights-leaving", daemon=True)
    closing.start()
    closing.join(wait_s)
