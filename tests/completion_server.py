"""A real HTTP server that streams completions like vLLM, and can do what a real engine cannot be made to do."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse, StreamingResponse

from dynaserve.local.fleet import free_ports

METRICS = """\
vllm:num_requests_running{engine="0",model_name="toy"} 2.0
vllm:num_requests_running{engine="1",model_name="toy"} 1.0
vllm:num_requests_waiting{engine="0",model_name="toy"} 5.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="toy",reason="capacity"} 9.0
vllm:kv_cache_usage_perc{engine="0",model_name="toy"} 0.25
vllm:kv_cache_usage_perc{engine="1",model_name="toy"} 0.5
vllm:cache_config_info{block_size="16",enable_prefix_caching="True",engine="0",num_gpu_blocks="100"} 1.0
"""


@dataclass(frozen=True)
class Act:
    """What happens to requests; the client's probe, of 2 tokens, is spared faults.

    status: answers with that. delay_s: before each event. per_event: tokens in one event. usage: `each` event, `end` or `never`.
    cut_after, error_after, stop_after: after that many tokens the connection is cut, an error event is sent, or the answer ends for
    the reason `finish`. gather: nothing is answered before that many requests have come. lose: prompt tokens that are not counted, of
    prompts over 2. strict: refuses fields of vLLM. health: status of /health. text: of a token. slots: requests that are answered at a
    time, the others wait in a queue; 0: all. pause_s: before the last token of the third prompt. holds_back: end tokens, until there are
    `min_tokens` others; otherwise one that is asked for by `logit_bias` comes at once.
    """

    status: int = 200
    delay_s: float = 0.0
    per_event: int = 1
    usage: str = "each"
    cut_after: int | None = None
    error_after: int | None = None
    stop_after: int | None = None
    finish: str = "stop"
    gather: int = 0
    lose: int = 0
    strict: bool = False
    health: int = 200
    text: str = "a"
    slots: int = 0
    pause_s: float = 0.0
    holds_back: bool = True


@dataclass
class CompletionServer:
    url: str
    act: Act = field(default_factory=Act)
    models: list[str] = field(default_factory=lambda: ["toy"])
    adapters: list[str] = field(default_factory=list)
    bodies: list[dict[str, Any]] = field(default_factory=list)
    authorizations: list[str | None] = field(default_factory=list)
    gathered: asyncio.Event = field(default_factory=asyncio.Event)
    slots: asyncio.Semaphore | None = None
    metrics: str = METRICS

    @property
    def prompts(self) -> list[list[int]]:
        """Without the probe, which is always the first."""
        return [body["prompt"] for body in self.bodies if len(body["prompt"]) > 2]

    def app(self) -> FastAPI:
        app = FastAPI()
        app.get("/v1/models")(self._list)
        app.get("/version")(lambda: {"version": "1.2.3"})
        app.get("/health", response_model=None)(lambda: Response(status_code=self.act.health))
        app.get("/metrics", response_class=PlainTextResponse)(lambda: self.metrics)
        app.post("/v1/completions", response_model=None)(self._complete)
        return app

    async def _list(self) -> dict[str, Any]:
        adapters = [{"id": name, "parent": self.models[0]} for name in self.adapters]
        return {"data": [{"id": name, "root": "/models/toy", "max_model_len": 64} for name in self.models] + adapters}

    async def _complete(self, request: Request) -> Response:
        body = await request.json()
        self.bodies.append(body)
        self.authorizations.append(request.headers.get("authorization"))
        act = self.act
        is_probe = len(body["prompt"]) == 2
        if act.strict and "continuous_usage_stats" in body["stream_options"]:
            return JSONResponse({"error": {"message": "unknown field continuous_usage_stats"}}, 400)
        if act.status != 200 and not is_probe:
            return JSONResponse({"error": {"message": "as asked"}}, act.status)
        if act.gather and not is_probe:
            if len(self.prompts) == act.gather:
                self.gathered.set()
            await self.gathered.wait()
        if len(self.prompts) != 3:
            act = replace(act, pause_s=0.0)
        if act.slots and not is_probe:
            self.slots = self.slots or asyncio.Semaphore(act.slots)
            return StreamingResponse(_in_turn(self.slots, body, act), media_type="text/event-stream")
        return StreamingResponse(
            _events(body, Act(lose=act.lose, usage=act.usage, holds_back=act.holds_back) if is_probe else act),
            media_type="text/event-stream",
        )


async def _in_turn(slots: asyncio.Semaphore, body: dict[str, Any], act: Act) -> AsyncIterator[str]:
    async with slots:
        async for event in _events(body, act):
            yield event


async def _events(body: dict[str, Any], act: Act) -> AsyncIterator[str]:
    wanted, finish_reason = body["max_tokens"], "length"
    if "logit_bias" in body:
        wanted, finish_reason = (body["min_tokens"] if act.holds_back else 0) + 1, "stop"
    if act.stop_after is not None:
        wanted, finish_reason = act.stop_after, act.finish
    prompt_tokens = len(body["prompt"]) - (act.lose if len(body["prompt"]) > 2 else 0)
    made = 0
    while made < wanted:
        await asyncio.sleep(act.delay_s)
        if act.cut_after is not None and made >= act.cut_after:
            raise ConnectionResetError
        if act.error_after is not None and made >= act.error_after:
            yield _data({"error": {"message": "engine gone"}})
            return
        tokens = min(act.per_event, wanted - made)
        if made + tokens == wanted:
            await asyncio.sleep(act.pause_s)
        made += tokens
        finish = None if made < wanted else finish_reason
        choice = {"text": act.text * tokens, "finish_reason": finish} | (
            {"token_ids": [7] * tokens} if body.get("return_token_ids") else {}
        )
        event: dict[str, Any] = {"choices": [choice]}
        yield _data(event | ({"usage": _usage(prompt_tokens, made)} if act.usage == "each" else {}))
    if act.usage != "never":
        yield _data({"choices": [], "usage": _usage(prompt_tokens, made)})
    yield "data: [DONE]\n\n"


def _usage(prompt_tokens: int, completion_tokens: int) -> dict[str, int]:
    return {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens}


def _data(event: dict[str, Any]) -> str:
    return f"data: {json.dumps(event, ensure_ascii=False)}\n\n"


@contextmanager
def running_server(certificate: Path | None = None) -> Iterator[CompletionServer]:
    """certificate: PEM with its key; it then speaks TLS."""
    (port,) = free_ports(1)
    scheme = "http" if certificate is None else "https"
    completion_server = CompletionServer(f"{scheme}://127.0.0.1:{port}")
    app = completion_server.app()
    config = uvicorn.Config(app, port=port, log_level="critical", lifespan="off", ws="none", ssl_certfile=certificate)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        while not server.started:
            assert thread.is_alive()
        yield completion_server
    finally:
        server.should_exit = True
        thread.join()
