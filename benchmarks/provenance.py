"""What a figure needs to be trusted later: the command that made it, its seed, the commit and the machine."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.checkout import commit
from dynaserve.bench.report import machine
from dynaserve.files import write_in_one_move


def of(module: str, arguments: Sequence[str], **more: Any) -> dict[str, Any]:
    """Of `python -m MODULE` with these arguments, here and now. more: what stands beside the command, as its seed."""
    command = shlex.join(["python", "-m", module, *arguments])
    return {"command": command, **more, "commit": commit(), "machine": machine()}


def text(provenance: Mapping[str, Any]) -> str:
    """A line for each part."""
    return "\n".join(f"{name}: {value if isinstance(value, str) else json.dumps(value)}" for name, value in provenance.items())


def beside(table: Path) -> Path:
    """The file of its provenance: NAME.provenance.json of NAME.csv.

    Not NAME.json: that may be the profile which the table was made of. Not lines in the table: its readers would take them for the header.
    """
    return table.parent / f"{table.name.removesuffix('.csv')}.provenance.json"


def keep(table: Path, provenance: Mapping[str, Any]) -> None:
    """Beside the table."""
    write_in_one_move(beside(table), json.dumps(provenance, indent=1).encode())
