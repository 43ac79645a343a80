"""Which groups without variance are left out, and how many; which prompts a pool gives."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable

from configs.rollout_schema import PoolsConfig
from rollout_pool.tasks.task import Prompt
from rollout_pool.worker.variance import MAX_SAVED_GROUPS, PoolCurriculum, VarianceFilter, Verdict

OUT, ALL_EQUAL = Verdict.leave_out, Verdict.keep_all_equal


def judged(variance: VarianceFilter, number: int) -> list[Verdict]:
    return [variance.judge(teaches=False) for _ in range(number)]


def test_filter_keeps_and_reports_groups_beyond_its_budget() -> None:
    verdicts = judged(VarianceFilter(max_ratio=2.0), 6)
    assert verdicts == [OUT, OUT, ALL_EQUAL, OUT, OUT, ALL_EQUAL]


def test_filter_budget_below_one_per_group_adds_up() -> None:
    verdicts = judged(VarianceFilter(max_ratio=0.5), 4)
    assert verdicts == [ALL_EQUAL, OUT, ALL_EQUAL, ALL_EQUAL]
    assert judged(VarianceFilter(max_ratio=0.0), 3) == [ALL_EQUAL] * 3


def test_filter_budget_is_limited() -> None:
    variance = VarianceFilter(max_ratio=2.0)
    assert {variance.judge(teaches=True) for _ in range(1000)} == {Verdict.keep}
    verdicts = judged(variance, 2 * MAX_SAVED_GROUPS + 1)
    assert verdicts == [OUT] * 2 * MAX_SAVED_GROUPS + [ALL_EQUAL]


# Pools --------------------------------------------------------------------------------------------

EPOCH = 200
REWARDS = {"easy": 1.0, "medium": 0.5, "hard": 0.0}


def pool_of(number: int) -> str:
    """The pool of a problem: 160 are easy, 30 medium and 10 hard."""
    return "easy" if number < 160 else "medium" if number < 190 else "hard"


def asked(
    curriculum: PoolCurriculum,
    epochs: range,
    pool_of: Callable[[int], str] = pool_of,
) -> Counter[int]:
    """How often each problem is taken, whose groups get the rewards of its pool."""
    taken = Counter[int]()
    for epoch in epochs:
        for place, number in enumerate(random.Random(epoch).sample(range(EPOCH), EPOCH)):
            index = EPOCH * epoch + place
            prompt = Prompt(index=index, is_held_out=False, text=f"problem {number}")
            if curriculum.takes(curriculum.meet(prompt)):
                taken[number] += 1
                curriculum.note(prompt, REWARDS[pool_of(number)], teaches=False)
    return taken


def by_pool(taken: Counter[int]) -> dict[str, int]:
    return {pool: sum(taken[n] for n in taken if pool_of(n) == pool) for pool in REWARDS}


def test_pools_give_their_weights_and_what_is_unknown_is_always_taken() -> None:
    curriculum = PoolCurriculum(PoolsConfig(floor=0.01), seed=0)
    first = asked(curriculum, range(1))
    assert first == dict.fromkeys(range(EPOCH), 1)
    asked(curriculum, range(1, 10))  # those met before fill the window
    taken = by_pool(asked(curriculum, range(10, 110)))
    # All hard ones are, as they come least often; twice as many medium ones, as many easy ones.
    assert taken["hard"] == 10 * 100
    assert 0.85 * 2000 < taken["medium"] < 1.15 * 2000
    assert 0.85 * 1000 < taken["easy"] < 1.15 * 1000


def test_pool_of_weight_0_keeps_its_floor_and_its_problems_move_when_their_rewards_do() -> None:
    curriculum = PoolCurriculum(PoolsConfig(hard=0, medium=1, easy=1, floor=0.2), seed=0)
    asked(curriculum, range(5))
    taken = asked(curriculum, range(5, 55))
    assert 0.15 * 500 < by_pool(taken)["hard"] < 0.25 * 500
    assert min(taken[number] for number in range(EPOCH)) > 0  # none starves
    asked(curriculum, range(55, 105), lambda number: "medium")
    prompts = [Prompt(index=n, is_held_out=False, text=f"problem {n}") for n in range(EPOCH)]
    assert {curriculum.meet(prompt) for prompt in prompts} == {"medium"}


def test_problems_of_one_text_are_in_a_pool_by_the_task_that_they_are_of() -> None:
    curriculum = PoolCurriculum(PoolsConfig(hard_below=-1, easy_from=2), seed=0)
    one, same, other = (
        Prompt(index=index, is_held_out=False, text="a", task=task)
        for index, task in ((0, "x"), (7, "x"), (0, "y"))
    )
    assert curriculum.meet(one) == ""
    curriculum.note(one, -1.5, teaches=True)
    assert (curriculum.meet(same), curriculum.meet(other)) == ("hard", "")
    curriculum.note(one, -1.0, teaches=True)
    assert curriculum.meet(same) == "medium"
    curriculum.note(one, 2.0, teaches=True)
    assert curriculum.meet(same) == "easy"
