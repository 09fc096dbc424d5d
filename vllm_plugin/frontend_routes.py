"""The front-end's own HTTP routes: what was done with a request, and how the fleet is."""

from __future__ import annotations

import logging
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
from fastapi import APIRouter, Depends, FastAPI, HTTPException, Request, Response
from prometheus_client import REGISTRY
from pydantic import BaseModel, Field, model_validator
from vllm.entrypoints.serve.middleware.authenticate import AuthenticationMiddleware

from dynaserve import live_page
from dynaserve.errors import BadRequest, ConfigError
from dynaserve.fleet_secret import is_loopback
from dynaserve.fleet_view import Snapshot
from dynaserve.frontend_metrics import FleetCollector
from dynaserve.serve import MOST_BODY_BYTES
from vllm_plugin.body_limit import BodyLimit
from vllm_plugin.fleet_client import FleetClient

if TYPE_CHECKING:
    from argparse import Namespace
    from pathlib import Path

    from starlette.datastructures import State
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

logger = logging.getLogger("vllm.dynaserve.frontend")

LEAST_RETRY_S, MOST_RETRY_S = 1, 60


@dataclass
class RequestAnswer:
    """sequences: one per answer of the request (several for n > 1 or several prompts); fields as in `dynaserve.records`."""

    request_id: str
    sequences: list[dict[str, Any]]


@dataclass
class FleetAnswer:
    """instances: health (up, suspect, dead or draining), description and last load report of each."""

    frontend_id: str
    instances: dict[str, dict[str, Any]]


class HandOff(BaseModel):
    """hand_off_at: the token at which to cut, as vLLM counts `num_computed_tokens`; null lets the alpha finish alone. to: the instance that
    goes on with a request that runs whole, and is cut now."""

    hand_off_at: int | None = Field(gt=0, lt=1 << 31)
    to: str | None = None

    @model_validator(mode="after")
    def _says_where(self) -> HandOff:
        if self.to is not None and self.hand_off_at is None:
            raise ValueError("to is given, and hand_off_at is null: it must be the token at which to cut")
        return self


@dataclass
class HandOffAnswer:
    """moved: sequences whose instances were asked to; 0: each of them has been handed over already, or runs whole; with `to`: none of them
    runs whole on another instance, as it was placed, and may be cut."""

    request_id: str
    moved: int


class NewInstance(BaseModel):
    """url: of the instance's API server."""

    url: str


@dataclass
class MembershipAnswer:
    """health: up, suspect, dead, draining (it finishes what it runs) or gone."""

    instance: str
    health: str


