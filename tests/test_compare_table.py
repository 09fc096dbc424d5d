"""`make bench-compare`: the table over all workloads, and its aims."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.compare import table
from benchmarks.compare.aims import judged
from benchmarks.compare.outcome import Compared, Outcome


def outcome(
    *rates: float | None, saturation: float = 10.0, front_cores: float | None = None, client_lag_p99_ms: float | None = 4.0
) -> Outcome:
    """Its capacity is the middle one of the rates."""
    capacity = sorted(rate or 0.0 for rate in rates)[len(rates) // 2] or None
    goodput, ttft_ms = (50.0, 1500.0) if capacity else (None, None)
    return Outcome(rates, capacity, saturation, goodput, ttft_ms, front_cores, None, client_lag_p99_ms)


def compared(workload: str = "azure-code", tbt_slo_ms: float = 100.0, **systems: Outcome) -> Compared:
    """Names with _ for -."""
    return Compared(workload, tbt_slo_ms, "abc1234", 20.0, 3, {name.replace("_", "-"): one for name, one in systems.items()})


def test_a_system_below_a_tenth_of_its_saturation_is_not_servable_and_left_out_of_the_mean() -> None:
    found = [
        compared("azure-code", stock=outcome(0.9), slo_colocated=outcome(2.0), dynamic=outcome(3.0)),
        compared("azure-conv", stock=outcome(1.0), slo_colocated=outcome(2.0), dynamic=outcome(4.0)),
        compared("hybrid", stock=outcome(None), slo_colocated=outcome(2.0), dynamic=outcome(1.0)),
    ]
    lines = table.markdown(found).splitlines()
    assert "| stock | not servable, 10 at once | 1 / 50 / 1.5 | not servable, 10 at once | 4.0 |" in lines
    assert "| stock's default chunk | - | 4.00 | - | 4.00 |" in lines
    assert "| SLO-aware colocation | 1.50 | 2.00 | 0.50 | 1.14 |" in lines
    assert table.data(found)["mean_over"]["stock's default chunk"] == pytest.approx(4.0)


def test_the_best_of_several_baselines_is_named() -> None:
    one = compared(stock_256=outcome(2.0), stock_384=outcome(2.5), disaggregated=outcome(1.0), dynamic=outcome(3.0, front_cores=0.25))
    lines = table.markdown([one]).splitlines()
    assert "| dynamic | 3 / 50 / 1.5 / 0.25 | 4.0 |" in lines
    assert "| the best of chunks 32, 64, 128, 256, 512, 1024 and disaggregation | 1.50 (stock-256) | 1.50 |" in lines
    assert "| the best of all baselines | 1.20 (stock-384) | 1.20 |" in lines
    assert "| SLO-aware colocation | - | - |" in lines


def test_the_table_tells_how_late_the_client_was_with_each_system() -> None:
    found = [
        compared("azure-code", stock=outcome(1.0, client_lag_p99_ms=2.5), dynamic=outcome(2.0, client_lag_p99_ms=None)),
        compared("azure-conv", stock=outcome(1.0, client_lag_p99_ms=5.8), dynamic=outcome(2.0, client_lag_p99_ms=None)),
    ]
    lines = table.markdown(found).splitlines()
    assert lines[0].endswith("; client lag: the greatest P99 of the runs that count, in ms")
    assert "|  | azure-code | azure-conv | client lag |" in lines
    assert "| stock | 1 / 50 / 1.5 | 1 / 50 / 1.5 | 5.8 |" in lines
    assert "| dynamic | 2 / 50 / 1.5 | 2 / 50 / 1.5 | - |" in lines
    systems = table.data(found)["workloads"]["azure-conv"]["systems"]
    assert [systems[name]["client_lag_p99_ms"] for name in ("stock", "dynamic")] == [5.8, None]


def test_a_ratio_has_an_interval_over_the_repetitions_unless_one_found_no_rate() -> None:
    over = compared(stock=outcome(1.0, 1.0, 1.0), dynamic=outcome(2.0, 4.0, 8.0)).over_worst(["stock"])
    assert over is not None
    assert over.ratio.value == pytest.approx(4.0)
    assert over.ratio.low is not None
    lucky = compared(stock=outcome(1.0, 1.0, 1.0), dynamic=outcome(None, None, 8.0)).over_worst(["stock"])
    assert lucky is not None
    assert (lucky.ratio.value, lucky.ratio.low) == (0.0, None)


def test_of_several_baselines_the_one_beside_which_ours_looks_worst_counts() -> None:
    """Of pairs: the one with the higher median had it easy."""
    one = compared(stock=outcome(1.0, 2.0, 9.0), stock_256=outcome(1.8, 1.9, 18.0), dynamic=outcome(1.0, 2.0, 9.0))
    over = one.over_worst(["stock", "stock-256"])
    assert over is not None
    assert over.baseline == "stock-256"
    assert over.ratio.value == pytest.approx((1.0 / 1.8 * 2.0 / 1.9 * 9.0 / 18.0) ** (1 / 3))


def test_aims_are_met_or_missed_or_not_measured() -> None:
    found = [
        compared("azure-code", stock=outcome(1.0), slo_colocated=outcome(3.0), dynamic=outcome(3.0)),
        compared("mini-reasoning", stock=outcome(2.0), slo_colocated=outcome(2.0), dynamic=outcome(1.95)),
    ]
    told = list(map(str, judged(found)))
    assert "MISSED: at least 4 times stock's default chunk, mean of azure-code: 3.00" in told
    assert "met: at least 0.97 times stock's default chunk, each of mini-reasoning: 0.97" in told
    assert "MISSED: at least 1.08 times SLO-aware colocation, each of azure-code: 1.00" in told
    tuned = "the best of chunks 32, 64, 128, 256, 512, 1024 and disaggregation"
    assert f"not measured, or no baseline is servable: at least 1.15 times {tuned}" in told
    assert any(line.startswith("met: at least 0.97 times the best of all baselines, each of azure-code, mini-reasoning") for line in told)
    assert all("1.2 times" not in line for line in told)
    tight = [replace(one, tbt_slo_ms=50.0) for one in found]
    assert "MISSED: at least 1.2 times SLO-aware colocation, mean of azure-code, mini-reasoning: 0.99" in map(str, judged(tight))


def test_the_table_tells_how_long_runs_were() -> None:
    assert "within 100 ms, runs of 20 s, at most 3 of a rate: capacity" in table.markdown([compared(dynamic=outcome(2.0))])


def test_what_is_only_known_to_be_at_least_so_much_is_no_capacity_to_divide_by() -> None:
    capped = replace(outcome(3.0), is_least=True)
    one = compared(slo_colocated=capped, stock=outcome(2.0), dynamic=outcome(3.1))
    assert one.over_worst(["slo-colocated"]) is None
    assert one.over_worst(["slo-colocated", "stock"]) is None
    lines = table.markdown([one]).splitlines()
    assert "| slo-colocated | ≥ 3 / 50 / 1.5 | 4.0 |" in lines
    assert "| SLO-aware colocation | - | - |" in lines
    ours = compared(stock=outcome(2.0), dynamic=capped)
    assert str(ours.over_worst(["stock"])) == "≥ 1.50"
