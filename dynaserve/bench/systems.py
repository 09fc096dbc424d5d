"""The systems of a comparison: servers that run already, or that are started for each turn."""

from __future__ import annotations

import math
import re
import shlex
import tempfile
import time
import tomllib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import httpx

from dynaserve import direct_http
from dynaserve.bench.endpoint import base_urls
from dynaserve.errors import ConfigError
from dynaserve.local.children import Child, start_child, stop_children

_POLL_INTERVAL_S = 0.5
_ASKS_FOR_A_KEY = (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN)
_CUTS = re.compile(r'^dynaserve_requests_total\{cut="(yes|no)".*\} (\S+)$', re.MULTILINE)
_CUT_LATE = re.compile(r'^dynaserve_revised_hand_offs_total\{reason="gathers_decodes"\} (\S+)$', re.MULTILINE)
_LIFTED = re.compile(r"^dynaserve_lifted_hand_offs_total (\S+)$", re.MULTILINE)


@dataclass(frozen=True)
class Running:
    """A system during its turn. urls: requests go to each in turn. front_pids: the processes in front of its servers, where they are
    known: their CPU time is told beside the system's figures. check: called after each run; raises DynaServeError if the run was not one
    of the whole system."""

    urls: Sequence[str]
    front_pids: Sequence[int] = ()
    check: Callable[[], None] = lambda: None


@dataclass(frozen=True)
class System:
    """commands: started in this order before each turn and ended after it; empty: the servers run already.

    start: used instead of both, by systems that Python starts; entered before each turn and left after it.
    """

    name: str
    urls: Sequence[str] = ()
    commands: Sequence[Sequence[str]] = ()
    start_timeout_s: float = 600.0
    start: Callable[[], AbstractContextManager[Running]] | None = None


@dataclass(frozen=True)
class CutCounts:
    """Of all requests that the front-end has placed. cut: also those that it cut later. lifted: of those with a cut, how many came to no
    hand-off."""

    cut: float
    whole: float
    lifted: float

    def since(self, before: CutCounts) -> float | None:
        """The share of requests handed over since then; None: there were none."""
        cut, whole, lifted = self.cut - before.cut, self.whole - before.whole, self.lifted - before.lifted
        return max(0.0, cut - lifted) / (cut + whole) if cut + whole > 0 else None


def from_url(text: str) -> System:
    """`NAME=URL` or `NAME=URL,URL,...`. Raises ConfigError."""
    name, equals, urls = text.partition("=")
    if not (equals and name):
        raise ConfigError(f"--system {text!r} is not NAME=URL")
    return System(name, base_urls(urls.split(",")))


def from_toml(path: Path) -> list[System]:
    """A table `[[system]]` for each, with `name`, `url` or a list `urls`, and optionally `commands` (a list of shell-like lines) and
    `start_timeout_s`. Raises ConfigError, naming file and key."""
    try:
        content = tomllib.loads(path.read_text())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from error
    tables = content.get("system")
    if set(content) != {"system"} or not isinstance(tables, list):
        raise ConfigError(f"{path}: holds {', '.join(content) or 'nothing'}; it must hold tables [[system]] only")
    return [_system(path, table) for table in tables]


def _system(path: Path, table: object) -> System:
    if not isinstance(table, dict):
        raise ConfigError(f"{path}: system has {table!r}, which is no table [[system]]")
    kinds: dict[str, type | tuple[type, ...]] = {
        "name": str,
        "url": str,
        "urls": list,
        "commands": list,
        "start_timeout_s": (int, float),
    }
    for key, value in table.items():
        if key not in kinds:
            raise ConfigError(f"{path}: system key {key!r} is unknown; there is {', '.join(kinds)}")
        if not isinstance(value, kinds[key]) or isinstance(value, bool):
            raise ConfigError(f"{path}: system key {key} is {value!r}")
    urls = [table["url"]] if "url" in table else table.get("urls", [])
    if missing := [key for key, value in (("name", table.get("name")), ("url", urls)) if not value]:
        raise ConfigError(f"{path}: a system has no {', '.join(missing)}")
    if "url" in table and "urls" in table:
        raise ConfigError(f"{path}: system {table['name']} has url and urls: it needs one of them")
    start_timeout_s = table.get("start_timeout_s", System.start_timeout_s)
    if not 0 < start_timeout_s < math.inf:
        raise ConfigError(f"{path}: system key start_timeout_s is {start_timeout_s!r}, not a number above 0")
    commands = [_command(path, line) for line in table.get("commands", [])]
    try:
        return System(table["name"], base_urls(map(str, urls)), commands, float(start_timeout_s))
    except ConfigError as error:
        raise ConfigError(f"{path}: system {table['name']}: {error}") from error


