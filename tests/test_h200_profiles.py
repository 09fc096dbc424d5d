"""The latencies that were measured on a GPU, as the simulator reads them."""

from __future__ import annotations

from pathlib import Path

import pytest

from dynaserve import latency_profile
from dynaserve.bench import latency_tables

MEASURED = Path(__file__).parent.parent / "benchmarks" / "h200"
MODELS = ("llama-3-8b", "qwen2.5-14b", "qwen2.5-32b")


@pytest.mark.parametrize("model", MODELS)
def test_a_profile_is_what_its_grid_teaches(model: str) -> None:
    path = MEASURED / f"{model}.json"
    table, taught = latency_profile.load(path), latency_tables.from_grid(MEASURED / "steps.csv", model, "h200", 0.0, 1.0)
    samples = latency_tables.samples(MEASURED / "steps.csv", model, "h200")
    assert len(samples) > 100
    for sample in samples:
        assert table.step_ms(sample.shape) == pytest.approx(taught.step_ms(sample.shape), rel=1e-9)
    key = latency_profile.key_of(path)
    assert (key.model, key.device, key.vllm_version) == (model, "NVIDIA H200", "0.25.1")


@pytest.mark.parametrize("model", MODELS)
def test_a_table_learns_a_gpu(model: str) -> None:
    """Bins over a roofline (`docs/decisions/0004`): near what was measured."""
    path = MEASURED / "steps.csv"
    table = latency_tables.from_grid(path, model, "h200", 0.0, 1.0)
    errors = sorted(abs(table.step_ms(s.shape) / s.measured_ms - 1) for s in latency_tables.samples(path, model, "h200"))
    assert sum(errors) / len(errors) < 0.03
