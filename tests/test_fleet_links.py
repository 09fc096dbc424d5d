"""A front-end's connections over real sockets, to gateways that can be silenced, cut and started anew."""

from __future__ import annotations

import asyncio
import errno
import threading
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest
import zmq
import zmq.asyncio

from dynaserve import fleet_links
from dynaserve.errors import ConfigError
from dynaserve.fleet import Instance
from dynaserve.fleet_links import FleetLinks
from dynaserve.fleet_secret import FleetSecret, secure_server
from dynaserve.instance_link import InstanceLink, keep_alive
from dynaserve.liveness import Changed, FleetLiveness, Health, Limits
from dynaserve.messages import (
    PROTOCOL_VERSION,
    Abort,
    Beat,
    Bye,
    FromInstance,
    Hello,
    InstanceDescription,
    Pulse,
    Step,
    ToInstance,
    Welcome,
)

URL = "http://instance"


def description(gateway: str, epoch: str) -> InstanceDescription:
    return InstanceDescription(
        PROTOCOL_VERSION,
        epoch,
        gateway,
        model="m",
        served_model_names=["m"],
        vllm_version="0",
        dtype="float32",
        block_size=32,
        max_model_len=100,
        max_num_seqs=8,
        max_num_batched_tokens=64,
        num_blocks=50,
        prefix_caching=True,
        tensor_parallel_size=1,
        device="cpu",
        parallelism="tp1",
        tbt_slo_ms=None,
        min_prefill_tokens=16,
        cut_obstacle=None,
        workers=[],
    )


@dataclass
class Gateway:
    """api, core: which of an instance's processes runs."""

    epoch: str = "first"
    api: bool = True
    core: bool = True
    draining: bool = False
    pulses: int = 0
    step_s: float | None = None
    """For how long its step has run."""
    heard: list[ToInstance] = field(default_factory=list)
    identities: list[bytes] = field(default_factory=list)
    tasks: list[asyncio.Task[None]] = field(default_factory=list)
    secret: FleetSecret | None = None

    def start(self, context: zmq.asyncio.Context) -> None:
        self.socket = context.socket(zmq.ROUTER)
        self.socket.linger = 0
        keep_alive(self.socket)
        secure_server(self.socket, self.secret)
        self.address = f"tcp://127.0.0.1:{self.socket.bind_to_random_port('tcp://127.0.0.1')}"
        self.tasks = [asyncio.create_task(self.serve()), asyncio.create_task(self.beat())]

    def cut(self) -> None:
        for task in self.tasks:
            task.cancel()
        self.socket.close()

    async def serve(self) -> None:
        while True:
            identity, frame, *_ = await self.socket.recv_multipart()
            message = msgspec.msgpack.decode(frame, type=ToInstance)
            self.heard.append(message)
            if isinstance(message, Hello) and self.api:
                self.identities.append(identity)
                await self.say(Welcome(self.epoch))

    async def beat(self) -> None:
        while True:
            self.pulses += self.core
            if self.api and self.identities:
                await self.say(Beat(Pulse(self.pulses, step_running_s=self.step_s), self.draining))
            await asyncio.sleep(0.05)

    async def say(self, message: FromInstance, frames: Sequence[Any] = ()) -> None:
        await self.socket.send_multipart([self.identities[-1], msgspec.msgpack.encode(message), *frames])


@dataclass
class Frontend:
    """With one instance, and everything that was heard."""

    gateway: Gateway
    changes: list[Changed] = field(default_factory=list)
    messages: list[FromInstance] = field(default_factory=list)
    faults: list[BaseException] = field(default_factory=list)
    gateways: dict[str, Gateway] = field(default_factory=dict)
    """Of instances that join later."""

    async def on_message(self, name: str, frames: list[bytes]) -> None:
        message = msgspec.msgpack.decode(frames[0], type=FromInstance)
        self.messages.append(message)
        if isinstance(message, Beat):
            await self.links.heard(name, message.pulse)

    async def on_change(self, change: Changed) -> None:
        self.changes.append(change)

    async def on_tick(self, now_s: float) -> None:
        assert now_s > 0

    def description_of(self, url: str, _: float = 1.0) -> InstanceDescription:
        gateway = self.gateways.get(url, self.gateway)
        return description(gateway.address, gateway.epoch)

    async def connect(self, timeout_s: float = 30.0, also: Sequence[str] = (), *, may_lack: bool = False) -> None:
        """also: instances beside the one."""
        self.links = FleetLinks(
            "frontend",
            self.on_message,
            self.on_change,
            self.on_tick,
            self.faults.append,
            self.description_of,
            FleetLiveness(Limits(hung_s=1.4)),
        )
        instances = [Instance(name, self.description_of(name)) for name in (URL, *also)]
        self.links.instances |= {instance.instance_id: instance for instance in instances}
        await self.links.connect(instances, timeout_s, may_lack=may_lack)
        self.links.watch()

    @property
    def healths(self) -> list[tuple[Health, int]]:
        return [(change.health, change.epoch) for change in self.changes]


