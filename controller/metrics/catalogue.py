"""The catalogue of a run's metrics, which `catalogue.yaml` states: a row each.

    catalogue.yaml ──┬──► Prometheus        a family each (prometheus_metrics.py)
                     ├──► metrics.jsonl     the fields of `buffer` records (history.py)
                     ├──► TensorBoard       the help as the description of a curve (sinks.py)
                     ├──► panel, summary    words for what the workers counted (counters.py)
                     └──► docs/metrics.md   `make docs` (reference.py)

`metrics.jsonl` has every field of a record, also those that are not listed, as the metrics of a
user's own loss.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from pathlib import Path

import msgspec
import yaml


class Kind(Enum):
    gauge = "gauge"
    counter = "counter"
    histogram = "histogram"


class Metric(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One metric. It has the label `run` in Prometheus, and `label` too if it is by something.

    Metric(name="train_loss", field="loss", kind=Kind.gauge, unit="nats", help="Mean loss.")
    """

    name: str
    """Its name in Prometheus, where that of a counter ends in `_total`."""
    field: str
    """Its name where it is measured; see `by_label` for one with a star. "": it counts records."""
    kind: Kind
    unit: str
    help: str
    label: str = ""
    on_panel: str = ""
    """Words behind a number above 0 on the panel."""
    in_summary: bool = False
    when: tuple[str, str] | None = None
    """It is taken from records with this value in this field alone."""

    @property
    def title(self) -> str:
        """The first sentence of `help`, as the name of a row."""
        sentence = self.help.partition(".")[0]
        return sentence[0].lower() + sentence[1:]

    def by_label(self, values: Mapping[str, float]) -> dict[str, float]:
        """The values of its fields, by the text in place of the star: `reward/right` is `right`."""
        start, _, end = self.field.partition("*")
        found = {
            name.removeprefix(start).removesuffix(end): value
            for name, value in values.items()
            if name.startswith(start) and name.endswith(end)
        }
        # `reward/right/staleness_2` is no part of the reward.
        return {label: value for label, value in found.items() if "/staleness_" not in label}


class Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The metrics of one kind of record or other source, and its section of docs/metrics.md."""

    title: str
    text: str
    metrics: tuple[Metric, ...]


SECTIONS: Mapping[str, Section] = msgspec.convert(
    yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text()), dict[str, Section]
)
METRICS = {source: section.metrics for source, section in SECTIONS.items()}
"""By the kind of the records that have them, and by where else they are read."""

RECORDED = ("step", "eval_command", "lengths", "publish", "commit", "weights_event")
"""Kinds of records whose metrics are added up record by record."""
