"""A real gateway, with a heart but without an engine, over real sockets: whom it hears, and what it makes of rubbish."""

from __future__ import annotations

import asyncio
import contextlib
import time
from argparse import Namespace
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import zmq.asyncio
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

pytest.importorskip("vllm")

from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.serial_utils import MsgpackEncoder

from dynaserve.errors import ConfigError
from dynaserve.fleet_secret import FleetSecret, derive, secure_client
from dynaserve.instance_link import InstanceLink
from dynaserve.kv_transfer.transport import WorkerEndpoint
from dynaserve.messages import (
    Abort,
    AddLora,
    Announce,
    Beat,
    Continue,
    Cut,
    Ended,
    Expect,
    FromInstance,
    Granted,
    Hello,
    Holding,
    Lifted,
    MeasuredStep,
    Move,
    Prepare,
    PromptProgress,
    Refused,
    Release,
    Reserved,
    Resumed,
    Run,
    SenderLost,
    Step,
    ToInstance,
    Welcome,
    WorkerDescription,
)
from dynaserve.messages import InstanceDescription as Description
from dynaserve.step_report import BatchReport, StepReport
from dynaserve.token_deadlines import TokenCounts
from tests.test_fleet_links import description, until
from tests.test_wire_limits import almost
from vllm_plugin import gateway as gateway_module
from vllm_plugin.batching import REPORT_CARRIER, REPORT_KEY
from vllm_plugin.gateway import Gateway
from vllm_plugin.gateway_metrics import DROPPED, PARKED, QUARANTINED, RESERVED
from vllm_plugin.heart import Heart, StepClock
from vllm_plugin.micro_requests import EXTRA_ARG
from vllm_plugin.options import PLUGIN, PluginOptions
from vllm_plugin.scheduler import EVENT_CARRIER

WORKER = WorkerDescription(WorkerEndpoint("worker", "tcp://127.0.0.1:1", {"torch": ""}), "layout", 1)
LINE = "0123456789abcdef0123456789abcdef"


@dataclass
class Engine:
    """vLLM's client of an engine core, as far as a gateway uses it."""

    heart: Heart
    added: list[Any] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    adapters: list[tuple[str, bool]] = field(default_factory=list)
    called: list[tuple[str, Any]] = field(default_factory=list)
    moves: bool = True
    """Whether a hand-off can be moved."""

    async def call_utility_async(self, method: str, *arguments: Any) -> Any:
        self.called.append((method, arguments))
        if method == "dynaserve_listen":
            return self.heart.address
        if method == "dynaserve_describe":
            known = msgspec.to_builtins(msgspec.structs.replace(description("", ""), workers=[WORKER]))
            return {key: value for key, value in known.items() if key not in GATEWAYS_OWN}
        if method == "dynaserve_reservation":
            return msgspec.to_builtins(Granted("beta", 0, 9))
        return self.moves if method in ("dynaserve_move", "dynaserve_cut") else None

    async def add_request_async(self, request: Any) -> None:
        self.added.append(request)

    async def abort_requests_async(self, request_ids: list[str]) -> None:
        self.aborted += request_ids

    async def add_lora_async(self, request: Any) -> None:
        """Any is loaded."""
        self.adapters.append((request.lora_path, request.load_inplace))


GATEWAYS_OWN = (
    "protocol_version",
    "instance_epoch",
    "gateway",
    "model",
    "served_model_names",
    "vllm_version",
    "secured",
    "tbt_slo_ms",
    "min_prefill_tokens",
)


@dataclass
class Instance:
    gateway: Gateway
    engine: Engine
    context: zmq.asyncio.Context
    secret: FleetSecret | None

    @property
    def description(self) -> Description:
        return self.gateway.description

    async def link(self, name: str, secret: FleetSecret | None, timeout_s: float = 30.0) -> InstanceLink:
        link = InstanceLink(self.context, self.description.gateway, name, 1, secret)
        try:
            await link.open(self.description.instance_epoch, timeout_s)
        except BaseException:
            link.close()
            raise
        return link

    @contextlib.contextmanager
    def dealer(self) -> Any:
        """A right peer that may say anything."""
        socket = self.context.socket(zmq.DEALER)
        socket.linger = 0
        secure_client(socket, self.secret)
        socket.connect(self.description.gateway)
        yield socket
        socket.close()


