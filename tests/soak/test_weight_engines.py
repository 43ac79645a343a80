"""Engines that die or stall while versions come and are committed: they cost only themselves.

Stand-in servers under the real follower, committer and restarts, each fault at a random moment of
the transfer or of the commit. CI plays each once; LEASH_SOAK_WEIGHT_FAULTS=20 the long form.
"""

from __future__ import annotations

import asyncio
import signal
import time

import pytest

from tests.soak.crash.size import size
from tests.soak.weights.engines import MortalEngine
from tests.soak.weights.fleet import own_address
from tests.soak.weights.model import Weights
from tests.soak.weights.play import HANG_S, Play

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(0),  # every wait of a play has a bound
    pytest.mark.asyncio(loop_scope="module"),
]

NUM_FAULTS = size("WEIGHT_FAULTS", 1)
COMMIT_S = 4.0
"""weight_sync.commit_timeout_s of the play: when a stalled engine is started again."""
COMMITTING_S = 0.6
"""About as long after its last bucket a version is verified, released and loaded."""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
async def test_engine_that_is_lost_costs_only_itself(the_play: Play, number: int) -> None:
    engines = [
        MortalEngine(
            the_play.scene, f"engine-{i}", own_address(f"receiver-{i % 2}"), the_play.state
        )
        for i in range(3)
    ]
    await asyncio.gather(*(engine.start() for engine in engines))
    await _all_serve(the_play, engines)
    survivors_took = []
    try:
        for _ in range(NUM_FAULTS):
            victim = the_play.dice.choice(engines)
            is_early = the_play.dice.random() < 0.5
            async with the_play.at_a_bucket(the_play.any_rank()):
                if is_early:
                    victim.signal(number)
            began = time.monotonic()
            if not is_early:
                await asyncio.sleep(the_play.dice.uniform(0, COMMITTING_S))  # somewhere in it
                victim.signal(number)
            await the_play.published()
            await the_play.converge()
            await _all_serve(the_play, [engine for engine in engines if engine is not victim])
            survivors_took.append(time.monotonic() - began)
            # One that stalled is found out by its silence, and started again.
            await the_play.publish(is_full=False)
            await the_play.converge()
            await _all_serve(the_play, engines)
    finally:
        await asyncio.gather(*(engine.stop() for engine in engines))
    print(f"the other engines served the version within {max(survivors_took):.1f} s")
    weights = Weights(the_play.scene.tensors)
    torn = [what for engine in engines for what in engine.torn(weights)]
    assert not torn, torn


async def _all_serve(the_play: Play, engines: list[MortalEngine]) -> None:
    served: dict[str, int] = {}
    try:
        async with asyncio.timeout(HANG_S):
            while any(served.get(engine.name, -1) < the_play.version for engine in engines):
                served = await the_play.state.wait_engines_changed(served, HANG_S)
    except TimeoutError:
        names = [engine.name for engine in engines]
        raise AssertionError(
            f"{names} did not come to version {the_play.version} within {HANG_S:g} s: {served}"
        ) from None
