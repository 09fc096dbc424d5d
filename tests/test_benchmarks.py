"""What the benchmark of the local scheduler computes from what it measures."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import NoReturn

import httpx
import pytest

from benchmarks import batching, endurance, fidelity, handoff, overload, placement, prediction
from benchmarks.fidelity import Figures, hand_off_ms_of, learnt_by, rows
from benchmarks.goals import OURS, STOCK, best_chunk, median_of, misses, print_compared
from benchmarks.load_search import best_rate, next_rate
from benchmarks.processes import Held
from benchmarks.runs import Run, RunFailed, Trace, replay
from benchmarks.servers import Servers
from dynaserve.bench import trial
from dynaserve.errors import DynaServeError, NotTrusted
from dynaserve.local.fleet import FleetFailed, LocalFleet
from dynaserve.messages import MeasuredStep
from dynaserve.step_report import StepLog, StepReport
from tests.completion_server import Act, running_server

TOOLS = {"grid_profile"}
"""Commands that measure nothing."""
BENCHMARKS = sorted(
    path.stem for path in Path(batching.__file__).parent.glob("*.py") if "\ndef main(" in path.read_text() and path.stem not in TOOLS
)
NEEDS = {"decide": "vllm", "kv_copies": "torch", "ttft": "vllm"}


@pytest.mark.parametrize("capacity", [0.3, 2.5, 40.0])
def test_the_load_is_found_within_a_few_tries(capacity: float) -> None:
    tried: dict[float, float] = {}
    rate = next_rate(tried, 0.45, 0.60, first=2.0)
    while rate is not None:
        tried[rate] = 1 / (1 + math.exp(8 * math.log(rate / capacity)))
        rate = next_rate(tried, 0.45, 0.60, first=2.0)
        assert len(tried) < 12
    assert 0.45 <= tried[best_rate(tried, 0.45, 0.60)] <= 0.60


def test_the_search_ends_where_attainment_falls_off_a_cliff() -> None:
    tried: dict[float, float] = {}
    rate = next_rate(tried, 0.45, 0.60, first=2.0)
    while rate is not None:
        tried[rate] = 0.9 if rate < 3.0 else 0.1
        rate = next_rate(tried, 0.45, 0.60, first=2.0)
        assert len(tried) < 15
    assert best_rate(tried, 0.45, 0.60) == pytest.approx(3.0, rel=0.05)


def run_of(attainment: float = 0.995, ttft_ms: float = 300.0, tokens_per_s: float = 100.0, *, grows: bool = False) -> Run:
    return Run(2.0, 50, 50, attainment, ttft_ms, 3 * ttft_ms, 90.0, tokens_per_s, 0.1 * grows, grows, 1.0)


def test_the_goals_that_are_missed_are_named() -> None:
    stock = run_of(attainment=0.5, ttft_ms=200.0, tokens_per_s=103.0)
    assert misses(stock, run_of(), lost_requests=False) == []
    assert misses(stock, run_of(), lost_requests=True) == ["all requests finish"]
    assert misses(stock, run_of(ttft_ms=301.0), lost_requests=False) == ["TTFT P50 at most 1.5x", "TTFT P99 at most 1.5x"]
    assert misses(stock, run_of(attainment=0.98, tokens_per_s=97.0, grows=True), lost_requests=False) == [
        "TTFT does not grow",
        "99 % of tokens within the SLO",
        "tokens/s within 5 %",
    ]


def test_one_run_that_lost_requests_is_not_hidden_by_the_median(capsys: pytest.CaptureFixture[str]) -> None:
    lossy = replace(run_of(), finished=49)
    print_compared("load point", {STOCK: 3 * [run_of()], OURS: [run_of(), lossy, run_of()]})
    assert "goals missed: all requests finish\n" in capsys.readouterr().out


def test_ttft_grows_if_it_does_in_most_runs() -> None:
    still, grows = run_of(), run_of(grows=True)
    assert not median_of([still, grows, still]).ttft_grows
    assert median_of([grows, still, grows]).ttft_grows
    assert median_of([still, grows]).ttft_grows


def test_a_fleet_that_serves_nothing_is_no_agreement() -> None:
    serves, fails = Figures(60.0, 20.0, 80.0, 200.0, 4.0), Figures(60.0, 20.0, 80.0, 200.0, 0.0)
    (*_, (name, real, simulated, ratio)) = rows(fails, serves)
    assert (name, real, simulated, ratio) == ("capacity_per_s", 0.0, 4.0, math.inf)
    assert rows(serves, fails)[-1][-1] == 0.0
    assert rows(fails, fails)[-1][-1] == 1.0
    assert len(rows(replace(serves, capacity_per_s=None), replace(serves, capacity_per_s=None))) == 4


def test_the_best_fixed_chunk_has_the_most_tokens_in_time() -> None:
    runs = {64: run_of(1.0, tokens_per_s=50.0), 128: run_of(0.9), 256: run_of(0.9), 512: run_of(0.6, tokens_per_s=110.0)}
    assert best_chunk(runs) == 256


def test_a_median_is_of_each_figure_by_itself() -> None:
    median = median_of([run_of(0.9, 300.0), run_of(0.99, 500.0, grows=True), run_of(0.95, 400.0)])
    assert (median.attainment, median.ttft_p50_ms, median.ttft_grows) == (0.95, 400.0, False)


def test_servers_start_when_the_first_is_asked_for_and_stop_afterwards() -> None:
    told: list[str] = []

    @contextmanager
    def start() -> Iterator[dict[str, str]]:
        told.append("started")
        yield {"a": "http://a", "b": "http://b"}
        told.append("stopped")

    cores = os.sched_getaffinity(0)
    with Servers(start, lambda name, url: told.append(f"{name} {url}")) as servers:
        assert told == []
        assert (servers.url("b"), servers.url("a")) == ("http://b", "http://a")
        assert os.sched_getaffinity(0) == {max(cores)}
    assert told == ["started", "a http://a", "b http://b", "stopped"]
    assert os.sched_getaffinity(0) == cores


def step(at_s: float, predicted_ms: float | None, measured_ms: float, decodes: int = 4) -> StepReport:
    return StepReport(at_s, MeasuredStep(0, 0.0, decodes, 100 * decodes, measured_ms), predicted_ms, None, 0, "all_work", late=False)


def test_errors_are_relative_to_what_was_measured() -> None:
    steps = [step(i, None if i == 0 else 12.0, 10.0) for i in range(60)]
    errors = prediction.errors(steps)
    assert (errors.steps, errors.live) == (59, pytest.approx(0.2))
    assert errors.frozen == pytest.approx(0.0, abs=0.02)


def test_recovery_counts_the_steps_after_the_change() -> None:
    steps = [step(i, 10.0, 10.0 if i < 100 or i >= 150 else 20.0) for i in range(300)]
    # After 50 wrong steps a window of 20 holds at most five of them.
    assert prediction.steps_to_recover(steps, changed_s=99.5) == 50 + 20 - 5
    assert prediction.steps_to_recover(steps, changed_s=199.5) == prediction.WINDOW_STEPS
    assert prediction.steps_to_recover([step(i, 10.0, 20.0) for i in range(300)], 0.0) is None


def test_a_slowdown_is_told_from_a_change_of_the_batches() -> None:
    quiet = [step(i, 10.0, 10.0 + 2.0 * (i % 2), decodes=4 + 8 * (i % 2)) for i in range(200)]
    others = [step(i, 10.0, 18.0, decodes=12) for i in range(20)]
    assert prediction.slowdown(quiet, others) == pytest.approx(1.5, rel=0.1)


def command(name: str, *arguments: str) -> None:
    """`python -m benchmarks.NAME`."""
    if name in NEEDS:
        pytest.importorskip(NEEDS[name])
    import_module(f"benchmarks.{name}").main(arguments)


def test_a_hand_over_is_timed_without_the_steps_around_it() -> None:
    def handed_over(parked_ms: float, resumed_ms: float, step_rest_ms: float | None) -> dict[str, object]:
        return {"timeline_ms": {"alpha_parked": parked_ms, "beta_resumed": resumed_ms}, "step_rest_ms": step_rest_ms}

    uncut = {"timeline_ms": {"first_token": 3.0}, "step_rest_ms": None}
    assert hand_off_ms_of([handed_over(10.0, 45.0, 15.0), handed_over(10.0, 14.0, None), uncut, handed_over(1.0, 8.0, 1.0)], 2.5) == 3.5
    assert hand_off_ms_of([handed_over(10.0, 14.0, None)], 9.0) == 0.1
    assert hand_off_ms_of([uncut], 2.5) is None


def test_a_replay_of_a_late_client_is_tried_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    raw = tmp_path / "raw.json"
    with running_server() as server:
        chosen = ["replay", "--url", server.url, "--workload", "fixed:20,5", "--rate", "50", "--requests", "2", "--output", str(raw)]
        with pytest.raises(DynaServeError, match=r"(?s)exit status 3: .*the client itself was late"):
            fidelity._bench([*chosen, "--max-client-lag-ms", "0.000001"], raw, attempts=2)
        assert len(server.prompts) == 2 * 2
        assert capsys.readouterr().err.count("tried again: ") == 1
        assert fidelity._bench([*chosen, "--max-client-lag-ms", "60000"], raw, attempts=2)["not_trusted_because"] is None
        assert len(server.prompts) == 3 * 2


def summary_of(**changed: object) -> dict[str, object]:
    good = {"requests": 2, "failures": {}, "goodput_tokens_per_s": 9.0, "tbt_ms": {"p50": 1.0, "p99": 2.0}, "ttft_ms": {"p50": 3.0}}
    return good | changed


def test_a_run_on_real_instances_counts_only_whole() -> None:
    assert fidelity.figures_of(summary_of()) == Figures(9.0, 1.0, 2.0, 3.0)
    with pytest.raises(DynaServeError, match=r"of 2 requests some failed: \{'status 500': 1\}"):
        fidelity.figures_of(summary_of(failures={"status 500": 1}))
    with pytest.raises(DynaServeError, match="none of 2 answers had a second token"):
        fidelity.figures_of(summary_of(tbt_ms=None))


def test_a_simulated_instance_has_the_profile_of_the_real_one_in_its_place(tmp_path: Path) -> None:
    """Policies tell instances apart by the order of their URLs, whose ports are any."""
    for index in range(3):
        (tmp_path / f"profile-{index}.json").write_text(str(index))
    found = learnt_by(tmp_path, "dynamic", ["http://127.0.0.1:31473", "http://127.0.0.1:22274", "http://127.0.0.1:9000"])
    assert [(path.name, path.read_text()) for path in found] == [(f"dynamic-learnt-{index}.json", str(index)) for index in (1, 0, 2)]


def test_a_run_without_gaps_is_no_run_of_a_benchmark(tmp_path: Path) -> None:
    trace = Trace(("--workload", "fixed:8,1", "--requests", "12"), 1, None, 100.0)
    with running_server() as server, pytest.raises(RunFailed, match="none of 12 answers had a second token"):
        replay(trace, server.url, 50.0, tmp_path / "raw.json")


def test_a_process_that_was_seen_once_has_no_slope(capsys: pytest.CaptureFixture[str]) -> None:
    seen = [(0.0, Held(2**20, 1, 1, 1)), (3600.0, Held(3 * 2**20, 1, 1, 1))]
    endurance.report({"engine": seen, "helper": seen[:1]})
    rows = capsys.readouterr().out.splitlines()[2:]
    assert rows == ["| engine | 1.0, 3.0 | +2.0 | 1, 1 | 1, 1 | 1, 1 |", "| helper | gone after 1 samples | | | | |"]


QUOTE = "'"
NO_END = f"{QUOTE!r} cannot be split into words: No closing quotation"
"""Of a quote that stays open."""


@pytest.mark.parametrize("name", BENCHMARKS)
def test_the_help_has_an_example(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        command(name, "--help")
    assert end.value.code == 0
    assert f"example:\n  python -m benchmarks.{name} " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "option", "value", "named"),
    [
        ("batching", "--point-rate", "0", "'0' is not a number above 0"),
        *[("batching", option, QUOTE, NO_END) for option in ("--point", "--curve", "--vllm-args")],
        ("decide", "--steps", "0", "'0' is not a whole number of at least 1"),
        ("fidelity", "--duration-s", "nan", "'nan' is not a number above 0"),
        ("fidelity", "--trace", QUOTE, NO_END),
        ("placement", "--decisions", "0", "'0' is not a whole number of at least 1"),
        ("placement", "--gap-fleets", "0", "'0' is not a whole number of at least 1"),
        ("predictor", "--rate", "0", "'0' is not a number above 0"),
        ("predictor", "--requests", "1", "'1' is not a whole number of at least 2"),
        ("endurance", "--rate", "0", "'0' is not a number above 0"),
        ("endurance", "--every-s", "nan", "'nan' is not a number above 0"),
        ("frontend", "--turns", "0", "'0' is not a whole number of at least 1"),
        ("frontend", "--streams", "0", "'0' is not a whole number of at least 1"),
        ("gpu_batching", "--rates", "0", "'0' is not a number above 0"),
        ("gpu_batching", "--trace", QUOTE, NO_END),
        ("handoff", "--requests", "0", "'0' is not a whole number of at least 1"),
        ("handoff", "--vllm-args", QUOTE, NO_END),
        ("idle", "--requests", "0", "'0' is not a whole number of at least 2"),
        ("idle", "--duration-s", "0", "'0' is not a number above 0"),
        ("kv_copies", "--blocks", "1", "'1' is not a whole number of at least 2"),
        ("kv_copies", "--piece-mib", "0", "'0' is not a whole number of at least 1"),
        ("overload", "--instances", "0", "'0' is not a whole number of at least 1"),
        ("overload", "--times", "0", "'0' is not a number above 0"),
        ("ttft", "--rate", "0", "'0' is not a number above 0"),
        ("ttft", "--seed", "-1", "'-1' is not a whole number of at least 0"),
        ("ttft", "--seed", "9" * 20, f"'{'9' * 20}' is more than 9223372036854775807"),
    ],
)
def test_numbers_that_measure_nothing_are_refused(
    name: str, option: str, value: str, named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        command(name, option, value)
    assert end.value.code == 2
    assert f"argument {option}: {named}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("overload", "--step-s 10", "--step-s 10 leaves nothing to count: the first 10 s of a load fill the fleet"),
        ("overload", "--overload-s 9.5", "--overload-s 9.5 leaves nothing to count: the first 10 s of a load fill the fleet"),
        ("endurance", "--rate 1 --minutes 0.2", "--minutes 0.2 is too short for two samples, 10 s (--every-s) apart"),
        ("kv_copies", "--blocks 8 --piece-mib 32", "--piece-mib 32 is 16 blocks of 8b, more than the 8 of a cache (--blocks)"),
        (
            "ttft",
            "--workload azure-conv",
            "workload azure-conv is not part of the package: name the folder that holds azure_conv_2023.csv with --traces",
        ),
        ("ttft", "--rate 1000 --duration-s 1000", "workload sample ends after "),
        ("ttft", "--step-log not-there.csv", "No such file or directory: 'not-there.csv'"),
        ("fidelity", "--trace=--workload=nosuch", "no workload 'nosuch'"),
        ("fidelity", "--trace=--drawn", "the following arguments are required: --workload"),
        ("fidelity", "--quick --trace=--workload=sample --rate 50", "workload sample ends after "),
        ("gpu_batching", "folder --trace=--workload=nosuch", "no workload 'nosuch'"),
    ],
)
def test_options_that_do_not_fit_are_refused(name: str, options: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        command(name, *options.split())
    assert end.value.code == 2
    assert said in capsys.readouterr().err


def test_a_step_log_that_holds_only_warm_up_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "steps.csv"
    log = StepLog(path)
    for at_s in range(50):
        log.add(step(at_s, None, 10.0))
    log.close()
    with pytest.raises(SystemExit) as end:
        command("ttft", "--step-log", str(path))
    assert end.value.code == 2
    assert f"{path}: has 50 steps, of which the first 50 are left out" in capsys.readouterr().err


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is converted: the folders are there, and empty."""
    monkeypatch.setenv("DYNASERVE_CACHE", str(tmp_path))
    for name in ("SmolLM2-135M-Instruct", "random-llama"):
        (tmp_path / name).mkdir()


