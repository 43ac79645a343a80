"""The page's routes: who gets in, and what they answer."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Sequence
from dataclasses import replace

import httpx
import pytest
from starlette.testclient import TestClient

from configs.load import load_config
from controller.main import EXIT_BAD_INPUT
from controller.metrics.history import MetricsLog, Record
from controller.page.app import PageServer, _allowed, make_app
from controller.page.watched import WatchedRun
from controller.run_dir import RunDir
from controller.watch.finding import Finding
from tests.support.controller.buffers import Command, opened
from tests.support.controller.records import (
    STATS,
    buffer_record,
    record_all,
    record_groups,
    recorded_group,
    run_records,
    step_record,
)

HOSTS = ["127.0.0.1", "localhost"]
ADDRESS = "http://127.0.0.1:8400"
ORIGIN = {"origin": ADDRESS}


def client_of(run_dir: RunDir, raises: bool = True) -> TestClient:
    app = make_app(WatchedRun(run_dir), "secret", HOSTS)
    client = TestClient(app, base_url=ADDRESS, raise_server_exceptions=raises)
    assert client.get("/?token=secret").status_code == 200
    return client


@pytest.fixture
def page(run_dir: RunDir) -> TestClient:
    record_all(run_dir, run_records(20))
    record_groups(run_dir, [recorded_group("a"), recorded_group("b")], said="<script>x</script>")
    run_dir.end("finished")
    return client_of(run_dir)


@pytest.mark.parametrize("path", ["/", "/static/page.js", "/api/state", "/?token=wrong", "/none"])
def test_nothing_is_served_without_the_token(run_dir: RunDir, path: str) -> None:
    client = TestClient(make_app(WatchedRun(run_dir), "secret", HOSTS), base_url=ADDRESS)
    assert client.get(path).status_code == 401
    assert client.post("/api/tune", json={}, headers=ORIGIN).status_code == 401
    assert client.get("/api/state?token=secret").status_code == 401


def test_token_of_the_address_becomes_a_cookie_that_scripts_cannot_read(run_dir: RunDir) -> None:
    client = TestClient(make_app(WatchedRun(run_dir), "secret", HOSTS), base_url=ADDRESS)
    first = client.get("/?token=secret", follow_redirects=False)
    assert first.status_code == 303 and first.headers["location"] == "/"
    cookie = first.headers["set-cookie"].lower()
    assert "httponly" in cookie and "samesite=lax" in cookie


def test_other_host_is_refused(page: TestClient) -> None:
    assert page.get("/api/state", headers={"host": "evil.example:8400"}).status_code == 400
    assert page.get("/api/state", headers={"host": "localhost:9"}).status_code == 200


def test_cookies_of_other_programs_on_this_host_do_not_hide_ours(page: TestClient) -> None:
    ours = "; ".join(f"{name}={value}" for name, value in page.cookies.items())
    for other in ('prefs={"a": [1, "b c"]}', "a b=c", "x@y:z=1"):
        assert page.get("/api/state", headers={"cookie": f"{other}; {ours}"}).status_code == 200


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2", "[::1]", "10.0.0.5"])
def test_page_answers_at_the_address_where_it_listens(run_dir: RunDir, host: str) -> None:
    app = make_app(WatchedRun(run_dir), "secret", _allowed(host.strip("[]")))
    client = TestClient(app, base_url=f"http://{host}:8400")
    assert client.get("/?token=secret", follow_redirects=False).status_code == 303


@pytest.mark.parametrize(
    "path", ["/", "/static/page.js", "/static/page.css", "/static/plotly.min.js", "/api/state"]
)
def test_every_response_forbids_scripts_of_others(page: TestClient, path: str) -> None:
    response = page.get(path)
    assert response.status_code == 200
    policy = response.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "script-src 'self';" in policy
    assert response.headers["x-content-type-options"] == "nosniff"


@pytest.mark.parametrize(
    "path",
    [
        "/static/..%2Fapp.py",
        "/static/%2e%2e/app.py",
        "/static/%2Fetc%2Fpasswd",
        "/static/no.js",
        "/api/curves?metric=step/loss&run=..%2F..",
        "/api/curves?metric=step/loss&run=/etc",
        "/api/group?id=../../run.json",
    ],
)
def test_paths_lead_out_of_nothing(page: TestClient, path: str) -> None:
    assert page.get(path).status_code == 404


def test_reads_take_no_other_method(page: TestClient) -> None:
    for path in ("/", "/api/state", "/api/groups"):
        assert page.post(path).status_code == 405
    assert page.get("/api/tune").status_code == 405


def test_state_has_the_words_of_status(page: TestClient, run_dir: RunDir, leash: Command) -> None:
    state = page.get("/api/state").json()
    said = json.loads(leash("status", "--json"))
    assert state["findings"] == said["findings"] != []
    assert page.get("/api/areas").json()["stages"] == said["stages"] != []
    assert state["line"] in leash("status").replace("\n", " ")
    assert state["state"] == "finished" and not state["is_live"] and state["step"] == 20
    assert "step/reward_mean" in state["metrics"] and state["titles"]["step/loss"]


def test_curves_of_several_runs_are_drawn_over_each_other(
    page: TestClient, run_dir: RunDir
) -> None:
    other = RunDir.create(str(run_dir.path.parent), "other", "quickstart")
    record_all(other, [step_record(step, 50.0 + step, reward=0.9) for step in range(5)])
    found = page.get(
        "/api/curves", params={"metric": "step/reward_mean", "run": [run_dir.name, "other"]}
    ).json()
    assert found["other"][0]["y"] == [0.9] * 5 and len(found[run_dir.name][0]["y"]) == 20
    assert page.get("/api/state").json()["others"] == ["other"]


def test_state_follows_a_file_that_grows(run_dir: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("controller.page.watched.EVERY_S", -1.0)
    client = client_of(run_dir)
    assert client.get("/api/state").json()["num_records"] == 0
    record_all(run_dir, [step_record(step, float(step)) for step in range(4)])
    with run_dir.metrics.open("a") as file:
        file.write('{"t": 9.0, "ki')
    (line,) = client.get("/api/curves?metric=step/step").json()[run_dir.name]
    assert line["y"] == [1, 2, 3, 4]
    with MetricsLog(run_dir.metrics) as log:  # which removes the incomplete line
        log.append("resumed", {"step": 2, "away_s": 1.0, "source": "disk"})
        log.append("step", step_record(2, 11.0).values)
    (line,) = client.get("/api/curves?metric=step/step").json()[run_dir.name]
    assert line["y"] == [1, 2, 3], "the undone step is gone"


def test_areas_and_bars_of_a_run(page: TestClient) -> None:
    areas = page.get("/api/areas").json()
    assert areas["depth"]["layers"] and areas["time"]["layers"]
    found = page.get("/api/timeline?version=7").json()
    assert found["version"]["version"] == 7
    assert {bar["row"] for bar in found["lanes"]} == {"trainer", "engine-0", "engine-1"}
    assert page.get("/api/timeline?version=x").status_code == 400
    assert page.get("/api/timeline?version=999").json()["version"] is None


def test_last_seconds_of_a_run_can_be_drawn_alone(run_dir: RunDir) -> None:
    record_all(run_dir, [step_record(step, 100.0 + step) for step in range(20)])
    page = client_of(run_dir)
    for since, number in (("", 20), ("2.5", 3)):
        (line,) = page.get(f"/api/curves?metric=step/step&since={since}").json()[run_dir.name]
        assert line["y"] == [*range(21 - number, 21)]
        areas = page.get(f"/api/areas?since={since}").json()
        assert len(areas["time"]["layers"][0]["x"]) == number
    assert page.get("/api/areas?since=x").status_code == 400


def test_script_of_the_charts_comes_compressed_and_is_kept(page: TestClient) -> None:
    script = page.get("/static/plotly.min.js")
    assert script.headers["content-encoding"] == "gzip" and "plotly" in script.text[:200]
    assert int(script.headers["content-length"]) < len(script.content) / 2
    assert "max-age" in script.headers["cache-control"]


def test_server_has_begun_to_read_before_a_browser_asks(
    run_dir: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = threading.Event()
    monkeypatch.setattr(WatchedRun, "state", lambda self: read.set())
    server = PageServer(run_dir, "127.0.0.1", 0)
    try:
        assert read.wait(60)
    finally:
        server.close()


def test_groups_are_listed_filtered_and_shown(page: TestClient) -> None:
    listed = page.get("/api/groups?min_reward=0.5&task=sums").json()
    assert listed["total"] == 2 and listed["left"] == 0 and listed["tasks"] == ["sums"]
    assert page.get("/api/groups?min_length=99").json()["rows"] == []
    assert page.get("/api/groups?min_reward=x").status_code == 400
    shown = page.get("/api/group?id=a&trajectory=1").json()
    assert shown["group_id"] == "a" and shown["messages"][0]["content"] == "<script>x</script>"
    assert page.get("/api/group?id=a&trajectory=7").status_code == 404


def test_knob_is_for_the_page_alone_and_changes_a_running_job(
    live_run: RunDir, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def open_it() -> None:
        async with opened(redis_url, live_run.name, 4):
            pass

    asyncio.run(open_it())
    client = client_of(live_run)
    assert client.get("/api/state").json()["max_staleness"] == 2
    wanted = {"max_staleness": 5}
    assert client.post("/api/tune", json=wanted).status_code == 403
    evil = {"origin": "http://evil.example"}
    assert client.post("/api/tune", json=wanted, headers=evil).status_code == 403
    form = {"content-type": "text/plain", **ORIGIN}
    assert client.post("/api/tune", content=b"{}", headers=form).status_code == 403
    refused = client.post("/api/tune", json={"max_staleness": -1}, headers=ORIGIN)
    assert refused.status_code == 400 and "buffer.max_staleness=-1" in refused.text
    assert (
        client.post(
            "/api/tune", content=b"[", headers={"content-type": "application/json", **ORIGIN}
        ).status_code
        == 400
    )
    assert client.post("/api/tune", json=wanted, headers=ORIGIN).status_code == 200
    assert client.get("/api/state").json()["max_staleness"] == 5


def test_knob_of_a_run_that_has_ended_says_so(page: TestClient) -> None:
    refused = page.post("/api/tune", json={"max_staleness": 1}, headers=ORIGIN)
    assert refused.status_code == 400 and "is not running" in refused.text


def test_redis_that_is_gone_is_said_on_the_page(live_run: RunDir) -> None:
    live_run.write_redis_url("redis://127.0.0.1:1/0")
    live_run.write_config(
        replace(config := load_config([]), buffer=replace(config.buffer, outage_timeout_s=0.1))
    )
    state = client_of(live_run).get("/api/state").json()
    assert "does not answer" in state["problem"] and state["max_staleness"] is None


def test_damaged_file_is_named(page: TestClient, run_dir: RunDir) -> None:
    run_dir.metrics.write_text("nonsense\n")
    damaged = client_of(run_dir, raises=False).get("/api/state")
    assert damaged.status_code == 500 and "metrics.jsonl:1 is damaged" in damaged.text
    (run_dir.path / "run.json").unlink()
    gone = client_of(run_dir, raises=False).get("/api/state")
    assert gone.status_code == 500 and "run.json" in gone.text


def test_server_in_a_thread_answers_and_closes(run_dir: RunDir) -> None:
    server = PageServer(run_dir, "127.0.0.1", 0)
    try:
        with httpx.Client(follow_redirects=True) as client:
            assert client.get(server.url).status_code == 200
            port = int(server.url.split(":")[2].split("/")[0])
            with pytest.raises(ValueError, match=rf"run\.page_port={port}: cannot listen"):
                PageServer(run_dir, "127.0.0.1", port)
    finally:
        server.close()
    with pytest.raises(httpx.ConnectError):
        httpx.get(server.url)


def test_server_that_closes_awaits_its_first_look_at_the_run(
    run_dir: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_closing, looked = threading.Event(), list[bool]()
    monkeypatch.setattr(WatchedRun, "begin", lambda _: looked.append(is_closing.wait(60)))
    server = PageServer(run_dir, "127.0.0.1", 0)
    end = server._loop.stop
    monkeypatch.setattr(server._loop, "stop", lambda work: (end(work), is_closing.set()))
    server.close()
    assert looked == [True] and not server._begins.is_alive()


def test_command_names_a_port_that_is_in_use(run_dir: RunDir, leash: Command) -> None:
    server = PageServer(run_dir, "127.0.0.1", 0)
    try:
        port = server.url.split(":")[2].split("/")[0]
        error = leash("page", "--port", port, exit_code=EXIT_BAD_INPUT)
        assert f"PORT={port}: cannot listen on 127.0.0.1:{port}" in error
    finally:
        server.close()


def test_long_run_is_read_once_and_sent_in_few_points(
    run_dir: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("controller.page.watched.EVERY_S", -1.0)
    record_all(run_dir, run_records(10_000))
    run_dir.end("finished")
    judged = list[int]()

    def judge(records: Sequence[Record]) -> list[Finding]:
        judged.append(len(records))
        return []

    monkeypatch.setattr("controller.page.watched.findings_of_ended", judge)
    client = client_of(run_dir)
    for path in ("/api/state", "/api/curves?metric=step/reward_mean", "/api/areas", "/api/groups"):
        found = client.get(path)
        assert found.status_code == 200 and len(found.content) < 500_000
    assert len(judged) == 1 and judged[0] > 10_000


def test_group_shows_its_advantages_and_the_trainers_logprobs(
    page: TestClient, run_dir: RunDir
) -> None:
    found = page.get("/api/group?id=a&trajectory=1").json()
    assert found["trained_step"] is None and found["trainer_logprobs"] is None
    one = {"place": 1, "advantage": 0.5, "logprobs": [None] * 3 + [-0.25] * 5}
    line = {"group_id": "a", "step": 4, "version": 3, "at": 1.0, "trajectories": [one]}
    folder = run_dir.path / "trained"
    folder.mkdir()
    cut = json.dumps({**line, "group_id": "b"}, separators=(",", ":"))[:50]
    (folder / "rank-0.jsonl").write_text(json.dumps(line, separators=(",", ":")) + "\n" + cut)
    found = page.get("/api/group?id=a&trajectory=1&start=2").json()
    assert found["trained_step"] == 4 and found["advantages"] is None
    assert [one["advantage"] for one in found["trajectories"]] == [None, 0.5]
    assert found["trainer_logprobs"] == [None] + [-0.25] * 5
    (folder / "rank-0.jsonl").rename(folder / "away")  # it is not read for each trajectory
    found = page.get("/api/group?id=a&trajectory=0").json()
    assert found["trained_step"] == 4 and found["trainer_logprobs"] is None
    (folder / "away").rename(folder / "rank-0.jsonl")
    assert page.get("/api/group?id=b").json()["trained_step"] is None
    # Sampled by versions 3 and 4, it may be trained until 6, with a larger bound until 9.
    late = json.dumps({**line, "group_id": "b", "version": 9}, separators=(",", ":"))
    (folder / "rank-0.jsonl").write_text(late + "\n")
    assert page.get("/api/group?id=b").json()["trained_step"] is None
    page.get("/api/group?id=a")
    # A resume has written the smaller one into config.yaml.
    tuned = {"setting": "buffer.max_staleness", "before": 5, "after": 2, "who": "x"}
    sampled = buffer_record(1.0, replace(STATS, max_staleness=5))
    for record in (Record(t=1.0, kind="tuned", values=tuned), sampled):
        written = run_dir.metrics.read_bytes()
        record_all(run_dir, [record])
        assert client_of(run_dir).get("/api/group?id=b").json()["trained_step"] == 4
        run_dir.metrics.write_bytes(written)


def test_largest_staleness_of_a_run_without_records_is_that_of_its_settings(
    run_dir: RunDir,
) -> None:
    run_dir.write_config(load_config(["buffer.max_staleness=3"]))
    assert WatchedRun(run_dir).largest_staleness() == 3
