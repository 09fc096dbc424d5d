"""What this machine is, for the record of a measurement."""

from __future__ import annotations

import platform
from pathlib import Path


def cpu_model() -> str:
    """As Linux names it; elsewhere the processor's kind."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())
