"""The grid of GPU steps: what is in it, and, where aiconfigurator-core is installed, that the simulator reads what it tells."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks import gpu_grid
from dynaserve.bench import latency_tables


def test_a_grid_has_each_step_once() -> None:
    steps = list(gpu_grid.steps())
    assert len(set(steps)) == len(steps) == 35 + 8 * 4 * 36
    assert all(step.prefill_tokens + step.decodes > 0 for step in steps), "each has a token"


def test_without_the_tables_one_sentence_says_what_to_install(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "aiconfigurator_core", None)
    with pytest.raises(SystemExit) as ended:
        gpu_grid.main(["--output", str(tmp_path / "grid.csv")])
    assert ended.value.code == 2
    assert capsys.readouterr().err.splitlines()[-1].endswith("pip install 'dynaserve[gpu-tables]'")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["grid.csv", "grid.csv.gz"])
def test_the_simulator_reads_the_grid(tmp_path: Path, name: str) -> None:
    pytest.importorskip("aiconfigurator_core")
    path = tmp_path / name
    gpu_grid.main(["--models", "llama-3-8b", "--systems", "h100_sxm", "--output", str(path)])
    samples = latency_tables.samples(path, "llama-3-8b", "h100_sxm")
    assert len(samples) == 1187
    decode = next(sample for sample in samples if sample.shape.decodes == 1 and not sample.shape.prefill_tokens)
    assert 1.0 < decode.measured_ms < 20.0, "a step of a model of 8B that reads 16 GB"
