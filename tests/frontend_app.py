"""The front-end's own routes on an app, over a client of which they only ask what it knows."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from types import SimpleNamespace

from fastapi import FastAPI

from dynaserve.fleet_view import Snapshot
from tests import looked_at
from vllm_plugin.frontend_routes import FrontendEndpoint


async def attach(
    app: FastAPI,
    keys: list[str],
    snapshot: Callable[[], Snapshot] = looked_at.snapshot,
    *,
    host: str | None = "127.0.0.1",
    uds: str | None = None,
) -> None:
    """As vLLM starts it, without adapters. snapshot: what the client shows; everything else that it is asked for is of no instance."""
    endpoint = FrontendEndpoint()
    endpoint.attach_router(app)
    client = SimpleNamespace(
        snapshot=snapshot, watch=lambda _: None, know_adapters=lambda _: None, retry_after_s=0.0, instances={}, frontend_id="f"
    )
    app.state.openai_serving_models = SimpleNamespace(lora_requests={})
    await endpoint.init_state(SimpleNamespace(engine_core=client), app.state, Namespace(api_key=keys, host=host, uds=uds))
