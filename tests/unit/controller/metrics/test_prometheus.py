"""The numbers for Prometheus: a scrape of a real buffer, and what a scrape says without one."""

from __future__ import annotations

import asyncio
import socket
import sys
import threading
import urllib.request
from contextlib import closing
from math import nan
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from buffer.redis.connection import connect
from buffer.redis.server import EmbeddedServer
from buffer.results import BufferStats
from buffer.run_state import MetricsEntry, RunState
from configs.choices import OnStale
from configs.schema import BufferConfig
from controller.buffer_access import BufferAddress
from controller.metrics.prometheus import MetricsServer
from controller.metrics.prometheus_metrics import KEPT_MS, EngineGauges, RecordTotals
from tests.support.buffer.groups import lease_batch, make_group
from tests.support.controller.buffers import fill, opened
from tests.support.controller.records import event_record, skipped_record, weights_records

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def scrape(url: str) -> Samples:
    """Samples by name and labels, read with Prometheus' own parser."""
    with urllib.request.urlopen(url, timeout=20) as reply:
        text = reply.read().decode()
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


@pytest.fixture
def address(redis_url: str, run_name: str) -> BufferAddress:
    return BufferAddress(url=redis_url, run=run_name, settings=BufferConfig())


def labels(run: str, **more: str) -> frozenset[tuple[str, str]]:
    return frozenset({"run": run, **more}.items())


async def live_then_stats(url: str, run: str) -> BufferStats:
    """Some of everything: two groups trained (one acked), a stale one dropped, one running."""
    settings = {"max_staleness": 0, "on_stale": OnStale.drop, "capacity_bytes": 10**6}
    async with opened(url, run, **settings) as buffer:
        for number in range(5):
            await buffer.push(make_group(f"group-{number}"))
        for step in range(2):
            batch = await lease_batch(buffer, step)
            await buffer.consume(batch, batch.group_ids)
        await buffer.ack(0)
        await buffer.announce_version(1)
        await buffer.sweep()
        await buffer.change_settings({"max_staleness": 3})
        await buffer.admit("running-0", timeout_s=60)
        for number in range(2):
            await buffer.push(make_group(f"fresh-{number}", version=number))
        return await buffer.stats()


def test_scrape_agrees_with_the_buffer(
    address: BufferAddress, redis_url: str, run_name: str
) -> None:
    stats = asyncio.run(live_then_stats(redis_url, run_name))
    with closing(MetricsServer(address, "127.0.0.1", 0)) as server:
        samples = scrape(server.url)
    run = labels(run_name)
    expected = {
        ("replay_up", run): 1,
        ("replay_scrape_errors_total", run): 0,
        ("replay_depth_groups", run): 2,
        ("replay_ready_groups", labels(run_name, staleness="0")): 1,
        ("replay_ready_groups", labels(run_name, staleness="1")): 1,
        ("replay_running_groups", run): 1,
        ("replay_leased_groups", run): 0,
        ("replay_consumed_groups", run): 1,
        ("replay_quarantined_groups", run): 0,
        ("replay_pushed_total", run): 7,
        ("replay_acked_total", run): 1,
        ("replay_dropped_total", labels(run_name, reason="stale")): 3,
        ("replay_dropped_tokens_total", labels(run_name, reason="stale")): 48,
        ("replay_bytes", run): stats.bytes,
        ("replay_capacity_bytes", run): 10**6,
        ("replay_trainer_version", run): 1,
        ("replay_max_staleness", run): 3,
        ("replay_push_blocked_total", run): 0,
        ("replay_push_blocked_seconds_total", run): 0,
        ("replay_staleness_versions_bucket", labels(run_name, le="0.0")): 2,
        ("replay_staleness_versions_count", run): 2,
        ("replay_staleness_versions_sum", run): 0,
        ("replay_age_seconds_count", run): 2,
        ("replay_age_seconds_bucket", labels(run_name, le="+Inf")): 2,
    }
    assert {name: samples.get(name) for name in expected} == expected
    assert ("replay_capacity_groups", run) not in samples, "there is no such limit here"
    assert 0 <= samples["replay_oldest_age_seconds", run] < 60
    assert 0 <= samples["replay_age_seconds_sum", run] < 60


