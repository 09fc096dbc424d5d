"""Instances of two tensor-parallel workers each: every rank sends its part of the KV to its peer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from dynaserve.local.fleet import LocalFleet
from dynaserve.local.model import cache_dir, random_model, smollm2
from tests.e2e.fleet import NO_KEEP_ALIVE, FleetUnderTest, prompt_of
from tests.transports import OFFERED, TRANSPORTS

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

P = 100


@pytest.fixture(scope="module")
def parallel_fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FleetUnderTest]:
    model = random_model(smollm2(), cache_dir() / "random-llama", seed=1)
    local = LocalFleet(
        model,
        vllm_args=["--tensor-parallel-size", "2", "--max-num-batched-tokens", "64", "--dynaserve-transports", *OFFERED],
        env={"VLLM_CPU_OMP_THREADS_BIND": "0|1"},
        max_model_len=512,
        log_dir=tmp_path_factory.mktemp("parallel"),
        start_timeout_s=600.0,
    )
    with local:
        frontend, *instances = [httpx.Client(base_url=url, timeout=300, limits=NO_KEEP_ALIVE) for url in (local.frontend_url, *local.urls)]
        under_test = FleetUnderTest(frontend, instances, str(model))
        under_test.warm_up()
        yield under_test
        for client in (frontend, *instances):
            client.close()


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("split", [1, 64, P - 1, P, P + 1, P + 20])
def test_a_cut_over_two_ranks_is_exact(parallel_fleet: FleetUnderTest, split: int, transport: str) -> None:
    prompt = prompt_of(P, seed=4)
    params: dict[str, Any] = {"max_tokens": 30, "temperature": 0.9, "seed": 3}
    reference = parallel_fleet.complete(prompt, split=0, **params)
    answer = parallel_fleet.complete(prompt, split=split, transport=transport, **params)
    record = parallel_fleet.record(answer)
    assert answer.same_as(reference)
    assert (record["split_token"], record["lifted"], record["recomputed_tokens"]) == (split, None, 0)
    assert record["kv"]["bytes"] == -(-split // 32) * record["kv"]["block_bytes"], "both ranks together"
    parallel_fleet.wait_until_empty()