def run(scenario: Callable[[Instance], Awaitable[None]], secret_file: Path | None = None) -> None:
    async def with_instance() -> None:
        options = PluginOptions(fleet_secret_file=None if secret_file is None else str(secret_file))
        secret = options.read_secret()
        heart = Heart("127.0.0.1", StepClock(), secret)
        engine = Engine(heart)
        config = SimpleNamespace(additional_config={PLUGIN: options.to_config()})
        client: Any = SimpleNamespace(engine_core=engine, vllm_config=config, shutdown=lambda: None)
        gateway = await Gateway.start(client, Namespace(model="m", served_model_name=None))
        context = zmq.asyncio.Context()
        try:
            await scenario(Instance(gateway, engine, context, secret))
        finally:
            gateway.close()
            await asyncio.sleep(0)
            context.destroy(linger=0)
            heart.close()

    asyncio.run(with_instance())


@pytest.fixture
def secret_file(tmp_path: Path) -> Path:
    path = tmp_path / "secret"
    path.write_text(LINE)
    path.chmod(0o600)
    return path


def test_front_ends_with_the_secret_are_served_beside_strangers(secret_file: Path) -> None:
    async def scenario(instance: Instance) -> None:
        strangers = [asyncio.create_task(instance.link("stranger", secret, 1.0)) for secret in (None, derive("t" * 32))]
        link = await instance.link("right", derive(LINE))
        for stranger in strangers:
            with pytest.raises(ConfigError, match="does not answer"):
                await stranger
        await link.receive()  # its beats go on
        assert len(instance.gateway.sessions.identities) == 1
        link.close()

    run(scenario, secret_file)


def test_what_an_instance_keeps_for_others_is_in_its_metrics() -> None:
    async def scenario(instance: Instance) -> None:
        instance.engine.heart._steps.holding = Holding(parked=1, reserved_blocks=2, quarantined_blocks=3)
        await until(lambda: [gauge._value.get() for gauge in (PARKED, RESERVED, QUARANTINED)] == [1, 2, 3])

    run(scenario)


def test_an_instance_that_is_told_to_stop_says_so_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(instance: Instance) -> None:
        link = await instance.link("frontend", None)

        async def next_beat() -> Beat:
            async with asyncio.timeout(30):
                (frame, *_) = await link.receive()
            message = msgspec.msgpack.decode(frame, type=FromInstance)
            assert isinstance(message, Beat)
            return message

        monkeypatch.setattr(gateway_module, "BEAT_S", 1000.0)
        with contextlib.suppress(TimeoutError):
            while True:  # those that are under way
                assert not (await asyncio.wait_for(next_beat(), 1.0)).draining
        await asyncio.to_thread(instance.gateway.drain)
        assert (await next_beat()).draining
        link.close()

    run(scenario)


def test_nobody_is_told_the_secret(secret_file: Path) -> None:
    async def scenario(instance: Instance) -> None:
        assert instance.description.secured
        secret = derive(LINE)
        told = msgspec.json.encode(instance.description) + repr(vars(instance.gateway)).encode()
        assert not [part for part in (LINE.encode(), secret.public_key, secret.secret_key) if part in told]

    run(scenario, secret_file)


def test_another_adapter_of_a_number_that_is_there_is_read() -> None:
    """A front-end that was started anew, or another one, knows of nothing that was loaded in place."""

    async def scenario(instance: Instance) -> None:
        link = await instance.link("frontend", None)
        loads = [("/v1", False), ("/v2", True), ("/v1", False), ("/v1", False)]
        for count, (path, in_place) in enumerate(loads, 1):
            await link.send(AddLora("first", 5, path, load_inplace=in_place), [])
            await until(lambda count=count: len(instance.engine.adapters) == count)  # type: ignore[misc]
        assert instance.engine.adapters == [("/v1", False), ("/v2", True), ("/v1", True), ("/v1", False)]
        link.close()

    run(scenario)


