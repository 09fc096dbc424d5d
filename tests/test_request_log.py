"""The log's line of a request that is over."""

from __future__ import annotations

import json
import logging

import pytest

pytest.importorskip("pythonjsonlogger")  # vLLM's

from pythonjsonlogger.json import JsonFormatter

from dynaserve.records import RequestRecord
from dynaserve.request_log import log_over
from tests import looked_at
from tests.looked_at import A, B

OF_EVERY_LINE = ("fileinfo", "vllm_process_name")
"""vLLM adds these, once it has configured the log."""


def failed() -> RequestRecord:
    return RequestRecord("failed", 30, None, "colocated", 0, "error", timeline_ms={"finished": 7.0})


def lines(caplog: pytest.LogCaptureFixture, record: RequestRecord, *, every: bool) -> list[logging.LogRecord]:
    caplog.clear()
    with caplog.at_level("INFO", "vllm.dynaserve.requests"):
        log_over(every, record, {"traceparent": "00-1-2-01"})
    return caplog.records


def test_who_asks_for_every_request_gets_a_line_of_each(caplog: pytest.LogCaptureFixture) -> None:
    (line,) = lines(caplog, looked_at.cut(), every=True)
    assert line.getMessage().startswith("request cut is over: finish_reason length, prompt_tokens 100, output_tokens 40, ")
    shown = json.loads(JsonFormatter("%(levelname)s").format(line))
    assert {name: value for name, value in shown.items() if name not in OF_EVERY_LINE} == {
        "levelname": "INFO",
        "request_id": "cut",
        "finish_reason": "length",
        "prompt_tokens": 100,
        "output_tokens": 40,
        "alpha": A,
        "beta": B,
        "split_token": 110,
        "reason": "balanced",
        "first_token_ms": 250.0,
        "total_ms": 1900.0,
        "longest_gap_ms": 140.0,
        "gaps_in_slo": round(36 / 39, 4),
        "traceparent": "00-1-2-01",
    }


def test_otherwise_only_those_that_failed_have_one(caplog: pytest.LogCaptureFixture) -> None:
    assert not lines(caplog, looked_at.cut(), every=False)
    (line,) = lines(caplog, failed(), every=False)
    assert line.levelno == logging.WARNING
    assert line.getMessage() == (
        "request failed is over: finish_reason error, prompt_tokens 30, output_tokens 0, reason colocated, total_ms 7.0, "
        "traceparent 00-1-2-01"
    )
