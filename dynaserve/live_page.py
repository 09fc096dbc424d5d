"""The page at `/dynaserve/`: one HTML file without data, which asks for a snapshot each second.

Its style and its script are known to the browser by their hashes; nothing else may run, load, or be sent anywhere else.
"""

from __future__ import annotations

import base64
import hashlib
import re
from importlib import resources


def _hash(tag: str, html: str) -> str:
    (content,) = re.findall(rf"<{tag}>(.*?)</{tag}>", html, re.DOTALL)
    return f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"


def _policy(html: str) -> str:
    """Its Content-Security-Policy. `data:` is the empty icon, without which a browser asks for one."""
    rules = {
        "default-src": "'none'",
        "script-src": _hash("script", html),
        "style-src": _hash("style", html),
        "img-src": "data:",
        "connect-src": "'self'",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
    }
    return "; ".join(f"{name} {value}" for name, value in rules.items())


_HTML = resources.files("dynaserve").joinpath("live_page.html").read_text(encoding="utf-8")

CONTENT = _HTML.encode()
HEADERS = {
    "content-type": "text/html; charset=utf-8",
    "content-security-policy": _policy(_HTML),
    "cache-control": "no-cache",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}
