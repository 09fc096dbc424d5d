"""The sensitivity scripts: one command, one CSV, one plot."""

from __future__ import annotations

import csv
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path

import pytest

from benchmarks.paper import __main__ as paper
from benchmarks.sensitivity import __main__ as sensitivity
from benchmarks.sensitivity import balance

SAMPLE = ("--roofline", "10,0.2,16,0.00002,0.2,0.0005", "--workload", "sample", "--rate", "4", "--requests", "100", "--repetitions", "1")


def test_a_sweep_writes_a_table_and_a_plot(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    sensitivity.main(["chunk", "--output", str(tmp_path / "chunk"), "--", *SAMPLE])
    with (tmp_path / "chunk.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 5 * 6
    assert (tmp_path / "chunk.png").read_bytes().startswith(b"\x89PNG")
    assert any(float(row["capacity_per_s"]) > 0 for row in rows)
    assert all(float(row["least_per_s"]) <= float(row["capacity_per_s"]) <= float(row["most_per_s"]) for row in rows)


def test_bad_options_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    with pytest.raises(SystemExit) as end:
        sensitivity.main(["slo", "--output", str(tmp_path / "slo"), "--", "--workload", "sample"])
    assert end.value.code == 2
    assert "one of --profile" in capsys.readouterr().err


@pytest.mark.parametrize("sweep", ["split", "burstiness"])
def test_each_system_of_a_sweep_has_a_capacity_at_each_of_its_values(tmp_path: Path, sweep: str) -> None:
    pytest.importorskip("matplotlib")
    sensitivity.main([sweep, "--output", str(tmp_path / "swept"), "--", *SAMPLE])
    with (tmp_path / "swept.csv").open() as file:
        rows = list(csv.DictReader(file))
    _, values = sensitivity.SWEEPS[sweep]
    assert [(row["system"], row[sweep]) for row in rows] == list(product(sensitivity.systems_of(sweep), values))
    assert all(float(row["capacity_per_s"]) > 0 for row in rows if row["system"] != "fixed chunk")


def test_the_balance_of_a_trace_is_told_by_the_minute(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    trace = tmp_path / "trace.csv"
    trace.write_text("arrived_at_s,prompt_tokens,output_tokens\n0,2048,1\n1,2048,1\n70,1,3200\n200,10,10\n")
    balance.main([f"file:{trace}", "--roofline", "0,0.1,1,0,1,0", "--output", str(tmp_path / "balance")])
    assert "prefill takes more than decoding in 1 of 3 minutes" in capsys.readouterr().out
    with (tmp_path / "balance.csv").open() as file:
        rows = {row["minute"]: row for row in csv.DictReader(file)}
    assert list(rows) == ["0", "1", "3"]
    # Each token of a step costs 0.1 ms, and a decode 1 ms beside that.
    assert float(rows["0"]["prefill_ms"]) == pytest.approx(409.6, rel=1e-6)
    assert float(rows["0"]["decode_ms"]) == pytest.approx(2.2, rel=0.01)
    assert float(rows["1"]["decode_ms"]) == pytest.approx(3520, rel=0.01)
    assert float(rows["3"]["prefill_share"]) == pytest.approx(1 / 12, rel=0.01)
    assert (tmp_path / "balance.png").read_bytes().startswith(b"\x89PNG")


def test_the_values_of_a_mix_are_named_by_their_share() -> None:
    assert [sensitivity.label_of(value) for value in sensitivity.MIXES] == ["0", "0.25", "0.5", "0.75", "1"]
    assert sensitivity.label_of("gamma:2") == "gamma:2"


@pytest.mark.parametrize(
    ("workload", "roofline", "told"),
    [
        ("mini-reasoning", "0,0.1,1,0,1,0", "workload mini-reasoning has no arrival times of its own"),
        ("sample", "0,0,1,0,0,0", "neither prefill nor decoding takes any time"),
    ],
)
def test_what_has_no_balance_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], workload: str, roofline: str, told: str
) -> None:
    pytest.importorskip("matplotlib")
    with pytest.raises(SystemExit) as end:
        balance.main([workload, "--roofline", roofline, "--output", str(tmp_path / "balance")])
    assert end.value.code == 2
    assert told in capsys.readouterr().err


@pytest.mark.parametrize("main", [sensitivity.main, balance.main, paper.main])
def test_the_help_has_an_example(main: Callable[[Sequence[str]], None], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["--help"])
    assert end.value.code == 0
    assert "    python -m benchmarks." in capsys.readouterr().out
