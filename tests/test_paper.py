"""The paper's tables in the simulator: what the commands compute from, on a small grid that is not a GPU's."""

from __future__ import annotations

import csv
import gzip
from pathlib import Path

import pytest

from benchmarks.paper import __main__ as paper
from benchmarks.paper import baselines, tables, why
from benchmarks.paper.oracle import ORACLES
from benchmarks.paper.setting import DISAGGREGATED, SLO_AWARE, Bench, Row, write
from dynaserve.bench.simulate import SimulatedRun
from dynaserve.global_scheduler import GlobalScheduler, Options, Policy
from dynaserve.step_latency import ProfileTable
from workloads import catalog

COLUMNS = "model,system,tp,prefill_new,prefill_cached,decode_n,decode_ctx,ms"
TRACE = "arrived_at_s,prompt_tokens,output_tokens"


@pytest.fixture
def grid(tmp_path: Path) -> Path:
    path = tmp_path / "grid.csv"
    steps = [(new, number, context) for new in (0, 64, 256, 1024, 2048) for number in (0, 1, 16, 64, 128) for context in (256, 2048)]
    rows = [f"qwen2.5-14b,a100_sxm,1,{n},0,{d},{c},{20 + 0.1 * (n + d) + 1e-4 * d * c}" for n, d, c in steps if n + d]
    path.write_text("\n".join([COLUMNS, *rows]) + "\n")
    return path


def command(*arguments: str) -> None:
    paper.main(arguments)


