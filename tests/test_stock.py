"""A vLLM server without the plugin, as the front-end sees it; `tests/e2e/test_stock.py` has a real one."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import msgspec
import pytest
from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest, FinishReason
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from dynaserve import fleet, stock
from dynaserve.errors import ConfigError
from dynaserve.fleet import Instance
from dynaserve.messages import Abort, Beat, Ended, FromInstance, Load, Run, Step
from tests.completion_server import METRICS, Act, CompletionServer, running_server
from tests.test_fleet import FIRST
from vllm_plugin.stock_link import StockLink, body_of, carries

PROMPT = [11, 12, 13]


@pytest.fixture
def server() -> Iterator[CompletionServer]:
    with running_server() as running:
        yield running


def request(prompt: list[int] | None = PROMPT, cache_salt: str | None = None, **params: Any) -> EngineCoreRequest:
    sampling = SamplingParams(**({"max_tokens": 4} | params))
    return EngineCoreRequest("r", prompt, None, sampling, None, 0.0, None, cache_salt, None)


def test_the_load_is_that_of_all_engines() -> None:
    assert stock.load_of(METRICS) == Load(3, 5, 0.5)


def test_a_page_without_the_metric_is_refused_by_its_name() -> None:
    with pytest.raises(ValueError, match="no vllm:num_requests_running at /metrics"):
        stock.load_of("python_info 1.0")


def test_a_server_without_the_plugin_is_asked_only_where_that_is_allowed(server: CompletionServer) -> None:
    with pytest.raises(ConfigError, match="is not a DynaServe instance"):
        fleet.describe(server.url)
    told = fleet.describe(server.url, allow_stock=True)
    assert (told.model, told.served_model_names, told.vllm_version) == ("/models/toy", ["toy"], "1.2.3")
    assert (told.max_model_len, told.block_size, told.num_blocks, told.prefix_caching) == (64, 16, 100, True)


@pytest.mark.parametrize(
    ("label", "instead"),
    [('block_size="16",', ""), ('num_gpu_blocks="100"', 'num_gpu_blocks="None"'), ('num_gpu_blocks="100"', 'num_gpu_blocks="0"')],
)
def test_a_server_of_which_the_cache_is_not_known_is_refused_in_a_sentence(server: CompletionServer, label: str, instead: str) -> None:
    server.metrics = METRICS.replace(label, instead)
    with pytest.raises(ConfigError, match="is neither a DynaServe instance nor a vLLM server: "):
        fleet.describe(server.url, allow_stock=True)


def test_what_it_does_not_tell_is_as_beside_it(server: CompletionServer) -> None:
    told = Instance(server.url, fleet.describe(server.url, allow_stock=True))
    assert fleet.completed(told, FIRST).description.dtype == FIRST.description.dtype
    assert fleet.completed(told, FIRST).description.vllm_version == FIRST.description.vllm_version, "as a latency profile names it"
    assert fleet.completed(told, FIRST).description.num_blocks == 100
    with pytest.raises(ConfigError, match="model differs"):
        fleet.check(told, FIRST)
    of_that_model = msgspec.structs.replace(FIRST.description, model="/models/toy", vllm_version="1.2.3+cpu")
    fleet.check(told, Instance("http://a", of_that_model))
    with pytest.raises(ConfigError, match="vllm_version differs"):
        fleet.check(told, Instance("http://a", msgspec.structs.replace(of_that_model, vllm_version="1.2.4")))
    with pytest.raises(ConfigError, match="none of the instances is a DynaServe instance"):
        fleet.reference_of([told])


CARRIED: list[dict[str, Any]] = [
    {},
    {"temperature": 0.5, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "seed": 3},
    {"presence_penalty": 1.0, "frequency_penalty": 0.5, "repetition_penalty": 1.2, "min_tokens": 2, "stop_token_ids": [5]},
    {"stop": ["a"], "include_stop_str_in_output": True, "skip_special_tokens": False, "allowed_token_ids": [1, 2], "ignore_eos": True},
    {"extra_args": {"dynaserve_tbt_ms": 50}},
    {"watermarking": False},  # what vLLM's input processor makes of None
]
NOT_CARRIED: list[dict[str, Any]] = [
    {"logprobs": 1},
    {"prompt_logprobs": 1},
    {"prompt_logprobs": 0, "prompt_logprob_token_ids": [1, 2]},
    {"logit_bias": {1: 2.0}},
    {"bad_words": ["a"]},
    {"structured_outputs": StructuredOutputsParams(regex="a+")},
    {"extra_args": {"mine": 1}},
    {"prompt": None},
]


@pytest.mark.parametrize("params", CARRIED, ids=str)
def test_what_http_can_say_is_carried(params: dict[str, Any]) -> None:
    assert carries(request(**params))


@pytest.mark.parametrize("params", NOT_CARRIED, ids=str)
def test_what_http_cannot_say_exactly_is_not(params: dict[str, Any]) -> None:
    assert not carries(request(**params))


def test_every_parameter_that_is_carried_is_said() -> None:
    params: dict[str, Any] = {"temperature": 0.5, "top_p": 0.9, "seed": 3, "stop_token_ids": [5], "min_tokens": 1}
    body = body_of(request(cache_salt="salt", **params), "toy")
    assert {name: body[name] for name in params} == params
    assert (body["model"], body["prompt"], body["cache_salt"]) == ("toy", PROMPT, "salt")


# --- the link


class Heard:
    """What a front-end hears of one server. run: gives it a request and waits until it has ended."""

    def __init__(self, link: StockLink) -> None:
        self.link = link
        self.messages: list[FromInstance] = []
        self.outputs: list[EngineCoreOutput] = []
        self._decoder = MsgpackDecoder(EngineCoreOutputs)

    async def hear(self) -> None:
        while True:
            header, *frames = await self.link.receive()
            self.messages.append(msgspec.msgpack.decode(header, type=FromInstance))
            if frames:
                self.outputs += self._decoder.decode(frames).outputs

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(10.0):
            while not condition():  # noqa: ASYNC110 - of several tasks at once
                await asyncio.sleep(0.01)

    async def begin(self, **params: Any) -> None:
        await self.link.send(Run("r/alpha.0@f"), MsgpackEncoder().encode(request(**params)))

    async def run(self, **params: Any) -> None:
        await self.begin(**params)
        await self.until(lambda: bool(self.ended))

    @property
    def events(self) -> list[Any]:
        return [event for message in self.messages if isinstance(message, Step) for event in message.events]

    @property
    def ended(self) -> list[Ended]:
        return [event for event in self.events if isinstance(event, Ended)]

    @property
    def tokens(self) -> list[int]:
        return [token for output in self.outputs for token in output.new_token_ids]


def with_link(server: CompletionServer, scenario: Callable[[Heard], Awaitable[None]]) -> None:
    async def run() -> None:
        link = StockLink(Instance(server.url, fleet.describe(server.url, allow_stock=True)))
        heard = Heard(link)
        await link.open("", 2.0)
        hearing = asyncio.create_task(heard.hear())
        try:
            await scenario(heard)
        finally:
            link.close()
            await asyncio.wait([hearing])

    asyncio.run(run())


def test_tokens_come_as_from_an_engine(server: CompletionServer) -> None:
    async def scenario(heard: Heard) -> None:
        await heard.run()
        assert heard.tokens == [7] * 4
        assert [output.finish_reason for output in heard.outputs] == [None] * 3 + [FinishReason.LENGTH]
        assert heard.ended == [Ended("r/alpha.0@f", 6, 0)]

    with_link(server, scenario)
    assert server.prompts == [PROMPT]


FAULTS = [Act(cut_after=2), Act(error_after=2), Act(stop_after=2, finish="length"), Act(stop_after=2, finish="odd")]


@pytest.mark.parametrize("act", [*FAULTS, *(Act(status=status) for status in (400, 429, 503))], ids=str)
def test_what_another_instance_may_survive_is_aborted(server: CompletionServer, act: Act) -> None:
    server.act = act

    async def scenario(heard: Heard) -> None:
        await heard.run()
        assert heard.tokens == [7] * (0 if act.status != 200 else 1 if act.finish == "odd" else 2)
        *before, last = [output.finish_reason for output in heard.outputs]
        assert (last, set(before) - {None}) == (FinishReason.ABORT, set()), "the client hears of no end"
        assert len(heard.ended) == 1

    with_link(server, scenario)


def test_a_text_with_other_line_ends_is_one_line(server: CompletionServer) -> None:
    server.act = Act(text="\u2028")

    async def scenario(heard: Heard) -> None:
        await heard.run()
        assert (heard.tokens, heard.outputs[-1].finish_reason) == ([7] * 4, FinishReason.LENGTH)

    with_link(server, scenario)


def test_the_first_output_tells_when_it_was_sent_and_what_was_computed(server: CompletionServer) -> None:
    async def scenario(heard: Heard) -> None:
        await heard.run()
        first, *others = heard.outputs
        assert first.prefill_stats is not None
        assert (first.prefill_stats.num_prompt_tokens, first.prefill_stats.num_cached_tokens) == (3, 0)
        assert first.events is not None
        assert 0 <= time.monotonic() - first.events[-1].timestamp < 60
        assert all(output.events is None and output.prefill_stats is None for output in others)

    with_link(server, scenario)


def test_an_abort_that_comes_at_once_ends_the_request_as_well(server: CompletionServer) -> None:
    async def scenario(heard: Heard) -> None:
        await heard.begin()
        await heard.link.send(Abort(["r/alpha.0@f"]))
        await heard.until(lambda: bool(heard.ended))
        assert heard.ended == [Ended("r/alpha.0@f", 0, 0)]
        assert not heard.outputs

    with_link(server, scenario)


def test_an_abort_ends_the_answer(server: CompletionServer) -> None:
    server.act = Act(delay_s=0.02)

    async def scenario(heard: Heard) -> None:
        await heard.begin(max_tokens=500)
        await heard.until(lambda: len(heard.tokens) > 2)
        await heard.link.send(Abort(["r/alpha.0@f", "unknown"]))
        await heard.until(lambda: bool(heard.ended))
        assert len(heard.tokens) < 100
        assert all(output.finish_reason is None for output in heard.outputs)

    with_link(server, scenario)


def test_a_server_that_answers_is_alive_and_tells_its_load(server: CompletionServer) -> None:
    async def scenario(heard: Heard) -> None:
        await heard.until(lambda: sum(isinstance(message, Beat) for message in heard.messages) > 2)
        assert Load(3, 5, 0.5) in [message.load for message in heard.messages if isinstance(message, Step)]

    with_link(server, scenario)


def test_a_server_that_is_not_healthy_any_more_has_ended(server: CompletionServer) -> None:
    async def scenario(heard: Heard) -> None:
        server.act = Act(health=503)
        assert "its server does not answer" in await asyncio.wait_for(heard.link.ended(), 5.0)

    with_link(server, scenario)
