"""Who may import whom: the architecture stays as drawn in docs/architecture.md."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("dynaserve", "vllm_plugin", "workloads")

FORBIDDEN = {
    "dynaserve": ("vllm", "vllm_plugin"),
    "dynaserve/kv_transfer/sender.py": ("zmq", "torch", "asyncio", "time"),
    "dynaserve/kv_transfer/receiver.py": ("zmq", "torch", "asyncio", "time"),
    "dynaserve/request_flow.py": ("zmq", "asyncio", "time", "httpx"),
    "dynaserve/liveness.py": ("zmq", "asyncio", "time", "httpx"),
    "dynaserve/frontend_sessions.py": ("zmq", "asyncio", "time", "httpx"),
    "dynaserve/fleet_view.py": ("zmq", "asyncio", "time", "prometheus_client"),
    "dynaserve/request_spans.py": ("zmq", "asyncio", "time"),
    "vllm_plugin/micro_requests.py": ("vllm", "zmq", "torch", "asyncio", "time"),
    "workloads": ("dynaserve", "vllm", "vllm_plugin"),
}
"""Modules, or whole packages of ours, that may not import what is named."""

_DOORS_TO_CORE = [
    "dynaserve/execution_predictor.py",
    "dynaserve/global_scheduler.py",
    "dynaserve/placement_search.py",
    "dynaserve/simulation.py",
    "dynaserve/step_latency.py",
]


def imports_of(path: Path) -> set[str]:
    """Full names of the modules that a file imports, wherever in it, and of what it takes from them, which may be modules as well."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module is not None and not node.level:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


def files(where: str) -> list[Path]:
    path = ROOT / where
    return [path] if path.is_file() else sorted(path.rglob("*.py"))


@pytest.mark.parametrize(("where", "forbidden"), FORBIDDEN.items())
def test_imports_keep_to_the_layers(where: str, forbidden: tuple[str, ...]) -> None:
    assert files(where)
    for file in files(where):
        wrong = {name for name in imports_of(file) if name.partition(".")[0] in forbidden}
        assert not wrong, f"{file.relative_to(ROOT)} imports {sorted(wrong)}"


def test_vllm_is_imported_by_the_plugin_only() -> None:
    importers = {
        file.relative_to(ROOT).parts[0] for p in PACKAGES for file in files(p) if "vllm" in {n.partition(".")[0] for n in imports_of(file)}
    }
    assert importers == {"vllm_plugin"}


def test_workloads_are_imported_by_the_bench_only() -> None:
    for file in files("dynaserve"):
        if "bench" not in file.relative_to(ROOT).parts:
            assert "workloads" not in {name.partition(".")[0] for name in imports_of(file)}, file


def test_the_core_has_five_doors() -> None:
    importers = [str(file.relative_to(ROOT)) for p in PACKAGES for file in files(p) if "dynaserve._core" in imports_of(file)]
    assert importers == _DOORS_TO_CORE


def test_the_core_includes_the_standard_library_only() -> None:
    for file in (ROOT / "cpp_scheduler").rglob("*"):
        if file.suffix in (".h", ".cc") and "bindings" not in file.parts:
            includes = [line.split()[1] for line in file.read_text().splitlines() if line.startswith("#include")]
            foreign = [name for name in includes if name.startswith('"') and not name.startswith('"dynaserve/')]
            assert not foreign, (file.name, foreign)
            assert not {"<chrono>", "<thread>", "<mutex>", "<iostream>", "<fstream>"} & set(includes), file.name