def test_table_4_compares_each_sigma_with_the_paper(grid: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "table4.csv"
    command("table4", "--gpu-grid", str(grid), "--traces", str(tmp_path), "--requests", "60", "--output", str(out))
    with out.open() as file:
        rows = {row["what"]: row for row in csv.DictReader(file)}
    first = rows["sigma 0: goodput, tokens/s"]
    assert float(first["here"]) > 0
    assert float(first["ratio"]) == pytest.approx(float(first["here"]) / 3606.93)
    assert float(rows["sigma 0: goodput over that of sigma 0"]["here"]) == 1.0
    assert "sigma 100: goodput, tokens/s" in capsys.readouterr().out


def test_streaming_kv_saves_most_of_the_wait(grid: Path, tmp_path: Path) -> None:
    out = tmp_path / "transfer.csv"
    command("transfer", "--gpu-grid", str(grid), "--traces", str(tmp_path), "--requests", "60", "--output", str(out))
    with out.open() as file:
        rows = {row["what"]: float(row["here"]) for row in csv.DictReader(file)}
    assert rows["5 GB/s, blocks: mean wait ms"] < 0.5 * rows["5 GB/s, end: mean wait ms"]


def test_dynamic_is_compared_with_the_best_of_the_baselines(grid: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = ("chunk 256", "SLO-aware colocation", "dynamic")
    monkeypatch.setattr(baselines, "SYSTEMS", {name: baselines.SYSTEMS[name] for name in kept})
    out = tmp_path / "baselines.csv"
    common = ("--gpu-grid", str(grid), "--traces", str(tmp_path), "--requests", "40", "--output", str(out))
    command("baselines", *common, "--workloads", "mini-reasoning", "--tbt-slo-ms", "100")
    with out.open() as file:
        rows = {row["what"]: float(row["here"]) for row in csv.DictReader(file)}
    capacity = {name: rows[f"mini-reasoning at 100 ms: {name}, requests/s"] for name in kept}
    assert min(capacity.values()) > 0
    (ratio,) = (value for what, value in rows.items() if "dynamic / " in what)
    assert ratio == pytest.approx(capacity["dynamic"] / max(capacity["chunk 256"], capacity["SLO-aware colocation"]))


def test_an_overload_is_told_over_that_of_slo_aware_colocation(grid: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "overload.csv"
    common = ("--gpu-grid", str(grid), "--traces", str(tmp_path), "--requests", "40", "--output", str(out))

    def over_colocation(system: tuple[str, ...]) -> list[float]:
        monkeypatch.setattr(baselines, "DYNAMIC", system)
        command("overload", *common, "--workloads", "mini-reasoning", "--tbt-slo-ms", "100")
        with out.open() as file:
            rows = {row["what"]: float(row["here"]) for row in csv.DictReader(file)}
        return [rows[f"mini-reasoning at 100 ms: {figure}"] for figure in ("goodput", "mean TTFT")]

    assert over_colocation(SLO_AWARE) == [1.0, 1.0]
    goodput, _ = over_colocation(DISAGGREGATED)
    assert goodput < 1.0


def test_a_row_without_a_published_figure_has_no_ratio(tmp_path: Path) -> None:
    write(tmp_path / "rows.csv", [Row("a", 2.0), Row("b", 3.0, 2.0)])
    assert (tmp_path / "rows.csv").read_text().splitlines()[1:] == ["a,2.0,,", "b,3.0,2.0,1.5"]


def test_bad_data_is_refused_in_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        command("table1", "--gpu-grid", str(tmp_path / "none.csv"), "--traces", str(tmp_path))
    assert end.value.code == 2
    assert "none.csv: cannot be read" in capsys.readouterr().err


@pytest.mark.parametrize("what", ["plans", "figure3"])
def test_traces_that_are_missing_are_told(what: str, grid: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        command(what, "--gpu-grid", str(grid))
    assert end.value.code == 2
    assert "azure-code is not part of the package" in capsys.readouterr().err


def test_a_workload_that_a_table_does_not_have_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        command("plans", "--gpu-grid", str(tmp_path / "grid.csv"), "--traces", str(tmp_path), "--workloads", "mooncake")
    assert end.value.code == 2
    assert "and not mooncake" in capsys.readouterr().err


def test_a_part_of_a_table_that_has_no_parts_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for part in (("--workloads", "mooncake"), ("--tbt-slo-ms", "50")):
        with pytest.raises(SystemExit) as end:
            command("table1", "--gpu-grid", str(tmp_path / "grid.csv"), "--traces", str(tmp_path), *part)
        assert end.value.code == 2
        assert "are of baselines, oracle, overload, plans, not of table1" in capsys.readouterr().err


def test_the_oracle_takes_the_cuts_and_seeds_that_it_is_told(
    grid: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[tuple[str, str]] = []
    run = Bench.run

    def noted(bench: Bench, workload: str, *more: str) -> SimulatedRun:
        ran.append((more[more.index("--policy") + 1], more[more.index("--seed") + 1]))
        return run(bench, workload, *more)

    monkeypatch.setattr(Bench, "run", noted)
    out = tmp_path / "oracle.csv"
    few = ("--requests", "60", "--seeds", "2", "--stride-tokens", "512")
    command("oracle", "--gpu-grid", str(grid), *few, "--workloads", "table1-balanced", "--tbt-slo-ms", "100", "--output", str(out))
    with out.open() as file:
        (row,) = csv.DictReader(file)
    assert row["what"].startswith("table1-balanced at 100 ms: dynamic / oracle, exhaustive")
    assert 0.9 < float(row["here"]) < 1.2
    assert sorted(ran) == sorted((policy, seed) for policy in ("dynamic", *(f"{it}:stride=512" for it in ORACLES)) for seed in "12")
    with pytest.raises(SystemExit):
        command("figure5", "--gpu-grid", str(grid), "--seeds", "2")
    assert "of oracle, not of figure5" in capsys.readouterr().err


@pytest.fixture
def bench(grid: Path, tmp_path: Path) -> Bench:
    """Its `bursty-chat` is made up."""
    rows = [f"{number},{100 + 40 * number % 700},{20 + number % 50}" for number in range(60)]
    (tmp_path / catalog.TRACE_FILES["bursty-chat"]).write_bytes(gzip.compress("\n".join([TRACE, *rows, ""]).encode()))
    return Bench(grid, tmp_path, requests=60, repetitions=1)


def test_the_paper_s_own_search_is_timed_as_ours(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    timed: list[Policy] = []

    class Noted(GlobalScheduler):
        def __init__(self, opts: Options, table: ProfileTable) -> None:
            super().__init__(opts, table)
            timed.append(opts.policy)

    monkeypatch.setattr(tables, "GlobalScheduler", Noted)
    for rows in (tables.table3(bench), why.table3_why(bench)):
        assert [row.paper for row in rows] == list(tables.TABLE_3.values())
        assert all(row.here > 0 for row in rows)
    assert timed == len(tables.TABLE_3) * [Policy.dynamic] + len(tables.TABLE_3) * [Policy.paper]


def test_the_goodput_of_table_4_is_looked_for_below_the_limit(bench: Bench) -> None:
    goodput = [row.here for row in why.table4_why(bench)]
    assert goodput[0] < goodput[-1]
