"""A network that loses one reply in twenty: every request that it hits was applied, and is retried.

`make soak` runs it with more groups (LEASH_SOAK_LOSSY_GROUPS).
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.soak.crash.lossy_proxy import LossyProxy
from tests.soak.crash.mortal_server import MortalServer
from tests.soak.crash.play import Play
from tests.soak.crash.scenario import Scenario
from tests.soak.crash.size import size

pytestmark = pytest.mark.slow

NUM_GROUPS = size("LOSSY_GROUPS", 400)
LOSS = 0.05


@pytest.mark.timeout(0)  # the play watches itself
def test_lost_replies_neither_lose_nor_double_a_group(
    mortal_server: MortalServer, tmp_path: Path
) -> None:
    folder = tmp_path / "soak"
    folder.mkdir()
    proxy = LossyProxy(mortal_server.url, LOSS, seed=size("SEED", 0))
    try:
        scenario = Scenario(
            url=proxy.url,
            run="lossy",
            folder=folder,
            num_producers=2,
            num_ranks=2,
            groups_per_step=16,
            groups_per_producer=NUM_GROUPS // 2,
            lease_timeout_s=60.0,  # many retries in a row are not a lost lease
        )
        outcome = Play(scenario, mortal_server.url).run(lambda num_pushed: None)
    finally:
        proxy.close()
    print(f"{proxy.num_lost} replies lost; {outcome.summary}")
    assert not outcome.faults, "\n".join(outcome.faults[:50])
    assert proxy.num_lost > NUM_GROUPS * LOSS / 2
    assert outcome.num_trained > 0.5 * NUM_GROUPS
