"""The systems of a comparison: servers that run already, or that a command starts for each turn."""

from __future__ import annotations

import re
import shlex
import tempfile
import time
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from dynaserve.bench.endpoint import base_url
from dynaserve.errors import ConfigError
from dynaserve.local.children import Child, start_child, stop_children

_POLL_INTERVAL_S = 0.5
_CUTS = re.compile(r'^dynaserve_requests_total\{cut="(yes|no)".*\} (\S+)$', re.MULTILINE)


@dataclass(frozen=True)
class System:
    """commands: started in this order before each turn and ended after it; empty: the server runs already."""

    name: str
    url: str
    commands: Sequence[Sequence[str]] = ()
    start_timeout_s: float = 600.0


@dataclass(frozen=True)
class CutCounts:
    """Of all requests that the front-end has placed."""

    cut: float
    whole: float

    def since(self, before: CutCounts) -> float | None:
        """The share of requests cut since then; None: there were none."""
        cut, whole = self.cut - before.cut, self.whole - before.whole
        return cut / (cut + whole) if cut + whole > 0 else None


def from_url(text: str) -> System:
    """`NAME=URL`. Raises ConfigError."""
    name, equals, url = text.partition("=")
    if not (equals and name):
        raise ConfigError(f"--system {text!r} is not NAME=URL")
    return System(name, base_url(url))


def from_toml(path: Path) -> list[System]:
    """A table `[[system]]` for each, with `name`, `url`, and optionally `commands` (a list of shell-like lines) and
    `start_timeout_s`. Raises ConfigError, naming file and key."""
    try:
        content = tomllib.loads(path.read_text())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from error
    tables = content.get("system")
    if set(content) != {"system"} or not isinstance(tables, list):
        raise ConfigError(f"{path}: holds {', '.join(content) or 'nothing'}; it must hold tables [[system]] only")
    return [_system(path, table) for table in tables]


def _system(path: Path, table: dict[str, Any]) -> System:
    kinds: dict[str, type | tuple[type, ...]] = {"name": str, "url": str, "commands": list, "start_timeout_s": (int, float)}
    for key, value in table.items():
        if key not in kinds:
            raise ConfigError(f"{path}: system key {key!r} is unknown; there is {', '.join(kinds)}")
        if not isinstance(value, kinds[key]):
            raise ConfigError(f"{path}: system key {key} is {value!r}")
    if missing := [key for key in ("name", "url") if key not in table]:
        raise ConfigError(f"{path}: a system has no {', '.join(missing)}")
    commands = [shlex.split(str(line)) for line in table.get("commands", [])]
    return System(table["name"], base_url(table["url"]), commands, float(table.get("start_timeout_s", System.start_timeout_s)))


@contextmanager
def running(system: System) -> Iterator[Sequence[Child]]:
    """Starts the system's commands and waits until it lists its models; ends them on leaving. Gives their processes, in order.

    Raises ConfigError.
    """
    if not system.commands:
        yield ()
        return
    if _answers(system.url):
        raise ConfigError(f"system {system.name}: something answers at {system.url} before it is started")
    with tempfile.TemporaryDirectory(prefix="dynaserve-compare-") as folder:
        children = []
        try:
            for number, command in enumerate(system.commands):
                children.append(start_child(f"{system.name}-{number}", command, Path(folder) / f"{number}.log"))
            deadline = time.monotonic() + system.start_timeout_s
            while not _answers(system.url):
                for child in children:
                    if child.exit_status is not None:
                        raise ConfigError(f"system {system.name}: a command ended with status {child.exit_status}: {child.last_lines(5)}")
                if time.monotonic() > deadline:
                    raise ConfigError(f"system {system.name}: {system.url} does not answer after {system.start_timeout_s:g} s")
                time.sleep(_POLL_INTERVAL_S)
            yield children
        finally:
            stop_children(children)


def cut_counts(url: str) -> CutCounts | None:
    """What the front-end counted so far; None: this server counts no cuts."""
    try:
        response = httpx.get(f"{url}/metrics", timeout=10)
    except httpx.HTTPError:
        return None
    return None if response.is_error else counts_in(response.text)


def counts_in(metrics: str) -> CutCounts | None:
    """From the text of `/metrics`."""
    if "dynaserve_requests" not in metrics:
        return None
    found = [(kind, float(value)) for kind, value in _CUTS.findall(metrics)]
    return CutCounts(sum(value for kind, value in found if kind == "yes"), sum(value for kind, value in found if kind == "no"))


def _answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/v1/models", timeout=5).is_success
    except httpx.HTTPError:
        return False
