"""What the front-end's own routes answer, beside vLLM's, to who has a key and who has none."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import httpx
import msgspec
import pytest
from fastapi import FastAPI

pytest.importorskip("vllm")

from prometheus_client.parser import text_string_to_metric_families
from vllm.entrypoints.serve.instrumentator.metrics import attach_router as attach_metrics

from dynaserve.fleet_view import Snapshot
from tests import frontend_app, looked_at
from tests.looked_at import B


def run(scenario: Callable[[httpx.AsyncClient], Awaitable[None]], keys: list[str]) -> None:
    """With a front-end that has started, as vLLM starts it."""

    async def with_frontend() -> None:
        app = FastAPI()
        attach_metrics(app)
        await frontend_app.attach(app, keys)
        async with (
            app.router.lifespan_context(app),
            httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://frontend") as http,
        ):
            await scenario(http)

    asyncio.run(with_frontend())


def test_the_page_is_open_and_its_data_are_not() -> None:
    async def scenario(http: httpx.AsyncClient) -> None:
        page = await http.get("/dynaserve/")
        assert (page.status_code, page.headers["content-type"]) == (200, "text/html; charset=utf-8")
        assert (await http.get("/dynaserve", follow_redirects=True)).content == page.content
        assert (await http.get("/dynaserve/snapshot")).status_code == 401
        answer = await http.get("/dynaserve/snapshot", headers={"authorization": "Bearer sesame"})
        assert msgspec.json.decode(answer.content, type=Snapshot) == looked_at.snapshot()
        assert "/dynaserve/snapshot" in (await http.get("/openapi.json")).json()["paths"]

    run(scenario, ["sesame"])


@pytest.mark.parametrize("_", ["once", "again"])
def test_the_gauges_are_in_vllms_metrics_while_the_server_runs(_: str) -> None:
    async def scenario(http: httpx.AsyncClient) -> None:
        text = (await http.get("/metrics", follow_redirects=True)).text
        samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
        health = {
            sample.labels["health"]: sample.value for sample in samples if sample.labels.get("url") == B and "health" in sample.labels
        }
        assert health == {"up": 0, "suspect": 1, "dead": 0, "draining": 0, "loading": 0}

    run(scenario, [""])
