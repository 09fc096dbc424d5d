"""HTTP to processes of the fleet and to servers that are measured: never through a proxy of the environment, which is for the world
outside and may not reach them."""

from __future__ import annotations

from typing import Any

import httpx


def client(timeout_s: float) -> httpx.Client:
    # A transport of our own takes no proxies. With `trust_env=False` SSL_CERT_FILE would mean nothing, either.
    return httpx.Client(transport=httpx.HTTPTransport(), timeout=timeout_s)


def async_client(base_url: str, timeout: httpx.Timeout, limits: httpx.Limits) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=base_url, transport=httpx.AsyncHTTPTransport(limits=limits), timeout=timeout)


def get(url: str, timeout_s: float) -> httpx.Response:
    with client(timeout_s) as http:
        return http.get(url)


def post(url: str, json: Any, timeout_s: float) -> httpx.Response:
    with client(timeout_s) as http:
        return http.post(url, json=json)
