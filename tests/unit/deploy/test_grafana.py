"""The files for Prometheus and Grafana: what they name exists, and a real Prometheus takes them."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from buffer.redis.connection import connect
from buffer.run_state import RunState
from configs.schema import BufferConfig
from controller.buffer_access import BufferAddress
from controller.metrics.catalogue import METRICS, Kind
from controller.metrics.dashboard import FILE, GRID, dashboard_json
from controller.metrics.prometheus import MetricsServer
from controller.watch.faults import FULL_MEMORY, Room
from controller.watch.run_view import RunView
from controller.watch.verdict import parts_at_fault
from host.network import listen
from tests.support.controller.buffers import fill
from tests.support.controller.records import STATS, settings_of_run, step_record, weights_records
from tests.support.repository import ROOT
from tests.support.rollout import until

FOLDER = ROOT / "deploy/grafana"
EVERY = [metric for metrics in METRICS.values() for metric in metrics]
ENDINGS = {
    Kind.gauge: ("",),
    Kind.counter: ("_total",),
    Kind.histogram: ("_bucket", "_sum", "_count"),
}
KNOWN = {metric.name + ending for metric in EVERY for ending in ENDINGS[metric.kind]} | {"up"}
"""Names on the wire; Prometheus itself makes `up`."""
KEYWORDS = {"and", "or", "unless", "bool", "offset", "inf", "nan"}
GROUPED = re.compile(r"\b(?:by|without|on|ignoring|group_left|group_right)\s*\([^)]*\)")
NEEDED = "a Prometheus with promtool is needed (Debian: apt install prometheus)"


def unknown_names(expression: str) -> list[str]:
    """Names of metrics in PromQL that no run serves."""
    bare = re.sub(r"\{[^}]*\}|\[[^\]]*\]|#.*", "", GROUPED.sub("", expression))
    names = re.findall(r"(?<![\w.$])[a-zA-Z_:][\w:]*(?!\w)(?!\s*\()", bare)
    return [name for name in names if name not in KNOWN | KEYWORDS]


def names_in_prose(text: str) -> set[str]:
    """Words that can only be names on the wire."""
    words = r"\b(?:replay_(?!buffer\b)\w+|run_(?:alarm|hint)\w*|[a-z]\w*_(?:total|bucket))\b"
    return set(re.findall(words, text))


def dashboard() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(FILE.read_text())
    return found


def rows_and_panels() -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    top = dashboard()["panels"]
    rows = [panel for panel in top if panel["type"] == "row"]
    inside = [panel for row in rows for panel in row["panels"]]
    return rows, [panel for panel in top if panel["type"] != "row"] + inside


def expressions() -> list[str]:
    return [target["expr"] for panel in rows_and_panels()[1] for target in panel["targets"]]


def alerts() -> list[dict[str, Any]]:
    (group,) = yaml.safe_load((FOLDER / "alerts.yml").read_text())["groups"]
    rules: list[dict[str, Any]] = group["rules"]
    return rules


def test_dashboard_is_what_make_docs_writes() -> None:
    assert FILE.read_text() == dashboard_json(), "run `make docs`"


def test_dashboard_has_a_panel_for_each_metric_and_no_other() -> None:
    described = [panel["description"].partition(":")[0] for panel in rows_and_panels()[1]]
    assert sorted(described) == sorted(metric.name for metric in EVERY)


def test_every_name_in_rules_panels_and_docs_is_in_the_catalogue() -> None:
    assert [found for text in expressions() for found in unknown_names(text)] == []
    assert [found for rule in alerts() for found in unknown_names(rule["expr"])] == []
    page = (ROOT / "docs/watching.md").read_text()
    (asked,) = re.findall(r"Some questions to them:\n\n((?: {4}.*\n)+)", page)
    questions = asked.strip().splitlines()
    assert len(questions) > 3
    assert [found for text in questions for found in unknown_names(text)] == []
    prose = {
        name for path in (ROOT / "docs").glob("*.md") for name in names_in_prose(path.read_text())
    }
    assert "replay_scrape_errors_total" in prose and prose <= KNOWN | {m.name for m in EVERY}


@pytest.mark.parametrize(
    ("expression", "wrong"),
    [
        ('rate(train_stepz{run=~"$run"}[$__rate_interval])', ["train_stepz"]),
        ("rate(replay_pushed[5m]) > 0", ["replay_pushed"]),  # a counter ends in _total
        ("train_step_total offset 5m", ["train_step_total"]),  # a gauge does not
        ("sum by (run, le) (rate(replay_age_seconds[5m]))", ["replay_age_seconds"]),
        ("up == 0 and on (run) replay_down # replay_up", ["replay_down"]),
    ],
)
def test_name_that_no_run_serves_is_noticed(expression: str, wrong: list[str]) -> None:
    assert unknown_names(expression) == wrong
    assert names_in_prose("see `replay_depht_groups`") == {"replay_depht_groups"}


def test_dashboard_is_what_grafanas_schema_demands() -> None:
    """Its kind `dashboard`: unique ids, a grid of 24 columns, sources and variables that exist."""
    whole = dashboard()
    rows, panels = rows_and_panels()
    assert isinstance(whole["schemaVersion"], int) and whole["title"] and len(whole["uid"]) <= 40
    ids = [panel["id"] for panel in (*rows, *panels)]
    assert len(ids) == len(set(ids)) and all(isinstance(one, int) and one > 0 for one in ids)
    variables = {one["name"]: one for one in whole["templating"]["list"]}
    for panel in panels:
        assert panel["type"] == "timeseries" and panel["title"]
        used = re.findall(r"\$\{?(?!__)(\w+)", json.dumps(panel))
        assert {"source", "run"} == {*used} & {"source", "run"} and {*used} <= {*variables}
        refs = [target["refId"] for target in panel["targets"]]
        assert refs and len(refs) == len(set(refs))
    for row in rows:
        assert row["collapsed"] == bool(row["panels"]) and row["gridPos"]["w"] == GRID
    for shown in (whole["panels"], *(row["panels"] for row in rows)):
        cells = [cell for panel in shown for cell in cells_of(panel)]
        assert len(cells) == len(set(cells)), "panels lie over each other"
        assert all(0 <= column < GRID for column, _ in cells)


def cells_of(panel: dict[str, Any]) -> Iterator[tuple[int, int]]:
    at = panel["gridPos"]
    for column in range(at["x"], at["x"] + at["w"]):
        yield from ((column, at["y"] + line) for line in range(at["h"]))


def test_service_monitor_looks_at_the_port_of_its_service() -> None:
    service, monitor = yaml.safe_load_all((FOLDER / "servicemonitor.yaml").read_text())
    labels = service["metadata"]["labels"].items()
    assert monitor["spec"]["selector"]["matchLabels"].items() <= labels
    (endpoint,), (port,) = monitor["spec"]["endpoints"], service["spec"]["ports"]
    assert endpoint["port"] == port["name"]


def promtool(*words: str, folder: Path) -> str:
    command = [shutil.which("promtool") or pytest.skip(NEEDED), *words]
    told = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)
    assert told.returncode == 0, told.stdout + told.stderr
    return told.stdout


def test_prometheus_parses_rules_scrape_file_and_every_panel(tmp_path: Path) -> None:
    assert f"{len(alerts())} rules found" in promtool(
        "check", "rules", str(FOLDER / "alerts.yml"), folder=tmp_path
    )
    promtool("check", "config", str(FOLDER / "scrape.yml"), folder=tmp_path)
    rules = [
        {"record": f"panel_{number}", "expr": text.replace("$__rate_interval", "1m")}
        for number, text in enumerate(expressions())
    ]
    group = {"groups": [{"name": "panels", "rules": rules}]}
    (tmp_path / "panels.yml").write_text(json.dumps(group))
    told = promtool("check", "rules", "panels.yml", folder=tmp_path)
    assert f"{len(rules)} rules found" in told


def test_alerts_fire_for_what_a_run_reports_and_end_with_it(tmp_path: Path) -> None:
    """Series every 15 s: an alarm from 1 to 3 minutes, a silent Redis, a run that is gone."""
    series = {
        'run_alarm{run="a", part="redis"}': "_x3 1x8 _x40",
        'replay_up{run="b"}': "1x4 0x8 1x40",
        'up{job="leash", instance="h:1"}': "1x4 0x400",
        'replay_up{run="c", job="leash", instance="h:1"}': "1x4 _x400",
    }
    expected = {
        "1m": {"LeashAlarm": [], "LeashRedisSilent": [], "LeashControllerSilent": []},
        "2m30s": {
            "LeashAlarm": [{"run": "a", "part": "redis"}],
            "LeashRedisSilent": [{"run": "b"}],
        },
        "4m": {"LeashControllerSilent": [{"job": "leash", "instance": "h:1"}]},
        "9m": {"LeashAlarm": [], "LeashRedisSilent": []},
        "90m": {"LeashControllerSilent": []},
    }
    severity = {rule["alert"]: rule["labels"]["severity"] for rule in alerts()}
    tests = [
        {
            "eval_time": at,
            "alertname": name,
            "exp_alerts": [
                {"exp_labels": {**labels, "severity": severity[name]}, "exp_annotations": {}}
                for labels in fired
            ],
        }
        for at, of_alerts in expected.items()
        for name, fired in of_alerts.items()
    ]
    # Their words are no part of this: promtool compares them as well.
    rules = [{**rule, "annotations": {}} for rule in alerts()]
    (tmp_path / "alerts.yml").write_text(json.dumps({"groups": [{"name": "a", "rules": rules}]}))
    scene = {
        "interval": "15s",
        "input_series": [{"series": name, "values": text} for name, text in series.items()],
        "alert_rule_test": tests,
    }
    whole = {"rule_files": ["alerts.yml"], "evaluation_interval": "15s", "tests": [scene]}
    (tmp_path / "test.yml").write_text(json.dumps(whole))
    promtool("test", "rules", "test.yml", folder=tmp_path)


@pytest.mark.parametrize(
    ("fraction", "found"), [(FULL_MEMORY - 0.01, {}), (FULL_MEMORY, {"redis": 1})]
)
def test_alarm_of_a_scrape_has_the_threshold_of_the_verdict(
    redis_url: str, run_name: str, fraction: float, found: dict[str, float]
) -> None:
    view = RunView(run=run_name, config=settings_of_run(9), started=0.0)
    room = Room(memory_used=int(fraction * 1000), memory_limit=1000)
    view.observe(1.0, STATS, {}, {}, room)
    address = BufferAddress(url=redis_url, run=run_name, settings=BufferConfig())
    with closing(MetricsServer(address, "127.0.0.1", 0)) as server:
        server.parts = parts_at_fault(view)
        with urllib.request.urlopen(server.url, timeout=20) as reply:
            text = reply.read().decode()
    alarms = re.findall(r'^run_alarm\{part="(\w+)",run="[^"]*"\} (\S+)$', text, re.MULTILINE)
    assert {part: float(value) for part, value in alarms} == found


@contextmanager
def prometheus(folder: Path, target: str) -> Iterator[str]:
    """A real one that scrapes `target`, with our files; yields its address."""
    scrape = (FOLDER / "scrape.yml").read_text()
    scrape = scrape.replace("127.0.0.1:9400", target).replace("15s", "1s")
    (folder / "prometheus.yml").write_text(f"rule_files: [{FOLDER / 'alerts.yml'}]\n{scrape}")
    listener, url = listen("127.0.0.1", 0)
    listener.close()
    words = ["--config.file=prometheus.yml", "--storage.tsdb.path=data"]
    address = f"--web.listen-address={urllib.parse.urlsplit(url).netloc}"
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            [shutil.which("prometheus") or pytest.skip(NEEDED), *words, address],
            cwd=folder,
            stdout=log,
            stderr=log,
        )
        try:
            yield url
        finally:
            process.terminate()
            process.wait(60)


def ask(url: str, path: str, **query: str) -> Any:
    with urllib.request.urlopen(f"{url}/api/v1/{path}?{urllib.parse.urlencode(query)}") as reply:
        return json.loads(reply.read())["data"]


def is_scraped(url: str) -> bool:
    try:
        return bool(ask(url, "query", query="train_step")["result"])
    except OSError:  # it starts
        return False


async def record_steps(url: str, run: str) -> None:
    state = RunState(await connect(url), run)
    try:
        for number in range(3):
            await state.append_metrics(step_record(number, 1.0).values, "step")
            for record in weights_records(number + 1, 1.0):
                await state.append_metrics(record.values, record.kind)
    finally:
        await state.close()


@pytest.mark.slow
def test_real_prometheus_scrapes_a_run_and_answers_every_panel(
    redis_url: str, run_name: str, tmp_path: Path
) -> None:
    asyncio.run(fill(redis_url, run_name, pushed=3, leased=2))
    asyncio.run(record_steps(redis_url, run_name))
    address = BufferAddress(url=redis_url, run=run_name, settings=BufferConfig())
    with closing(MetricsServer(address, "127.0.0.1", 0)) as server:
        server.parts = {"alarm": {"redis": 1.0}, "hint": {}}
        with prometheus(tmp_path, urllib.parse.urlsplit(server.url).netloc) as url:
            asyncio.run(until(lambda: is_scraped(url), 120))
            (step,) = ask(url, "query", query="train_step")["result"]
            assert step["value"][1] == "3" and step["metric"]["run"] == run_name
            (alarm,) = ask(url, "query", query="run_alarm > 0")["result"]
            assert alarm["metric"]["part"] == "redis"
            for text in expressions():
                query = text.replace("$__rate_interval", "1m").replace("$run", run_name)
                ask(url, "query", query=query)  # one that it cannot read is an HTTP error
            (group,) = ask(url, "rules")["groups"]
            assert [rule["name"] for rule in group["rules"]] == [r["alert"] for r in alerts()]
            served = ask(url, "label/__name__/values")
    own = {name for name in served if not name.startswith(("scrape_", "ALERTS"))}
    assert own <= KNOWN and len(own) > 50
