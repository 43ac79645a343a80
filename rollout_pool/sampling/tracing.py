"""OpenTelemetry spans of episodes and their requests, if rollout.trace_endpoint is set.

    episode ─┬─ sample ─┬─ request ─── queue, prefill, decode
             │          └─ request     at another engine, after a failure
             └─ sample                 the next turn

Without a provider OpenTelemetry makes spans that record nothing.
"""

from __future__ import annotations

import time

from opentelemetry import trace
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.trace import Span

from rollout_pool.sampling.sample import Sample

tracer = trace.get_tracer("leash")
EXPORT_TIMEOUT_S = 5.0


def open_tracing(endpoint: str, run: str, process: str) -> TracerProvider:
    """Sends spans to `endpoint` (OTLP over HTTP) from a thread; `shutdown` sends the rest.

    Headers, as with a password, come from OTEL_EXPORTER_OTLP_HEADERS.
    """
    about = {"service.name": "leash", "service.instance.id": process, "leash.run": run}
    provider = TracerProvider(resource=Resource.create(about))
    exporter = make_exporter(endpoint)
    provider.add_span_processor(BatchSpanProcessor(exporter))
    return provider


def make_exporter(endpoint: str) -> SpanExporter:
    """Raises ValueError if its package is not installed."""
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    except ImportError as error:
        raise ValueError(
            f"rollout.trace_endpoint={endpoint!r}: {error}; install leash-rl[tracing] or unset it"
        ) from None
    exporter: SpanExporter = OTLPSpanExporter(endpoint=endpoint, timeout=EXPORT_TIMEOUT_S)
    return exporter


def describe_request(
    span: Span,
    sample: Sample,
    engine: str,
    num_tokens_before: int,
    times: tuple[float, float, float | None],
) -> None:
    """Ends the description of a request: its attributes and its parts. `times`, monotonic: when it
    began to wait, when it got its slot, and its first token."""
    if not span.is_recording():
        return
    waited_from, began, first_token = times
    spans = [one for one in sample.version_spans if one.end > num_tokens_before]
    span.set_attributes(
        {
            "engine": engine,
            "prompt_tokens": len(sample.prompt) + num_tokens_before,
            "tokens": len(sample.output_ids) - num_tokens_before,
            "versions": sorted({one.version for one in spans}),
        }
    )
    now = time.monotonic()
    parts = [("queue", waited_from, began), ("prefill", began, first_token or now)]
    parts += [("decode", first_token, now)] if first_token else []
    wall, context = time.time() - now, trace.set_span_in_context(span)
    for name, start, end in parts:
        part = tracer.start_span(name, context, start_time=int((wall + start) * 1e9))
        part.end(int((wall + end) * 1e9))
