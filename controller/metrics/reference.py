"""Writes docs/metrics.md from the catalogue: `python -m controller.metrics.reference`.

The page is never edited by hand; a test compares it with the output of this module.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from controller.metrics.catalogue import SECTIONS, Kind, Metric, Section

PAGE = Path(__file__).resolve().parents[2] / "docs" / "metrics.md"

INTRODUCTION = """\
# Metrics

Every metric that a run serves to Prometheus with
[`run.prometheus_port`](watching.md#prometheus), and its field in `metrics.jsonl`, which TensorBoard
and Weights & Biases get as well ([logs and metrics](watching.md#logs-and-metrics)). `make docs`
generates this page from `controller/metrics/catalogue.yaml`; edit that instead.

In Prometheus all have the label `run`, and those by something the label in braces. On the wire the
name of a counter ends in `_total`. A star in a field stands for the value of that label.
"""


def reference_markdown() -> str:
    return "\n".join([INTRODUCTION, *map(_section, SECTIONS.values())])


def _section(section: Section) -> str:
    head = "| field | Prometheus | kind | unit | |\n|---|---|---|---|---|"
    lines = [f"## {section.title}\n\n{section.text}\n\n{head}", *_rows(section.metrics), ""]
    return "\n".join(lines)


def _rows(metrics: tuple[Metric, ...]) -> Iterator[str]:
    for metric in metrics:
        name = metric.name + ("_total" if metric.kind is Kind.counter else "")
        name += f"{{{metric.label}}}" if metric.label else ""
        field = f"`{metric.field}`" if metric.field else ""
        help_ = metric.help.replace("|", "\\|")
        yield f"| {field} | `{name}` | {metric.kind.value} | {metric.unit} | {help_} |"


if __name__ == "__main__":
    PAGE.write_text(reference_markdown())
