"""Traces, arrival processes and the catalogue."""

from __future__ import annotations

import gzip
import math
from collections import Counter
from itertools import islice, takewhile
from pathlib import Path

import numpy as np
import pytest

from workloads import arrivals, catalog, trace
from workloads.catalog import Workload
from workloads.trace import MOST_TOKENS, TraceRequest, WorkloadError

TRACES = Path(__file__).parents[2] / "shared" / "traces"
HEADER = "arrived_at_s,prompt_tokens,output_tokens"


def rng(seed: int = 7) -> np.random.Generator:
    return np.random.default_rng(seed)


def write(path: Path, *lines: str) -> Path:
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.fixture
def csv(tmp_path: Path) -> Path:
    return tmp_path / "trace.csv"


def test_a_trace_is_read(csv: Path) -> None:
    write(csv, HEADER, "0.0,10,2", "1.5,20,3")
    assert trace.read(csv) == [TraceRequest(0.0, 10, 2), TraceRequest(1.5, 20, 3)]


def test_a_compressed_trace_is_read(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv.gz"
    path.write_bytes(gzip.compress(f"{HEADER}\n0.0,10,2\n".encode()))
    assert trace.read(path) == [TraceRequest(0.0, 10, 2)]


def test_a_trace_may_have_no_times(csv: Path) -> None:
    write(csv, HEADER, ",10,2", ",20,3")
    assert [request.arrived_at_s for request in trace.read(csv)] == [None, None]


def test_prefix_hashes_and_labels_are_read(csv: Path) -> None:
    write(csv, f"{HEADER},hash_ids,class", "0,513,2,4 9,chat", "0,10,2,,code")
    assert trace.read(csv) == [TraceRequest(0.0, 513, 2, (4, 9), 512, "chat"), TraceRequest(0.0, 10, 2, label="code")]


@pytest.mark.parametrize(
    ("lines", "named"),
    [
        (["a,b", "1,2"], "line 1: no column arrived_at_s, prompt_tokens, output_tokens"),
        ([HEADER], "holds no request"),
        ([HEADER, "0,1,1", "0,0,1"], "line 3: prompt_tokens: '0'"),
        ([HEADER, "0,1,2.5"], "line 2: output_tokens: '2.5'"),
        ([HEADER, f"0,1,{MOST_TOKENS + 1}"], f"line 2: output_tokens: '{MOST_TOKENS + 1}' is not a whole number from 1 to {MOST_TOKENS}"),
        ([HEADER, f"0,{'9' * 5000},1"], "line 2: prompt_tokens: '999"),
        ([HEADER, "0,1"], "line 2: 2 values for 3 columns"),
        ([HEADER, "soon,1,1"], "line 2: arrived_at_s: 'soon'"),
        ([HEADER, "nan,1,1"], "line 2: arrived_at_s: 'nan'"),
        ([HEADER, "-1,1,1"], "line 2: arrived_at_s: '-1'"),
        ([HEADER, "2,1,1", "1,1,1"], "line 3: arrived_at_s 1.0 is less than 2.0"),
        ([HEADER, ",1,1", "1,1,1"], "line 3: arrived_at_s is 1.0, but empty in the first row"),
        ([HEADER + ",hash_ids", "0,1,1,x"], "line 2: hash_ids: 'x'"),
        (
            [HEADER + ",hash_ids", f"0,1,1,{'9' * 5000}"],
            f"line 2: hash_ids: '{'9' * 40}' is not a whole number from 0 on of at most 40 digits",
        ),
        ([HEADER + ",hash_ids", "0,512,1,1 2"], "line 2: hash_ids: 2 ids, but 512 prompt tokens are 1 blocks"),
    ],
)
def test_a_bad_trace_is_refused_with_file_line_column_and_value(csv: Path, lines: list[str], named: str) -> None:
    write(csv, *lines)
    with pytest.raises(WorkloadError) as refusal:
        trace.read(csv)
    assert str(refusal.value).startswith(str(csv))
    assert named in str(refusal.value)


def test_a_file_that_is_missing_or_not_compressed_is_refused(tmp_path: Path) -> None:
    with pytest.raises(WorkloadError, match=r"none\.csv: cannot be read: No such file"):
        trace.read(tmp_path / "none.csv")
    with pytest.raises(WorkloadError, match=r"plain\.csv\.gz: cannot be read: Not a gzipped file"):
        trace.read(write(tmp_path / "plain.csv.gz", HEADER, "0,1,1"))


@pytest.mark.parametrize("cv", [0.5, 1.0, 3.0])
def test_gamma_arrivals_have_the_rate_and_the_burstiness(cv: float) -> None:
    gaps = np.diff([0.0, *islice(arrivals.gamma(4.0, cv, rng()), 50_000)])
    assert gaps.mean() == pytest.approx(1 / 4, rel=0.05)
    assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.05)


