"""The sensitivity scripts: one command, one CSV, one plot."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from benchmarks.sensitivity import __main__ as sensitivity

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
