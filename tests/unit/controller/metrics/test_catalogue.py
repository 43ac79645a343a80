"""The catalogue agrees with what is measured and with its page; steps reach Prometheus."""

from __future__ import annotations

from collections import Counter
from dataclasses import fields
from math import nan

from buffer.results import BufferStats
from buffer.run_state import MetricsEntry
from controller.metrics.catalogue import METRICS
from controller.metrics.history import SAMPLED
from controller.metrics.prometheus_metrics import RecordTotals
from controller.metrics.reference import PAGE, reference_markdown
from tests.support.controller.records import STATS, step_record


def test_page_is_what_make_docs_writes() -> None:
    assert PAGE.read_text() == reference_markdown(), "run `make docs`"


def test_names_are_unique_and_every_metric_has_a_help() -> None:
    every = [metric for metrics in METRICS.values() for metric in metrics]
    assert [name for name, n in Counter(metric.name for metric in every).items() if n > 1] == []
    assert [metric.name for metric in every if not metric.help.endswith(".")] == []
    assert [m.name for m in every if "*" in m.field and not m.label] == []


def test_fields_of_the_buffer_exist() -> None:
    assert [m.field for m in METRICS["buffer"] if not hasattr(STATS, m.field)] == []
    assert "ready" in SAMPLED and "by_staleness" not in SAMPLED
    assert {m.field for m in METRICS["buffer"]} <= {f.name for f in fields(BufferStats)}


def samples(*values: dict[str, float | int | str]) -> dict[tuple[str, ...], float]:
    totals = RecordTotals("night")
    for number, record in enumerate(values):
        totals.add(MetricsEntry(f"{number}-0", "step", record))
    return {
        (sample.name, *(v for k, v in sample.labels.items() if k != "run")): sample.value
        for found in totals.registry.collect()
        for sample in found.samples
    }


def test_steps_are_gauges_of_the_last_one_and_counters_of_all() -> None:
    first, last = (dict(step_record(n, 1.0, n / 4, num_tokens=50).values) for n in (1, 2))
    found = samples(first, last | {"grad_norm": nan, "reward_mean": "text", "kl": 0.125})
    assert found["train_step",] == 3
    assert found["train_loss",] == -0.01 and found["train_kl",] == 0.125
    assert found["train_reward_mean",] == 0.25, "the last that was measured"
    assert found["train_grad_norm",] == 0.4
    assert found["train_tokens_total",] == 100
    assert found["train_lease_wait_seconds_total",] == 0.5


def test_parts_of_the_reward_and_tasks_have_a_label_each() -> None:
    parts = {"reward/right": 0.5, "reward/right/staleness_1": 0.25, "reward_mean": 0.75}
    found = samples({**parts, "task/sum/reward": 0.5, "task/sum/groups": 3})
    assert {key: value for key, value in found.items() if len(key) > 1} == {
        ("train_reward_part", "right"): 0.5,
        ("train_task_reward", "sum"): 0.5,
        ("train_task_groups_total", "sum"): 3,
    }
