"""The fleet as a file, one instance's URL a line, that may change while the front-end runs."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection
from pathlib import Path

import zmq

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

    A file that cannot be read, or is empty, changes nothing, and an instance leaves once two looks in a row lack it: a file
    may be seen half-written. An instance that cannot be added or removed is tried again. One that does not answer delays neither the others
    nor the next look.
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
        self._wanted: set[str] = set()
        """By the file, as it was read last."""
        self._missing: set[str] = set()
        """What it no longer named then: it leaves if the next look does not find it either, as somebody may be writing the file."""
        self._named: set[str] = set(members())
        self._changing: set[str] = set()
        """Those that are being added or removed: nothing else is done with them meanwhile."""
        self._told: dict[str, str] = {}
        """The fault that was told last, of a URL or of the file."""

    def check_not_named(self, url: str) -> None:
        """Raises ConfigError for one that would be back within a second."""
        if url in self._wanted:
            raise ConfigError(f"instance {url} is named by --instances-file {self._path}: take its line out")

    async def follow(self) -> None:
        """Never returns."""
        async with asyncio.TaskGroup() as changes:
            while True:
                await asyncio.sleep(LOOK_S)
                await self.look(changes)

    async def look(self, changes: asyncio.TaskGroup) -> None:
        """Reads the file and begins what is to be done, in `changes`."""
        try:
            self._wanted = wanted = set(await asyncio.to_thread(read, self._path))
        except ConfigError as error:
            self._tell(str(self._path), str(error))
            return
        members = set(self._members())
        # Also what is not named any more while it is being added: it leaves once it has joined.
        self._named = wanted | (self._named & (members | self._changing))
        self._told = {url: fault for url, fault in self._told.items() if url in self._named}
        for url in sorted(wanted - members - self._changing):
            self._begin(changes, self._add, url, "joins")
        missing = self._named - wanted
        for url in sorted(missing & self._missing & members - self._changing):
            self._begin(changes, self._let_go, url, "leaves")
        self._missing = missing

    def _begin(self, changes: asyncio.TaskGroup, change: Callable[[str], Awaitable[None]], url: str, what: str) -> None:
        self._changing.add(url)
        changes.create_task(self._try(change, url, what))

    async def _try(self, change: Callable[[str], Awaitable[None]], url: str, what: str) -> None:
        try:
            await change(url)
        except ConfigError as error:
            self._tell(url, f"--instances-file {self._path}: {error}")
        except (OSError, zmq.ZMQError) as error:  # no files are left, or the authority's certificate cannot be read: of now, not of it
            self._tell(url, f"--instances-file {self._path}: instance {url} cannot be changed now: {error}")
        else:
            self._told.pop(url, None)
            logger.info("instance %s %s the fleet: --instances-file %s", url, what, self._path)
        finally:
            self._changing.discard(url)

    async def _let_go(self, url: str) -> None:
        await self._remove(url)
        self._named.discard(url)  # should it come back otherwise, it stays

    def _tell(self, subject: str, fault: str) -> None:
        """Once, until it is over or another one."""
        if self._told.get(subject) != fault:
            self._told[subject] = fault
            logger.warning("%s", fault)
