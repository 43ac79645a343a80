"""Members that die, stall, join late or corrupt bytes during a publish: no torn version, no hang.

Every fault comes at a bucket that chance has chosen, with real processes. After each: what a
receiver shows equals the trainer's weights bit for bit, survivors show the newest version, and
nothing took longer than `HANG_S`. CI plays each once; LEASH_SOAK_WEIGHT_FAULTS=20 the
long form. LEASH_SOAK_SEED is printed by a failure.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.soak.crash.size import size
from tests.soak.weights.play import HANG_S, Play
from tests.soak.weights.scene import SILENCE_S
from tests.soak.weights.trainer import Touch

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(0),  # every wait of a play has a bound
    pytest.mark.asyncio(loop_scope="module"),
]

NUM_FAULTS = size("WEIGHT_FAULTS", 1)


async def test_receiver_that_is_killed_costs_only_itself(the_play: Play) -> None:
    for _ in range(NUM_FAULTS):
        victim = the_play.any_receiver()
        async with the_play.at_a_bucket(the_play.any_rank()):
            await victim.die()
            del the_play.fleet.receivers[victim.name]
        await the_play.published()
        await the_play.converge()
        the_play.fleet.receivers[victim.name] = victim
        await victim.start()
        await the_play.converge()  # the newest version, without another publish


async def test_receiver_that_stalls_costs_only_itself(the_play: Play) -> None:
    for _ in range(NUM_FAULTS):
        victim = the_play.any_receiver()
        async with the_play.at_a_bucket(the_play.any_rank()):
            victim.signal(signal.SIGSTOP)
            del the_play.fleet.receivers[victim.name]
        await the_play.published()
        await the_play.converge()
        the_play.fleet.receivers[victim.name] = victim
        if the_play.dice.random() < 0.5:
            victim.signal(signal.SIGCONT)
        else:
            await victim.die()
            await victim.start()
        await the_play.converge()


async def test_version_whose_trainer_dies_is_never_visible(the_play: Play) -> None:
    for _ in range(NUM_FAULTS):
        before = the_play.version
        victim = the_play.any_rank()
        async with the_play.at_a_bucket(victim):
            the_play.trainer.ranks[victim].signal(signal.SIGKILL)
        await _others_notice(the_play, victim)
        await _never_seen_above(the_play, before)
        await the_play.new_trainer()
        await _never_seen_above(the_play, before)
        await the_play.publish(is_full=the_play.dice.random() < 0.5)
        await the_play.converge()


async def test_trainer_rank_that_stalls_hangs_no_one(the_play: Play) -> None:
    for _ in range(NUM_FAULTS):
        before = the_play.version
        victim = the_play.any_rank()
        async with the_play.at_a_bucket(victim):
            the_play.trainer.ranks[victim].signal(signal.SIGSTOP)
        if the_play.dice.random() < 0.5:
            await asyncio.sleep(the_play.dice.uniform(0, SILENCE_S / 2))  # the length of the stall
            the_play.trainer.ranks[victim].signal(signal.SIGCONT)
            await the_play.converge()
            await the_play.published()
            continue
        await _others_notice(the_play, victim)
        await _never_seen_above(the_play, before)
        await the_play.new_trainer()
        await the_play.publish(is_full=False)
        await the_play.converge()


async def _others_notice(the_play: Play, victim: int) -> None:
    """A rank that lives learns at its next publish, at the latest, that the trainer is broken."""
    the_play.version += 1
    survivors = [rank for i, rank in enumerate(the_play.trainer.ranks) if i != victim]
    for rank in survivors:
        rank.publish(the_play.version)
    for rank in survivors:
        await rank.hears("failed", HANG_S)


async def _never_seen_above(the_play: Play, version: int) -> None:
    assert await the_play.state.available_version() == version
    assert max(the_play.fleet.sightings.served.values()) == version
    for receiver in the_play.fleet.receivers.values():
        assert (await receiver.client.status(timeout_s=HANG_S)).newest == version
    the_play.check()


async def test_receiver_that_joins_in_the_middle_catches_up(the_play: Play) -> None:
    for number in range(NUM_FAULTS):
        name = f"late-{number}"
        async with the_play.at_a_bucket(the_play.any_rank()):
            await the_play.fleet.add(name)
        await the_play.published()
        await the_play.converge()
        await the_play.fleet.remove(name)


async def test_publishes_back_to_back_end_with_the_last(the_play: Play) -> None:
    for _ in range(NUM_FAULTS):
        number = the_play.dice.choice((2, 2, 3))
        for _ in range(number):
            version = the_play.next_version(is_full=the_play.dice.random() < 0.5)
            the_play.trainer.publish(version)
        for _ in range(number):
            await the_play.published()
        await the_play.converge()


async def test_receiver_whose_tmpfs_is_full_costs_only_itself(
    the_play: Play, tmp_path: Path
) -> None:
    room = tmp_path / "small"
    for number in range(NUM_FAULTS):
        with small_tmpfs(room):
            async with the_play.at_a_bucket(the_play.any_rank()):
                crowded = await the_play.fleet.add(f"crowded-{number}", room / "stage")
                del the_play.fleet.receivers[crowded.name]
            await the_play.published()
            await the_play.converge()
            assert (await crowded.client.status(timeout_s=HANG_S)).newest is None
            subprocess.run(["mount", "-o", "remount,size=64m", str(room)], check=True)
            the_play.fleet.receivers[crowded.name] = crowded
            await the_play.publish(is_full=False)
            await the_play.converge()
            await the_play.fleet.remove(crowded.name)


@contextlib.contextmanager
def small_tmpfs(folder: Path) -> Iterator[None]:
    """With room for one staged version, not for two."""
    folder.mkdir(exist_ok=True)
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=5m", "leash-soak", str(folder)], capture_output=True
    )
    if mounted.returncode:
        pytest.skip(f"no small tmpfs without the right to mount: {mounted.stderr.decode().strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


async def test_byte_that_flips_on_the_way_is_never_served(the_play: Play) -> None:
    for _ in range(NUM_FAULTS):
        rank = the_play.any_rank()
        is_full = the_play.dice.random() < 0.7
        # A delta has few buckets: there it is the rank's first one.
        touch = Touch("flip", the_play.any_bucket(rank) if is_full else 0)
        version = the_play.next_version(is_full=is_full)
        the_play.trainer.publish(version, rank=rank, touch=touch)
        the_play.buckets.append(await the_play.trainer.ranks[rank].hears("at_bucket", HANG_S))
        await the_play.published()
        await the_play.converge()
