"""A real instance with SLO-aware batches: what it tells about its steps, and `dynaserve profile` of the same model."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from dynaserve import latency_profile
from dynaserve.local.fleet import LocalFleet
from dynaserve.local.model import cache_dir, random_model, smollm2
from dynaserve.step_latency import BatchShape
from dynaserve.step_report import read_log
from tests.e2e.fleet import prompt_of

pytestmark = pytest.mark.engine

REQUESTS, OUTPUT_TOKENS = 6, 30
SMALL = {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}
LIMITS = ["--max-num-seqs", "16", "--max-num-batched-tokens", "256"]


@pytest.fixture(scope="module")
def instance(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalFleet]:
    folder = tmp_path_factory.mktemp("instance")
    files = ["--dynaserve-step-log", str(folder / "steps.csv"), "--dynaserve-profile", str(folder / "profile.json")]
    fleet = LocalFleet(
        random_model(smollm2(), cache_dir() / "random-llama", seed=1),
        instances=1,
        vllm_args=[*LIMITS, "--dynaserve-batching", "slo", "--ttft-slo-ms", "60000", *files],
        max_model_len=2048,
        log_dir=folder,
    )
    try:
        fleet.start_instance(0)
        fleet.wait_healthy({"instance-0": fleet.urls[0]}, time.monotonic() + fleet.start_timeout_s)
        yield fleet
    finally:
        fleet.stop()


def complete(fleet: LocalFleet, seed: int, url: str | None = None) -> str:
    """url: of the instance, unless it is given. Returns the request's id."""
    body = {
        "model": str(fleet.model),
        "prompt": prompt_of(300, seed),
        "max_tokens": OUTPUT_TOKENS,
        "ignore_eos": True,
        "vllm_xargs": {"dynaserve_tbt_ms": 200, "dynaserve_ttft_ms": 90_000},
    }
    answer = httpx.post(f"{url or fleet.urls[0]}/v1/completions", json=body, timeout=120).raise_for_status()
    return str(answer.json()["id"])


def metrics(fleet: LocalFleet) -> dict[str, float]:
    """Values without labels, by name; those of a name with labels are added up."""
    values: dict[str, float] = {}
    for family in text_string_to_metric_families(httpx.get(f"{fleet.urls[0]}/metrics", timeout=30).text):
        for sample in family.samples:
            values[sample.name] = values.get(sample.name, 0.0) + sample.value
    return values


def test_every_token_and_every_step_is_in_the_metrics_and_in_the_log(instance: LocalFleet) -> None:
    before = metrics(instance)
    with ThreadPoolExecutor(REQUESTS) as pool:
        list(pool.map(lambda seed: complete(instance, seed), range(REQUESTS)))
    after = metrics(instance)
    counted = {name: after[name] - before.get(name, 0.0) for name in after if name.startswith("dynaserve_")}
    assert counted["dynaserve_tbt_tokens_total"] == REQUESTS * (OUTPUT_TOKENS - 1)
    assert 0 <= counted["dynaserve_tbt_tokens_in_slo_total"] <= counted["dynaserve_tbt_tokens_total"]
    assert counted["dynaserve_ttft_tokens_total"] == REQUESTS
    assert counted["dynaserve_ttft_tokens_in_slo_total"] == REQUESTS
    steps = counted["dynaserve_step_measured_seconds_count"]
    assert steps >= OUTPUT_TOKENS
    assert counted["dynaserve_prefill_budget_tokens_count"] == counted["dynaserve_prefill_budget_steps_total"] == steps
    assert 0 < counted["dynaserve_step_predicted_seconds_count"] < steps


def test_a_client_of_the_instance_may_name_its_request_at_any_length(instance: LocalFleet) -> None:
    body = {"model": str(instance.model), "prompt": prompt_of(900, 3), "max_tokens": 3, "ignore_eos": True}  # of several steps
    named = httpx.post(f"{instance.urls[0]}/v1/completions", json=body, headers={"X-Request-Id": "x" * 600}, timeout=120)
    assert named.raise_for_status().json()["usage"]["completion_tokens"] == 3
    assert complete(instance, 7)


def test_a_front_end_without_a_profile_places_by_what_the_instance_has_measured(instance: LocalFleet) -> None:
    instance.frontend_args = ("--policy", "dynamic")
    instance.start_frontend()

    def expected(seed: int) -> dict[str, Any]:
        request_id = complete(instance, seed, instance.frontend_url)
        record = httpx.get(f"{instance.frontend_url}/dynaserve/requests/{request_id}", timeout=30).raise_for_status().json()
        return dict(record["sequences"][0]["expected"])

    first = expected(0)
    assert "ttft_ms" not in first
    later = next(found for seed in range(1, 40) if "ttft_ms" in (found := expected(seed)))
    assert later["ttft_ms"] > 0
    assert later["decode_step_ms"] > 0


def test_what_was_learnt_is_there_when_the_instance_has_ended(instance: LocalFleet) -> None:
    instance.stop()
    assert instance.log_dir is not None
    steps = list(read_log(instance.log_dir / "steps.csv"))
    assert sum(step.measured.prefill_tokens + step.measured.decodes for step in steps) >= REQUESTS * (300 + OUTPUT_TOKENS - 1)
    table = latency_profile.load(instance.log_dir / "profile.json")
    assert table.step_ms(BatchShape(decodes=4, decode_context_tokens=1200)) > 0


def test_a_sweep_measures_just_the_steps_that_it_plans(instance: LocalFleet, tmp_path: Path) -> None:
    sizes = ["--prefill", "0", "48", "--decodes", "0", "1", "4", "--context", "100"]
    engine = ["--dtype", "float32", "--block-size", "32", "--max-model-len", "2048", "--enforce-eager", *LIMITS]
    command = [sys.executable, "-m", "dynaserve.cli", "profile", str(instance.model), "--output", str(tmp_path / "p.json"), *sizes, *engine]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, env=os.environ | SMALL)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "5 kinds of steps" in done.stderr
    table = latency_profile.load(tmp_path / "p.json")
    assert table.step_ms(BatchShape(prefill_tokens=48, prefill_pairs=48 * 24, decodes=4, decode_context_tokens=400)) > 0
