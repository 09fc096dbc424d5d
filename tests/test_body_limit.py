"""The limit of a request's body, at a real server with either of uvicorn's parsers."""

from __future__ import annotations

import select
import socket
import threading
import time
from collections.abc import Iterator

import httpx
import pytest

pytest.importorskip("fastapi")

import uvicorn
from fastapi import FastAPI
from pydantic import BaseModel

from vllm_plugin.body_limit import BodyLimit

LIMIT = 100_000
LONGEST_HEADER = 50_000


class Prompt(BaseModel):
    prompt: str


def application() -> FastAPI:
    app = FastAPI()

    @app.post("/length")
    async def length(body: Prompt) -> int:
        return len(body.prompt)

    app.add_middleware(BodyLimit, most_bytes=LIMIT)
    return app


@pytest.fixture(scope="module", params=["h11", "httptools"])
def client(request: pytest.FixtureRequest) -> Iterator[httpx.Client]:
    config = uvicorn.Config(application(), port=0, http=request.param, log_level="error", h11_max_incomplete_event_size=LONGEST_HEADER)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    with httpx.Client(base_url=f"http://127.0.0.1:{port}") as client:
        yield client
    server.should_exit = True
    thread.join()


def body_of(size: int) -> bytes:
    return b'{"prompt": "' + b"x" * (size - 14) + b'"}'


def pieces_of(size: int) -> Iterator[bytes]:
    """Sent without a Content-Length."""
    body = body_of(size)
    yield from (body[start : start + 7_000] for start in range(0, size, 7_000))


@pytest.mark.parametrize("chunked", [False, True], ids=["with a length", "chunked"])
@pytest.mark.parametrize(("size", "status"), [(LIMIT, 200), (LIMIT + 1, 413), (30 * LIMIT, 413)])
def test_a_longer_body_is_answered_413(client: httpx.Client, size: int, status: int, chunked: bool) -> None:
    content = pieces_of(size) if chunked else body_of(size)
    answer = client.post("/length", content=content, headers={"content-type": "application/json"})
    assert answer.status_code == status
    sentence = f"the body of the request is longer than {LIMIT} bytes (--max-body-bytes)"
    assert answer.json() == (size - 14 if status == 200 else {"detail": sentence})
    assert client.post("/length", json={"prompt": "four"}).json() == 4


def test_a_declared_length_is_enough(client: httpx.Client) -> None:
    """Nothing of the body is waited for: here none comes."""
    assert client.base_url.port is not None
    with socket.create_connection(("127.0.0.1", client.base_url.port), timeout=30) as connection:
        connection.sendall(f"POST /length HTTP/1.1\r\nhost: x\r\ncontent-length: {LIMIT + 1}\r\n\r\n".encode())
        assert connection.recv(100).startswith(b"HTTP/1.1 413 ")


def test_headers_have_a_limit_with_h11(client: httpx.Client, request: pytest.FixtureRequest) -> None:
    """Which is why the front-end uses it."""
    assert client.base_url.port is not None
    with socket.create_connection(("127.0.0.1", client.base_url.port)) as connection:
        connection.sendall(b"POST /length HTTP/1.1\r\nx-long: ")
        sent = 0
        while sent < 20 * LONGEST_HEADER and not select.select([connection], [], [], 0.02)[0]:
            sent += connection.send(b"x" * 10_000)
        if request.node.callspec.params["client"] == "h11":
            assert connection.recv(100).startswith(b"HTTP/1.1 400 ")
        assert (sent < 20 * LONGEST_HEADER) == (request.node.callspec.params["client"] == "h11")