def _command(path: Path, line: object) -> list[str]:
    try:
        words = shlex.split(line) if isinstance(line, str) else []
    except ValueError as error:
        raise ConfigError(f"{path}: system key commands has {line!r}, which is no command line: {error}") from error
    if not words:
        raise ConfigError(f"{path}: system key commands has {line!r}, which is no command line")
    return words


@contextmanager
def running(system: System) -> Iterator[Running]:
    """Starts the system for one turn, unless it runs already. Raises ConfigError."""
    if system.start is not None:
        with system.start() as serving:
            yield serving
        return
    with started(system) as children:
        yield Running(system.urls, check=partial(_check_alive, system, children))


@contextmanager
def started(system: System) -> Iterator[Sequence[Child]]:
    """Starts the system's commands and waits until it lists its models; ends them on leaving. Gives their processes, in order.

    Raises ConfigError.
    """
    if not system.commands:
        yield ()
        return
    if answering := [url for url in system.urls if _answers(url)]:
        raise ConfigError(f"system {system.name}: something answers at {answering[0]} before it is started")
    with tempfile.TemporaryDirectory(prefix="dynaserve-compare-") as folder:
        children = []
        try:
            for number, command in enumerate(system.commands):
                children.append(start_child(f"{system.name}-{number}", command, Path(folder) / f"{number}.log"))
            deadline = time.monotonic() + system.start_timeout_s
            while silent := [url for url in system.urls if not _answers(url)]:
                _check_alive(system, children)
                if time.monotonic() > deadline:
                    raise ConfigError(f"system {system.name}: {silent[0]} does not answer after {system.start_timeout_s:g} s")
                time.sleep(_POLL_INTERVAL_S)
            yield children
        finally:
            stop_children(children)


def _check_alive(system: System, children: Sequence[Child]) -> None:
    """Raises ConfigError with the end of its log where a command has ended: what stands before it may go on with the others."""
    for child in children:
        if child.exit_status is not None:
            raise ConfigError(f"system {system.name}: a command ended with status {child.exit_status}: {child.last_lines(5)}")


def cut_counts(urls: Sequence[str]) -> CutCounts | None:
    """What the front-ends counted so far; None: one of these servers counts no cuts."""
    counts = [counted for url in urls if (counted := _cut_counts(url)) is not None]
    if len(counts) < len(urls):
        return None
    return CutCounts(sum(one.cut for one in counts), sum(one.whole for one in counts), sum(one.lifted for one in counts))


def _cut_counts(url: str) -> CutCounts | None:
    try:
        response = direct_http.get(f"{url}/metrics", timeout_s=10.0)
    except httpx.HTTPError:
        return None
    return None if response.is_error else counts_in(response.text)


def counts_in(metrics: str) -> CutCounts | None:
    """From the text of `/metrics`."""
    if "dynaserve_requests" not in metrics:
        return None
    found = [(kind, float(value)) for kind, value in _CUTS.findall(metrics)]
    cut, whole = (sum(value for kind, value in found if kind == wanted) for wanted in ("yes", "no"))
    late = sum(map(float, _CUT_LATE.findall(metrics)))
    return CutCounts(cut + late, whole - late, sum(map(float, _LIFTED.findall(metrics))))


def _answers(url: str) -> bool:
    """Also where it asks for a key, which it does only once it serves."""
    try:
        response = direct_http.get(f"{url}/v1/models", timeout_s=5.0)
    except httpx.HTTPError:
        return False
    return response.is_success or response.status_code in _ASKS_FOR_A_KEY
