"""The account of a step's speed, against numbers worked out by hand."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch

from tests.support.repository import ROOT
from tests.support.trainer import made_up
from trainer_pool.collectives import RankWaits
from trainer_pool.data.packing import PassCost, Row, fill_up, pack
from trainer_pool.rank import Clock
from trainer_pool.speed import PEAK_TFLOPS, StepSpeed, peak_tflops, shown_ranks


@pytest.fixture(autouse=True)
def no_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which also restores what a test adds."""
    monkeypatch.setattr(RankWaits, "seconds", 0.0)


def row(length: int, last: int) -> Row:
    tokens = np.array([*range(length - 1), last], np.int32)
    return made_up.row([0] * (length - 1) + [1], tokens=tokens)


def test_wait_for_ranks_is_that_of_the_last_lap_alone() -> None:
    """A pause, and the wait before it, end with a lap whose seconds are not used."""
    clock = Clock()
    RankWaits.seconds += 1e6
    assert clock.lap() == clock.ranks_s
    assert clock.lap() > clock.ranks_s == 0.0


def test_speed_is_that_of_all_parts_of_the_step() -> None:
    speed = StepSpeed(device=torch.device("cpu"), multiply_adds=2e12)
    speed.seconds = {"plan": 1.0, "passes": 1.5, "update": 1.0}
    RankWaits.seconds += 0.5
    found = speed.record(400, peak=10.0)
    assert found == {
        "step_plan_s": 1.0,
        "step_passes_s": 1.5,
        "step_update_s": 1.0,
        "step_ranks_s": pytest.approx(0.5),
        "train_tokens_per_s": pytest.approx(100.0),
        "model_tflops": pytest.approx(3.0),  # 2 x 3 x 2 in 4 seconds
        "mfu": pytest.approx(0.3),
    }
    assert "mfu" not in speed.record(400, peak=None)
    assert peak_tflops(torch.device("cpu")) is None


@pytest.mark.parametrize("page", ["training", "configuration"])
def test_gpus_whose_peak_is_known_are_on_the_page(page: str) -> None:
    text = (ROOT / "docs" / f"{page}.md").read_text()
    assert [name for name in PEAK_TFLOPS if name not in text] == []


def test_of_many_ranks_the_slowest_the_fastest_and_an_even_choice_are_shown() -> None:
    assert shown_ranks([1.0] * 32) == [*range(32)]
    waits = [1.0] * 512
    waits[301], waits[302] = 0.5, 2.0
    shown = shown_ranks(waits)
    assert shown == sorted(set(shown)) and len(shown) == 32 and {0, 301, 302} < set(shown)
    assert max(b - a for a, b in pairwise([*shown, 512])) <= 18
    assert len(shown_ranks([1.0] * 33)) <= 32


def test_seconds_of_a_part_add_up() -> None:
    speed = StepSpeed(device=torch.device("cpu"))
    for _ in range(2):
        with speed.timing("passes"):
            before = dict(speed.seconds)
    assert speed.seconds["passes"] > before["passes"] > 0


def test_waits_for_other_ranks_are_no_part_of_another_one() -> None:
    speed = StepSpeed(device=torch.device("cpu"))
    with speed.timing("passes"):
        RankWaits.seconds += 1e6
    RankWaits.seconds += 1e5
    found = speed.record(1, peak=None)
    assert found["step_ranks_s"] == pytest.approx(1.1e6) and found["step_passes_s"] < 0


def test_cost_of_a_pass_counts_what_is_computed() -> None:
    cost = PassCost(per_token=3.0, per_pair=2.0)
    rows = [row(20, 50), row(20, 60)]
    (apart,) = pack(rows, 40, cost)
    assert apart.cost == 2 * (3 * 20 + 2 * 200)
    (shared,) = pack(rows, 40, cost, should_share_prefixes=True)
    # 19 tokens once, and two of one token that see 20.
    assert shared.cost == 3 * 19 + 361 + 2 * (3 + 400 - 361)
    assert fill_up([], 1)[0].cost == 0