def test_a_frame_that_is_too_long_ends_the_connection_of_its_sender_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateway_module, "LONGEST_FRAME_BYTES", 10_000)

    async def scenario(instance: Instance) -> None:
        right, wrong = await instance.link("right", None), await instance.link("wrong", None)
        await wrong.send(Run("r"), [bytes(10_001)])
        async with asyncio.timeout(30):
            assert await wrong.ended() == "its connection was cut"
            await right.receive()
        before = DROPPED.labels("malformed")._value.get()
        await right.send(Run("r"), [b"malformed"])
        async with asyncio.timeout(30):
            while DROPPED.labels("malformed")._value.get() <= before:  # noqa: ASYNC110 - counted by another task
                await asyncio.sleep(0.01)
        right.close()
        wrong.close()

    run(scenario)


def test_a_message_of_too_many_frames_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateway_module, "MOST_FRAMES", 5)

    async def scenario(instance: Instance) -> None:
        with instance.dealer() as peer:
            before = DROPPED.labels("malformed")._value.get()
            await peer.send_multipart([msgspec.msgpack.encode(Hello("many")), *[b""] * 5])
            await peer.send(msgspec.msgpack.encode(Hello("few")))
            assert isinstance(msgspec.msgpack.decode(await peer.recv(), type=Welcome), Welcome)
            assert DROPPED.labels("malformed")._value.get() == before + 1

    run(scenario)


async def told(link: InstanceLink, others: list[Reserved]) -> None:
    """Waits for a beat that tells this of other front-ends."""
    async with asyncio.timeout(30):
        while True:
            message = msgspec.msgpack.decode((await link.receive())[0], type=FromInstance)
            if isinstance(message, Beat) and message.others == others:
                return


def test_a_front_end_hears_what_others_have_reserved() -> None:
    async def scenario(instance: Instance) -> None:
        first, second = await instance.link("first", None), await instance.link("second", None)
        request = EngineCoreRequest("", [1, 2], None, SamplingParams(), None, 0.0, None, None, None)
        await first.send(Run("r", end_token=20), MsgpackEncoder().encode(request))
        await told(second, [Reserved(0, 2, 20)])
        await first.send(Run("alpha", 9, "t", end_token=20), MsgpackEncoder().encode(request))
        await told(second, [Reserved(0, 2, 20), Reserved(0, 2, 9)])
        await first.send(Move("alpha", 12))
        await told(second, [Reserved(0, 2, 20), Reserved(0, 2, 12)])
        instance.engine.moves = False
        await first.send(Move("alpha", 14))
        await first.send(Announce("beta", 9, "u", "torch", [WORKER.endpoint], 20), MsgpackEncoder().encode(request))
        await told(second, [Reserved(0, 2, 20), Reserved(0, 2, 12), Reserved(9, 2, 20, True)])
        await first.send(Continue("beta", 8, [5]))
        await told(second, [Reserved(0, 2, 20), Reserved(0, 2, 12), Reserved(8, 2, 20, True)])
        events = [Resumed("beta"), Lifted("alpha", "for the test")]
        carrier = EngineCoreOutput(EVENT_CARRIER, [], kv_transfer_params={EXTRA_ARG: msgspec.to_builtins(events)})
        await instance.gateway.take(EngineCoreOutputs(outputs=[carrier]))
        await told(second, [Reserved(0, 2, 20), Reserved(0, 2, 20), Reserved(8, 2, 20)])
        ended = {EXTRA_ARG: msgspec.to_builtins([Ended("alpha", 0, 0), Ended("beta", 0, 0)])}
        await instance.gateway.take(EngineCoreOutputs(outputs=[EngineCoreOutput(EVENT_CARRIER, [], kv_transfer_params=ended)]))
        await instance.gateway.take(EngineCoreOutputs(outputs=[EngineCoreOutput("r", [7]), EngineCoreOutput("r", [8, 9])]))
        await told(second, [Reserved(4, 2, 20)])
        await told(first, [])
        ended = {EXTRA_ARG: msgspec.to_builtins([Ended("r", 4, 0)])}
        await instance.gateway.take(EngineCoreOutputs(outputs=[EngineCoreOutput(EVENT_CARRIER, [], kv_transfer_params=ended)]))
        await told(second, [])
        first.close()
        second.close()

    run(scenario)


