"""What the benchmark of the local scheduler prints of its runs, and which of its goals they miss."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median

from benchmarks.runs import Run

STOCK, OURS = "stock", "DynaServe"


def line(name: str, run: Run) -> str:
    grows = "grows" if run.ttft_grows else "     "
    return (
        f"{name:22s} {run.rate_per_s:5.2f}/s {run.finished:4d}/{run.requests:<4d} within SLO {run.attainment:7.2%}"
        f"  TTFT P50 {run.ttft_p50_ms:6.0f} P99 {run.ttft_p99_ms:6.0f} ms {run.ttft_slope:+6.3f} s/s {grows}"
        f"  TBT P99 {run.tbt_p99_ms:5.0f} ms  {run.output_tokens_per_s:6.1f} tokens/s"
    )


def print_compared(title: str, by_name: Mapping[str, Sequence[Run]]) -> None:
    """Medians, what ours has to do with each of the others, and the goals that it misses beside stock."""
    print(f"\n{title}, medians of {min(map(len, by_name.values()))}")
    medians = {name: median_of(runs) for name, runs in by_name.items()}
    for name, run in medians.items():
        print(f"  {line(name, run)}")
    ours, lost = medians.pop(OURS), any(run.finished < run.requests for run in by_name[OURS])
    for name, other in medians.items():
        print(
            f"  {OURS} / {name}: TTFT P50 {ours.ttft_p50_ms / other.ttft_p50_ms:.2f}, P99 {ours.ttft_p99_ms / other.ttft_p99_ms:.2f},"
            f" tokens/s {ours.output_tokens_per_s / other.output_tokens_per_s:.3f}"
        )
    print(f"  goals missed: {', '.join(misses(medians[STOCK], ours, lost_requests=lost)) or 'none'}")


def misses(stock: Run, ours: Run, *, lost_requests: bool) -> list[str]:
    """Which of the goals are missed at a load, by medians. lost_requests: in any run of ours."""
    goals = {
        "all requests finish": not lost_requests,
        "TTFT does not grow": not ours.ttft_grows,
        "99 % of tokens within the SLO": ours.attainment >= 0.99,
        "TTFT P50 at most 1.5x": ours.ttft_p50_ms <= 1.5 * stock.ttft_p50_ms,
        "TTFT P99 at most 1.5x": ours.ttft_p99_ms <= 1.5 * stock.ttft_p99_ms,
        "tokens/s within 5 %": ours.output_tokens_per_s >= 0.95 * stock.output_tokens_per_s,
    }
    return [goal for goal, met in goals.items() if not met]


def best_chunk(by_chunk: Mapping[int, Run]) -> int:
    """The one with the most tokens in time per second; of equals the largest."""
    return max(by_chunk, key=lambda chunk: (round(by_chunk[chunk].attainment * by_chunk[chunk].output_tokens_per_s, 1), chunk))


def median_of(runs: Sequence[Run]) -> Run:
    """Of each figure by itself; whether TTFT grows by what most runs tell, and of two by either."""
    figures = {field: median(getattr(run, field) for run in runs) for field in Run.__dataclass_fields__}
    return Run(**{**figures, "ttft_grows": figures["ttft_grows"] > 0})
