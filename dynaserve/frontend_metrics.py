"""What a front-end tells Prometheus; beside it, `/metrics` has vLLM's own metrics of its answers (TTFT, TBT, tokens).

Counters are kept where things happen; gauges are read from a `fleet_view.Snapshot` whenever somebody asks. What an instance tells is
in `vllm_plugin.step_metrics`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from prometheus_client import Counter, Histogram
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from dynaserve.fleet_view import Snapshot
from dynaserve.records import RequestRecord

URL = "url"
"""Label that names an instance; `instance` is Prometheus's own, of whom it has asked."""
HEALTHS = ("up", "suspect", "dead", "draining", "loading")
_HAND_OVER_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.0, 5.0)
_RATIO = (0.25, 0.5, 0.67, 0.8, 0.9, 1.1, 1.25, 1.5, 2.0, 4.0, 16.0)

REQUESTS = Counter("dynaserve_requests", "Sequences by whether and where they were cut, and why or why not.", ["cut", "kind", "reason"])
ENDED = Counter("dynaserve_requests_ended", "Sequences that are over, by how they ended.", ["outcome"])
REFUSED = Counter("dynaserve_requests_refused", "Requests that were answered 429, by what they would have waited in or for.", ["by"])
UNAVAILABLE = Counter(
    "dynaserve_requests_unavailable",
    "Requests that no instance took (503), that took too long (504), or that had lost three instances (500).",
    ["status"],
)
PLACED_AGAIN = Counter("dynaserve_requests_placed_again", "Requests that went on elsewhere because an instance was lost.")
DEATHS = Counter("dynaserve_instance_deaths", "How often an instance was declared dead.", [URL])
REVISED = Counter("dynaserve_revised_hand_offs", "Hand-offs that the scheduler changed on the way, by what was better.", ["reason"])
LIFTED = Counter("dynaserve_lifted_hand_offs", "Announced hand-offs that did not happen; the alpha finished alone.")
HAND_OVER = Histogram(
    "dynaserve_hand_over_seconds", "From the alpha's standing at its hand-off point to the beta's going on.", buckets=_HAND_OVER_S
)
KV_BYTES = Counter("dynaserve_kv_moved_bytes", "KV that has arrived at betas.", ["transport"])
KV_EARLY_BYTES = Counter("dynaserve_kv_moved_early_bytes", "Of it, what had left while the alpha was still computing.", ["transport"])
GAPS = Counter("dynaserve_token_gaps", "Gaps between tokens of an answer, as they reached the front-end.")
GAPS_IN_SLO = Counter("dynaserve_token_gaps_in_slo", "Those within the TBT SLO of their request.")
FIRST_TOKENS = Counter("dynaserve_first_tokens", "First tokens of requests with a TTFT SLO.")
FIRST_TOKENS_IN_SLO = Counter("dynaserve_first_tokens_in_slo", "Those that came within it.")
MALFORMED = Counter("dynaserve_malformed_messages", "Messages from instances that were malformed.", [URL])
FAILED = Counter("dynaserve_failed_messages", "Messages from instances that the front-end failed at; each ends its instance's link.", [URL])
PLACING = Histogram(
    "dynaserve_placement_seconds",
    "Time to decide where a request runs.",
    buckets=(0.00001, 0.00003, 0.0001, 0.0003, 0.001, 0.003, 0.01, 0.1),
)
TTFT_ERROR = Histogram(
    "dynaserve_ttft_over_predicted",
    "Time to the first token over what was expected when the request was placed, of policies that predict; none of those placed again.",
    buckets=_RATIO,
)
END_ERROR = Histogram(
    "dynaserve_end_over_predicted",
    "Time to the end of an answer over what was expected when it was placed, of policies that predict; none of those placed again.",
    buckets=_RATIO,
)


for _status in (500, 503, 504):
    UNAVAILABLE.labels(_status)
for _kind in ("queue", "ttft"):
    REFUSED.labels(_kind)


def know(url: str) -> None:
    """Begins what is counted of an instance at 0: Prometheus sees no increase in a series that begins with its first event."""
    for counter in (DEATHS, MALFORMED, FAILED):
        counter.labels(url)


def forget(url: str) -> None:
    """Of an instance that has left for good; one that joins again begins at 0."""
    for counter in (DEATHS, MALFORMED, FAILED):
        counter.remove(url)


def observe_end(record: RequestRecord) -> None:
    """Counts a sequence that is over on all instances."""
    marks = record.timeline_ms
    ENDED.labels(record.finish_reason).inc()
    if record.lifted is not None:
        LIFTED.inc()
    if "alpha_parked" in marks and "beta_resumed" in marks:
        HAND_OVER.observe((marks["beta_resumed"] - marks["alpha_parked"]) / 1e3)
    if record.kv is not None:
        KV_BYTES.labels(record.kv.transport).inc(record.kv.bytes)
        KV_EARLY_BYTES.labels(record.kv.transport).inc(record.kv.bytes_before_alpha_end)
    if record.gaps is not None:
        GAPS.inc(record.gaps.count)
        GAPS_IN_SLO.inc(record.gaps.in_slo)
    if record.ttft_slo_ms is not None and "first_token" in marks:
        FIRST_TOKENS.inc()
        FIRST_TOKENS_IN_SLO.inc(marks["first_token"] <= record.ttft_slo_ms)
    if not record.lost_attempts:  # the loss of an instance was not to be expected
        _observe_errors(record)


def _observe_errors(record: RequestRecord) -> None:
    """Of what was expected when it was placed."""
    expected, marks = record.expected, record.timeline_ms
    if expected.get("ttft_ms") and "first_token" in marks:
        TTFT_ERROR.observe(marks["first_token"] / expected["ttft_ms"])
    if expected.get("end_ms") and record.finish_reason in ("stop", "length"):
        END_ERROR.observe(marks["finished"] / expected["end_ms"])


@dataclass(frozen=True)
class FleetCollector(Collector):
    """Gauges, read when they are asked for: nothing has to be kept up to date, or taken away with an instance."""

    snapshot: Callable[[], Snapshot]

    def describe(self) -> list[Metric]:
        """Nothing is asked of the fleet when this is registered."""
        return []

    def collect(self) -> Iterator[Metric]:
        now = self.snapshot()
        health = GaugeMetricFamily(
            "dynaserve_instance_health", "1 for the health that an instance has, 0 for others.", labels=[URL, "health"]
        )
        running = GaugeMetricFamily("dynaserve_instance_requests_running", "Requests in the batch of an instance.", labels=[URL])
        waiting = GaugeMetricFamily("dynaserve_instance_requests_waiting", "Requests in the queue of an instance.", labels=[URL])
        usage = GaugeMetricFamily("dynaserve_instance_kv_usage_ratio", "Share of an instance's KV blocks that are taken.", labels=[URL])
        for instance in now.instances:
            for name in HEALTHS:
                health.add_metric([instance.name, name], float(instance.health == name))
            for family, value in ((running, instance.running_requests), (waiting, instance.waiting_requests), (usage, instance.kv_usage)):
                if value is not None:
                    family.add_metric([instance.name], value)
        yield from (health, running, waiting, usage)
        yield GaugeMetricFamily("dynaserve_requests_running", "Sequences that are not over.", value=now.running_requests)
        yield GaugeMetricFamily("dynaserve_requests_waiting", "Requests that wait for their first token.", value=now.waiting_requests)
