"""The mean length trained over the mean length sampled, where long answers are given up."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Mapping

import pytest

from configs.choices import OnStale
from controller.watch.finding import log_once
from controller.watch.length_bias import Lengths, length_bias, measure_lengths
from controller.watch.run_view import RunView
from rollout_pool.sampling.group_samples import Answer
from rollout_pool.worker.counters import Counters, least_of_class
from tests.support.controller.records import settings_of_run, step_record

LONGEST, GROUP = 1024, 4
PER_VERSION = 64
"""Tokens of an answer while its engine serves a version."""


class Kept:
    """Keeps what is counted."""

    def __init__(self) -> None:
        self.amounts: dict[str, float] = {}

    async def count_all(self, amounts: Mapping[str, float]) -> None:
        self.amounts |= amounts


Group = tuple[list[Answer], set[str]]
"""Answers, and the episodes that ended."""


def counted(*groups: Group) -> dict[str, float]:
    async def count() -> dict[str, float]:
        counters = Counters(kept := Kept())
        for answers, ended in groups:
            counters.add_answers(answers, ended)
        await counters.flush()
        return kept.amounts

    return asyncio.run(count())


def measured(counts: Mapping[str, float], trained_mean: float) -> Lengths | None:
    step = step_record(0, 1.0, response_length_mean=trained_mean, num_groups=16)
    return measure_lengths(counts, [step], LONGEST)


def played(seed: int, max_staleness: int | None, num_prompts: int = 600) -> tuple[float, Lengths]:
    """Groups that are given up, and drawn again, when an answer meets too many versions; returns
    the true ratio, and what is said. One answer in a hundred is twenty times the median."""
    dice, sigma = random.Random(seed), math.log(20) / 2.326
    trained: list[int] = []
    first: list[int] = []
    groups = []
    for _ in range(num_prompts):
        of_prompt, is_first = dice.gauss(), True
        while True:
            z = [math.sqrt(0.3) * of_prompt + math.sqrt(0.7) * dice.gauss() for _ in range(GROUP)]
            lengths = [min(LONGEST, max(1, round(24 * math.exp(sigma * one)))) for one in z]
            phase = dice.random()
            most = LONGEST if max_staleness is None else int((max_staleness - phase) * PER_VERSION)
            if is_first:
                first += lengths
                so_far = [min(length, most) for length in lengths]
                answers = [
                    Answer(f"g.{place}", length, 7, 7 + int(length / PER_VERSION + phase))
                    for place, length in enumerate(so_far)
                ]
                ended = {f"g.{place}" for place, length in enumerate(lengths) if length <= most}
                groups.append((answers, ended))
            is_first = False
            if max(lengths) <= most:
                break
        trained += lengths
    trained_mean, sampled_mean = sum(trained) / len(trained), sum(first) / len(first)
    lengths_said = measured(counted(*groups), trained_mean)
    assert lengths_said is not None
    return trained_mean / sampled_mean, lengths_said


def test_classes_of_lengths_are_two_a_doubling() -> None:
    assert [least_of_class(n) for n in (0, 1, 2, 3, 4, 5, 6, 11, 12, 15, 16, 1024, 1500)] == [
        *(1, 1, 2, 3, 4, 4, 6, 8, 12, 12, 16, 1024, 1449)
    ]


def test_answer_is_all_that_the_model_wrote_in_an_episode() -> None:
    turns = [Answer("g-1.10-a1b2", 10, 3, 3), Answer("g-1.10-c3d4", 6, 4, 5)]
    cut = [Answer("g-1.1", 10, 3, 4), Answer("g-1.1", 2, 4, 4), Answer("g-1.2", 0, 0, 0)]
    assert counted(([*turns, *cut], {"g-1.10"})) == {
        "answers_ended:16": 1,
        "answer_tokens:16": 16,
        "answers_cut:12": 1,
        "answers_cut:1": 1,
        "answer_versions": 3,
    }


def test_run_that_gives_nothing_up_has_no_bias() -> None:
    true, said = played(1, None)
    assert said.ratio == pytest.approx(true, abs=1e-9) == 1.0
    assert said.given_up == {} and length_bias(said, 2, OnStale.requeue) is None


@pytest.mark.parametrize(("leash", "within"), [(2, 0.12), (4, 0.08), (8, 0.05), (16, 0.03)])
def test_ratio_is_near_the_true_one_though_the_longest_answers_never_end(
    leash: int, within: float
) -> None:
    for seed in range(3):
        true, said = played(seed, leash)
        assert said.ratio == pytest.approx(true, abs=within)


def test_advised_staleness_would_do() -> None:
    for seed in range(3):
        _, said = played(seed, 4)
        found = length_bias(said, 4, OnStale.requeue)
        assert found is not None and found.part == "length bias"
        assert found.words.startswith("long answers are trained too rarely: the mean trained, ")
        name, _, value = found.changes[0].partition("=")
        assert name == "buffer.max_staleness" and 12 <= int(value) <= 24
        assert played(seed, int(value))[0] > 0.94
        assert played(seed, int(value) // 2)[0] < 0.95
    for other in (OnStale.wait, OnStale.mask_tokens):
        assert length_bias(said, 4, other) is None


def test_bias_without_a_known_pace_of_versions_advises_to_wait() -> None:
    counts = {"answers_ended:8": 300.0, "answer_tokens:8": 2400.0, "answers_cut:64": 100.0}
    said = measured(counts, 8.0)
    assert said is not None and said.sufficient_staleness is None
    found = length_bias(said, 2, OnStale.requeue)
    assert found is not None and found.changes == () and "buffer.on_stale=wait" in found.advice
    assert "as 100% of those from 64 tokens on are given up" in found.words


def test_few_answers_say_nothing() -> None:
    assert measured({"answers_ended:8": 150.0, "answer_tokens:8": 1200.0}, 4.0) is None
    assert measured({}, 4.0) is None
    assert measured({"answers_ended:1": 300.0}, 4.0) is None  # all are empty
    assert measured({"answers_ended:8": 300.0, "answer_tokens:8": 2400.0}, math.nan) is None


def test_names_that_are_no_lengths_are_skipped() -> None:
    counts = {"answers_ended:8": 300.0, "answer_tokens:8": 2400.0}
    foreign = {"answers_ended:": 7.0, "answers_cut:x": 7.0, "answers_cut:-1": 7.0}
    assert measured(counts | foreign, 8.0) == measured(counts, 8.0)


@pytest.mark.parametrize("num_ended", [1001, 1008, 1100])
def test_tail_from_just_below_the_median_on_ends_at_the_longest_response(num_ended: int) -> None:
    counts = {"answers_ended:128": num_ended, "answer_tokens:128": 150.0 * num_ended}
    step = step_record(0, 1.0, response_length_mean=150.0, num_groups=16)
    said = measure_lengths(counts | {"answers_cut:2897": 2000.0 - num_ended}, [step], 4096)
    assert said is not None
    assert max(length for length, _ in said.sampled) <= 4096.01
    assert 0.4 * 3445 < said.sampled_mean < 0.6 * 4096


def test_bias_that_the_answers_given_up_do_not_explain_is_no_alarm() -> None:
    counts = {"answers_ended:64": 990.0, "answer_tokens:64": 70_000.0, "answers_cut:64": 10.0}
    said = measured(counts, 20.0)  # a filter leaves out the long ones
    assert said is not None and said.ratio < 0.5
    assert length_bias(said, 2, OnStale.requeue) is None


def test_measurement_that_fails_is_told_once_and_the_run_goes_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    log_once.cache_clear()
    view = RunView(run="night", config=settings_of_run(9), started=0.0)
    view.answers.add(0.0, {})
    view.answers.add(9.0, {f"answers_ended:{'9' * 5000}": 300.0})
    view.steps.append(step_record(0, 5.0, num_groups=16))
    assert view.lengths is None and view.lengths is None
    (told,) = caplog.records
    assert told.getMessage().startswith("the measurement of lengths failed")
