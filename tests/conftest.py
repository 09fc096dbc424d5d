"""Skips, shared by all tests."""

from __future__ import annotations

import importlib.util
import os
import shutil
from functools import cache

import pytest
from hypothesis import settings

settings.register_profile("any speed", deadline=None)  # of an example: a machine may pause in one
settings.load_profile("any speed")

CHROMIUM = ("chromium", "chromedriver")
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


@cache
def chromium_missing() -> str | None:
    """Why no page can be looked at here; None: one can."""
    if importlib.util.find_spec("selenium") is None:
        return "pip install 'dynaserve[dev]'"
    if not all(map(shutil.which, CHROMIUM)):
        return "apt-get install chromium chromium-driver"
    return None


NEEDS = {"mooncake": mooncake_missing, "chromium": chromium_missing}


def pytest_runtest_setup(item: pytest.Item) -> None:
    """DYNASERVE_REQUIRE_MOONCAKE=1 and DYNASERVE_REQUIRE_CHROMIUM=1: what is missing is a failure, not a reason to skip."""
    for name, missing in NEEDS.items():
        if item.get_closest_marker(name) and (reason := missing()):
            if os.environ.get(f"DYNASERVE_REQUIRE_{name.upper()}") == "1":
                pytest.fail(reason)
            pytest.skip(reason)


@pytest.fixture
def unreachable_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment names a proxy behind which nothing is."""
    for name in ("http_proxy", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