@pytest.mark.parametrize("cv", [0.5, 1.0, 4.0])
def test_gamma_arrivals_have_the_rate_from_the_first_second_on(cv: float) -> None:
    counts = [sum(1 for _ in takewhile(lambda at_s: at_s < 15.0, arrivals.gamma(4.0, cv, rng(seed)))) for seed in range(2000)]
    assert np.mean(counts) == pytest.approx(60, abs=4 * float(np.std(counts)) / math.sqrt(len(counts)))


def test_bursty_arrivals_have_the_rate_and_come_in_spells() -> None:
    rate_per_s, factor, spell_s = 4.0, 5.0, 10.0
    until_s = 100_000.0
    times = np.array(list(takewhile(lambda at_s: at_s < until_s, arrivals.bursty(rate_per_s, factor, spell_s, rng()))))
    assert len(times) / until_s == pytest.approx(rate_per_s, rel=0.05)
    counts = np.histogram(times, bins=np.arange(0.0, until_s + 1, spell_s))[0]
    # Of a Markov-modulated Poisson process: that of Poisson, and that of the rate's two values.
    half, change_per_s = rate_per_s * (factor - 1) / (factor + 1), 2 / spell_s
    of_rate = 2 * half**2 * (spell_s / change_per_s - (1 - math.exp(-change_per_s * spell_s)) / change_per_s**2)
    assert counts.var() == pytest.approx(rate_per_s * spell_s + of_rate, rel=0.1)


def test_numbers_of_bursty_arrivals_are_a_factor_and_seconds() -> None:
    named = arrivals.arrival_times("bursty:5,10", catalog.load("fixed:1,1"), 4.0, rng())
    assert list(islice(named, 1000)) == list(islice(arrivals.bursty(4.0, 5.0, 10.0, rng()), 1000))


def test_arrivals_are_the_same_for_the_same_seed_only() -> None:
    shape = catalog.load("fixed:1,1")
    first, again, other = (list(islice(arrivals.arrival_times("poisson", shape, 1.0, rng(seed)), 5)) for seed in (1, 1, 2))
    assert first == again != other


def test_a_trace_keeps_its_times_from_its_first_request_on() -> None:
    assert list(arrivals.replay([TraceRequest(time, 1, 1) for time in (3.0, 4.0, 8.0)])) == [0.0, 1.0, 5.0]


def test_a_trace_is_stretched_to_a_rate() -> None:
    assert list(arrivals.replay([TraceRequest(time, 1, 1) for time in (3.0, 4.0, 8.0)], 4.0)) == pytest.approx([0.0, 0.1, 0.5])


def test_lengths_without_times_need_an_arrival_process() -> None:
    with pytest.raises(WorkloadError, match="no arrival times"):
        arrivals.arrival_times("trace", catalog.load("fixed:1,1"), None, rng())
    with pytest.raises(WorkloadError, match="poisson need a rate"):
        arrivals.arrival_times("poisson", catalog.load("fixed:1,1"), None, rng())


