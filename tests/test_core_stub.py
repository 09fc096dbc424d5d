"""The committed stub is what the compiled core says of itself."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

STUB = Path(__file__).parent.parent / "dynaserve" / "_core.pyi"


def test_committed_stub_matches_the_compiled_core(tmp_path: Path) -> None:
    regenerated = tmp_path / "_core.pyi"
    subprocess.run(
        [sys.executable, "-m", "nanobind.stubgen", "-q", "-m", "dynaserve._core", "-o", str(regenerated)],
        check=True,
    )
    assert STUB.read_text() == regenerated.read_text(), "the stub is stale: run `make stubs`"
