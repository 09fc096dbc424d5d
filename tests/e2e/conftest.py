"""One fleet of real engines for the whole session: two instances and a front-end, a random float32 model."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from dynaserve.local.fleet import LocalFleet
from dynaserve.local.model import cache_dir, random_model, smollm2
from tests.device import DEVICE
from tests.e2e.adapter import ADAPTER, write_adapter
from tests.e2e.bit_flip import BitFlip
from tests.e2e.fleet import NO_KEEP_ALIVE, RUNNING_SLOTS, FleetUnderTest
from tests.transports import OFFERED

REPOSITORY = Path(__file__).parents[2]
CHUNK_TOKENS = 64
LORA = ["--enable-lora", "--max-lora-rank", "8"]
ON_CUDA = ["--attention-backend", "TRITON_ATTN", "--gpu-memory-utilization", "0.05", "--kv-cache-memory-bytes", str(1 << 30)]
"""The backend that computes in float32; both instances are on the one GPU. Without adapters."""
ENV_ON_CUDA = {"TRITON_F32_DEFAULT": "ieee"}
"""Otherwise Triton multiplies float32 as TF32: a token's logprobs differ by up to 0.008 then between batches, of uncut requests as well."""


@pytest.fixture(scope="session")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FleetUnderTest]:
    model = random_model(smollm2(), cache_dir() / "random-llama", seed=1)
    adapter = tmp_path_factory.mktemp("adapter")
    write_adapter(model, adapter, seed=3)
    local = LocalFleet(
        model,
        vllm_args=[
            "--max-num-batched-tokens",
            str(CHUNK_TOKENS),
            "--max-num-seqs",
            str(RUNNING_SLOTS),
            "--dynaserve-transports",
            *OFFERED,
            BitFlip.name,
            *(ON_CUDA if DEVICE == "cuda" else LORA),
        ],
        frontend_args=[
            *("--enable-auto-tool-choice", "--tool-call-parser", "hermes"),
            *([] if DEVICE == "cuda" else [*LORA, "--lora-modules", f"{ADAPTER}={adapter}"]),
        ],
        max_model_len=2048,
        env={
            "PYTHONPATH": os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep),
            **(ENV_ON_CUDA if DEVICE == "cuda" else {}),
        },
        log_dir=tmp_path_factory.mktemp("fleet"),
    )
    with local:
        frontend, *instances = [httpx.Client(base_url=url, timeout=120, limits=NO_KEEP_ALIVE) for url in (local.frontend_url, *local.urls)]
        under_test = FleetUnderTest(frontend, instances, str(model))
        under_test.warm_up()
        yield under_test
        under_test.wait_until_empty()
        for client in (frontend, *instances):
            client.close()
    assert_no_errors_logged(local)


def assert_no_errors_logged(local: LocalFleet) -> None:
    """An exception that nobody sees is still one."""
    assert local.log_dir is not None
    for log in local.log_dir.glob("*.log"):
        serving, _, _ = log.read_text().partition("[shutdown]")  # vLLM itself reports its dead engine core when it is stopped
        errors = [line for line in serving.splitlines() if " ERROR " in line or "Traceback" in line]
        assert not errors, (log.name, errors[:5])
