"""HTTP to processes of the fleet and to servers that are measured: never through a proxy of the environment, which is for the world
outside and may not reach them."""

from __future__ import annotations

import httpx


def get(url: str, timeout_s: float) -> httpx.Response:
    # A transport of our own takes no proxies. With `trust_env=False` SSL_CERT_FILE would mean nothing, either.
    with httpx.Client(transport=httpx.HTTPTransport(), timeout=timeout_s) as http:
        return http.get(url)
