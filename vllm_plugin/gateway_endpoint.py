"""How the gateway gets into vLLM's API server: a hook for the engine's outputs, and an endpoint plugin."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import msgspec
from fastapi import APIRouter, FastAPI, Request
from vllm.v1.engine import EngineCoreOutputs

from dynaserve.messages import InstanceDescription
from vllm_plugin.gateway import Gateway

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import AsyncIterator

    from starlette.datastructures import State
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.core_client import AsyncMPClient


async def take_fleet_outputs(client: AsyncMPClient, outputs: EngineCoreOutputs) -> None:
    """vLLM's `process_engine_outputs` hook: takes the outputs of fleet requests out of `outputs`, in place."""
    gateway: Gateway | None = getattr(client, "dynaserve_gateway", None)
    if gateway is not None:
        await gateway.take(outputs)


class GatewayEndpoint:
    """vLLM endpoint plugin: starts the gateway with the API server and adds `GET /dynaserve/instance`."""

    name = "dynaserve"
    required_tasks = ("generate",)

    def attach_router(self, app: FastAPI) -> None:
        router = APIRouter(tags=["DynaServe"])

        @router.get("/dynaserve/instance", summary="What a front-end must know of this instance")
        async def instance(request: Request) -> dict[str, Any]:
            description: InstanceDescription = request.app.state.dynaserve.description
            return dict(msgspec.to_builtins(description))

        @router.get("/dynaserve/instance/state", summary="Blocks, requests and transfers held right now")
        async def state(request: Request) -> dict[str, Any]:
            return dict(await request.app.state.dynaserve.engine.call_utility_async("dynaserve_state"))

        app.include_router(router)
        inner = app.router.lifespan_context

        @asynccontextmanager
        async def lifespan(app: FastAPI) -> AsyncIterator[Any]:
            gateway: Gateway = app.state.dynaserve
            async with inner(app) as value:
                try:
                    yield value
                finally:
                    gateway.close()

        app.router.lifespan_context = lifespan

    async def init_state(self, engine_client: AsyncLLM, state: State, args: Namespace) -> None:
        state.dynaserve = await Gateway.start(engine_client, args)
