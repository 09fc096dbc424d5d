"""What this machine is, for the record of a measurement."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from pathlib import Path

_STAT = Path("/proc/stat")


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


class StolenTime:
    """Since it was made: the share of the time of this machine's cores that its host gave to others. On a virtual machine, the noise
    that nothing here can explain."""

    def __init__(self) -> None:
        self._began = _cpu_ticks()

    def share(self) -> float | None:
        """None: this system does not tell, or no time has passed."""
        if self._began is None or (now := _cpu_ticks()) is None or now[0] == self._began[0]:
            return None
        return (now[1] - self._began[1]) / (now[0] - self._began[0])

    def __str__(self) -> str:
        share = self.share()
        return "not known" if share is None else f"{share:.1%}"


def _cpu_ticks() -> tuple[int, int] | None:
    """Of all cores since the start: all of them, and the stolen ones (proc_stat(5): the eighth)."""
    if not _STAT.exists():
        return None
    ticks = [int(field) for field in _STAT.read_text().partition("\n")[0].split()[1:9]]
    return sum(ticks), ticks[7]


def _told(*names: str) -> Iterator[str]:
    """By /proc/cpuinfo, of each core."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return (value.strip() for name, _, value in (line.partition(":") for line in lines) if name.strip() in names)
