"""The front-end's part in the life and death of instances: requests of a dead one go on elsewhere.

Which is alive says `dynaserve.liveness`; what becomes of one request, `dynaserve.request_flow`.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from abc import abstractmethod
from collections.abc import Sequence
from http import HTTPStatus

from dynaserve import frontend_metrics
from dynaserve.errors import ConfigError
from dynaserve.fleet import Instance
from dynaserve.fleet_links import FleetLinks
from dynaserve.flow_events import Event, InstanceDied, InstanceStopping, Instruction, Side
from dynaserve.kv_transfer.transports import TWO_SIDED
from dynaserve.liveness import JOINED, REMOVED, Changed, Health
from dynaserve.messages import SenderLost
from dynaserve.request_flow import State
from dynaserve.request_log import of_request
from dynaserve.request_placer import RequestPlacer
from vllm_plugin.adapters import AdapterLoader
from vllm_plugin.live import Live
from vllm_plugin.orphans import Orphans

logger = logging.getLogger("vllm.dynaserve.frontend")

ADD_TIMEOUT_S = 10.0
"""For an instance that is added to say who it is."""
LOAD_AGAIN_S = 5.0
"""After an instance that has come back could not load an adapter."""
MOST_LOST = 3
"""Instances that one request may lose: it may be what ends them (decision 8)."""
SETTLED_S = 0.5
"""After an instance has died of what may be ending others. Links are looked at every 0.25 s: by then all that are dead are known to be."""
IN_A_ROW_S = 0.2
"""Between two deaths of one cause."""


class Failover:
    """Base of `FleetClient`, which carries the instructions out."""

    _links: FleetLinks
    _placer: RequestPlacer
    _adapters: AdapterLoader
    _orphans: Orphans
    _live: dict[str, Live]
    _draining: set[str]
    _stopping: set[str]
    _loading: dict[str, asyncio.Task[None]]
    _timeout_s: float
    _transport: str
    _nobody_takes_since_s: float | None = None
    _died_s: float = -math.inf
    _settled_s: float = -math.inf
    """Until then nothing is placed again: it would only lose another life."""

    @property
    def instances(self) -> dict[str, Instance]:
        """All of the fleet, also those that are dead now."""
        return self._links.instances

    def on_unavailable(self, request_id: str, reason: str, status: int) -> None:
        """A request that is given up, with its HTTP status. The server sets what ends the client's answer."""
        logger.error("request %s: %s (%d)", request_id, reason, status, extra=of_request(request_id))

    @abstractmethod
    async def _handle(self, live: Live, side: Side, event: Event) -> bool: ...

    @abstractmethod
    async def _carry_out(self, live: Live, instructions: Sequence[Instruction]) -> bool: ...

    @abstractmethod
    def _close_if_over(self, live: Live) -> None: ...

    def health(self, instance: str) -> str:
        """up, suspect, dead, draining or loading (adapters, before which it takes no requests)."""
        if instance in self._draining | self._stopping:
            return "draining"
        return "loading" if instance in self._loading else self._links.liveness.health(instance).value

    async def _on_change(self, change: Changed) -> None:
        name = change.instance_id
        if change.health is Health.DEAD:
            self._placer.remove(name)
            self._stopping.discard(name)
            if (loading := self._loading.pop(name, None)) is not None:
                loading.cancel()
        elif change.reason == JOINED:
            frontend_metrics.know(name)
            if self._adapters.loaded and not self.instances[name].description.stock:
                self._loading[name] = self._links.spawn(self._load_adapters(name))
        await self._take_new_requests()
        match change.health:
            case Health.UP:
                await self._place_orphans()
            case Health.DEAD:
                await self._on_death(change)

    async def _load_adapters(self, name: str) -> None:
        """An instance that has come back has none of the fleet's adapters, and takes no requests before it has all."""
        told = ""
        while faults := await self._adapters.load_all(name):
            if (reason := "; ".join(faults)) != told:
                told = reason
                logger.error("instance %s takes no requests yet: %s", name, reason)
            await asyncio.sleep(LOAD_AGAIN_S)
        del self._loading[name]
        await self._take_new_requests()
        await self._place_orphans()

    async def _take_new_requests(self) -> None:
        """Tells the scheduler which instances do."""
        health = {other: self._links.liveness.health(other) for other in self._links.alive}
        takers = health.keys() - self._draining - self._stopping - self._loading.keys()
        # Rather one that is suspected than none, or only servers without the plugin, which do not take every request. Of instances that
        # are found dead together, those whose turn is to come are linked still.
        certain = any(health[other] is Health.UP and not self.instances[other].description.stock for other in takers)
        wanted = {Health.UP} if certain else {Health.UP, Health.SUSPECT}
        accepting = {other for other in takers if health[other] in wanted}
        for other in health:
            self._placer.observe(other, self.instances[other].description, accepts_new=other in accepting)
        if accepting:
            self._nobody_takes_since_s = None
        elif self._nobody_takes_since_s is None:
            self._nobody_takes_since_s = time.monotonic()

    async def _on_stopping(self, instance: str, *, is_stopping: bool) -> None:
        """An instance that was told to stop takes nothing new. It finishes what it runs or aborts it, and does not stay for a beta that
        has not resumed: alphas whose betas are there go on alone."""
        if is_stopping == (instance in self._stopping) or self.instances[instance].description.stock:
            return
        if not is_stopping:
            self._stopping.discard(instance)
            await self._take_new_requests()
            await self._place_orphans()
            return
        self._stopping.add(instance)
        await self._take_new_requests()
        for live in list(self._live.values()):
            await self._handle(live, Side.ALPHA, InstanceStopping(instance))

    async def _on_death(self, change: Changed) -> None:
        name = change.instance_id
        if change.reason != REMOVED:
            frontend_metrics.DEATHS.labels(name).inc()
            now_s = time.monotonic()
            if now_s - self._died_s < IN_A_ROW_S or self._links.liveness.in_doubt(now_s):
                self._settled_s = now_s + SETTLED_S
            self._died_s = now_s
        self.instances[name].load = None
        self._adapters.lost(name)
        for live in list(self._live.values()):
            await self._handle(live, Side.ALPHA, InstanceDied(name, change.reason, live.transport not in TWO_SIDED))
        if change.reason == REMOVED:
            return  # it was idle, and may go on serving others, whose transfers this would end
        # After a beta was told to continue: what it lacks is then computed anew, instead of its being given up.
        workers = [worker.endpoint.worker_id for worker in self.instances[name].description.workers]
        for other in self._links.alive:
            await self._links.send(other, SenderLost(workers))

    async def _on_tick(self, now_s: float) -> None:
        if -math.inf < self._settled_s <= now_s:
            self._settled_s = -math.inf
            await self._place_orphans()
        await self._fail_orphans(now_s)
        await self._fail_late(now_s)
        await self.let_go()

    # -- instances that come and go ------------------------------------------------------------------------------------

    async def add_instance(self, url: str) -> None:
        """Adds an instance to the fleet, or keeps one that is leaving. Raises ConfigError where it does not answer or fit."""
        name = url.rstrip("/")
        if name in self._draining:
            self._draining.discard(name)
            await self._take_new_requests()
            await self._place_orphans()
        elif name in self.instances:
            raise ConfigError(f"instance {name} is in the fleet already")
        else:
            await self._links.add(await self._links.ask(name, ADD_TIMEOUT_S))

    async def remove_instance(self, url: str) -> None:
        """Takes an instance out of the fleet: at once if it is dead or idle, else when it has finished what it runs.

        Raises ConfigError for an instance that is not in the fleet, or is the last one that stays.
        """
        name = url.rstrip("/")
        if name not in self.instances:
            raise ConfigError(f"instance {name} is not in the fleet")
        staying = self.instances.keys() - self._draining - {name}
        with_plugin = [other for other in staying if not self.instances[other].description.stock]
        takes = any(self.health(other) in (Health.UP.value, Health.SUSPECT.value) for other in with_plugin)
        if not takes and not self.instances[name].description.stock:
            raise ConfigError(f"instance {name} is the last one of the fleet that takes requests and has the plugin")
        self._draining.add(name)
        await self._take_new_requests()
        await self.let_go()

    async def let_go(self) -> None:
        """Of the instances that are to leave, those that run nothing any more."""
        if not self._draining:
            return
        busy = {name for live in self._live.values() for name in live.flow.instances}
        for name in self._draining - busy:
            self._draining.discard(name)
            await self._links.remove(name)
            frontend_metrics.forget(name)

    # -- requests that have lost their instance ------------------------------------------------------------------------

    async def _place_again(self, live: Live) -> None:
        """A request whose instance died, or one that waits since for any instance."""
        now_s = time.monotonic()
        if now_s < self._settled_s:
            self._orphans.add(live.internal_id, now_s)
            return
        lost = live.flow.record.lost_lives
        if lost >= MOST_LOST and self._links.alive:  # else the whole fleet is gone, for whatever reason
            await self._give_up(live, f"it has lost {lost} instances, and is not given to another", HTTPStatus.INTERNAL_SERVER_ERROR, now_s)
            return
        placement = self._placer.place_again(live.internal_id, len(live.flow.output_token_ids), 1e3 * now_s)
        if placement is None:
            self._orphans.add(live.internal_id, now_s)
            return
        self._orphans.remove(live.internal_id)
        frontend_metrics.PLACED_AGAIN.inc()
        await self._carry_out(live, live.flow.place_again(placement, 1e3 * (now_s - live.arrived_s)))

    async def _place_orphans(self) -> None:
        for request_id in self._orphans.waiting:
            if (live := self._live.get(request_id)) and live.flow.state is State.ORPHANED:
                await self._place_again(live)

    async def _fail_orphans(self, now_s: float) -> None:
        for request_id in self._orphans.given_up(now_s):
            if (live := self._live.get(request_id)) and live.flow.state is State.ORPHANED:
                await self._give_up(live, "no instance of the fleet takes this request any more", HTTPStatus.SERVICE_UNAVAILABLE, now_s)

    async def _fail_late(self, now_s: float) -> None:
        if self._timeout_s < math.inf:
            for live in [live for live in self._live.values() if now_s - live.arrived_s > self._timeout_s]:
                await self._give_up(live, self._too_late, HTTPStatus.GATEWAY_TIMEOUT, now_s)

    @property
    def _too_late(self) -> str:
        return f"not finished after {self._timeout_s:g} s"

    async def _give_up(self, live: Live, reason: str, status: HTTPStatus, now_s: float) -> None:
        await self._carry_out(live, live.flow.give_up(reason, status, 1e3 * (now_s - live.arrived_s)))
        self._close_if_over(live)
