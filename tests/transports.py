"""The transports that the tests go over, on this device and with what is installed."""

from __future__ import annotations

import pytest

from tests.conftest import mooncake_missing
from tests.device import DEVICE

ON_HOST = ("same-host",) if DEVICE == "cpu" else ()
"""Of caches in its memory only."""
OFFERED = ("torch", *ON_HOST, *(() if mooncake_missing() else ("mooncake",)))
"""By instances."""
TRANSPORTS = ("torch", *([*ON_HOST, pytest.param("mooncake", marks=pytest.mark.mooncake)] if DEVICE == "cpu" else []))
"""Of a test with a parameter `transport`."""
