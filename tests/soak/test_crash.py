"""Conservation under crashes: processes are killed at random, and nothing is lost or doubled.

CI runs it small; `make soak` at full size: LEASH_SOAK_GROUPS, LEASH_SOAK_KILLS (of all kinds),
LEASH_SOAK_SERVER_KILLS and LEASH_SOAK_SEED, which a failure prints.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.soak.crash.mortal_server import MortalServer
from tests.soak.crash.play import Play
from tests.soak.crash.scenario import Scenario
from tests.soak.crash.size import size

pytestmark = pytest.mark.slow

NUM_GROUPS = size("GROUPS", 2_000)
NUM_KILLS = size("KILLS", 12)
NUM_SERVER_KILLS = size("SERVER_KILLS", 3)
SEED = size("SEED", random.randrange(1 << 30))
SHARDS = size("SHARDS", 1)


@dataclass(kw_only=True, slots=True)
class Killer:
    """Kills at moments of progress that the seed has chosen."""

    server: MortalServer
    play: Play
    dice: random.Random
    plan: list[tuple[float, str]] = field(default_factory=list)
    """Number of pushed groups at which to kill, and whom; the next one last."""
    victims: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        num_producers = (NUM_KILLS - NUM_SERVER_KILLS) // 2
        kinds = ["server"] * NUM_SERVER_KILLS + ["producer"] * num_producers
        kinds += ["rank"] * (NUM_KILLS - len(kinds))
        self.dice.shuffle(kinds)
        moments = [self.dice.uniform(0.01, 0.97) * NUM_GROUPS for _ in kinds]
        self.plan = sorted(zip(moments, kinds, strict=True), reverse=True)

    def act(self, num_pushed: int) -> None:
        if not self.plan or num_pushed < self.plan[-1][0]:
            return
        _, kind = self.plan.pop()
        time.sleep(self.dice.uniform(0, 0.03))  # not always right after a look at the stats
        self.victims[kind] += 1
        match kind:
            case "server":
                self.server.kill()
                time.sleep(self.dice.uniform(0, 0.3))
                self.server.restart()
            case "producer":
                self.play.producers.kill_one(self.dice.randrange(len(self.play.producers.all)))
            case _:
                self.play.trainer.kill_one(self.dice.randrange(len(self.play.trainer.ranks)))


@pytest.mark.timeout(0)  # the play watches itself: it fails when nothing moves any more
def test_killed_processes_lose_no_group_and_train_none_twice(
    mortal_server: MortalServer, tmp_path: Path
) -> None:
    folder = tmp_path / "soak"
    folder.mkdir()
    num_producers = 8
    scenario = Scenario(
        url=mortal_server.url,
        run="crash",
        folder=folder,
        shards=SHARDS,
        num_producers=num_producers,
        groups_per_producer=-(-NUM_GROUPS // num_producers),
        capacity_groups=80,
    )
    play = Play(scenario, mortal_server.url)
    killer = Killer(server=mortal_server, play=play, dice=random.Random(SEED))
    try:
        outcome = play.run(killer.act)
    except BaseException:
        print(f"LEASH_SOAK_SEED={SEED}; killed {dict(killer.victims)}")
        print(mortal_server.log_tail())
        raise
    print(f"LEASH_SOAK_SEED={SEED}; killed {dict(killer.victims)}; {outcome.summary}")
    assert not outcome.faults, "\n".join(outcome.faults[:50])
    assert killer.victims.total() == NUM_KILLS
    assert outcome.num_acknowledged >= NUM_GROUPS
    assert outcome.num_trained > 0.5 * NUM_GROUPS, "most of the groups should have been trained"
