"""A rank that is killed at any moment of its steps and checkpoints."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.support.zero3.scene import NUM_STEPS, Scene


def chain(scene: Scene) -> None:
    """Train on from the last checkpoint, if there is one, with one after each step.

    `kill.json` may name a rank that is killed at a moment: right before its n-th update, write,
    sync or renaming of a file.
    """
    scene.store.folder = scene.folder / "checkpoints-chain"
    found, first = scene.store.latest(), 0
    if found is not None:
        scene.restore_from(scene.store.folder)
        first = found[1].step
    with killed_at_a_moment(scene) as moment:
        scene.train(first, NUM_STEPS, moment, save_after=range(1, NUM_STEPS + 1))
    scene.results["first"] = first
    scene.write()


@contextlib.contextmanager
def killed_at_a_moment(scene: Scene) -> Iterator[Callable[[], None]]:
    """Counts the moments inside the block, and calls of what it yields."""
    kill = json.loads((scene.folder / "kill.json").read_text())
    moments = itertools.count(1)

    def moment() -> None:
        if kill["rank"] == scene.ranks.rank and next(moments) == kill["moment"]:
            os.kill(os.getpid(), signal.SIGKILL)

    def after_a_moment(call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            moment()
            return call(*args, **kwargs)

        return wrapped

    with pytest.MonkeyPatch.context() as patches:
        for name in ("write", "fsync", "rename", "replace"):
            patches.setattr(os, name, after_a_moment(getattr(os, name)))
        yield moment
