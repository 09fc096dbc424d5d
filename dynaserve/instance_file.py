"""The fleet as a file, one instance's URL a line, that may change while the front-end runs."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection
from pathlib import Path

from dynaserve.errors import ConfigError
from dynaserve.files import read_entries

logger = logging.getLogger("vllm.dynaserve.frontend")

LOOK_S = 1.0


def read(path: Path) -> tuple[str, ...]:
    """URLs without a trailing slash, each once. Raises ConfigError where there is none."""
    urls = tuple(dict.fromkeys(entry.rstrip("/") for entry in read_entries("--instances-file", path)))
    if not urls:
        raise ConfigError(f"--instances-file {path} names no instance")
    return urls


class InstanceFile:
    """Keeps a fleet equal to what the file names. Instances that came otherwise stay: only what the file no longer names leaves.

    A file that cannot be read, or is empty, changes nothing; an instance that cannot be added or removed is tried again.
    """

    def __init__(
        self,
        path: Path,
        members: Callable[[], Collection[str]],
        add: Callable[[str], Awaitable[None]],
        remove: Callable[[str], Awaitable[None]],
    ) -> None:
        """members: those that are to stay. add, remove: raise ConfigError where it cannot be done."""
        self._path = path
        self._members = members
        self._add = add
        self._remove = remove
        self._named: set[str] = set(members())
        self._told: set[str] = set()

    async def follow(self) -> None:
        """Never returns."""
        while True:
            await asyncio.sleep(LOOK_S)
            await self.look()

    async def look(self) -> None:
        faults: set[str] = set()
        try:
            wanted = set(await asyncio.to_thread(read, self._path))
        except ConfigError as error:
            faults.add(str(error))
        else:
            members = set(self._members())
            self._named |= wanted
            leaving = (self._named - wanted) & members
            results = await asyncio.gather(
                *(self._try(self._add, url, "joins") for url in sorted(wanted - members)),
                *(self._try(self._remove, url, "leaves") for url in sorted(leaving)),
            )
            faults |= {fault for fault in results if fault is not None}
            self._named = wanted | (self._named & set(self._members()))
        for fault in faults - self._told:
            logger.warning("%s", fault)
        self._told = faults

    async def _try(self, change: Callable[[str], Awaitable[None]], url: str, what: str) -> str | None:
        try:
            await change(url)
        except ConfigError as error:
            return f"--instances-file {self._path}: {error}"
        logger.info("instance %s %s the fleet: --instances-file %s", url, what, self._path)
        return None