@pytest.mark.usefixtures("models")
@pytest.mark.parametrize(
    ("name", "options"),
    [("endurance", ("--rate", "1")), ("frontend", ()), ("handoff", ()), ("idle", ()), ("overload", ()), ("predictor", ())],
)
def test_a_failed_start_ends_in_one_sentence(
    name: str, options: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def start(_: LocalFleet) -> NoReturn:
        raise FleetFailed("instance-0 ended with status 1")

    monkeypatch.setattr(LocalFleet, "start", start)
    with pytest.raises(SystemExit) as end:
        command(name, *options)
    assert end.value.code == 1
    assert capsys.readouterr().err == f"bench-{name}: instance-0 ended with status 1\n"


@pytest.mark.usefixtures("models")
@pytest.mark.parametrize(
    ("name", "options"), [("fidelity", ()), ("predictor", ()), ("batching", ("--quick", "--point", "--workload sample --arrivals trace"))]
)
def test_an_interrupted_benchmark_says_so_in_one_line(
    name: str, options: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def start(_: LocalFleet, __: int) -> NoReturn:
        raise KeyboardInterrupt

    monkeypatch.setattr(LocalFleet, "start_instance", start)
    with pytest.raises(SystemExit) as end:
        command(name, *options, "--output", str(tmp_path / "out"))
    assert end.value.code == 130
    assert capsys.readouterr().err == f"bench-{name}: interrupted\n"


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("fidelity", ()),
        ("predictor", ()),
        ("batching", ("--quick", "--point", "--workload sample --arrivals trace")),
        ("gpu_batching", ("folder",)),
    ],
)
def test_a_folder_that_cannot_be_made_is_refused_before_anything_starts(
    name: str, options: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "out").write_text("a file")
    with pytest.raises(SystemExit) as end:
        command(name, *options, "--output", str(tmp_path / "out"))
    assert end.value.code == 2
    assert "cannot be written: Not a directory" in capsys.readouterr().err
    assert (tmp_path / "out").read_text() == "a file"


