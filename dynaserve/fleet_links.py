"""A front-end's connections to all instances of its fleet, and which of them are alive.

Each instance has one `InstanceLink` at a time.  When `FleetLiveness` declares it dead the link is closed for good, and
whatever still comes on it is not heard; then the instance is asked again and again who it is, until it is back.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import zmq.asyncio

from dynaserve import fleet, stock
from dynaserve.errors import ConfigError
from dynaserve.fleet import Instance
from dynaserve.fleet_secret import FleetSecret
from dynaserve.instance_link import InstanceLink, Link, LinkLost
from dynaserve.liveness import Changed, FleetLiveness, Health
from dynaserve.messages import InstanceDescription, Pulse, ToInstance

logger = logging.getLogger("vllm.dynaserve.frontend")

REJOIN_EVERY_S = 0.5
ANSWER_TIMEOUT_S = 2.0
BYE_LINGER_MS = 500
MOST_ASKED = 256
"""URLs that are asked at once who they are; each takes a thread until it answers, or its time is up."""


@dataclass
class FleetLinks:
    """All methods run in one event loop.

    on_message: gets every message of a living instance, in order. on_change: gets every change of its health; UP comes before
    the first message and DEAD after the last one. on_tick: called again and again with the time. on_fault: gets what must not happen.
    describe: asks an instance, by its URL and a time limit in seconds, who it is; called in a thread. secret: of the fleet; None:
    loopback only. link_to_stock: makes the link to a server without the plugin.
    """

    frontend_id: str
    on_message: Callable[[str, list[bytes]], Awaitable[None]]
    on_change: Callable[[Changed], Awaitable[None]]
    on_tick: Callable[[float], Awaitable[None]]
    on_fault: Callable[[BaseException], None]
    describe: Callable[[str, float], InstanceDescription] = fleet.describe
    liveness: FleetLiveness = field(default_factory=FleetLiveness)
    secret: FleetSecret | None = None
    link_to_stock: Callable[[Instance], Link] | None = None
    also_check: Callable[[Instance], None] = fleet.suits_any_policy
    instances: dict[str, Instance] = field(default_factory=dict)
    _links: dict[str, Link] = field(default_factory=dict)
    _rejoining: dict[str, asyncio.Task[None]] = field(default_factory=dict)
    _context: zmq.asyncio.Context = field(default_factory=zmq.asyncio.Context)
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)
    _joining: dict[str, Instance] = field(default_factory=dict)
    """Those that have been found to fit, and whose link is being opened."""
    # Not asyncio's own few threads: URLs that do not answer would keep everybody else who needs one waiting.
    _askers: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(MOST_ASKED, "dynaserve-ask"))
    _least_model_len: int = 0
    """Of the instances that the front-end began with: it promises as much to clients."""
    _session: int = 0
    _deserted_since_s: float | None = None
    _closed: bool = False

    async def connect(self, instances: Sequence[Instance], timeout_s: float, *, may_lack: bool = False) -> None:
        """Opens a link to each; raises ConfigError, naming it, where one does not answer as the instance described.

        may_lack: that one is no instance of the fleet then; one with the plugin must answer.
        """
        self._least_model_len = min(instance.description.max_model_len for instance in instances)
        opened = await asyncio.gather(*(self._open(instance, timeout_s) for instance in instances), return_exceptions=True)
        faults = [link for link in opened if isinstance(link, BaseException)]
        for instance, link in zip(instances, opened, strict=True):  # in their order
            if isinstance(link, BaseException):
                self.instances.pop(instance.instance_id, None)
            else:
                await self._enter(instance, link)
        for fault in faults:
            if not may_lack or not isinstance(fault, ConfigError):
                raise fault
            logger.warning("%s; it joins when that is over", fault)
        if faults and all(self.instances[name].description.stock for name in self._links):
            raise faults[0]

    def watch(self) -> None:
        """From now on the event loop is free: instances that are silent are dead."""
        self.spawn(self._watch())

    @property
    def alive(self) -> list[str]:
        return list(self._links)

    def deserted_s(self, now_s: float) -> float:
        """For how long no instance has been alive; 0: one is."""
        return 0.0 if self._deserted_since_s is None else now_s - self._deserted_since_s

    async def send(self, instance_id: str, message: ToInstance, frames: Iterable[Any] = ()) -> None:
        """What is sent to a dead instance is lost; who is concerned hears of the death."""
        if (link := self._links.get(instance_id)) is not None:
            await link.send(message, list(frames))

    async def lost(self, instance_id: str, reason: str) -> None:
        """The instance itself says that it does nothing more for us."""
        await self._apply(self.liveness.lost(instance_id, reason))

    def close(self) -> None:
        """Says goodbye. May be called when the event loop has gone."""
        self._closed = True
        for task in (*self._tasks, *self._rejoining.values()):
            task.cancel()
        for link in self._links.values():
            link.close(bye=True)
        self._links.clear()
        self._askers.shutdown(wait=False, cancel_futures=True)
        self._context.destroy(linger=BYE_LINGER_MS)

    async def add(self, instance: Instance) -> None:
        """A new instance; raises ConfigError where it does not fit, does not answer, or joins already."""
        name = instance.instance_id
        if name in self._joining or name in self.instances:
            raise ConfigError(f"instance {name} is in the fleet already, or is just joining")
        await self._join(self._fitting(instance, fleet.reference_of(self.instances.values())), ANSWER_TIMEOUT_S)

    async def remove(self, instance_id: str) -> None:
        """For good: it is told goodbye if it lives, and not asked any more if it does not."""
        if (rejoining := self._rejoining.pop(instance_id, None)) is not None:
            rejoining.cancel()
            self._joining.pop(instance_id, None)  # not only when the task notices: it may be added anew at once
        if (link := self._links.pop(instance_id, None)) is not None:
            link.close(bye=True)
            if not self._links:
                self._deserted_since_s = time.monotonic()
        for change in self.liveness.remove(instance_id):
            await self.on_change(change)
        self.instances.pop(instance_id, None)

    async def ask(self, url: str, timeout_s: float) -> Instance:
        """Who is there. Raises ConfigError where nobody answers as an instance, OSError where nobody can be asked now."""
        try:
            description = await asyncio.get_running_loop().run_in_executor(self._askers, self.describe, url, timeout_s)
        except (ConfigError, OSError):
            raise
        except Exception as error:  # what answers there must not end the front-end for all
            raise ConfigError(f"instance {url} answers what cannot be read: {error!r}") from error
        return Instance(url, description)

    # -- joining -------------------------------------------------------------------------------------------------------

    async def _join(self, instance: Instance, timeout_s: float) -> None:
        await self._enter(instance, await self._open(instance, timeout_s))

    async def _open(self, instance: Instance, timeout_s: float) -> Link:
        fleet.check_reach(instance, self.secret)
        name = instance.instance_id
        link = self._link_to(instance)
        self._joining[name] = instance
        try:
            await link.open(instance.description.instance_epoch, timeout_s)
        except BaseException:
            link.close()
            raise
        finally:
            if self._joining.get(name) is instance:
                del self._joining[name]
        return link

    async def _enter(self, instance: Instance, link: Link) -> None:
        name = instance.instance_id
        if instance.description.stock:
            logger.warning("instance %s takes whole requests only: %s", name, stock.OBSTACLE)
        self.instances[name] = instance
        self._links[name] = link
        self._deserted_since_s = None
        await self.on_change(self.liveness.join(name))
        self.spawn(self._listen(name, link))
        self.spawn(self._wait_for_end(name, link))

    def _link_to(self, instance: Instance) -> Link:
        if instance.description.stock:
            assert self.link_to_stock is not None
            return self.link_to_stock(instance)
        self._session += 1
        return InstanceLink(self._context, instance.description.gateway, self.frontend_id, self._session, self.secret, self.liveness.limits)

    def _fitting(self, instance: Instance, reference: Instance) -> Instance:
        """With all that is known of it; raises ConfigError where it does not fit."""
        fleet.check(instance, reference)
        fleet.check_distinct(instance, [*self.instances.values(), *self._joining.values()])
        instance = fleet.completed(instance, reference)
        self.also_check(instance)
        if (model_len := instance.description.max_model_len) < self._least_model_len:
            raise ConfigError(f"max_model_len of {instance.instance_id} is {model_len}, this front-end serves {self._least_model_len}")
        return instance

    async def _rejoin(self, name: str, reference: Instance) -> None:
        """Asks until the instance, or one that was started anew at its address, is back."""
        told = ""
        while True:
            try:
                instance = await self.ask(name, ANSWER_TIMEOUT_S)
                if instance.description.stock and not self.instances[name].description.stock:
                    raise ConfigError(f"{name} had the plugin, and has come back without it: take it out and add it, if that is meant")
                await self._join(self._fitting(instance, reference), ANSWER_TIMEOUT_S)
            except (ConfigError, OSError, zmq.ZMQError) as error:  # no files are left, for instance: of now, and no fault of the fleet's
                if str(error) != told:
                    told = str(error)
                    logger.info("instance %s is not back: %s", name, error)
            else:
                self._rejoining.pop(name, None)
                return
            await asyncio.sleep(REJOIN_EVERY_S)

    # -- living --------------------------------------------------------------------------------------------------------

    async def _listen(self, name: str, link: Link) -> None:
        try:
            while True:
                frames = await link.receive()
                if link.closed or self._links.get(name) is not link:
                    return
                await self.on_message(name, frames)
        except LinkLost:
            return

    async def _wait_for_end(self, name: str, link: Link) -> None:
        try:
            reason = await link.ended()
        except LinkLost:
            return
        if self._links.get(name) is link:
            await self._apply(self.liveness.lost(name, reason))

    async def _watch(self) -> None:
        while True:
            now_s = time.monotonic()
            await self._apply(self.liveness.tick(now_s))
            await self.on_tick(now_s)
            await asyncio.sleep(self.liveness.limits.tick_s)

    async def _apply(self, changes: list[Changed]) -> None:
        for change in changes:
            level = logging.WARNING if change.health is Health.DEAD else logging.INFO
            logger.log(level, "instance %s is %s: %s", change.instance_id, change.health.value, change.reason)
            if change.health is Health.DEAD:
                self._links.pop(change.instance_id).close()
                if not self._links:
                    self._deserted_since_s = time.monotonic()
                reference = fleet.reference_of([self.instances[change.instance_id], *self.instances.values()])
                self._rejoining[change.instance_id] = self._start(self._rejoin(change.instance_id, reference))
            await self.on_change(change)

    async def heard(self, instance_id: str, pulse: Pulse | None) -> None:
        """A `Beat` has come."""
        await self._apply(self.liveness.beat(instance_id, pulse))

    # -- tasks ---------------------------------------------------------------------------------------------------------

    def spawn(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Runs it until `close`; what it raises ends the front-end."""
        task = self._start(coroutine)
        self._tasks.add(task)
        return task

    def _start(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(coroutine)
        task.add_done_callback(self._on_done)
        return task

    def _on_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not self._closed and not task.cancelled() and (error := task.exception()) is not None:
            self.on_fault(error)
