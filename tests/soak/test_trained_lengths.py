"""The lengths that are trained are those that were sampled, whatever the staleness and the ends.

A worker of the house, at an emulated engine, samples answers whose lengths have a heavy tail; a
trainer takes them as a rank does. When each of the first prompts of the stream is trained or lost,
their trained lengths are compared with those that were drawn for them first. `mean` is the mean
trained over the mean sampled, `said` what a running job says of it, `long` the same for the share
of samples above the 95th percentile: they show what the statistic, which is blind to tails, does
not. `versions` is the most that one sample met.

CI plays a few settings; `make soak-lengths` all of them, and ten resumes:
LEASH_SOAK_LENGTH_PROMPTS, LEASH_SOAK_ALL_POLICIES, LEASH_SOAK_RESUMES,
LEASH_SOAK_RESUME_STEPS and LEASH_SOAK_SEED.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from configs.choices import OnStale, TailPolicy
from tests.soak.crash.size import size
from tests.soak.lengths.law import Comparison, kolmogorov_smirnov
from tests.soak.lengths.play import End, Play
from tests.soak.lengths.scene import Policy, Scene

pytestmark = [pytest.mark.slow, pytest.mark.timeout(0)]  # every wait of a play has a bound

NUM_PROMPTS = size("LENGTH_PROMPTS", 160)
ALL_POLICIES = size("ALL_POLICIES", 0)
"""0 or 1."""
NUM_RESUMES = size("RESUMES", 2)
RESUME_STEPS = size("RESUME_STEPS", 5)
"""From one end to the next."""
SEED = size("SEED", 23)
LEASHES = (0, 1, 4, 16)
GROUPS_PER_STEP = 16
INTERRUPT, POSTPONE = TailPolicy.interrupt_and_resume, TailPolicy.postpone


def _is_legal(leash: int, on_stale: OnStale, tail: TailPolicy) -> bool:
    """As configs.schema has it."""
    if tail is POSTPONE and on_stale is OnStale.wait:
        return False
    return leash > 0 or tail is TailPolicy.continue_across_versions


POLICIES = [
    Policy(max_staleness=leash, on_stale=on_stale, tail=tail)
    for on_stale, tail, leash in itertools.product(reversed(OnStale), TailPolicy, LEASHES)
    if _is_legal(leash, on_stale, tail)
]
POLICIES += [
    Policy(max_staleness=2),
    Policy(max_staleness=4, tail=INTERRUPT, keep_partial=False),
    Policy(max_staleness=4, on_stale=OnStale.wait, tail=INTERRUPT, keep_partial=False),
    Policy(max_staleness=4, tail=POSTPONE, keep_partial=False),
    Policy(max_staleness=4, oversampling=1.5),
    Policy(max_staleness=4, on_stale=OnStale.drop, oversampling=1.5),
    Policy(max_staleness=4, on_stale=OnStale.wait, filters=True),
]


def compare(
    tmp_path: Path, policy: Policy, num_prompts: int, ends: Sequence[tuple[int, End]] = ()
) -> Comparison:
    folder = tmp_path / str(len([*tmp_path.iterdir()]))
    folder.mkdir()
    scene = Scene(
        folder=folder,
        policy=policy,
        seed=SEED,
        num_prompts=num_prompts,
        groups_per_step=GROUPS_PER_STEP,
    )
    play = Play(scene)
    try:
        checkpoint = play.run(ends)
        counters = play.counters()
    finally:
        play.close()
    return Comparison(scene=scene, checkpoint=checkpoint, counters=counters, num_resumes=len(ends))


def judge(comparisons: Sequence[Comparison]) -> None:
    faults = [f"{one}: {fault}" for one in comparisons for fault in one.faults()]
    assert not faults, "\n".join(faults)


def test_lengths_trained_are_those_sampled_where_no_policy_gives_samples_up(
    tmp_path: Path,
) -> None:
    print(f"\nLEASH_SOAK_SEED={SEED}\n{Comparison.HEADER}")
    comparisons = []
    for policy in POLICIES if ALL_POLICIES else POLICIES[1:2]:
        comparisons.append(compare(tmp_path, policy, NUM_PROMPTS))
        print(comparisons[-1], flush=True)
    judge(comparisons)


def test_comparison_detects_a_policy_that_drops_long_samples(tmp_path: Path) -> None:
    policy = Policy(max_staleness=1, on_stale=OnStale.drop, oversampling=2)
    found = compare(tmp_path, policy, NUM_PROMPTS)
    print(f"\n{Comparison.HEADER}\n{found}")
    judge([found])
    # Without a loss both are 1; how much is lost depends on how fast the machine is.
    assert found.num_lost and found.mean_ratio < 0.98 and found.long_ratio < 0.95


def test_statistic_detects_that_a_tenth_of_the_groups_is_missing_for_their_length(
    tmp_path: Path,
) -> None:
    policy = Policy(max_staleness=0)
    scene = Scene(
        folder=tmp_path, policy=policy, seed=SEED, num_prompts=0, groups_per_step=GROUPS_PER_STEP
    )
    groups = [[scene.length(index, place, 0) for place in range(4)] for index in range(2000)]
    short = sorted(groups, key=max)[:1800]
    sampled, trained = ([n for group in some for n in group] for some in (groups, short))
    assert kolmogorov_smirnov(sampled, trained)[1] < 0.01
    halves = [[n for group in groups[k::2] for n in group] for k in (0, 1)]
    assert kolmogorov_smirnov(*halves)[1] > 0.01


@pytest.mark.parametrize("leash", LEASHES if NUM_RESUMES > 2 else (1,))
def test_resumes_lose_no_prompt_and_leave_the_lengths_as_they_are(
    tmp_path: Path, leash: int
) -> None:
    kinds = list(itertools.islice(itertools.cycle(End), NUM_RESUMES))
    random.Random(SEED).shuffle(kinds)
    ends = [(RESUME_STEPS * (number + 1), kind) for number, kind in enumerate(kinds)]
    num_prompts = GROUPS_PER_STEP * RESUME_STEPS * (NUM_RESUMES + 1)
    found = compare(tmp_path, Policy(max_staleness=leash, on_stale=OnStale.wait), num_prompts, ends)
    print(f"\nLEASH_SOAK_SEED={SEED}\n{Comparison.HEADER}\n{found}")
    judge([found])