@pytest.mark.parametrize(
    "process",
    [
        *("gamma", "gamma:", "gamma:0", "gamma:x", "gamma:inf", "gamma:nan", "gamma:1,2", "poisson:1", "uniform"),
        *("bursty", "bursty:2", "bursty:2,-1", "bursty:0.5,1", "bursty:5,1e-9", "trace:1"),
    ],
)
def test_an_unknown_arrival_process_is_refused(process: str) -> None:
    with pytest.raises(WorkloadError, match=process):
        arrivals.arrival_times(process, catalog.load("fixed:1,1"), 1.0, rng())


@pytest.mark.parametrize(("told", "share"), [("0", 0), (".25", 0.25), ("0.25", 0.25), ("1.0", 1), ("1", 1)])
def test_a_mixture_has_its_share_of_each_workload(tmp_path: Path, told: str, share: float) -> None:
    write(tmp_path / "azure_code_2023.csv", HEADER, "0,100,10", "1,101,11")
    write(tmp_path / "azure_conv_2023.csv", HEADER, "0,20,200", "1,21,201")
    mixed = catalog.load(f"mixed:{told},azure-code,azure-conv", tmp_path)
    assert mixed.endless
    labels = Counter(request.label for request in mixed.requests)
    assert labels["azure-code"] == share * len(mixed.requests)
    assert all((request.prompt_tokens >= 100) == (request.label == "azure-code") for request in mixed.requests)
    if share == 0.25:  # not one after the other
        assert 0.2 < np.mean([request.label == "azure-code" for request in mixed.requests[:1000]]) < 0.3


@pytest.mark.parametrize(
    "parts", ["", "0.5", "0.5,azure-code", "2,azure-code,azure-code", ".,azure-code,azure-code", "1,azure-code,nosuch"]
)
def test_a_mixture_that_cannot_be_is_refused(tmp_path: Path, parts: str) -> None:
    write(tmp_path / "azure_code_2023.csv", HEADER, "0,100,10")
    with pytest.raises(WorkloadError, match=r"not mixed:SHARE,NAME,NAME|no workload 'nosuch'"):
        catalog.load(f"mixed:{parts}", tmp_path)


def times_of(workload: Workload, requests: int | None, duration_s: float | None, fewest: int = 0) -> list[float | None]:
    times = (0.5 * number for number in range(1_000_000))
    planned = arrivals.schedule(workload, times, requests=requests, duration_s=duration_s, fewest=fewest)
    return [request.arrived_at_s for request in planned]


def test_a_schedule_is_cut_by_number_and_by_time() -> None:
    sample = catalog.load("sample")
    assert times_of(sample, 3, None) == [0.0, 0.5, 1.0]
    assert times_of(sample, None, 1.0) == [0.0, 0.5]
    assert times_of(sample, 3, 1.0) == [0.0, 0.5]
    assert times_of(sample, 300, None) == times_of(sample, None, None)
    assert len(times_of(catalog.load("fixed:1,1"), 1000, None)) == 1000


def test_the_fewest_are_there_however_late_they_arrive() -> None:
    sample = catalog.load("sample")
    assert times_of(sample, None, 1.0, fewest=1) == [0.0, 0.5]
    assert times_of(sample, None, 1.0, fewest=4) == [0.0, 0.5, 1.0, 1.5]
    assert times_of(sample, 3, 1.0, fewest=4) == [0.0, 0.5, 1.0]
    late = arrivals.schedule(sample, iter([7.0, 8.0]), requests=None, duration_s=1.0, fewest=1)
    assert [request.arrived_at_s for request in late] == [7.0]
    with pytest.raises(WorkloadError, match=r"no request of workload sample arrives in the first 1\.0 s"):
        arrivals.schedule(sample, iter([7.0, 8.0]), requests=None, duration_s=1.0)


@pytest.mark.parametrize(
    ("name", "requests", "duration_s", "named"),
    [
        ("sample", 301, None, "has 300 requests, not 301"),
        ("sample", None, 1e4, "ends after 149.5 s, before 10000.0 s"),
        ("fixed:1,1", None, None, "has no end"),
    ],
)
def test_a_workload_that_is_too_short_for_what_was_asked_is_refused(
    name: str, requests: int | None, duration_s: float | None, named: str
) -> None:
    with pytest.raises(WorkloadError, match=named):
        times_of(catalog.load(name), requests, duration_s)


