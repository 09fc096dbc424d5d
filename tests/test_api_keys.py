"""Keys of the front-end: where they come from, and what is closed without one."""

from __future__ import annotations

import asyncio
from argparse import Namespace
from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI

from dynaserve.errors import ConfigError
from dynaserve.serve import read_api_keys
from tests import frontend_app
from vllm_plugin.frontend_routes import choose_host


def status(path: str, keys: list[str], header: str | None, host: str | None = "127.0.0.1", uds: str | None = None) -> int:
    """Of a front-end without instances."""

    async def ask() -> int:
        app = FastAPI()
        await frontend_app.attach(app, keys, host=host, uds=uds)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://frontend") as client:
            headers = {} if header is None else {"Authorization": header}
            return (await client.get(path, headers=headers)).status_code

    return asyncio.run(ask())


@pytest.mark.parametrize(
    ("keys", "header", "expected"),
    [
        ([""], None, 200),
        (["one", "two"], "Bearer two", 200),
        (["one", "two"], "bearer one", 200),
        (["one", "two"], None, 401),
        (["one", "two"], "Bearer three", 401),
        (["one"], "Basic one", 401),
        (["one"], "Bearer ", 401),
    ],
)
def test_the_management_routes_open_with_any_of_the_keys(keys: list[str], header: str | None, expected: int) -> None:
    assert status("/dynaserve/fleet", keys, header) == expected


@pytest.mark.parametrize(
    ("keys", "host", "uds", "expected"),
    [
        ([""], "0.0.0.0", None, 403),
        ([""], None, None, 403),
        ([""], "10.0.0.1", None, 403),
        (["one"], "0.0.0.0", None, 200),
        ([""], "localhost", None, 200),
        ([""], None, "/run/frontend", 200),
    ],
)
def test_the_management_routes_are_not_served_to_a_network_without_a_key(
    keys: list[str], host: str | None, uds: str | None, expected: int
) -> None:
    assert status("/dynaserve/fleet", keys, "Bearer one", host, uds) == expected


@pytest.mark.parametrize(
    ("keys", "host", "uds", "chosen"),
    [
        ([""], None, None, "127.0.0.1"),
        ([""], "0.0.0.0", None, "0.0.0.0"),
        (["one"], None, None, None),
        ([""], None, "/run/frontend", None),
    ],
)
def test_without_a_key_loopback_is_the_default(keys: list[str], host: str | None, uds: str | None, chosen: str | None) -> None:
    args = Namespace(api_key=keys, host=host, uds=uds)
    choose_host(args)
    assert args.host == chosen


def test_keys_are_read_one_a_line(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("# of the chat application\nfirst \n\nsecond\n")
    assert read_api_keys(path) == ("first", "second")


def test_a_file_without_keys_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    with pytest.raises(ConfigError, match="keys cannot be read"):
        read_api_keys(path)
    path.write_text("# none\n")
    with pytest.raises(ConfigError, match="has no key"):
        read_api_keys(path)
