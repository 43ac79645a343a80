"""Writes the dashboard for Grafana from the catalogue: `python -m controller.metrics.dashboard`.

A row a section, a panel a metric. The file is never edited by hand; a test compares it with the
output of this module.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Any

from controller.metrics.catalogue import SECTIONS, Kind, Metric, Section

FILE = Path(__file__).resolve().parents[2] / "deploy" / "grafana" / "dashboard.json"

OPEN = ("scrape", "step")
"""Sections whose rows come first, and are open."""
SCHEMA_VERSION = 39
"""Grafana 11 has it; later ones read it too."""
GRID, WIDTH, HEIGHT = 24, 8, 7
"""Columns of Grafana's grid, and the size of a panel there."""
SOURCE = {"type": "prometheus", "uid": "${source}"}
UNITS = {"s": "s", "bytes": "bytes", "fraction": "percentunit"}
RATES = {"s": "percentunit", "bytes": "Bps"}
"""Grafana's names of units, of values and of how fast they grow; others are plain numbers."""
QUANTILES = (0.5, 0.99)
CHOSEN = '{run=~"$run"}'
VARIABLES: Sequence[dict[str, Any]] = [
    {"name": "source", "label": "Prometheus", "type": "datasource", "query": "prometheus"},
    {
        "name": "run",
        "type": "query",
        "datasource": SOURCE,
        "query": {"query": "label_values(replay_up, run)", "refId": "run"},
        "refresh": 2,  # whenever the time range changes
        "sort": 2,  # the last name first
        "multi": True,
        "includeAll": True,
        "current": {"text": "All", "value": "$__all"},
    },
]


def dashboard_json() -> str:
    whole = {
        "uid": "leash",
        "title": "Leash",
        "description": "All metrics of docs/metrics.md. `make docs` generates it.",
        "tags": ["leash"],
        "schemaVersion": SCHEMA_VERSION,
        "editable": True,
        "graphTooltip": 1,  # one cross-hair over all panels
        "refresh": "30s",
        "time": {"from": "now-3h", "to": "now"},
        "templating": {"list": VARIABLES},
        "panels": list(_panels()),
    }
    return json.dumps(whole, indent=1) + "\n"


def _panels() -> Iterator[dict[str, Any]]:
    """The rows, each with its panels: behind it if it is open, else in it."""
    ids, y = count(1), 0
    for source in (*OPEN, *(name for name in SECTIONS if name not in OPEN)):
        section, row_id = SECTIONS[source], next(ids)
        panels = [
            _panel(metric, next(ids), number, y + 1)
            for number, metric in enumerate(section.metrics)
        ]
        yield _row(section, row_id, y, [] if source in OPEN else panels)
        y += 1
        if source in OPEN:
            yield from panels
            y = panels[-1]["gridPos"]["y"] + HEIGHT


def _row(section: Section, row_id: int, y: int, inside: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "id": row_id,
        "type": "row",
        "title": section.title,
        "collapsed": bool(inside),
        "gridPos": {"x": 0, "y": y, "w": GRID, "h": 1},
        "panels": inside,
    }


def _panel(metric: Metric, panel_id: int, number: int, top: int) -> dict[str, Any]:
    line, column = divmod(number, GRID // WIDTH)
    units = RATES if metric.kind is Kind.counter else UNITS
    title = metric.title[0].upper() + metric.title[1:]
    return {
        "id": panel_id,
        "type": "timeseries",
        "title": f"{title}, per second" if metric.kind is Kind.counter else title,
        "description": f"{metric.name}: {metric.help}",
        "gridPos": {"x": column * WIDTH, "y": top + line * HEIGHT, "w": WIDTH, "h": HEIGHT},
        "datasource": SOURCE,
        "fieldConfig": {"defaults": {"unit": units.get(metric.unit, "none")}, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom", "showLegend": True}},
        "targets": [
            {"refId": "AB"[place], "datasource": SOURCE, "expr": expression, "legendFormat": legend}
            for place, (legend, expression) in enumerate(_expressions(metric))
        ],
    }


def _expressions(metric: Metric) -> Iterator[tuple[str, str]]:
    """The legend and the expression of each of a panel's curves."""
    legend = "{{run}}" + (f" {{{{{metric.label}}}}}" if metric.label else "")
    if metric.kind is Kind.gauge:
        yield legend, metric.name + CHOSEN
    elif metric.kind is Kind.counter:
        yield legend, f"rate({metric.name}_total{CHOSEN}[$__rate_interval])"
    else:
        by = ", ".join(["le", "run", *([metric.label] if metric.label else [])])
        rates = f"sum by ({by}) (rate({metric.name}_bucket{CHOSEN}[$__rate_interval]))"
        for quantile in QUANTILES:
            of_it = f"histogram_quantile({quantile}, {rates})"
            yield f"{legend} {quantile:.0%}", of_it


if __name__ == "__main__":
    FILE.write_text(dashboard_json())
