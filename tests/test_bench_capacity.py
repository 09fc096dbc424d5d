"""The search for a capacity: its bisection, its idea of a stable queue, and the command against a server of known capacity."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import accumulate
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynaserve.bench import capacity, exit_status, options, replay, trial
from dynaserve.bench.capacity import Repetition, SearchOptions, following, verdict_of
from dynaserve.bench.growth import Growth, growth
from dynaserve.bench.measures import Slo, summarize
from dynaserve.bench.records import Failure, RequestRecord
from dynaserve.bench.search import FACTOR, Found, highest_rate, steps
from dynaserve.bench.trial import Trial
from dynaserve.bench.verdict import LostCause, Verdict, judged
from dynaserve.errors import ConfigError
from tests.completion_server import Act, CompletionServer, running_server

SLO = Slo(100.0)


def search(told: Callable[[float], float | None], first: float, step: float = FACTOR) -> Found:
    """To a resolution of 0.1. told: what the search is sent for each rate that it tries."""
    rates = steps(first, 0.1, 0.1, 100.0, step)
    rate = next(rates)
    while True:
        try:
            rate = rates.send(told(rate))
        except StopIteration as end:
            found: Found = end.value
            return found


@given(truth=st.floats(0.11, 90.0), first=st.floats(0.1, 100.0), resolution=st.floats(0.01, 0.3))
def test_the_search_brackets_the_capacity(truth: float, first: float, resolution: float) -> None:
    tried: list[float] = []

    def passes(rate: float) -> bool:
        tried.append(rate)
        return rate <= truth

    found = highest_rate(passes, first, resolution, 0.1, 100.0)
    assert found.passed_per_s is not None
    assert found.failed_per_s is not None
    assert found.passed_per_s <= truth < found.failed_per_s <= found.passed_per_s * (1 + resolution)
    assert len(tried) == len(set(tried))


def test_the_search_ends_at_its_bounds() -> None:
    assert highest_rate(lambda _: True, 1.0, 0.1, 0.5, 3.0).passed_per_s == 3.0
    assert highest_rate(lambda _: True, 1.0, 0.1, 0.5, 3.0).failed_per_s is None
    assert highest_rate(lambda _: False, 1.0, 0.1, 0.5, 3.0).passed_per_s is None


def test_a_search_that_begins_near_the_capacity_takes_small_steps_first() -> None:
    tried: list[float] = []

    def told(rate: float) -> float | None:
        tried.append(rate)
        return None if rate <= 1.3 else rate

    found = search(told, 1.0, step=1.1)
    assert tried[:3] == pytest.approx([1.0, 1.1, 1.1 * 1.21])
    assert (found.passed_per_s, found.failed_per_s) == pytest.approx((1.1 * 1.1, 1.1 * 1.21))


@given(truth=st.floats(0.11, 90.0), first=st.floats(0.1, 100.0), shares=st.lists(st.floats(0.0, 1.0), min_size=60, max_size=60))
def test_the_search_brackets_the_capacity_whatever_failures_promise(truth: float, first: float, shares: list[float]) -> None:
    tried: list[float] = []

    def told(rate: float) -> float | None:
        tried.append(rate)
        return None if rate <= truth else rate * shares[len(tried)]

    found = search(told, first)
    assert found.passed_per_s is not None
    assert found.failed_per_s is not None
    assert found.passed_per_s <= truth < found.failed_per_s <= found.passed_per_s * 1.1
    assert len(tried) == len(set(tried))


def test_a_search_goes_where_a_failure_leads_it_and_to_its_least_rate_where_nothing_is_near() -> None:
    def tried(first: float, promising: Callable[[float], float]) -> list[float]:
        rates: list[float] = []

        def told(rate: float) -> float | None:
            rates.append(rate)
            return None if rate <= 5.2 else promising(rate)

        search(told, first)
        return rates

    assert tried(10.0, lambda _: 5.0) == pytest.approx([10.0, 5.0, 5.5])
    promised_twice = tried(6.0, lambda failed: 0.97 * failed)
    assert promised_twice[:3] == pytest.approx([6.0, 0.97 * 6.0, 0.97 * 6.0 / 1.6]), "promised once too much"
    assert tried(10.0, lambda _: 0.0)[:3] == pytest.approx([10.0, 0.1, 1.0])


def record(index: int, sent_s: float, wait_s: float, gap_s: float = 0.02, tokens: int = 5, failure: Failure | None = None) -> RequestRecord:
    times = [sent_s + wait_s + gap_s * number for number in range(tokens)]
    return RequestRecord(index, "", 10, tokens, sent_s, sent_s, times[-1], times, "usage", 10, tokens, "length", 200, failure)


def queue(load: float, seed: int, requests: int = 2000) -> list[RequestRecord]:
    """Of one server that takes 0.1 s for each request, at that share of its capacity."""
    gaps = np.random.default_rng(seed).exponential(0.1 / load, requests)
    free_at_s, records = 0.0, []
    for index, sent_s in enumerate(accumulate(gaps.tolist())):
        free_at_s = max(free_at_s, sent_s) + 0.1
        records.append(record(index, sent_s, free_at_s - sent_s))
    return records


def test_a_run_that_is_short_beside_its_requests_is_told() -> None:
    def told(apart_s: float, not_sustained: str | None = None) -> str:
        records = [record(index, apart_s * index, 1.0, gap_s=1.0) for index in range(10)]
        return verdict_of(Trial(1.0, 1, "m", summarize(records, [], SLO), not_sustained))

    assert told(apart_s=1.2) == "passed"
    assert told(apart_s=0.5) == "passed; too short to be sure: a request takes 5 s of its 9.5, so batches have hardly filled"
    assert told(0.5, "P99 TBT 120.0 ms") == "P99 TBT 120.0 ms"


def verdict(records: list[RequestRecord], slo: Slo = SLO) -> str | None:
    return judged([records], slo).reason


@pytest.mark.parametrize("seed", range(5))
def test_a_queue_that_grows_is_told_from_one_that_does_not(seed: int) -> None:
    assert verdict(queue(0.85, seed)) is None
    assert "TTFT grows" in (verdict(queue(1.15, seed)) or "")


@pytest.mark.parametrize("load", [1.15, 1.4, 2.0])
def test_a_queue_tells_what_may_be_sustained(load: float) -> None:
    assert load * judged([queue(load, 1)], SLO).promising_share == pytest.approx(1.0, abs=0.1)


def test_only_far_less_may_be_sustained_where_tokens_are_late_by_far() -> None:
    for gap_s, share in ((0.25, 1.0), (0.35, 0.0)):
        slow = [record(index, index * 1.0, 0.3, gap_s=gap_s) for index in range(20)]
        assert judged([slow], SLO).promising_share == share


def test_a_queue_behind_the_first_token_is_seen() -> None:
    records = []
    for index in range(200):
        one = record(index, index * 0.1, 0.1, tokens=300)
        handed_over = [*one.token_times_s[:10], *(at_s + 0.1 * one.sent_s for at_s in one.token_times_s[10:])]
        records.append(replace(one, token_times_s=handed_over))
    assert verdict(records) == "longest gap grows by 0.10 s per s"


def test_a_queue_in_which_the_first_wait_for_the_last_is_seen() -> None:
    records = []
    for index in range(800):
        one = record(index, index * 0.1, 0.1, tokens=300)
        if index % 4 == 0:  # it loses its memory, and goes on when nobody comes any more
            one = replace(one, token_times_s=[*one.token_times_s[:10], *(100.0 + 0.02 * token for token in range(290))])
        records.append(one)
    found = judged([records], SLO)
    assert found.reason is not None
    assert found.reason.startswith("longest gap falls by 0.2")
    assert not found.is_open
    assert found.promising_share == pytest.approx(0.8, abs=0.05)
    few = [record(index, index * 0.2, 0.1, gap_s=3.0 if index < 10 else 0.08) for index in range(100)]
    assert judged([few], Slo(4000.0)).is_open, "a stall near the beginning is chance"
    mirrored = [record(index, index * 0.2, 0.1, gap_s=3.0 if index >= 90 else 0.08) for index in range(100)]
    assert judged([mirrored], Slo(4000.0)).is_open
    cold = [record(index, index * 0.1, 0.1, gap_s=0.5 if index < 2 else 0.02, tokens=300) for index in range(200)]
    assert verdict(cold) is None, "the first answers of a cold server are slow"


def test_answers_that_take_longer_as_batches_fill_wait_in_no_queue() -> None:
    records = [record(index, index * 0.4, 0.3, gap_s=0.02 + 0.0005 * index, tokens=300) for index in range(100)]
    assert records[-1].e2e_ms == pytest.approx(300 + 299 * 69.5)
    assert judged([records], SLO) == Verdict(None, is_open=False, promising_share=1.0)


def test_what_breaks_the_slo_is_named() -> None:
    slow = [record(index, index * 1.0, 0.3, gap_s=0.15) for index in range(20)]
    assert verdict(slow) == "P99 TBT 150.0 ms"
    assert verdict(slow, Slo(200.0)) is None
    assert verdict(slow, Slo(200.0, 250.0)) == "P99 TTFT 300.0 ms"
    assert verdict([*slow[:-1], record(20, 20.0, 0.3, failure=Failure("HTTP 500", ""))], Slo(200.0)) == "1 failed: HTTP 500"


def noisy(slope: float, seed: int, requests: int = 100) -> list[RequestRecord]:
    """Waits of 3 s or so that grow; the standard error of the slope is some 0.02."""
    waits = 3 + np.random.default_rng(seed).normal(0, 2.3, requests)
    return [record(index, 0.4 * index, float(max(0.0, wait)) + 0.4 * index * slope) for index, wait in enumerate(waits)]


def line(run: list[RequestRecord]) -> Growth:
    found = growth([([one.sent_s for one in run], [one.ttft_ms or 0.0 for one in run])])
    assert found is not None
    return found


def test_a_verdict_is_open_where_the_error_of_a_growth_leaves_it_so() -> None:
    runs = [noisy(0.05, seed) for seed in range(60)]
    assert {judged([run], SLO).is_open for run in runs} == {True, False}
    for run in runs:
        found = line(run)
        grows = found.slope > 0.05 and found.slope > 2 * found.independent_error
        assert judged([run], SLO).is_open == (found.slope + found.error > 0.05 and not (grows and found.slope - found.error > 0.05))
    assert not any(judged([noisy(slope, seed)], SLO).is_open for slope in (-0.2, 0.4) for seed in range(20))


@pytest.mark.parametrize("load", [0.8, 1.0, 1.2])
def test_the_error_of_a_growth_is_that_of_a_queue_whose_requests_wait_alike(load: float) -> None:
    lines = [line(queue(load, seed)) for seed in range(100)]
    deviation = float(np.std([found.slope for found in lines]))
    assert 0.5 * deviation < float(np.mean([found.error for found in lines])) < 2 * deviation
    assert float(np.mean([found.independent_error for found in lines])) < 0.3 * deviation


def test_the_error_of_a_growth_is_the_usual_one_where_requests_do_not_wait_alike() -> None:
    lines = [line(noisy(0.0, seed)) for seed in range(100)]
    deviation = float(np.std([found.slope for found in lines]))
    assert 0.8 * deviation < float(np.mean([found.independent_error for found in lines])) < 1.2 * deviation
    assert float(np.mean([found.error for found in lines])) < 2 * deviation


def test_the_error_of_two_runs_is_less_than_that_of_one() -> None:
    one, other = (
        ([float(second) for second in range(100)], [1e3 * wait for wait in np.cumsum(seeded.normal(0, 1, 100))])
        for seeded in map(np.random.default_rng, (1, 2))
    )
    alone, beside, both = growth([one]), growth([other]), growth([one, other])
    assert alone is not None
    assert beside is not None
    assert both is not None
    assert both.slope == pytest.approx((alone.slope + beside.slope) / 2)
    assert both.error == pytest.approx(np.hypot(alone.error, beside.error) / 2)


def test_two_runs_are_nearer_to_the_truth_than_one() -> None:
    for slope, is_sustained in ((0.02, True), (0.09, False)):
        wrong = {1: 0, 2: 0}
        for seed in range(0, 200, 2):
            runs = [noisy(slope, seed), noisy(slope, seed + 1)]
            for count in wrong:
                wrong[count] += (judged(runs[:count], SLO).reason is None) != is_sustained
        assert wrong[2] < 0.8 * wrong[1]


def test_runs_that_begin_at_other_heights_have_the_slope_of_each() -> None:
    low, high = ([record(index, index * 1.0, wait) for index in range(50)] for wait in (0.1, 30.0))
    assert judged([low, high], SLO).reason is None
    assert judged([high, low], SLO).reason is None


def bursts(late_by_block: list[int]) -> list[RequestRecord]:
    """Ten blocks of 100 gaps, one after the other, so many of each late."""
    times = [0.0]
    for late in late_by_block:
        times += [times[-1] + gap for gap in accumulate([0.2] * late + [0.02] * (100 - late))]
    return [RequestRecord(0, "", 10, len(times), 0.0, 0.0, times[-1], times, "usage", 10, len(times), "length", 200, None)]


def test_late_gaps_leave_a_verdict_open_by_how_they_come() -> None:
    assert not judged([bursts([0] * 10)], SLO).is_open
    assert judged([bursts([0] * 2)], SLO).is_open, "of so few gaps none may be late by chance"
    assert judged([bursts([0] * 9 + [12])], SLO).is_open, "one burst is chance"
    assert judged([bursts([0] * 9 + [8])], SLO).is_open
    evenly = judged([bursts([3] * 10)], SLO)
    assert evenly.reason is not None
    assert not evenly.is_open
    assert not judged([bursts([0] * 9 + [3])], SLO).is_open
    both = judged([bursts([0] * 9 + [12]), bursts([0] * 9 + [2])], SLO)
    assert both.reason is None


def test_what_cannot_be_chance_leaves_nothing_open() -> None:
    run = next(run for run in (noisy(0.05, seed) for seed in range(20)) if judged([run], SLO).is_open)
    assert not judged([[*run, record(200, 20.0, 0.3, failure=Failure("HTTP 500", ""))]], SLO).is_open
    assert not judged([[record(one.index, one.sent_s, (one.ttft_ms or 0.0) / 1e3, gap_s=0.3) for one in run]], SLO).is_open
    assert not judged([run], Slo(100.0, 1.0)).is_open


@given(gaps=st.integers(2, 700), late_share=st.floats(0.0, 0.03), seed=st.integers(0, 99))
def test_a_run_is_lost_as_soon_as_its_late_gaps_are_too_many(gaps: int, late_share: float, seed: int) -> None:
    late = np.random.default_rng(seed).random(gaps) < late_share
    cause = LostCause(gaps, SLO)
    told = [cause.is_lost(200.0 if each else 20.0) for each in late]
    assert told[-1] == (np.percentile(np.where(late, 200.0, 20.0), 99, method="lower") > SLO.tbt_ms)
    assert told == sorted(told)


def test_no_line_is_drawn_through_too_few_requests() -> None:
    assert growth([([0.0, 1.0], [0.0, 5e3])]) is None
    assert growth([([1.0] * 20, [5.0] * 20)]) is None
    assert growth([([0.0, 1.0], [0.0, 5e3])] * 4) is None, "each run has a height of its own"


@pytest.fixture
def server() -> Iterator[CompletionServer]:
    with running_server() as server:
        yield server


def command(server: CompletionServer, *more: str) -> int:
    arguments = ["--url", server.url, "--workload", "fixed:20,5", "--rate", "10", "--repetitions", "1", "--max-client-lag-ms", "60000"]
    with pytest.raises(SystemExit) as end:
        capacity.main([*arguments, *more])
    assert isinstance(end.value.code, int)
    return end.value.code


def test_the_capacity_of_a_known_server_is_found(server: CompletionServer, tmp_path: Path) -> None:
    server.act = Act(slots=2, delay_s=0.02)  # Two at a time, 0.1 s each: at most 20 requests per second.
    raw = tmp_path / "raw.json"
    assert command(server, "--duration-s", "5", "--resolution", "0.3", "--tbt-slo-ms", "5000", "--output", str(raw)) == 0
    found = json.loads(raw.read_text())
    assert 4 <= found["capacity_per_s"] <= 24
    assert found["command"].startswith("dynaserve bench capacity --url ")
    assert {trial["not_sustained"] is None for trial in found["repetitions"][0]["trials"]} == {True, False}


def test_a_rate_at_which_nothing_arrives_in_time_is_judged_by_its_first_request(server: CompletionServer, tmp_path: Path) -> None:
    duration, raw = ("--duration-s", "0.05"), tmp_path / "raw.json"
    planned = options.parse(["--url", server.url, "--workload", "fixed:20,5", "--rate", "1", "--seed", "1", *duration])
    with pytest.raises(ConfigError, match=r"no request .* arrives in the first 0\.05 s"):
        replay.plan_requests(planned)
    assert command(server, *duration, "--rate", "1", "--least-rate", "1", "--most-rate", "1", "--output", str(raw)) == 0
    trials = json.loads(raw.read_text())["repetitions"][0]["trials"]
    assert [(one["rate_per_s"], one["summary"]["requests"]) for one in trials] == [(1.0, 1)]


def test_what_was_measured_before_an_error_stays(server: CompletionServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace, raw = tmp_path / "trace.csv", tmp_path / "raw.json"
    trace.write_text("arrived_at_s,prompt_tokens,output_tokens\n0,2,5\n1,20,5\n")
    chosen = ("--workload", f"file:{trace}", "--requests", "1")

    def prompt_tokens(seed: int) -> int:
        planned = ["--url", server.url, *chosen, "--drawn", "--rate", "10", "--seed", str(seed)]
        return replay.plan_requests(options.parse(planned))[0].prompt_tokens

    server.act = Act(lose=1)  # Prompts of 2 tokens are spared: the second search is the first one that fails.
    seed = next(seed for seed in range(100) if (prompt_tokens(seed), prompt_tokens(seed + 1)) == (2, 20))
    bounds = ("--least-rate", "10", "--most-rate", "10", "--tbt-slo-ms", "5000")
    status = command(server, *chosen, *bounds, "--repetitions", "3", "--seed", str(seed), "--output", str(raw))
    assert status == exit_status.NOT_TRUSTED
    assert capsys.readouterr().err.endswith(f"; repetitions measured before it: 1, in {raw}\n")
    kept = json.loads(raw.read_text())
    assert kept["capacity_per_s"] is None
    assert [(one["seed"], one["passed_per_s"]) for one in kept["repetitions"]] == [(seed, 10.0)]


def test_nothing_is_left_where_nothing_was_measured(server: CompletionServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    server.act = Act(lose=1)
    assert command(server, "--requests", "1", "--output", str(tmp_path / "raw.json")) == exit_status.NOT_TRUSTED
    assert "measured before it" not in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_capacity_above_all_rates_tried_is_told_as_such(
    server: CompletionServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    raw = tmp_path / "raw.json"
    bounds = ("--most-rate", "10", "--most-runs", "1", "--tbt-slo-ms", "5000", "--output", str(raw))
    assert command(server, "--requests", "7", *bounds) == 0
    told = capsys.readouterr()
    assert "capacity at least 10 requests/s" in told.out
    assert "too few to be sure: of 7 requests nobody can tell whether a queue grows" in told.err
    kept = json.loads(raw.read_text())
    assert (kept["capacity_per_s"], kept["capacity_is_least"]) == (10.0, True)
    assert command(server, "--requests", "8", *bounds) == 0
    assert "too few" not in capsys.readouterr().err


def test_a_server_that_fails_some_of_all_at_once_has_no_saturation(server: CompletionServer, tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("arrived_at_s,prompt_tokens,output_tokens\n0,20,5\n1,20,2\n")
    opts = options.parse(["--url", server.url, "--workload", f"file:{trace}", "--rate", "1", "--requests", "2"])
    server.act = Act(error_after=3)
    with pytest.raises(ConfigError, match=r"^1 of 2 requests fail when all are sent at once: .*engine gone"):
        trial.saturation(opts, 1)


def test_a_server_that_is_always_too_slow_is_not_servable(server: CompletionServer, capsys: pytest.CaptureFixture[str]) -> None:
    server.act = Act(delay_s=0.02)
    assert command(server, "--requests", "3", "--tbt-slo-ms", "1", "--least-rate", "5") == exit_status.NOTHING_TO_REPORT
    assert "not even 5 requests/s passed" in capsys.readouterr().err


def test_a_search_begins_where_the_last_one_ended() -> None:
    searching = SearchOptions(8.0, 1.0, 64.0, 0.1, 3)
    passed, failed = Repetition(1, 12.0, 13.0, ()), Repetition(2, None, 1.0, ())
    assert following(searching, []).first_per_s == 8.0
    assert following(searching, [passed, failed]).first_per_s == 12.0
    assert following(searching, [failed]).first_per_s == 1.0


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ((), "--duration-s or --requests is needed"),
        (("--requests", "1", "--arrivals", "trace"), "--arrivals trace: requests are drawn"),
        (("--requests", "1", "--least-rate", "11"), "--rate 10 is not between --least-rate 11"),
        (("--requests", "1", "--resolution", "1e-17"), "--resolution 1e-17 is finer than 0.0001"),
        (("--requests", "1", "--repetitions", "0"), "'0' is not a whole number of at least 1"),
        (("--requests", "1", "--scale", "1e308"), "tokens, which times 1e+308 is more than 1099511627776"),
    ],
)
def test_bad_options_are_refused(server: CompletionServer, capsys: pytest.CaptureFixture[str], more: tuple[str, ...], named: str) -> None:
    assert command(server, *more) == exit_status.BAD_INPUT
    assert named in capsys.readouterr().err


def test_the_help_has_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        capacity.main(["--help"])
    assert "example:\n  dynaserve bench capacity --url" in capsys.readouterr().out
