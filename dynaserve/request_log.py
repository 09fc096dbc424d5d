"""A line of the front-end's log for a request that is over, with what identifies it as fields.

vLLM configures the log: `--enable-log-requests` asks for every request, `--logging-config.formatter json` makes each line an object,
with these fields as keys of it.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

from dynaserve.records import RequestRecord

logger = logging.getLogger("vllm.dynaserve.requests")


def of_request(request_id: str) -> dict[str, str]:
    """`extra` of a line about one request."""
    return {"request_id": request_id}


def log_over(every: bool, record: RequestRecord, trace_headers: Mapping[str, str] | None) -> None:
    """every: also those that went well."""
    level = logging.WARNING if record.finish_reason == "error" else logging.INFO
    if every or level != logging.INFO:
        known = fields(record, trace_headers)
        told = ", ".join(f"{name} {value}" for name, value in known.items() if name != "request_id")
        logger.log(level, "request %s is over: %s", record.request_id, told, extra=known)


def fields(record: RequestRecord, trace_headers: Mapping[str, str] | None) -> dict[str, str | int | float]:
    """What is known of it; times in milliseconds from its arrival."""
    gaps, marks = record.gaps, record.timeline_ms
    known: dict[str, str | int | float | None] = {
        **of_request(record.request_id),
        "finish_reason": record.finish_reason,
        "prompt_tokens": record.prompt_tokens,
        "output_tokens": record.output_tokens,
        "alpha": None if record.alpha is None else record.alpha.instance,
        "beta": None if record.beta is None else record.beta.instance,
        "split_token": None if record.beta is None else record.split_token,
        "reason": record.reason,
        "lifted": record.lifted,
        "lost_attempts": len(record.lost_attempts) or None,
        "first_token_ms": marks.get("first_token"),
        "total_ms": max(marks.values(), default=None),
        "longest_gap_ms": None if gaps is None or not gaps.count else gaps.longest_ms,
        "gaps_in_slo": None if gaps is None or not gaps.count else round(gaps.in_slo / gaps.count, 4),
        "traceparent": (trace_headers or {}).get("traceparent"),
    }
    return {name: value for name, value in known.items() if value is not None}