def run(scenario: Callable[[Frontend, zmq.asyncio.Context], Awaitable[Any]]) -> None:
    async def with_parts() -> None:
        context = zmq.asyncio.Context()
        frontend = Frontend(Gateway())
        frontend.gateway.start(context)
        try:
            await scenario(frontend, context)
        finally:
            if hasattr(frontend, "links"):
                frontend.links.close()
            frontend.gateway.cut()
            await asyncio.sleep(0)
            context.destroy(linger=0)
        assert not frontend.faults

    asyncio.run(with_parts())


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not condition():  # noqa: ASYNC110 - of several tasks at once
            await asyncio.sleep(0.01)


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Instances may take their time to join."""
    monkeypatch.setattr(fleet_links, "ANSWER_TIMEOUT_S", 30.0)


def test_messages_of_a_living_instance_are_heard() -> None:
    async def scenario(frontend: Frontend, _: zmq.asyncio.Context) -> None:
        await frontend.connect()
        await frontend.gateway.say(Step([], None, 1.0))
        await until(lambda: Step([], None, 1.0) in frontend.messages)
        assert frontend.healths == [(Health.UP, 1)]

    run(scenario)


def test_an_instance_that_has_joined_at_another_address_does_not_join_again() -> None:
    async def scenario(frontend: Frontend, _: zmq.asyncio.Context) -> None:
        await frontend.connect()
        other = Instance("http://127.0.0.1", frontend.description_of(URL))
        with pytest.raises(ConfigError, match=f"^http://127.0.0.1 and {URL} are the same instance$"):
            await frontend.links.add(other)
        assert frontend.links.alive == [URL]
        assert len(frontend.gateway.identities) == 1

    run(scenario)


@pytest.mark.usefixtures("patient")
def test_of_two_urls_of_one_instance_that_are_added_at_once_the_first_joins() -> None:
    async def scenario(frontend: Frontend, context: zmq.asyncio.Context) -> None:
        await frontend.connect()
        gateway = frontend.gateways["http://one"] = frontend.gateways["http://two"] = Gateway("new")
        gateway.start(context)
        adding = [frontend.links.add(Instance(url, frontend.description_of(url))) for url in ("http://one", "http://two")]
        first, second = await asyncio.gather(*adding, return_exceptions=True)
        assert first is None
        assert isinstance(second, ConfigError)
        assert str(second) == "http://two and http://one are the same instance"
        assert frontend.links.alive == [URL, "http://one"]
        assert len(gateway.identities) == 1
        gateway.cut()

    run(scenario)


def test_an_instance_that_comes_back_while_it_joins_at_another_url_stays_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet_links, "ANSWER_TIMEOUT_S", 30.0)

    async def scenario(frontend: Frontend, context: zmq.asyncio.Context) -> None:
        await frontend.connect()
        asked = 0
        is_back = False

        def describe(url: str, _: float) -> InstanceDescription:
            nonlocal asked
            if not is_back:
                raise ConfigError("it is not back")
            asked += 1
            return frontend.description_of(url)

        frontend.links.describe = describe
        frontend.gateway.cut()
        await until(lambda: (Health.DEAD, 1) in frontend.healths)
        frontend.gateway = Gateway("second", core=False)  # so that joining takes a while
        frontend.gateway.start(context)
        adding = asyncio.create_task(frontend.links.add(Instance("http://other", frontend.description_of(URL))))
        await until(lambda: bool(frontend.gateway.identities))
        is_back = True
        await until(lambda: asked == 2)
        frontend.gateway.core = True
        await adding
        assert frontend.links.alive == ["http://other"]
        assert len(frontend.gateway.identities) == 1

    run(scenario)


@pytest.mark.usefixtures("patient")
def test_an_address_that_is_free_again_may_be_taken_at_once() -> None:
    """One that was removed while it was just coming back."""

    async def scenario(frontend: Frontend, context: zmq.asyncio.Context) -> None:
        await frontend.connect()
        other = frontend.gateways["http://other"] = Gateway("other")
        other.start(context)
        await frontend.links.add(Instance("http://other", frontend.description_of("http://other")))
        other.cut()
        await until(lambda: (Health.DEAD, 2) in frontend.healths)
        silent = frontend.gateways["http://other"] = Gateway("silent", api=False)
        silent.start(context)
        await until(lambda: "http://other" in frontend.links._joining)
        await frontend.links.remove("http://other")
        new = frontend.gateways["http://other"] = Gateway("new")
        new.start(context)
        await frontend.links.add(Instance("http://other", frontend.description_of("http://other")))
        assert frontend.links.alive == [URL, "http://other"]
        assert frontend.links._joining == {}
        for gateway in (silent, new):
            gateway.cut()

    run(scenario)


def test_an_instance_comes_back_although_files_were_lacking_for_a_while() -> None:
    async def scenario(frontend: Frontend, _: zmq.asyncio.Context) -> None:
        await frontend.connect()
        lacking = [OSError(errno.EMFILE, "Too many open files"), zmq.ZMQError(errno.EMFILE)]

        def describe(url: str, _: float) -> InstanceDescription:
            if lacking:
                raise lacking.pop()
            return frontend.description_of(url)

        frontend.links.describe = describe
        frontend.gateway.api = False
        await until(lambda: (Health.DEAD, 1) in frontend.healths)
        frontend.gateway.api = True
        await until(lambda: (Health.UP, 2) in frontend.healths)
        assert not lacking

    run(scenario)


def test_an_instance_without_a_running_engine_core_is_not_joined() -> None:
    async def scenario(frontend: Frontend, _: zmq.asyncio.Context) -> None:
        frontend.gateway.core = False
        with pytest.raises(ConfigError, match="does not answer"):
            await frontend.connect(timeout_s=2.0)

    run(scenario)


@pytest.mark.parametrize("may_lack", [False, True])
def test_a_fleet_begins_without_an_instance_whose_gateway_does_not_answer_where_one_may_lack(may_lack: bool) -> None:
    async def scenario(frontend: Frontend, context: zmq.asyncio.Context) -> None:
        silent = frontend.gateways["http://silent"] = Gateway("another", api=False)
        silent.start(context)
        try:
            if may_lack:
                await frontend.connect(2.0, also=["http://silent"], may_lack=True)
                assert frontend.links.alive == list(frontend.links.instances) == [URL]
            else:
                with pytest.raises(ConfigError, match=rf"^the gateway {silent.address} does not answer"):
                    await frontend.connect(2.0, also=["http://silent"])
        finally:
            silent.cut()

    run(scenario)


def test_a_fleet_does_not_begin_without_any_instance() -> None:
    async def scenario(frontend: Frontend, _: zmq.asyncio.Context) -> None:
        frontend.gateway.api = False
        with pytest.raises(ConfigError, match="does not answer"):
            await frontend.connect(2.0, may_lack=True)

    run(scenario)


@pytest.mark.usefixtures("patient")
def test_an_instance_whose_workers_hang_stays_dead_until_they_go_on() -> None:
    """Its engine core goes on pulsing."""

    async def scenario(frontend: Frontend, _: zmq.asyncio.Context) -> None:
        await frontend.connect()
        frontend.gateway.step_s = 61.0
        await until(lambda: (Health.DEAD, 1) in frontend.healths)
        hellos = len(frontend.gateway.heard)
        await until(lambda: len(frontend.gateway.heard) >= hellos + 2)
        assert frontend.links.alive == []
        assert frontend.healths[-1] == (Health.DEAD, 1)
        frontend.gateway.step_s = None
        await until(lambda: frontend.healths[-1] == (Health.UP, 2))

    run(scenario)


@pytest.mark.parametrize("process", ["api", "core"])
def test_an_instance_that_hangs_dies_and_is_joined_anew_when_it_goes_on(process: str) -> None:
    async def scenario(frontend: Frontend, _: zmq.asyncio.Context) -> None:
        await frontend.connect()
        setattr(frontend.gateway, process, False)
        await until(lambda: (Health.DEAD, 1) in frontend.healths)
        assert frontend.links.alive == []
        heard = len(frontend.messages)
        await frontend.links.send(URL, Abort(["lost on the way"]))
        setattr(frontend.gateway, process, True)
        await until(lambda: frontend.healths[-1] == (Health.UP, 2))
        sessions = [message.session for message in frontend.gateway.heard if isinstance(message, Hello)]
        assert sessions == sorted(set(sessions))
        assert Abort(["lost on the way"]) not in frontend.gateway.heard
        await until(lambda: len(frontend.messages) > heard)

    run(scenario)


def test_a_cut_connection_is_noticed_at_once_and_never_mended() -> None:
    async def scenario(frontend: Frontend, context: zmq.asyncio.Context) -> None:
        await frontend.connect()
        frontend.gateway.cut()
        await until(lambda: (Health.DEAD, 1) in frontend.healths)
        assert "connection" in frontend.changes[-1].reason
        assert Health.SUSPECT not in [health for health, _ in frontend.healths]
        frontend.gateway = Gateway("second")
        frontend.gateway.start(context)
        await until(lambda: frontend.healths[-1] == (Health.UP, 2))
        assert frontend.links.instances[URL].description.instance_epoch == "second"

    run(scenario)


def test_urls_that_do_not_answer_delay_no_other() -> None:
    async def scenario(frontend: Frontend, _: zmq.asyncio.Context) -> None:
        await frontend.connect()
        answer = threading.Event()

        def describe(url: str, _: float) -> InstanceDescription:
            if url != URL:
                answer.wait()
            return frontend.description_of(URL)

        frontend.links.describe = describe
        silent = [asyncio.create_task(frontend.links.ask(f"http://silent-{number}", 1.0)) for number in range(100)]
        try:
            async with asyncio.timeout(30):
                assert (await frontend.links.ask(URL, 1.0)).instance_id == URL
                await asyncio.to_thread(lambda: None)  # others who need a thread have one
            assert not any(task.done() for task in silent)
        finally:
            answer.set()
            await asyncio.gather(*silent)

    run(scenario)


def test_what_is_sent_after_the_end_of_a_connection_is_lost_at_once() -> None:
    async def scenario(frontend: Frontend, context: zmq.asyncio.Context) -> None:
        link = InstanceLink(context, frontend.gateway.address, "frontend", 1)
        await link.open("first", timeout_s=30)
        frontend.gateway.cut()
        async with asyncio.timeout(30):
            await link.ended()
            await link.send(Bye())
        link.close(bye=True)

    run(scenario)


def test_an_instance_with_an_address_that_is_none_stays_out() -> None:
    async def scenario(frontend: Frontend, _: zmq.asyncio.Context) -> None:
        await frontend.connect()
        for gateway in ("tcp://127.0.0.1", "tcp://127.0.0.1:x"):
            with pytest.raises(ConfigError, match="is none"):
                await frontend.links.add(Instance("http://other", description(gateway, "another")))
        assert frontend.links.alive == [URL]

    run(scenario)


def test_an_instance_that_takes_shorter_texts_stays_out() -> None:
    async def scenario(frontend: Frontend, _: zmq.asyncio.Context) -> None:
        await frontend.connect()
        shorter = msgspec.structs.replace(description(frontend.gateway.address, "another"), max_model_len=99)
        with pytest.raises(ConfigError, match="max_model_len of http://other is 99, this front-end serves 100"):
            await frontend.links.add(Instance("http://other", shorter))

    run(scenario)


def test_an_instance_that_the_policy_cannot_use_stays_out() -> None:
    def refuse(instance: Instance) -> None:
        raise ConfigError(f"{instance.instance_id} was not measured")

    async def scenario(frontend: Frontend, context: zmq.asyncio.Context) -> None:
        await frontend.connect()
        frontend.links.also_check = refuse
        with pytest.raises(ConfigError, match="http://other was not measured"):
            await frontend.links.add(Instance("http://other", description("tcp://127.0.0.1:1", "other")))
        frontend.gateway.cut()
        frontend.gateway = Gateway("second")
        frontend.gateway.start(context)
        await until(lambda: (Health.DEAD, 1) in frontend.healths)
        await asyncio.sleep(0.7)
        assert frontend.links.alive == []

    run(scenario)


@pytest.mark.parametrize("change", [{"dtype": "bfloat16"}, {"stock": True, "workers": []}], ids=["dtype", "without the plugin"])
def test_an_instance_that_is_another_one_now_stays_out(change: dict[str, Any]) -> None:
    async def scenario(frontend: Frontend, context: zmq.asyncio.Context) -> None:
        await frontend.connect()
        frontend.gateway.cut()
        frontend.gateway = Gateway("second")
        frontend.gateway.start(context)
        other = msgspec.structs.replace(description(frontend.gateway.address, "second"), **change)
        frontend.links.describe = lambda *_: other
        await until(lambda: (Health.DEAD, 1) in frontend.healths)
        await asyncio.sleep(0.7)
        assert frontend.healths[-1] == (Health.DEAD, 1)

    run(scenario)


def test_an_instance_that_answers_what_nobody_understands_stays_out_until_it_answers_otherwise() -> None:
    async def scenario(frontend: Frontend, context: zmq.asyncio.Context) -> None:
        await frontend.connect()
        understood, asked = frontend.links.describe, []

        def describe(url: str, timeout_s: float) -> InstanceDescription:
            asked.append(url)
            if len(asked) < 3:
                raise KeyError("num_gpu_blocks")
            return understood(url, timeout_s)

        frontend.links.describe = describe
        frontend.gateway.cut()
        frontend.gateway = Gateway("second")
        frontend.gateway.start(context)
        await until(lambda: frontend.healths[-1][0] is Health.UP and len(asked) >= 3)

        def fails(*_: object) -> InstanceDescription:
            raise ZeroDivisionError

        frontend.links.describe = fails
        with pytest.raises(ConfigError, match=r"instance http://new answers what cannot be read: ZeroDivisionError"):
            await frontend.links.ask("http://new", 1.0)

    run(scenario)


@pytest.mark.usefixtures("patient")
def test_an_instance_joins_and_leaves_a_running_fleet() -> None:
    async def scenario(frontend: Frontend, context: zmq.asyncio.Context) -> None:
        await frontend.connect()
        new = frontend.gateways["http://new"] = Gateway("new")
        new.start(context)
        await frontend.links.add(Instance("http://new", frontend.description_of("http://new")))
        assert frontend.links.alive == [URL, "http://new"]
        await frontend.links.remove("http://new")
        await until(lambda: Bye() in new.heard)
        assert (frontend.changes[-1].instance_id, frontend.changes[-1].health) == ("http://new", Health.DEAD)
        assert list(frontend.links.instances) == frontend.links.alive == list(frontend.links.liveness._observed) == [URL]
        new.cut()

    run(scenario)


def test_an_instance_that_was_removed_is_not_asked_any_more() -> None:
    async def scenario(frontend: Frontend, _: zmq.asyncio.Context) -> None:
        await frontend.connect()
        frontend.gateway.api = False
        await until(lambda: (Health.DEAD, 1) in frontend.healths)
        await frontend.links.remove(URL)
        frontend.gateway.api = True
        hellos = sum(isinstance(message, Hello) for message in frontend.gateway.heard)
        await asyncio.sleep(1.0)
        assert sum(isinstance(message, Hello) for message in frontend.gateway.heard) <= hellos + 1, "one may have been on its way"
        assert frontend.links.alive == []

    run(scenario)


def test_an_instance_that_does_not_fit_does_not_join() -> None:
    async def scenario(frontend: Frontend, _: zmq.asyncio.Context) -> None:
        await frontend.connect()
        other = msgspec.structs.replace(description("tcp://127.0.0.1:1", "other"), dtype="bfloat16")
        with pytest.raises(ConfigError, match="dtype differs"):
            await frontend.links.add(Instance("http://other", other))
        assert frontend.links.alive == [URL]

    run(scenario)