def test_a_whole_request_becomes_an_alpha_once_its_engine_agrees() -> None:
    async def scenario(instance: Instance) -> None:
        first, second = await instance.link("first", None), await instance.link("second", None)
        request = EngineCoreRequest("", [1, 2], None, SamplingParams(), None, 0.0, None, None, None)
        await first.send(Run("r", end_token=20), MsgpackEncoder().encode(request))
        await second.send(Cut("r", 7, "not mine"))
        await first.send(Cut("r", instance.description.max_model_len, "t"))
        instance.engine.moves = False
        await first.send(Cut("r", 8, "u"))
        await told(second, [Reserved(0, 2, 20)])
        instance.engine.moves = True
        await first.send(Cut("r", 9, "t"))
        await told(second, [Reserved(0, 2, 9)])
        await first.send(Run("alpha", 9, "t", end_token=20), MsgpackEncoder().encode(request))
        await refused(first, "alpha", "transfer id t is in use")
        calls = [arguments for method, arguments in instance.engine.called if method == "dynaserve_cut"]
        assert calls == [("r", 8, "u"), ("r", 9, "t")]
        first.close()
        second.close()

    run(scenario)


@pytest.mark.parametrize(
    "message",
    [Abort(["r"]), Move("r", 5), Move("r", None), Release("r"), Continue("r", 3, [1]), Prepare("r")],
    ids=["abort", "move", "lift", "release", "continue", "prepare"],
)
def test_a_front_end_has_no_say_in_the_requests_of_another(message: ToInstance) -> None:
    async def scenario(instance: Instance) -> None:
        first, second = await instance.link("first", None), await instance.link("second", None)
        request = EngineCoreRequest("", [1, 2], None, SamplingParams(), None, 0.0, None, None, None)
        await first.send(Run("r", 9, "t", end_token=20), MsgpackEncoder().encode(request))
        await until(lambda: len(instance.engine.added) == 1)
        before = len(instance.engine.called)
        await second.send(message)
        await second.send(Run("behind it"), MsgpackEncoder().encode(request))
        await until(lambda: len(instance.engine.added) == 2)
        await told(second, [Reserved(0, 2, 9)])
        assert instance.engine.aborted == []
        assert [call for call in instance.engine.called[before:] if "r" in call[1] or call[0] == "dynaserve_prepare"] == []
        await first.send(message)
        await until(lambda: instance.engine.aborted == ["r"] or len(instance.engine.called) > before)
        first.close()
        second.close()

    run(scenario)


def test_a_cut_that_meets_the_end_of_its_request_leaves_nothing_behind() -> None:
    async def scenario(instance: Instance) -> None:
        link = await instance.link("front-end", None)
        request = EngineCoreRequest("", [1, 2], None, SamplingParams(), None, 0.0, None, None, None)
        await link.send(Run("r", end_token=20), MsgpackEncoder().encode(request))
        await link.send(Run("alpha", 9, "t", end_token=20), MsgpackEncoder().encode(request))
        await until(lambda: len(instance.engine.added) == 2)
        instance.gateway._forget("r")
        await instance.gateway._cut(Cut("r", 9, "u"))
        await instance.gateway._cut(Cut("alpha", 12, "v"))
        assert instance.gateway.transfers == {"alpha": "t"}
        instance.engine.moves = False
        await link.send(Run("whole", end_token=20), MsgpackEncoder().encode(request))
        await link.send(Cut("whole", 9, "w"))
        await until(lambda: ("dynaserve_cut", ("whole", 9, "w")) in instance.engine.called)
        await until(lambda: instance.gateway.transfers == {"alpha": "t"})
        link.close()

    run(scenario)


def test_an_answer_that_is_there_as_a_whole_is_not_begun_again() -> None:
    async def scenario(instance: Instance) -> None:
        link = await instance.link("front-end", None)
        request = MsgpackEncoder().encode(EngineCoreRequest("", [1, 2], None, SamplingParams(max_tokens=3), None, 0.0, None, None, None))
        await link.send(Run("over", output_token_ids=[7, 7, 7], end_token=20), request)
        await refused(link, "over", "3 tokens of the answer are there, which ends with 3")
        await link.send(Run("goes on", output_token_ids=[7, 7], end_token=20), request)
        await until(lambda: len(instance.engine.added) == 1)
        link.close()

    run(scenario)


