"""What this machine is, for the record of a measurement."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from pathlib import Path


def cpu_model() -> str:
    """As Linux names it; elsewhere the processor's kind."""
    return next(_told("model name"), platform.processor() or platform.machine())


def fast_dtype() -> str:
    """bfloat16 where this processor computes in it. Elsewhere it is emulated: a prefill of SmolLM2 takes six times as long as in float32
    (AMD EPYC with AVX2, `docs/measurements.md`)."""
    return "bfloat16" if cpu_features() & {"avx512_bf16", "amx_bf16", "bf16"} else "float32"


def cpu_features() -> set[str]:
    """As Linux names them; elsewhere none."""
    return set(next(_told("flags", "Features"), "").split())


def _told(*names: str) -> Iterator[str]:
    """By /proc/cpuinfo, of each core."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return (value.strip() for name, _, value in (line.partition(":") for line in lines) if name.strip() in names)
