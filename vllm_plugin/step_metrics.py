"""The local scheduler in Prometheus: what the engine core reports is counted here, in the API server's process."""

from __future__ import annotations

from prometheus_client import Counter, Histogram

from dynaserve.step_report import BatchReport, StepReport

_STEP_S = (0.002, 0.005, 0.01, 0.02, 0.03, 0.04, 0.05, 0.06, 0.08, 0.1, 0.12, 0.15, 0.2, 0.3, 0.5, 1.0, 2.0, 5.0)
_TOKENS = (0, 1, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)

PREDICTED = Histogram("dynaserve_step_predicted_seconds", "Latency of a step as predicted before it ran.", buckets=_STEP_S)
MEASURED = Histogram("dynaserve_step_measured_seconds", "Latency of a step as measured.", buckets=_STEP_S)
ERROR = Counter("dynaserve_step_prediction_error_seconds", "Sum over predicted steps of |predicted - measured|.")
BUDGET = Histogram("dynaserve_prefill_budget_tokens", "Prefill tokens that a step was allowed.", buckets=_TOKENS)
CUT = Counter("dynaserve_prefill_budget_steps", "Steps by what bounded their prefill budget.", ["reason"])
LATE = Counter("dynaserve_late_steps", "Steps whose decodes left no time for the least prefill within the TBT SLO.")
NEXT_TOKENS = Counter("dynaserve_tbt_tokens", "Tokens after the first of their request.")
NEXT_TOKENS_IN_TIME = Counter("dynaserve_tbt_tokens_in_slo", "Those that came within the TBT SLO of their request.")
FIRST_TOKENS = Counter("dynaserve_ttft_tokens", "First tokens of requests with a TTFT SLO.")
FIRST_TOKENS_IN_TIME = Counter("dynaserve_ttft_tokens_in_slo", "Those that came within it.")


def observe(report: BatchReport) -> None:
    for step in report.steps:
        _observe_step(step)
    NEXT_TOKENS.inc(report.tokens.next_tokens)
    NEXT_TOKENS_IN_TIME.inc(report.tokens.next_tokens_in_time)
    FIRST_TOKENS.inc(report.tokens.first_tokens)
    FIRST_TOKENS_IN_TIME.inc(report.tokens.first_tokens_in_time)


def _observe_step(step: StepReport) -> None:
    measured_s = step.measured.measured_ms / 1e3
    MEASURED.observe(measured_s)
    if step.predicted_ms is not None:
        PREDICTED.observe(step.predicted_ms / 1e3)
        ERROR.inc(abs(step.predicted_ms / 1e3 - measured_s))
    BUDGET.observe(step.budget_tokens)
    CUT.labels(step.reason).inc()
    if step.late:
        LATE.inc()