async def refused(link: InstanceLink, request_id: str, reason: str) -> None:
    async with asyncio.timeout(30):
        while True:
            message = msgspec.msgpack.decode((await link.receive())[0], type=FromInstance)
            if isinstance(message, Step) and message.events:
                assert message.events == [Refused(request_id, reason)]
                return


def test_an_engine_hears_of_whose_transfers_a_peer_was_lost() -> None:
    """Of the front-end that says so, and of those that have gone, until the engine has let go of them."""

    def lost(instance: Instance) -> list[list[str]]:
        return [sorted(arguments[1]) for method, arguments in instance.engine.called if method == "dynaserve_peers_lost"]

    async def scenario(instance: Instance) -> None:
        links = {name: await instance.link(name, None) for name in ("first", "second", "gone")}
        request = EngineCoreRequest("", [1, 2], None, SamplingParams(), None, 0.0, None, None, None)
        for name, link in links.items():
            await link.send(Run(f"r-{name}", 9, f"t-{name}"), MsgpackEncoder().encode(request))
        await until(lambda: len(instance.engine.added) == 3)
        links["gone"].close()
        await until(lambda: len(instance.gateway.sessions.identities) == 2)
        await until(lambda: instance.engine.aborted == ["r-gone"])
        await links["first"].send(SenderLost(["w"]))
        await until(lambda: lost(instance) == [["t-first", "t-gone"]])
        ended = {EXTRA_ARG: msgspec.to_builtins([Ended("r-first", 0, 0), Ended("r-gone", 0, 0)])}
        await instance.gateway.take(EngineCoreOutputs(outputs=[EngineCoreOutput(EVENT_CARRIER, [], kv_transfer_params=ended)]))
        await links["first"].send(SenderLost(["w"]))
        await until(lambda: len(lost(instance)) == 2)
        assert lost(instance)[1] == []
        for link in links.values():
            link.close()

    run(scenario)


def test_each_front_end_hears_how_far_its_own_prompts_are_after_its_tokens() -> None:
    async def scenario(instance: Instance) -> None:
        first, second = await instance.link("first", None), await instance.link("second", None)
        request = EngineCoreRequest("", list(range(50)), None, SamplingParams(), None, 0.0, None, None, None)
        for link, name in ((first, "mine"), (first, "answers"), (second, "theirs")):
            await link.send(Run(name, end_token=80), MsgpackEncoder().encode(request))
        await until(lambda: len(instance.engine.added) == 3)
        step = StepReport(1.0, MeasuredStep(40, 800.0, 0, 0, 20.0), None, None, 40, "all_work", False)
        prompts = [PromptProgress("mine", 40), PromptProgress("theirs", 30)]
        report = BatchReport([step], TokenCounts(), prompts, 0.8, 0.9)
        carrier = EngineCoreOutput(REPORT_CARRIER, [], kv_transfer_params={REPORT_KEY: msgspec.to_builtins(report)})
        outputs = [carrier, EngineCoreOutput("answers", [7])]
        await instance.gateway.take(EngineCoreOutputs(outputs=outputs, scheduler_stats=SchedulerStats(num_running_reqs=3)))
        tokens, told_first = await steps(first, 2)
        (told_second,) = await steps(second, 1)
        assert tokens.load is not None
        assert tokens.load.prompts is None
        for told_one, own in ((told_first, prompts[:1]), (told_second, prompts[1:])):
            assert told_one.load is not None
            assert told_one.load.prompts == own
            assert told_one.load.steps == [step.measured]
            assert (told_one.load.step_share, told_one.load.admitting_share) == (0.8, 0.9)
        await told(second, [Reserved(40, 50, 80), Reserved(50, 50, 80)])
        first.close()
        second.close()

    run(scenario)