def test_a_fixed_shape_repeats_for_ever() -> None:
    workload = catalog.load("fixed:512,64")
    assert workload.endless
    assert [(r.prompt_tokens, r.output_tokens) for r in workload.requests] == [(512, 64)]


def test_the_sample_comes_with_the_package() -> None:
    sample = catalog.load("sample")
    assert len(sample.requests) == 300
    assert {request.label for request in sample.requests} == {"chat", "code"}
    assert max(request.total_tokens for request in sample.requests) <= 1800


def test_answers_of_a_normal_workload_have_its_mean_and_deviation() -> None:
    outputs = np.array([row.output_tokens for row in catalog.load("normal:219,1467,50").requests])
    assert (outputs.mean(), outputs.std()) == pytest.approx((1467, 50), rel=0.03)
    assert max(row.output_tokens for row in catalog.load(f"normal:1,{MOST_TOKENS},50").requests) == MOST_TOKENS


@pytest.mark.parametrize("name", ["normal:1,2", "normal:1,2,-1", "fixed:512", "fixed:0,1", "fixed:5,-1", "fixed:", "nosuch", "azure-code"])
def test_a_name_that_is_not_in_the_catalogue_is_refused(name: str) -> None:
    with pytest.raises(WorkloadError, match=name):
        catalog.load(name)


def test_lengths_are_scaled_to_at_least_one_token() -> None:
    workload = Workload("w", (TraceRequest(0.0, 1000, 2, (1, 2)),))
    assert catalog.scaled(workload, 0.25).requests == (TraceRequest(0.0, 250, 1, (1, 2), 128),)


@pytest.mark.parametrize("scale", [1.01, 1e30, 1e308])
def test_lengths_are_not_scaled_beyond_what_the_core_counts(scale: float) -> None:
    workload = Workload("w", (TraceRequest(0.0, 1000, MOST_TOKENS), TraceRequest(1.0, 1, 1)))
    with pytest.raises(WorkloadError, match=f"workload w has a length of {MOST_TOKENS} tokens, which times"):
        catalog.scaled(workload, scale)
    assert catalog.scaled(workload, 1.0) is workload


@pytest.mark.parametrize(
    ("name", "told"),
    [
        (f"fixed:1,{MOST_TOKENS + 1}", f"{MOST_TOKENS + 1} tokens are more than {MOST_TOKENS}"),
        pytest.param(f"fixed:{'9' * 5000},1", f"9 tokens are more than {MOST_TOKENS}", id="many digits"),
        (f"normal:{'9' * 20},1,1", f"9 tokens are more than {MOST_TOKENS}"),
        (f"normal:1,{'9' * 20},1", f"9 tokens are more than {MOST_TOKENS}"),
        pytest.param(f"normal:1,1,{'9' * 400}", f"a sigma of 9+ tokens is more than {MOST_TOKENS}", id="infinite sigma"),
    ],
)
def test_lengths_that_the_core_does_not_count_are_refused(name: str, told: str) -> None:
    with pytest.raises(WorkloadError, match=told):
        catalog.load(name)


def test_requests_over_the_limit_are_left_out() -> None:
    workload = Workload("w", (TraceRequest(0.0, 10, 2), TraceRequest(1.0, 10, 3)))
    assert catalog.limited(workload, 12).requests == (TraceRequest(0.0, 10, 2),)
    with pytest.raises(WorkloadError, match="the shortest has 12"):
        catalog.limited(workload, 11)


@pytest.mark.skipif(not TRACES.is_dir(), reason="the trace files are not part of the repository")
@pytest.mark.parametrize("name", catalog.TRACE_FILES)
def test_named_traces_are_read(name: str) -> None:
    workload = catalog.load(name, TRACES)
    assert len(workload.requests) > 2500
    assert any(request.prefix_hashes for request in workload.requests) == name.startswith("mooncake")
