"""URLs that a person types."""

from __future__ import annotations

import httpx

from dynaserve.errors import ConfigError


def http_url(text: str) -> str:
    """Without a trailing slash. Raises ConfigError for what is not an HTTP URL."""
    try:
        url = httpx.URL(text)
    except httpx.InvalidURL as error:
        raise ConfigError(f"{text!r} is not a URL: {error}") from error
    if url.scheme not in ("http", "https") or not url.host:
        raise ConfigError(f"{text!r} is not a URL: it needs http:// or https://, and a host")
    return text.rstrip("/")
