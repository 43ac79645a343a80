"""Spans of episodes and their requests, over real HTTP: to the engine, and to a collector."""

from __future__ import annotations

import pytest
from opentelemetry import trace
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode, set_span_in_context

from rollout_pool.sampling.router import Router
from rollout_pool.sampling.sampler import Sampler
from rollout_pool.sampling.tracing import open_tracing, tracer
from tests.support.collector import collecting
from tests.support.rollout import make_sample


@pytest.fixture(scope="module")
def exporter():
    """The process's exporter: OpenTelemetry takes one provider, and no other later."""
    provider, exporter = TracerProvider(), InMemorySpanExporter()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    trace.set_tracer_provider(provider)
    yield exporter
    provider.shutdown()


@pytest.fixture
def ended(exporter):
    """The spans that ended since this test began, by name."""
    exporter.clear()

    def ended(name):
        return [span for span in exporter.get_finished_spans() if span.name == name]

    return ended


def parent_of(span):
    return span.parent.span_id if span.parent else None


async def test_request_is_a_span_with_its_parts_below_its_sample_and_episode(
    fake, other_fake, client, other_client, ended
):
    router = Router([client, other_client], wait_timeout_s=60.0)
    router.follow({"engine-0": 3, "engine-1": 4}, 4, 1)
    fake.version, other_fake.version = "3", "4"
    fake.says(parts=[1], logprobs=[-0.5, None, -0.5], delay_s=0.1)
    with tracer.start_as_current_span("episode") as episode:
        context = set_span_in_context(episode)
    sample = make_sample(span_context=context)
    await Sampler(router, max_retries=1).complete(sample)
    [of_sample] = ended("sample")
    assert parent_of(of_sample) == episode.get_span_context().span_id
    assert of_sample.attributes == {"sample": "g.0", "finish_reason": "stop"}
    first, second = ended("request")
    assert parent_of(first) == parent_of(second) == of_sample.context.span_id
    assert first.attributes == {
        "engine": "engine-0",
        "prompt_tokens": 3,
        "tokens": 1,
        "versions": (3,),
    }
    assert second.attributes == {
        "engine": "engine-1",
        "prompt_tokens": 4,
        "tokens": 3,
        "versions": (4,),
    }
    assert first.status.status_code is StatusCode.ERROR and "is None" in first.status.description
    assert second.status.status_code is StatusCode.UNSET is of_sample.status.status_code
    for name in ("queue", "prefill", "decode"):
        assert [parent_of(part) for part in ended(name)] == [
            first.context.span_id,
            second.context.span_id,
        ]
    [queue, _], [prefill, _], [decode, _] = ended("queue"), ended("prefill"), ended("decode")
    assert queue.end_time == prefill.start_time and prefill.end_time == decode.start_time
    assert abs(queue.start_time - first.start_time) < 10**9
    assert decode.start_time < decode.end_time <= first.end_time + 10**9


async def test_request_without_a_token_has_no_decode_part(fake, client, ended):
    fake.status = 500
    router = Router([client], wait_timeout_s=60.0)
    router.follow({"engine-0": 0}, 0, 0)
    with pytest.raises(RuntimeError, match="out of order"):
        await Sampler(router, max_retries=0).complete(make_sample())
    assert len(ended("queue")) == len(ended("prefill")) == 1 and ended("decode") == []
    [request] = ended("request")
    assert request.status.status_code is StatusCode.ERROR and request.attributes["tokens"] == 0


def test_spans_reach_a_collector_with_the_headers_of_the_environment(monkeypatch, capfd, caplog):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "authorization=Bearer%20s3cret")
    with collecting() as (url, posted):
        provider = open_tracing(url, "night", "worker-2")
        provider.get_tracer("leash").start_span("episode").end()
        provider.shutdown()
    [(path, headers, body)] = posted
    assert path == "/v1/traces" and headers["authorization"] == "Bearer s3cret"
    [spans] = ExportTraceServiceRequest.FromString(body).resource_spans
    about = {one.key: one.value.string_value for one in spans.resource.attributes}
    assert about["service.name"] == "leash" and about["leash.run"] == "night"
    assert about["service.instance.id"] == "worker-2"
    assert [span.name for span in spans.scope_spans[0].spans] == ["episode"]
    out, err = capfd.readouterr()
    assert "s3cret" not in out + err + caplog.text


def test_collector_that_is_gone_costs_spans_only():
    with collecting() as (url, posted):
        provider = open_tracing(url, "night", "worker-0")
    provider.get_tracer("leash").start_span("episode").end()
    provider.shutdown()  # returns, and raises nothing
    assert posted == []
