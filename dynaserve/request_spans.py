"""OpenTelemetry spans of a request that is over: one for it, and in it one for each micro-request and for its KV.

They are made from its record, when it is over, with the times of then; while a request runs, tracing costs nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from opentelemetry.context import Context
from opentelemetry.trace import Span, SpanKind, StatusCode, Tracer, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from dynaserve.records import KvRecord, MicroRecord, RequestRecord


def emit(tracer: Tracer, record: RequestRecord, trace_headers: Mapping[str, str] | None) -> None:
    """trace_headers: `traceparent` and `tracestate` of the caller, whose span becomes the parent."""
    parent = TraceContextTextMapPropagator().extract(trace_headers) if trace_headers else Context()
    end_ms = max(record.timeline_ms.values(), default=0.0)
    request = tracer.start_span("dynaserve.request", parent, SpanKind.SERVER, _of_request(record), start_time=_ns(record, 0.0))
    for lost in record.lost_attempts:
        request.add_event("instance lost", {"reason": lost.reason, "output_tokens": lost.output_tokens}, _ns(record, lost.at_ms))
    if record.finish_reason == "error":
        request.set_status(StatusCode.ERROR)
    inside = set_span_in_context(request, Context())
    for part in _parts(record, end_ms):
        attributes = _of_micro(part.micro)
        _end(tracer.start_span(part.name, inside, attributes=attributes, start_time=_ns(record, part.from_ms)), record, part.to_ms)
    if record.kv is not None and record.kv.chunks:
        times_ms = [chunk["at_ms"] for chunk in record.kv.chunks]
        kv = tracer.start_span("dynaserve.kv", inside, attributes=_of_kv(record.kv), start_time=_ns(record, min(times_ms)))
        _end(kv, record, max(times_ms))
    _end(request, record, end_ms)


@dataclass(frozen=True, slots=True)
class _Part:
    """Times in milliseconds from the request's arrival."""

    name: str
    micro: MicroRecord
    from_ms: float
    to_ms: float


def _parts(record: RequestRecord, end_ms: float) -> Iterator[_Part]:
    """The micro-requests of all attempts. Only the first attempt may have been cut: whatever is placed again runs whole."""
    marks = record.timeline_ms
    attempts = [(lost.alpha, lost.beta, lost.at_ms) for lost in record.lost_attempts]
    if not (attempts and attempts[-1][0] is record.alpha):  # else it was given up before it was placed again
        attempts.append((record.alpha, record.beta, end_ms))
    begin_ms = 0.0
    for alpha, beta, to_ms in attempts:
        if alpha is not None and beta is not None and "beta_resumed" in marks:
            yield _Part("dynaserve.alpha", alpha, begin_ms, marks.get("alpha_parked", marks.get("alpha_lost", marks["beta_resumed"])))
            yield _Part("dynaserve.beta", beta, marks["beta_resumed"], to_ms)
        elif alpha is not None:
            yield _Part("dynaserve.alpha" if beta is not None else "dynaserve.whole", alpha, begin_ms, to_ms)
        begin_ms = to_ms


def _of_request(record: RequestRecord) -> dict[str, str | int]:
    known: dict[str, str | int | None] = {
        "gen_ai.request.id": record.request_id,
        "gen_ai.usage.prompt_tokens": record.prompt_tokens,
        "gen_ai.usage.completion_tokens": record.output_tokens,
        "dynaserve.reason": record.reason,
        "dynaserve.split_token": record.split_token,
        "dynaserve.lifted": record.lifted,
        "dynaserve.finish_reason": record.finish_reason,
    }
    return {name: value for name, value in known.items() if value is not None}


def _of_micro(micro: MicroRecord) -> dict[str, str | int | bool]:
    known: dict[str, str | int | bool | None] = {
        "dynaserve.instance": micro.instance,
        "dynaserve.computed_tokens": micro.computed_tokens,
        "dynaserve.cached_tokens": micro.cached_tokens,
        "dynaserve.output_tokens": micro.output_tokens,
        "dynaserve.lost": micro.lost,
    }
    return {name: value for name, value in known.items() if value is not None}


def _of_kv(kv: KvRecord) -> dict[str, str | int]:
    return {
        "dynaserve.transport": kv.transport,
        "dynaserve.kv_bytes": kv.bytes,
        "dynaserve.kv_early_bytes": kv.bytes_before_alpha_end,
        "dynaserve.kv_chunks": len(kv.chunks),
    }


def _end(span: Span, record: RequestRecord, at_ms: float) -> None:
    span.end(_ns(record, at_ms))


def _ns(record: RequestRecord, at_ms: float) -> int:
    """Unix time in nanoseconds."""
    return int(1e9 * record.arrived_s) + int(1e6 * at_ms)
