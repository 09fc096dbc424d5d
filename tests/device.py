"""Where the caches of the tests lie that may be run on a GPU: `DYNASERVE_TEST_DEVICE=cuda`, all of them on the one there is."""

from __future__ import annotations

import os

DEVICE = os.environ.get("DYNASERVE_TEST_DEVICE", "cpu")
