"""What this machine must have to install DynaServe and to run a local fleet. Standard library only."""

from __future__ import annotations

import os
import platform
import shutil
import socket
import subprocess
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

GIB = 1 << 30
OLDEST_PYTHON, NEWEST_PYTHON = (3, 11), (3, 13)
FLEET_MEMORY_BYTES = 10 * GIB
INSTALL_DISK_BYTES = 5 * GIB
FLEET_CORES = 2
CXX20_PROGRAM = "#include <concepts>\n#include <span>\nstatic_assert(std::integral<int>);\nint main() { return std::span<int>{}.size(); }\n"


@dataclass(frozen=True)
class Machine:
    """Facts about a machine. compiler: a C++20 compiler that works here, None without one."""

    python: tuple[int, int]
    has_ensurepip: bool
    has_python_headers: bool
    compiler: str | None
    processor: str
    cpu_flags: frozenset[str]
    cores: int
    free_memory_bytes: int
    free_disk_bytes: int


def inspect_machine(folder: Path) -> Machine:
    """Facts about this machine; the disk is that of `folder`."""
    return Machine(
        python=(sys.version_info.major, sys.version_info.minor),
        has_ensurepip=find_spec("ensurepip") is not None,
        has_python_headers=(Path(sysconfig.get_path("include")) / "Python.h").is_file(),
        compiler=find_compiler(os.environ),
        processor=f"{platform.system()} {platform.machine()}",
        cpu_flags=_cpu_flags(),
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        free_memory_bytes=free_memory_bytes(),
        free_disk_bytes=shutil.disk_usage(folder).free,
    )


def install_misses(machine: Machine, disk_bytes: int = INSTALL_DISK_BYTES) -> list[str]:
    """What the installation lacks, one sentence each."""
    misses = []
    if not OLDEST_PYTHON <= machine.python <= NEWEST_PYTHON:
        misses.append(f"Python is {_dotted(machine.python)}, but {_dotted(OLDEST_PYTHON)} to {_dotted(NEWEST_PYTHON)} is needed.")
    if not machine.has_ensurepip:
        misses.append(f"This Python has no ensurepip, which makes virtual environments (Debian: python{_dotted(machine.python)}-venv).")
    if not machine.has_python_headers:
        misses.append(f"Python.h is missing, which the C++ core is compiled against (Debian: python{_dotted(machine.python)}-dev).")
    if machine.compiler is None:
        misses.append("No C++20 compiler was found: install g++ 11 or newer, clang++ 14 or newer, or name one in CXX.")
    if machine.free_disk_bytes < disk_bytes:
        misses.append(f"The disk has {_gib(machine.free_disk_bytes)} free, but the installation takes {_gib(disk_bytes)}.")
    return misses


def fleet_misses(machine: Machine) -> list[str]:
    """What a local fleet of two instances lacks, one sentence each."""
    misses = []
    if machine.processor != "Linux x86_64":
        misses.append(f"This is {machine.processor}, but the local fleet runs on Linux x86_64 only.")
    elif not machine.cpu_flags & {"avx2", "avx512f"}:
        misses.append("The processor has neither AVX2 nor AVX512, one of which vLLM's CPU build needs.")
    if machine.cores < FLEET_CORES:
        misses.append(f"This process may use {machine.cores} core, but the fleet needs {FLEET_CORES}: one for each instance.")
    if machine.free_memory_bytes < FLEET_MEMORY_BYTES:
        misses.append(f"{_gib(machine.free_memory_bytes)} of memory are free, but the fleet takes {_gib(FLEET_MEMORY_BYTES)}.")
    return misses


def port_misses(ports: Sequence[int]) -> list[str]:
    """One sentence for each port of 127.0.0.1 that another process listens on."""
    return [f"Port {port} of 127.0.0.1 is in use: stop what listens there, or choose another." for port in ports if not _is_free(port)]


def find_compiler(environment: Mapping[str, str]) -> str | None:
    """The first of $CXX, c++, g++ and clang++ that compiles C++20; $CXX alone if it is set."""
    for candidate in [environment["CXX"]] if environment.get("CXX") else ["c++", "g++", "clang++"]:
        command = [*candidate.split(), "-std=c++20", "-fsyntax-only", "-x", "c++", "-"]
        if shutil.which(command[0]) and subprocess.run(command, input=CXX20_PROGRAM, text=True, capture_output=True).returncode == 0:
            return candidate
    return None


def held_bytes(folder: Path) -> int:
    """What its files take of the disk; 0: there is none."""
    return sum(512 * path.lstat().st_blocks for path in folder.rglob("*"))


def _is_free(port: int) -> bool:
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def _cpu_flags() -> frozenset[str]:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return frozenset(next((line.partition(":")[2].split() for line in lines if line.startswith("flags")), []))


def free_memory_bytes(meminfo: Path = Path("/proc/meminfo"), cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Of the machine, or of the container's cgroup where that is less; what caches hold of files counts as free in both."""
    lines = meminfo.read_text().splitlines() if meminfo.exists() else []
    free = next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable")), 0)
    limit, used, stat = cgroup / "memory.max", cgroup / "memory.current", cgroup / "memory.stat"
    if limit.exists() and used.exists() and limit.read_text().strip() != "max":
        held = dict(line.split() for line in stat.read_text().splitlines()) if stat.exists() else {}
        cached = sum(int(held.get(name, 0)) for name in ("active_file", "inactive_file", "slab_reclaimable"))
        free = min(free, int(limit.read_text()) - int(used.read_text()) + cached)
    return free


def _dotted(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / GIB:.1f} GiB"
