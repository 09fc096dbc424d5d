"""Which commit of this repository is measured."""

from __future__ import annotations

import subprocess
from pathlib import Path


def commit() -> str:
    """Abbreviated, with a + where files differ from it; `not known` where git does not tell."""
    command = ["git", "describe", "--always", "--abbrev=7", "--exclude=*", "--dirty=+"]
    try:
        done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "not known"
    return done.stdout.strip()
