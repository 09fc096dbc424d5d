"""Skips, shared by all tests."""

from __future__ import annotations

import importlib.util
import os
from functools import cache

import pytest

APT_LINE = "apt-get install libibverbs1 librdmacm1 libnuma1 liburing2"


@cache
def mooncake_missing() -> str | None:
    """Why the Mooncake transfer engine does not load here; None: it does."""
    if importlib.util.find_spec("mooncake") is None:
        return "pip install 'dynaserve[mooncake]'"
    try:
        import mooncake.engine  # noqa: F401
    except ImportError as error:
        return f"{error}: {APT_LINE}"
    return None


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("mooncake") and (missing := mooncake_missing()):
        if os.environ.get("DYNASERVE_REQUIRE_MOONCAKE") == "1":
            pytest.fail(missing)
        pytest.skip(missing)