async def live_with_weights(url: str, run: str) -> None:
    """Two versions of 2.5 MB, the second as a delta, at one receiver and two engines."""
    state = RunState(await connect(url), run)
    try:
        await state.register_receiver("receiver-0", "http://127.0.0.1:1")
        await state.record_staged("receiver-0", 1)
        await state.mark_available(1)
        await state.record_commits({"engine-0": 1, "engine-1": 0})
        records = [
            *weights_records(0, 100.0),
            *weights_records(1, 101.0, mode="delta"),
            skipped_record(2, 102.0),
            event_record("epoch", "trainer"),
            event_record("caught_up", "receiver-0"),
            event_record("caught_up", "receiver-0"),
        ]
        for record in records:
            await state.append_metrics(record.values, record.kind)
    finally:
        await state.close()


def test_scrape_has_the_weights_and_counts_no_record_twice(
    address: BufferAddress, redis_url: str, run_name: str
) -> None:
    asyncio.run(fill(redis_url, run_name))
    asyncio.run(live_with_weights(redis_url, run_name))
    run = labels(run_name)
    with closing(MetricsServer(address, "127.0.0.1", 0)) as server:
        scrape(server.url)
        samples = scrape(server.url)
        expected = {
            ("weights_published_version", run): 1,
            ("weights_receivers", run): 1,
            ("weights_engines", run): 2,
            ("weights_staged_version", labels(run_name, receiver="receiver-0")): 1,
            ("weights_served_version", labels(run_name, engine="engine-1")): 0,
            ("weights_publishes_total", labels(run_name, mode="full")): 1,
            ("weights_publishes_total", labels(run_name, mode="delta")): 1,
            ("weights_publishes_total", labels(run_name, mode="skipped")): 1,
            ("weights_events_total", labels(run_name, event="caught_up")): 2,
            ("weights_bytes_total", run): 5_000_000,
            ("weights_wire_bytes_total", run): 2_750_000,
            ("weights_delta_density", run): 0.05,
            ("weights_epoch", run): 1,
            ("weights_snapshot_seconds_count", run): 3,
            ("weights_snapshot_seconds_bucket", labels(run_name, le="0.05")): 2,
            ("weights_snapshot_seconds_bucket", labels(run_name, le="+Inf")): 3,
            ("weights_encode_seconds_count", run): 1,
            ("weights_convergence_seconds_count", run): 2,
            ("weights_commit_pause_seconds_count", labels(run_name, engine="engine-0")): 2,
        }
        assert {name: samples.get(name) for name in expected} == expected
        assert samples["weights_convergence_seconds_sum", run] == pytest.approx(1.8)
        asyncio.run(live_with_weights(redis_url, run_name))
        assert scrape(server.url)["weights_publishes_total", labels(run_name, mode="full")] == 2


async def engines_report(url: str, run: str) -> None:
    state = RunState(await connect(url), run)
    try:
        for engine, worker, limit, usage in (("0", 0, 8, 0.2), ("0", 1, 6, 0.5), ("1", 0, 4, nan)):
            values = {"engine": f"engine-{engine}", "worker": worker, "limit": limit}
            values |= {"in_flight": limit - 1, "running": 9, "queued": 1, "kv_usage": usage}
            await state.append_metrics(values, "engine")
    finally:
        await state.close()


def test_scrape_has_the_last_load_of_each_engine_and_sums_over_workers(
    address: BufferAddress, redis_url: str, run_name: str
) -> None:
    asyncio.run(fill(redis_url, run_name))
    asyncio.run(engines_report(redis_url, run_name))
    with closing(MetricsServer(address, "127.0.0.1", 0)) as server:
        samples = scrape(server.url)
        asyncio.run(engines_report(redis_url, run_name))
        again = scrape(server.url)
    zero, one = labels(run_name, engine="engine-0"), labels(run_name, engine="engine-1")
    assert samples["rollout_engine_limit", zero] == again["rollout_engine_limit", zero] == 14
    assert samples["rollout_engine_in_flight", zero] == 12
    assert samples["rollout_engine_running", zero] == 9
    assert samples["rollout_engine_kv_usage", zero] == 0.5
    assert samples["rollout_engine_limit", one] == 4
    assert ("rollout_engine_kv_usage", one) not in samples


