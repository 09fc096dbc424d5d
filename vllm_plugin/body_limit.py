"""Bounds what a client may send: vLLM's server keeps the body of a request in memory, however long it is."""

from __future__ import annotations

from typing import TYPE_CHECKING

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send


class BodyLimit:
    """ASGI middleware: a request with a body of more than `most_bytes` is answered 413, with or without a Content-Length.

    The error is raised where the application reads, so that it is written as the application's other errors are.
    """

    def __init__(self, app: ASGIApp, most_bytes: int) -> None:
        self.app = app
        self.most_bytes = most_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":  # the server bounds the messages of a websocket itself
            await self.app(scope, receive, send)
            return
        declared = Headers(scope=scope).get("content-length", "")
        length = int(declared) if declared.isdecimal() else 0
        received = 0

        async def receive_bounded() -> Message:
            nonlocal received
            if length <= self.most_bytes:
                message = await receive()
                received += len(message.get("body", b""))
            if max(length, received) > self.most_bytes:
                raise HTTPException(413, f"the body of the request is longer than {self.most_bytes} bytes (--max-body-bytes)")
            return message

        await self.app(scope, receive_bounded, send)