def test_a_report_that_cannot_be_read_is_dropped_and_the_outputs_beside_it_are_not() -> None:
    async def scenario(instance: Instance) -> None:
        link = await instance.link("front-end", None)
        request = EngineCoreRequest("", [1, 2], None, SamplingParams(), None, 0.0, None, None, None)
        await link.send(Run("r"), MsgpackEncoder().encode(request))
        await until(lambda: len(instance.engine.added) == 1)
        counted = DROPPED.labels("report")
        before = counted._value.get()
        report = BatchReport([], TokenCounts(), [PromptProgress("x" * 600, 1)], None, None)
        carrier = EngineCoreOutput(REPORT_CARRIER, [], kv_transfer_params={REPORT_KEY: msgspec.to_builtins(report)})
        outputs = EngineCoreOutputs(outputs=[carrier, EngineCoreOutput("r", [7])])
        await instance.gateway.take(outputs)
        assert counted._value.get() == before + 1
        assert outputs.outputs == []
        assert len(await steps(link, 1)) == 1
        link.close()

    run(scenario)


def test_an_engine_hears_when_its_own_clock_will_show_the_end_of_an_alpha() -> None:
    async def scenario(instance: Instance) -> None:
        link, another = await instance.link("front-end", None), await instance.link("another", None)
        request = EngineCoreRequest("", [1, 2], None, SamplingParams(), None, 0.0, None, None, None)
        await link.send(Announce("beta", 9, "u", "torch", [WORKER.endpoint], 20), MsgpackEncoder().encode(request))
        await until(lambda: bool(instance.engine.added))
        before_s = time.monotonic()
        await another.send(Expect("beta", 1.0))  # not its own
        await another.send(Run("r"), MsgpackEncoder().encode(request))
        await until(lambda: len(instance.engine.added) == 2)
        await link.send(Expect("beta", 5000.0))

        def expected() -> list[tuple[str, float]]:
            return [arguments for method, arguments in instance.engine.called if method == "dynaserve_expect"]

        await until(lambda: bool(expected()))
        ((name, at_s),) = expected()
        assert name == "beta"
        assert before_s + 5.0 <= at_s <= time.monotonic() + 5.0
        link.close()
        another.close()

    run(scenario)


async def steps(link: InstanceLink, number: int) -> list[Step]:
    """The next ones that this front-end gets."""
    got: list[Step] = []
    async with asyncio.timeout(30):
        while len(got) < number:
            message = msgspec.msgpack.decode((await link.receive())[0], type=FromInstance)
            if isinstance(message, Step):
                got.append(message)
    return got


messages = st.lists(st.lists(almost(ToInstance), min_size=1, max_size=4), min_size=50, max_size=200)


@settings(max_examples=5, deadline=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck))
@given(rubbish=messages)
def test_a_gateway_goes_on_whatever_it_is_told(rubbish: list[list[bytes]]) -> None:
    async def scenario(instance: Instance) -> None:
        failed = DROPPED.labels("failed")._value.get()
        with instance.dealer() as peer:
            await peer.send(msgspec.msgpack.encode(Hello("fuzz")))
            for frames in rubbish:
                await peer.send_multipart(frames)
            link = await instance.link("right", None)
            await link.send(Abort(["nobody's"]))
            await link.receive()
            link.close()
        assert DROPPED.labels("failed")._value.get() == failed, "a kind of error that nobody has thought of"
        assert not instance.engine.added

    run(scenario)


@pytest.mark.parametrize("goes", ["in silence", "to a newer session"])
def test_what_a_front_end_that_has_gone_asked_for_is_aborted(goes: str) -> None:
    async def scenario(instance: Instance) -> None:
        link = await instance.link("right", None)
        request = EngineCoreRequest("", [1, 2], None, SamplingParams(), None, 0.0, None, None, None)
        await link.send(Run("r"), MsgpackEncoder().encode(request))
        await until(lambda: bool(instance.engine.added))
        if goes == "in silence":
            link.close()
            await until(lambda: not instance.gateway.sessions.identities)
        else:
            newer = InstanceLink(instance.context, instance.description.gateway, "right", 2, None)
            await newer.open(instance.description.instance_epoch, 30.0)
            assert len(instance.gateway.sessions.identities) == 1
            newer.close()
        await until(lambda: instance.engine.aborted == ["r"])
        link.close()

    run(scenario)