def test_engine_that_is_gone_leaves_the_gauges() -> None:
    gauges = EngineGauges("night")
    for at_ms, engine in ((1_000, "engine-0"), (1_000 + KEPT_MS, "engine-1")):
        gauges.add(MetricsEntry(f"{at_ms}-0", "engine", {"engine": engine, "limit": 3}))
    gauges.add(MetricsEntry("99999999-0", "commit", {"engine": "engine-0"}))
    assert names_of(gauges) == {"engine-0", "engine-1"}
    gauges.add(MetricsEntry(f"{1_001 + KEPT_MS}-0", "engine", {"engine": "engine-1", "limit": 4}))
    assert names_of(gauges) == {"engine-1"}


def names_of(gauges: EngineGauges) -> set[str]:
    return {s.labels["engine"] for family in gauges.families() for s in family.samples}


@pytest.mark.slow
def test_scrape_is_answered_when_redis_is_gone(tmp_path: Path) -> None:
    redis = EmbeddedServer.start(tmp_path / "redis", BufferConfig(), "127.0.0.1", tmp_path / "log")
    address = BufferAddress(url=redis.url, run="night", settings=BufferConfig())
    with closing(MetricsServer(address, "127.0.0.1", 0, timeout_s=0.5)) as server:
        redis.stop(timeout_s=60)
        samples = scrape(server.url)  # within 20 s: it does not wait for Redis
    assert samples == {
        ("replay_up", labels("night")): 0,
        ("replay_scrape_errors_total", labels("night")): 1,
    }


def test_closed_server_frees_its_port_and_leaves_no_thread(address: BufferAddress) -> None:
    before = {*threading.enumerate()}  # threads of other tests may end meanwhile
    server = MetricsServer(address, "127.0.0.1", 0)
    server.close()
    assert {*threading.enumerate()} <= before
    with pytest.raises(OSError):
        scrape(server.url)


def test_server_looks_up_no_name_for_its_address(
    address: BufferAddress, redis_url: str, run_name: str
) -> None:
    """A resolver that does not answer would hold up the start of a run by seconds."""
    questions = [f"socket.{name}" for name in ("gethostbyaddr", "gethostbyname", "getnameinfo")]
    asked: list[str] = []

    def note(event: str, arguments: tuple[Any, ...]) -> None:
        if event in questions:
            asked.append(f"{event}{arguments}")

    asyncio.run(fill(redis_url, run_name))
    sys.addaudithook(note)  # for as long as this process lives: there is no way to remove one
    with closing(MetricsServer(address, "127.0.0.1", 0)) as server:
        assert scrape(server.url)["replay_up", labels(run_name)] == 1
    assert asked == []


def test_port_in_use_is_named_by_its_setting(address: BufferAddress) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ValueError, match=rf"run\.prometheus_port={port}: cannot listen"):
            MetricsServer(address, "127.0.0.1", port)


def test_evaluations_by_a_program_leave_its_last_numbers_and_are_counted_by_result() -> None:
    totals = RecordTotals("night")
    ended = {"result": "ok", "skipped": 2, "metric/gsm8k": 0.5}
    totals.add(MetricsEntry("5-0", "eval_command", ended))
    totals.add(MetricsEntry("6-0", "eval_command", {"result": "failed", "skipped": 1, "why": "?"}))
    found = {
        (sample.name, *(v for k, v in sample.labels.items() if k != "run")): sample.value
        for family in totals.registry.collect()
        for sample in family.samples
        if sample.name.startswith("eval_command_") and not sample.name.endswith("_created")
    }
    assert found == {
        ("eval_command_metric", "gsm8k"): 0.5,
        ("eval_command_ended_total", "ok"): 1,
        ("eval_command_ended_total", "failed"): 1,
        ("eval_command_skipped_total",): 3,
    }


def test_lengths_of_which_none_is_given_up_any_more_are_gone() -> None:
    totals = RecordTotals("night")
    totals.add(
        MetricsEntry("5-0", "lengths", {"ratio": 0.7, "given_up/8": 0.5, "given_up/12": 1.0})
    )
    totals.add(MetricsEntry("6-0", "lengths", {"ratio": 0.8, "given_up/8": 0.25}))
    found = {
        (sample.name, sample.labels.get("from")): sample.value
        for family in totals.registry.collect()
        for sample in family.samples
        if sample.name.startswith("rollout_length_")
    }
    assert found == {
        ("rollout_length_ratio", None): 0.8,
        ("rollout_length_given_up", "8"): 0.25,
    } | {name: value for name, value in found.items() if name[0].endswith("mean")}