class FrontendEndpoint:
    """vLLM endpoint plugin (see `patches.install_endpoint`).

    instances_file: names the fleet; None: nothing does but the routes. most_body_bytes: of any request.
    """

    name = "dynaserve"
    required_tasks = ("generate",)

    def __init__(self, instances_file: Path | None = None, most_body_bytes: int = MOST_BODY_BYTES) -> None:
        self._instances_file = instances_file
        self._most_body_bytes = most_body_bytes

    def attach_router(self, app: FastAPI) -> None:
        router = APIRouter(tags=["DynaServe"], dependencies=[Depends(_check_key)])

        @router.get("/dynaserve/requests/{request_id}", summary="Where a request was cut, and what each instance did")
        async def requests(request_id: str, request: Request) -> RequestAnswer:
            records = _client(request).book.find(request_id)
            if not records:
                raise HTTPException(404, f"no record of request {request_id}; the last 4096 sequences are kept")
            return RequestAnswer(request_id, [record.to_json() for record in records])

        @router.post(
            "/dynaserve/requests/{request_id}/hand_off", summary="Move the hand-off point of a running request, lift it, or set one"
        )
        async def hand_off(request_id: str, body: HandOff, request: Request) -> HandOffAnswer:
            client = _client(request)
            try:
                if body.to is not None and body.hand_off_at is not None:
                    asked = await client.cut_whole(request_id, body.hand_off_at, body.to)
                else:
                    asked = await client.move_hand_off(request_id, body.hand_off_at)
            except BadRequest as error:
                raise HTTPException(400, str(error)) from error
            if asked is None:
                raise HTTPException(404, f"no request {request_id} is running")
            return HandOffAnswer(request_id, asked)

        @router.get("/dynaserve/fleet", summary="The instances of the fleet and how busy they are")
        async def fleet(request: Request) -> FleetAnswer:
            client = _client(request)
            instances = {
                name: {
                    "health": client.health(name),
                    "description": msgspec.to_builtins(i.description),
                    "load": msgspec.to_builtins(i.load),
                }
                for name, i in client.instances.items()
            }
            return FleetAnswer(client.frontend_id, instances)

        @router.get("/dynaserve/snapshot", summary="The instances and the last requests, for those who look", response_model=Snapshot)
        async def snapshot(request: Request) -> Response:
            return Response(msgspec.json.encode(_client(request).snapshot()), media_type="application/json")

        @app.get("/dynaserve/", include_in_schema=False)
        async def page() -> Response:
            """Has no data, and needs no key."""
            return Response(live_page.CONTENT, headers=live_page.HEADERS)

        @router.post("/dynaserve/instances", summary="Add an instance to the fleet, or keep one that is leaving")
        async def add(body: NewInstance, request: Request) -> MembershipAnswer:
            client = _client(request)
            try:
                await client.add_instance(body.url)
            except ConfigError as error:
                raise HTTPException(400, str(error)) from error
            return MembershipAnswer(body.url, client.health(body.url.rstrip("/")))

        @router.delete("/dynaserve/instances", summary="Take an instance out of the fleet when it has finished what it runs")
        async def remove(url: str, request: Request) -> MembershipAnswer:
            client = _client(request)
            try:
                await client.take_out(url)
            except ConfigError as error:
                raise HTTPException(400, str(error)) from error
            name = url.rstrip("/")
            return MembershipAnswer(url, client.health(name) if name in client.instances else "gone")

        app.include_router(router)
        app.add_middleware(RetryAfter)
        app.add_middleware(BodyLimit, most_bytes=self._most_body_bytes)
        inner = app.router.lifespan_context

        @asynccontextmanager
        async def lifespan(app: FastAPI) -> AsyncIterator[Any]:
            async with inner(app) as value:
                client: FleetClient = app.state.dynaserve
                client.watch(self._instances_file)  # the start of the server keeps its event loop busy for seconds
                gauges = FleetCollector(client.snapshot)
                REGISTRY.register(gauges)
                try:
                    yield value
                finally:
                    REGISTRY.unregister(gauges)

        app.router.lifespan_context = lifespan

    async def init_state(self, engine_client: Any, state: State, args: Namespace) -> None:
        state.dynaserve = engine_client.engine_core
        engine_client.engine_core.know_adapters(state.openai_serving_models.lora_requests.values)
        keys = [key for key in args.api_key if key]
        state.dynaserve_keys = AuthenticationMiddleware(APIRouter(), keys) if keys else None
        state.dynaserve_open = _is_open(args)


class RetryAfter:
    """ASGI middleware: whoever is told to come again is told when."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_header(message: Message) -> None:
            if message["type"] == "http.response.start" and message["status"] in (429, 503):
                client: FleetClient = scope["app"].state.dynaserve
                wait_s = min(max(math.ceil(client.retry_after_s), LEAST_RETRY_S), MOST_RETRY_S)
                message["headers"] = [*message.get("headers", ()), (b"retry-after", str(wait_s).encode())]
            await send(message)

        await self.app(scope, receive, send_with_header)


def choose_host(args: Namespace) -> None:
    """vLLM's default, all interfaces, is for servers with keys; an address that is named is used, but see `_is_open`."""
    if not args.host and args.uds is None and not any(args.api_key):
        args.host = "127.0.0.1"
        logger.info("listening on %s only, because there is no API key; --host names another address", args.host)


def _is_open(args: Namespace) -> bool:
    """Whether /dynaserve, which can stop instances, is served: to a network only with a key, whatever /v1 is."""
    return any(args.api_key) or args.uds is not None or is_loopback(args.host or "")


def _check_key(request: Request) -> None:
    """vLLM's own check, which guards /v1 only."""
    if not request.app.state.dynaserve_open:
        raise HTTPException(403, "/dynaserve is served to a network only with an API key: start with --api-key or --api-key-file")
    keys: AuthenticationMiddleware | None = request.app.state.dynaserve_keys
    if keys is not None and not keys.verify_token(request.headers):
        raise HTTPException(401, "Unauthorized")


def _client(request: Request) -> FleetClient:
    client: FleetClient = request.app.state.dynaserve
    return client
