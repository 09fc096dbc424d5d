"""`make bench-pairs`: what it plays, in which order, and what it makes of it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import pairs
from benchmarks.compare.campaign import Campaign
from benchmarks.pairs import PairedRun
from dynaserve.bench.measures import Distribution, summarize
from dynaserve.bench.systems import Running, System
from dynaserve.bench.trial import ATTEMPTS, Trial
from dynaserve.errors import NotTrusted
from tests.completion_server import Act, running_server
from tests.test_bench_measures import RECORD, SLO


def toy(name: str, _slo_ms: float, _logs: Path) -> System:
    """The second one answers more slowly."""

    @contextmanager
    def start() -> Iterator[Running]:
        with running_server() as server:
            server.act = Act(slots=4, delay_s=0.1 if name == "dynamic" else 0.002)
            yield Running((server.url,))

    return System(name, start=start)


def campaign_of(output: Path, max_client_lag_ms: float = 60000.0) -> Campaign:
    return Campaign(
        workloads=("fixed:20,5", "fixed:10,3"),
        systems=("stock", "dynamic"),
        tbt_slos_ms=(5000.0,),
        layers=30,
        together=2,
        scale=1.0,
        traces=None,
        duration_s=0.5,
        repetitions=1,
        resolution=1.0,
        most_runs=1,
        seed=1,
        max_client_lag_ms=max_client_lag_ms,
        eos_token_id=None,
        output=output,
    )


def test_both_get_the_same_requests_in_turns(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    campaign = campaign_of(tmp_path)
    found = list(pairs.run(campaign, {"fixed:20,5": 20.0, "fixed:10,3": 10.0}, (1, 2), toy))
    assert [(one.workload, one.system, one.trial.seed) for one in found] == [
        ("fixed:20,5", "dynamic", 1),
        ("fixed:20,5", "stock", 1),
        ("fixed:10,3", "dynamic", 1),
        ("fixed:10,3", "stock", 1),
        ("fixed:20,5", "stock", 2),
        ("fixed:20,5", "dynamic", 2),
        ("fixed:10,3", "stock", 2),
        ("fixed:10,3", "dynamic", 2),
    ]
    for first, second in zip(found[::2], found[1::2], strict=True):
        sent = [[(one.due_s, one.prompt_tokens, one.output_tokens) for one in run.trial.records] for run in (first, second)]
        assert sent[0] == sent[1]
        slow, fast = sorted((first, second), key=lambda one: one.system)
        assert (slow.mean_ttft_s or 0.0) > (fast.mean_ttft_s or 0.0)
    pairs.write(tmp_path / "pairs.json", {"command": "a command"}, found)
    written = json.loads((tmp_path / "pairs.json").read_text())
    assert (written["command"], len(written["runs"])) == ("a command", 8)
    assert written["runs"][0]["summary"]["requests"] == found[0].trial.summary.requests


def test_runs_of_a_late_client_are_left_out_and_named_at_the_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    found: list[PairedRun] = []
    with pytest.raises(NotTrusted, match=r"^not measured: fixed:20,5, seed 1: dynamic; fixed:20,5, seed 1: stock$"):
        found.extend(pairs.run(campaign_of(tmp_path, max_client_lag_ms=1e-6), {"fixed:20,5": 20.0}, (1,), toy))
    assert found == []
    told = capsys.readouterr().err
    for name in ("dynamic", "stock"):
        assert f"bench-pairs: fixed:20,5, seed 1: {name}: not measured: {ATTEMPTS} times in a row at 20 requests/s the client" in told


def paired(system: str, seed: int, ttft_ms: float, late: float) -> PairedRun:
    """Of a hundred gaps."""
    summary = summarize([RECORD], [], SLO)
    ttft, tbt = Distribution.of([ttft_ms]), Distribution.of([20.0] * 100)
    return PairedRun(
        "hybrid", system, Trial(1.2, seed, "model", replace(summary, ttft_ms=ttft, tbt_ms=tbt, token_attainment=1 - late), None)
    )


def failed(system: str, seed: int) -> PairedRun:
    one = paired(system, seed, 1.0, 0.0)
    return replace(one, trial=replace(one.trial, summary=replace(one.trial.summary, failures={"HTTP 500": 1})))


def test_whole_pairs_are_summed_up() -> None:
    found = [
        paired("stock", 1, 1000.0, 0.01),
        paired("dynamic", 1, 500.0, 0.0),
        paired("dynamic", 2, 1000.0, 0.02),
        paired("stock", 2, 2000.0, 0.03),
        paired("stock", 3, 9000.0, 0.5),
        failed("stock", 4),
        paired("dynamic", 4, 1.0, 0.9),
    ]
    lines = pairs.markdown(("stock", "dynamic"), found).splitlines()
    assert lines[0] == "| workload, requests/s | seeds | stock: TTFT s, late % | dynamic: TTFT s, late % | TTFT stock / dynamic |"
    assert lines[2:] == ["| hybrid, 1.2 | 2 | 1.50, 2.00 | 0.75, 1.00 | 2.00 [2.00, 2.00] |"]


def test_the_first_system_is_compared_with_each_other_one() -> None:
    found = [
        paired(name, seed, ttft_ms, 0.0) for seed in (1, 2) for name, ttft_ms in (("dynamic", 500.0), ("stock", 1000.0), ("paper", 250.0))
    ]
    lines = pairs.markdown(("dynamic", "stock", "paper"), found).splitlines()
    assert lines[0].endswith("| TTFT dynamic / stock | TTFT dynamic / paper |")
    assert lines[2].endswith("| 0.50 [0.50, 0.50] | 2.00 [2.00, 2.00] |")
    assert len({line.count("|") for line in lines}) == 1


@pytest.mark.parametrize(("systems", "reason"), [(["stock"], "has stock alone"), (["stock", "paper", "stock"], "has stock twice")])
def test_systems_that_cannot_be_compared_are_refused(
    systems: list[str], reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        pairs.main(["--systems", *systems, "--output", str(tmp_path)])
    assert end.value.code == 2
    assert f"--systems {reason}" in capsys.readouterr().err


def test_a_workload_at_two_rates_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        pairs.main(["--cases", "hybrid:1", "hybrid:2", "--output", str(tmp_path)])
    assert end.value.code == 2
    assert "--cases hybrid:1 hybrid:2 has a workload twice" in capsys.readouterr().err


@pytest.mark.parametrize("case", ["hybrid", "hybrid:", ":2", "hybrid:-1", "hybrid:nan", "hybrid:inf"])
def test_a_case_without_a_rate_is_refused(case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        pairs.main(["--cases", case, "--output", str(tmp_path)])
    assert end.value.code == 2
    assert f"--cases {case!r} is not WORKLOAD:RATE" in capsys.readouterr().err


def test_the_help_has_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        pairs.main(["--help"])
    assert end.value.code == 0
    assert "example:\n  python -m benchmarks.pairs " in capsys.readouterr().out
