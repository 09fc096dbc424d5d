"""`vllm_plugin.stock_sweep` with a real engine: what it writes is what `dynaserve simulate --gpu-grid` reads."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from dynaserve.bench import latency_tables
from dynaserve.local.model import cache_dir, random_model, smollm2

pytestmark = pytest.mark.engine


def test_a_grid_of_a_real_engine_is_read(tmp_path: Path) -> None:
    model, grid = random_model(smollm2(), cache_dir() / "random-llama", seed=1), tmp_path / "steps.csv"
    limits = ("--max-model-len", "1024", "--max-num-batched-tokens", "256", "--max-num-seqs", "9", "--enforce-eager")
    command = [sys.executable, "-m", "vllm_plugin.stock_sweep", str(model), "--name", "random", "--system", "cpu", "--output", str(grid)]
    done = subprocess.run([*command, *limits, "--dtype", "float32"], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    shapes = {(s.shape.prefill_tokens, s.shape.decodes) for s in latency_tables.samples(grid, "random", "cpu")}
    assert shapes == {(64, 0), (128, 0), (256, 0), (0, 1), (0, 8)}
    assert "Composition(new=0, cached=0, decodes=16, context=512) does not fit" in done.stdout
