"""`vllm_plugin.stock_sweep` with a real engine: what it writes is what `dynaserve simulate --gpu-grid` reads."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from dynaserve.bench import latency_tables
from dynaserve.local.model import cache_dir, random_model, smollm2
from dynaserve.step_latency import prefill_pairs

pytestmark = pytest.mark.engine


def test_a_grid_of_a_real_engine_is_read(tmp_path: Path) -> None:
    model, grid = random_model(smollm2(), cache_dir() / "random-llama", seed=1), tmp_path / "steps.csv"
    limits = ("--max-model-len", "2500", "--max-num-batched-tokens", "300", "--max-num-seqs", "9", "--enforce-eager")
    command = [sys.executable, "-m", "vllm_plugin.stock_sweep", str(model), "--name", "random", "--system", "cpu", "--output", str(grid)]
    small = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}  # the fleet of the session may be up
    done = subprocess.run([*command, *limits, "--dtype", "float32"], capture_output=True, text=True, timeout=300, env=small)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    samples = latency_tables.samples(grid, "random", "cpu")
    shapes = {(s.shape.prefill_tokens, s.shape.decodes) for s in samples}
    assert shapes == {(64, 0), (128, 0), (256, 0), (0, 1), (0, 8), (64, 1), (256, 1), (64, 8), (256, 8)}
    contexts = {s.shape.decode_context_tokens for s in samples if s.shape.decodes == 8}
    assert contexts == {8 * 512, 8 * 1024, 8 * 2048}
    pairs = {s.shape.prefill_pairs for s in samples if s.shape.prefill_tokens == 256}
    assert pairs == {prefill_pairs(256, 0), prefill_pairs(256, 2048)}
    assert "Composition(new=0, cached=0, decodes=16, context=512) does not fit" in done.stdout
