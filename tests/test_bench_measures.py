"""Figures from timings, tokens from a stream, prompts from a workload."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

import pytest

from dynaserve.bench import report
from dynaserve.bench.measures import Distribution, Slo, is_good, summarize, why_late, why_not_exact
from dynaserve.bench.prompts import Prompts
from dynaserve.bench.records import Failure, RequestRecord
from dynaserve.bench.stream import CompletionStream
from workloads.trace import TraceRequest

SLO = Slo(tbt_ms=100.0)
RECORD = RequestRecord(
    index=0,
    label="",
    prompt_tokens=10,
    output_tokens=4,
    due_s=1.0,
    sent_s=1.002,
    ended_s=2.0,
    token_times_s=(1.502, 1.552, 1.752, 1.752),
    tokens_counted_by="usage",
    usage_prompt_tokens=10,
    usage_output_tokens=4,
    finish_reason="length",
    http_status=200,
    failure=None,
)
"""TTFT 500 ms, gaps 50, 200 and 0 ms."""
FAST = replace(RECORD, index=1, due_s=1.5, sent_s=1.5, token_times_s=(1.6, 1.7, 1.75, 1.8))
FAILED = replace(RECORD, index=2, due_s=2.0, sent_s=2.0, ended_s=3.0, token_times_s=(2.5, 2.7), failure=Failure("HTTP 500", "no"))


def test_latencies_of_a_request() -> None:
    assert RECORD.ttft_ms == pytest.approx(500)
    assert RECORD.gaps_ms == pytest.approx([50, 200, 0])
    assert RECORD.e2e_ms == pytest.approx(750)
    assert RECORD.send_lag_ms == pytest.approx(2)


def test_percentiles_are_those_of_all_values() -> None:
    distribution = Distribution.of(float(value) for value in range(101))
    assert distribution == Distribution(101, 50.0, 50.0, 90.0, 95.0, 99.0, 100.0)
    assert Distribution.of([]) is None


def test_rates_are_over_the_time_from_the_first_planned_sending_to_the_last_end() -> None:
    summary = summarize([RECORD, FAST, FAILED], [], SLO)
    assert summary.duration_s == pytest.approx(2.0)
    assert summary.offered_rate_per_s == pytest.approx(2.0)
    assert summary.requests_per_s == pytest.approx(2 / 2)
    assert summary.output_tokens_per_s == pytest.approx(10 / 2)
    assert summary.prompt_tokens_per_s == pytest.approx(20 / 2)


def test_failed_requests_count_with_the_tokens_that_came_but_are_never_good() -> None:
    summary = summarize([RECORD, FAST, FAILED], [], SLO)
    assert (summary.requests, summary.finished, summary.failures) == (3, 2, {"HTTP 500": 1})
    assert summary.tbt_ms is not None
    assert summary.tbt_ms.count == 7
    assert summary.e2e_ms is not None
    assert summary.e2e_ms.count == 2
    assert summary.token_attainment == pytest.approx(5 / 7)
    assert summary.request_attainment == pytest.approx(1 / 3)


def test_goodput_counts_what_came_within_its_slo() -> None:
    summary = summarize([RECORD, FAST], [], Slo(tbt_ms=100.5, ttft_ms=200.0))
    assert summary.duration_s == pytest.approx(1.0)
    assert summary.goodput_requests_per_s == pytest.approx(1.0)
    assert summary.goodput_tokens_per_s == pytest.approx(2 + 4)


@pytest.mark.parametrize(
    ("record", "slo", "good"),
    [
        (RECORD, Slo(201.0), True),
        (RECORD, Slo(199.0), False),
        (RECORD, Slo(201.0, 501.0), True),
        (RECORD, Slo(201.0, 499.0), False),
        (replace(RECORD, failure=Failure("timed out", "")), Slo(201.0), False),
    ],
)
def test_a_good_request_meets_every_slo(record: RequestRecord, slo: Slo, good: bool) -> None:
    assert is_good(record, slo) == good


def test_a_run_without_any_token_has_no_latencies() -> None:
    summary = summarize([replace(FAILED, token_times_s=())], [], SLO)
    assert (summary.ttft_ms, summary.tbt_ms, summary.e2e_ms, summary.token_attainment) == (None, None, None, None)
    assert summary.requests_per_s == 0


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"usage_prompt_tokens": 11}, "counted 11 prompt tokens, but 10 were sent"),
        ({"usage_prompt_tokens": None}, "usage"),
        ({"usage_output_tokens": 8}, "4 tokens were seen .* counted 8"),
    ],
)
def test_lengths_that_the_server_counts_otherwise_are_named(change: dict[str, Any], named: str) -> None:
    assert why_not_exact([RECORD]) is None
    problem = why_not_exact([RECORD, replace(RECORD, **change)])
    assert problem is not None
    assert re.search(named, problem)


def test_a_late_client_is_named_with_the_figures() -> None:
    on_time = summarize([FAST], [1.0], SLO)
    assert why_late(on_time, 10.0) is None
    assert on_time.client_lag_p99_ms == 1.0
    late_sending = why_late(summarize([replace(FAST, sent_s=1.525)], [1.0], SLO), 10.0)
    assert late_sending is not None
    assert "sent requests 25.0 ms" in late_sending
    assert summarize([replace(FAST, sent_s=1.525)], [1.0], SLO).client_lag_p99_ms == pytest.approx(25.0)
    late_reading = why_late(summarize([FAST], [30.0], SLO), 10.0)
    assert late_reading is not None
    assert "woke up 30.0 ms" in late_reading


def event(text: str = "a", *, usage: int | None = None, finish: str | None = None, **choice: Any) -> bytes:
    fields: dict[str, Any] = {"choices": [{"text": text, "finish_reason": finish, **choice}]}
    if usage is not None:
        fields["usage"] = {"prompt_tokens": 5, "completion_tokens": usage}
    return f"data: {json.dumps(fields)}\n\n".encode()


LAST_USAGE = b'data: {"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 3}}\n\ndata: [DONE]\n\n'


def read(*events: bytes) -> CompletionStream:
    """The events arrive at 0, 1, 2 ... s."""
    stream = CompletionStream()
    for at_s, data in enumerate(events):
        stream.feed(data, float(at_s))
    return stream


def test_several_tokens_in_an_event_have_one_gap_before_them_and_none_between() -> None:
    stream = read(event(usage=1), event("bc", usage=3, finish="length"))
    assert stream.token_times_s == [0.0, 1.0, 1.0]
    assert stream.end(3) is None


def test_token_ids_count_where_no_usage_comes() -> None:
    stream = read(event(token_ids=[7]), event("", token_ids=[8, 9], finish="length"), LAST_USAGE)
    assert (stream.token_times_s, stream.counted_by) == ([0.0, 1.0, 1.0], "token_ids")


def test_events_with_text_count_where_nothing_else_is_said() -> None:
    stream = read(event(), event(), event(), event("", finish="length"), LAST_USAGE)
    assert (stream.token_times_s, stream.counted_by, stream.usage_output_tokens) == ([0.0, 1.0, 2.0], "events", 3)


def test_a_usage_only_at_the_end_does_not_hide_that_events_carried_several_tokens() -> None:
    stream = read(event("ab"), event("c", finish="length", usage=3))
    assert (len(stream.token_times_s), stream.usage_output_tokens) == (2, 3)


def test_bytes_may_be_cut_anywhere() -> None:
    data = event(usage=1) + event(usage=2, finish="length")
    stream = CompletionStream()
    for at_s, byte in enumerate(data):
        stream.feed(bytes([byte]), float(at_s))
    assert len(stream.token_times_s) == 2
    assert stream.end(2) is None


@pytest.mark.parametrize(
    ("events", "reason"),
    [
        ([], "answer cut off"),
        ([event(usage=1)], "answer cut off"),
        ([event(usage=2, finish="stop")], "wrong output length"),
        ([event(usage=1), b'data: {"error": {"message": "no"}}\n\n'], "error in the stream"),
        ([b"data: {not json}\n\n"], "not a completion"),
        ([b'data: {"choices": [{"text": "\xff"}]}\n\n'], "not a completion"),
        ([b'data: {"error": ' + b"[" * 100_000 + b"}\n\n"], "not a completion"),
        ([b'{"choices": []}'], "answer cut off"),
    ],
)
def test_an_answer_that_is_not_whole_is_a_failure(events: list[bytes], reason: str) -> None:
    failure = read(*events).end(3)
    assert failure is not None
    assert failure.reason == reason


PROMPTS = Prompts(seed=3, vocabulary=range(1000, 20000))


def test_prompts_have_the_exact_length_and_stay_in_the_vocabulary() -> None:
    for tokens in (1, 17, 5000):
        ids = PROMPTS.token_ids(0, TraceRequest(0.0, tokens, 1))
        assert len(ids) == tokens
        assert all(1000 <= token < 20000 for token in ids)


def test_prompts_are_the_same_for_the_same_seed_and_share_nothing_otherwise() -> None:
    request = TraceRequest(0.0, 100, 1)
    assert PROMPTS.token_ids(4, request) == PROMPTS.token_ids(4, request)
    assert PROMPTS.token_ids(4, request)[:16] != PROMPTS.token_ids(5, request)[:16]
    assert PROMPTS.token_ids(4, request)[:16] != Prompts(4, PROMPTS.vocabulary).token_ids(4, request)[:16]


def test_prompts_share_the_blocks_with_equal_hashes() -> None:
    one = PROMPTS.token_ids(0, TraceRequest(0.0, 1100, 1, (7, 8, 9)))
    two = PROMPTS.token_ids(1, TraceRequest(0.0, 1500, 1, (7, 8, 10)))
    assert (len(one), len(two)) == (1100, 1500)
    assert one[:1024] == two[:1024]
    assert one[1024:1040] != two[1024:1040]


@pytest.mark.parametrize("arguments", [["--api-key", "secret"], ["--api-key=secret"]])
def test_the_key_is_not_in_the_raw_data(arguments: list[str]) -> None:
    assert "secret" not in report.command_line([*arguments, "--url", "http://a"])
