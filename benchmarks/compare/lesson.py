"""What the latencies that all starts begin with were learnt from, beside them on disk: those of other requests, or of another machine,
would make other systems of the same names."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks import provenance
from benchmarks.checkout import commit
from benchmarks.compare.outcome import differences
from dynaserve.errors import ConfigError


@dataclass(frozen=True)
class Lesson:
    """traces: the folder of the trace files; None: none."""

    workloads: Sequence[str]
    scale: float
    traces: str | None
    dtype: str
    machine: Mapping[str, Any]


def keep(profile: Path, lesson: Lesson) -> None:
    """With the commit."""
    profile.parent.mkdir(parents=True, exist_ok=True)
    provenance.keep(profile, {**asdict(lesson), "commit": commit()})


def of(profile: Path) -> dict[str, Any] | None:
    """None: it does not say. Raises ConfigError for a file that cannot be read."""
    path = provenance.beside(profile)
    try:
        return dict(json.loads(path.read_bytes()))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from error


def why_not_of(profile: Path, lesson: Lesson) -> str | None:
    """Why these latencies are not what this lesson would teach; None: they are, also where it was of more workloads. Raises ConfigError as
    `of`."""
    there = of(profile)
    if there is None:
        return f"has no {provenance.beside(profile).name} that says what it was learnt from"
    here = asdict(lesson)
    if lacking := [name for name in here.pop("workloads") if name not in there.get("workloads", ())]:
        return f"was learnt without {', '.join(lacking)}"
    different = differences({name: there.get(name) for name in here}, here)
    return f"was learnt otherwise, {different}" if different else None
