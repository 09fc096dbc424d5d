"""The spans of a request that is over."""

from __future__ import annotations

import pytest

pytest.importorskip("opentelemetry.sdk")

from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from dynaserve.records import LostAttempt, RequestRecord
from dynaserve.request_spans import emit
from tests import looked_at
from tests.looked_at import A, B

CALLER = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}


def spans_of(record: RequestRecord, headers: dict[str, str] | None = None) -> dict[str, ReadableSpan]:
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    emit(provider.get_tracer("dynaserve"), record, headers)
    spans = exporter.get_finished_spans()
    assert len({span.context.trace_id for span in spans if span.context}) == 1
    provider.shutdown()
    return {span.name: span for span in spans}


def times_ms(span: ReadableSpan, record: RequestRecord) -> tuple[float, float]:
    assert span.start_time is not None
    assert span.end_time is not None
    zero_ns = int(1e9 * record.arrived_s)
    return (span.start_time - zero_ns) / 1e6, (span.end_time - zero_ns) / 1e6


def attributes(span: ReadableSpan) -> dict[str, object]:
    return {name.removeprefix("dynaserve."): value for name, value in (span.attributes or {}).items()}


def test_a_cut_request_has_a_span_for_each_half_and_for_its_kv() -> None:
    record = looked_at.cut()
    spans = spans_of(record)
    assert {name: times_ms(span, record) for name, span in spans.items()} == {
        "dynaserve.request": (0.0, 1900.0),
        "dynaserve.alpha": (0.0, 800.0),
        "dynaserve.beta": (820.0, 1900.0),
        "dynaserve.kv": (300.0, 780.0),
    }
    request = spans["dynaserve.request"]
    assert request.parent is None
    assert all(span.parent == request.context for span in spans.values() if span is not request)
    assert attributes(spans["dynaserve.beta"]) == {
        "instance": B,
        "computed_tokens": 30,
        "cached_tokens": 0,
        "output_tokens": 30,
        "lost": False,
    }
    assert attributes(request)["split_token"] == 110
    assert attributes(spans["dynaserve.kv"]) == {"transport": "torch", "kv_bytes": 4000, "kv_early_bytes": 3000, "kv_chunks": 2}


def test_the_callers_span_is_the_parent() -> None:
    request = spans_of(looked_at.whole(), CALLER)["dynaserve.request"]
    assert request.parent is not None
    assert (f"{request.parent.trace_id:032x}", f"{request.parent.span_id:016x}") == tuple(CALLER["traceparent"].split("-")[1:3])


def test_a_whole_request_has_one_part() -> None:
    record = looked_at.whole()
    record.mark("finished", 400.0)
    spans = spans_of(record)
    assert spans.keys() == {"dynaserve.request", "dynaserve.whole"}
    assert attributes(spans["dynaserve.whole"])["instance"] == A


def test_a_request_that_was_placed_again_has_all_its_attempts() -> None:
    record = looked_at.placed_again()
    record.finish_reason = "stop"
    record.mark("finished", 2000.0)
    spans = spans_of(record)
    assert times_ms(spans["dynaserve.beta"], record) == (820.0, 1000.0)
    assert times_ms(spans["dynaserve.whole"], record) == (1000.0, 2000.0)
    (event,) = spans["dynaserve.request"].events
    assert (event.name, dict(event.attributes or {})["reason"]) == ("instance lost", "instance b was lost")


def test_a_request_that_is_given_up_is_an_error() -> None:
    record = looked_at.whole()
    record.lost_attempts = [LostAttempt("instance a was lost", 5, 300.0, record.alpha, None)]
    record.finish_reason = "error"
    record.mark("finished", 5300.0)
    spans = spans_of(record)
    assert spans["dynaserve.request"].status.status_code is StatusCode.ERROR
    assert times_ms(spans["dynaserve.whole"], record) == (0.0, 300.0)
