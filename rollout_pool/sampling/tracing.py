"""OpenTelemetry spans of episodes and their requests, if rollout.trace_endpoint is set.

    episode ─┬─ sample ─┬─ request ─── queue, prefill, decode
             │          └─ request     at another engine, after a failure
             └─ sample                 the next turn

Without a provider no span is made: one that records nothing costs as much as a part of a sample.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.trace import Span

tracer = trace.get_tracer("leash")
EXPORT_TIMEOUT_S = 5.0


def open_span(
    name: str,
    attributes: Mapping[str, str] | None = None,
    context: Context | None = None,
    *,
    fails: bool = True,
) -> AbstractContextManager[Span]:
    """The current span while it is open; `context`: None is the current one. `fails`: what is
    raised inside is an error of it."""
    if isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider):
        return nullcontext(trace.INVALID_SPAN)
    return tracer.start_as_current_span(
        name,
        context=context,
        attributes=attributes,
        record_exception=fails,
        set_status_on_exception=fails,
    )


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