def test_what_the_simulator_or_a_search_would_refuse_is_refused_before_engines_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for trace, told in (
        ("--workload sample --arrivals trace", "--arrivals trace: requests are drawn at random"),
        ("--workload sample --warmup 3", "unrecognized arguments: --warmup 3"),
        ("--workload sample --instances 3", "unrecognized arguments: --instances 3"),
    ):
        with pytest.raises(SystemExit) as end:
            command("fidelity", "--trace", trace, "--output", str(tmp_path / "out"))
        assert end.value.code == 2
        assert told in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.usefixtures("models")
@pytest.mark.parametrize(("name", "options"), [("endurance", ("--rate", "1")), ("overload", ())])
def test_a_late_client_ends_the_benchmark_at_once(
    name: str, options: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(*_: object, attempts: int) -> NoReturn:
        raise NotTrusted(f"late in each of {attempts} runs")

    monkeypatch.setattr(LocalFleet, "start", lambda _: None)
    monkeypatch.setattr(overload, "token_counts", lambda _: (0.0, 0.0))
    monkeypatch.setattr(trial, "run", run)
    with pytest.raises(SystemExit) as end:
        command(name, *options)
    assert end.value.code == 1
    assert capsys.readouterr().err == f"bench-{name}: late in each of 1 runs\n"


def test_streams_that_are_refused_keep_no_instance_busy() -> None:
    with running_server() as server:
        server.act = Act(status=503)
        port = int(server.url.rpartition(":")[2])
        fleet = LocalFleet("toy", instances=1, ports=(port, port + 1))

        def be_busy_until_asked() -> None:
            with handoff.busy(fleet, 1):
                while not server.bodies:
                    time.sleep(0.01)

        with pytest.raises(httpx.HTTPStatusError, match="503"):
            be_busy_until_asked()


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ((), "workload azure-code is not part of the package: name the folder that holds azure_code_2023.csv with --traces"),
        (("--point", "--workload sample --nosuch"), "unrecognized arguments: --nosuch"),
        (("--point", "--workload sample"), "workload azure-conv is not part of the package"),
    ],
)
def test_traces_are_looked_for_before_servers_start(
    options: tuple[str, ...], named: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        batching.main([*options, "--output", str(tmp_path / "out")])
    assert end.value.code == 2
    assert named in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_the_curve_is_not_looked_for_where_it_is_not_measured() -> None:
    point = ("--workload", "sample", "--arrivals", "trace")
    batching.Bench(batching.QUICK, None, point, ("--workload", "azure-conv"), 100.0, (), Path("out")).check()


def test_the_gap_is_told_with_its_tail(capsys: pytest.CaptureFixture[str]) -> None:
    placement.print_gaps([0.001 * number for number in range(200)])
    assert capsys.readouterr().out == "gap to exhaustive search, 200 fleets: mean 9.95%, p95 19.00%, p99 19.80%, worst 19.90%\n"
