"""Which instances make a fleet together."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import httpx
import msgspec
import pytest

from dynaserve import direct_http, fleet
from dynaserve.errors import ConfigError
from dynaserve.fleet import (
    Instance,
    check,
    check_distinct,
    check_read_by_server,
    check_reasoning_parser,
    check_version,
    choose_transport,
    join,
    join_present,
)
from dynaserve.fleet import describe as ask
from dynaserve.kv_transfer.transport import WorkerEndpoint
from dynaserve.messages import PROTOCOL_VERSION, InstanceDescription, WorkerDescription
from tests.completion_server import running_server
from tests.test_request_placer import DESCRIPTION


def describe(tensor_parallel_size: int = 1, kv_layout: str = "2 layers", **fields: object) -> InstanceDescription:
    workers = [WorkerDescription(WorkerEndpoint(f"w{i}", "tcp://h", {}), kv_layout, 1024) for i in range(tensor_parallel_size)]
    return msgspec.structs.replace(DESCRIPTION, tensor_parallel_size=tensor_parallel_size, workers=workers, **fields)


FIRST = Instance("http://a", describe())


def test_equal_instances_fit_together() -> None:
    check(Instance("http://b", describe(instance_epoch="another", gateway="tcp://127.0.0.1:2", num_blocks=7)), FIRST)


@pytest.mark.parametrize(
    ("other", "sentence"),
    [
        (describe(tensor_parallel_size=2), "tensor_parallel_size differs: http://a has 1, http://b has 2"),
        (describe(dtype="bfloat16"), "dtype differs: http://a has float32, http://b has bfloat16"),
        (describe(reasoning_parser="deepseek_r1"), "reasoning_parser differs: http://a has None, http://b has deepseek_r1"),
        (describe(kv_layout="3 layers"), "KV layout differs: http://a has 2 layers; http://b has 3 layers"),
        (describe(protocol_version=99), f"instance http://b speaks protocol 99, this front-end {PROTOCOL_VERSION}"),
    ],
)
def test_one_that_does_not_fit_is_refused_with_both_values(other: InstanceDescription, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        check(Instance("http://b", other), FIRST)


@pytest.mark.parametrize(("its", "ours"), [("qwen3", None), (None, "qwen3"), ("qwen3", "mistral")])
def test_a_front_end_has_the_reasoning_parser_of_its_instances(its: str | None, ours: str | None) -> None:
    instance = Instance("http://b", describe(reasoning_parser=its))
    check_reasoning_parser(its, [instance])
    check_reasoning_parser(ours, [Instance("http://c", describe(stock=True, reasoning_parser=its))])
    with pytest.raises(ConfigError, match=f"^instance http://b has the reasoning parser {its}, this front-end {ours}: "):
        check_reasoning_parser(ours, [instance])


def test_an_option_that_only_the_server_reads_is_not_lost_where_instances_have_it_and_the_front_end_does_not() -> None:
    usual = {"--max-logprobs": "20", "--generation-config": '"auto"', "--watermark-config": "false"}
    instances = [Instance("http://b", describe(read_by_server=usual)), Instance("http://c", describe(stock=True))]
    check_read_by_server(usual, usual, instances)
    check_read_by_server(usual | {"--max-logprobs": "50"}, usual, instances)  # the front-end's own counts
    with pytest.raises(ConfigError, match=r"^instance http://b has --watermark-config false, this front-end true: give both the same$"):
        check_read_by_server(usual | {"--watermark-config": "true"}, usual, instances)
    instances.append(Instance("http://d", describe(read_by_server=usual | {"--max-logprobs": "50"})))
    with pytest.raises(ConfigError, match=r"^instance http://d has --max-logprobs 50, this front-end 20: give both the same$"):
        check_read_by_server(usual, usual, instances)
    with pytest.raises(ConfigError, match=r"read_by_server differs: http://b has .*, http://d has "):
        check(instances[2], instances[0])


@pytest.mark.parametrize("url", ["http://10.0.0.7:8OOO", "http://[::1:8000", "http://a..b:8000", "no url", "http://127.0.0.1:9"])
def test_an_address_that_is_none_is_refused_in_a_sentence(url: str) -> None:
    with pytest.raises(ConfigError, match="does not answer"):
        ask(url)


@pytest.mark.usefixtures("unreachable_proxy")
def test_an_instance_is_asked_without_the_proxy_of_the_environment() -> None:
    with running_server() as server:
        with pytest.raises(ConfigError, match="is not a DynaServe instance"):
            ask(server.url)
        assert ask(server.url, allow_stock=True).model == "/models/toy"


def test_one_process_at_two_addresses_is_one_instance() -> None:
    twice, stock = Instance("http://localhost", FIRST.description), describe(instance_epoch="")
    check_distinct(FIRST, [FIRST, Instance("http://b", describe(instance_epoch="another")), Instance("http://c", stock)])
    with pytest.raises(ConfigError, match=r"^http://localhost and http://a are the same instance$"):
        check_distinct(twice, [FIRST, twice])


def test_another_number_of_workers_does_not_fit() -> None:
    other = msgspec.structs.replace(FIRST.description, workers=FIRST.description.workers * 2)
    with pytest.raises(ConfigError, match="workers differ: http://a has 1, http://b has 2"):
        check(Instance("http://b", other), FIRST)


def offering(name: str, **transports: str) -> Instance:
    addresses = {transport.replace("_", "-"): address for transport, address in transports.items()}
    workers = [WorkerDescription(WorkerEndpoint(name, "tcp://h", addresses), "2 layers", 1024)]
    return Instance(f"http://{name}", msgspec.structs.replace(DESCRIPTION, workers=workers))


def on_host(host: str) -> str:
    return msgspec.json.encode({"host": host, "pid": 7, "fd": 3}).decode()


def test_instances_of_one_machine_reach_each_other_in_its_memory() -> None:
    fleet = [offering(name, same_host=on_host("machine"), torch="h:1") for name in ("a", "b")]
    assert choose_transport(fleet, None) == "same-host"
    assert choose_transport(fleet, "torch") == "torch"


@pytest.mark.parametrize("address", [on_host("another"), "nonsense"])
def test_instances_of_two_machines_do_not(address: str) -> None:
    fleet = [offering("a", same_host=on_host("machine"), torch="h:1"), offering("b", same_host=address, torch="h:2")]
    assert choose_transport(fleet, None) == "torch"
    with pytest.raises(
        ConfigError,
        match=r"no common transport same-host that reaches from each machine to the others: http://a: same-host, torch; http://b: ",
    ):
        choose_transport(fleet, "same-host")


def test_an_instance_that_says_it_has_no_plugin_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = httpx.Response(200, content=msgspec.json.encode(describe(stock=True)))
    monkeypatch.setattr(direct_http, "get", lambda *_: answer)
    for allowed in (False, True):
        with pytest.raises(ConfigError, match="instance http://a says that it has no plugin"):
            ask("http://a", allow_stock=allowed)


def _answers(monkeypatch: pytest.MonkeyPatch, descriptions: dict[str, InstanceDescription]) -> None:
    def answer(url: str, *_: object, **__: object) -> InstanceDescription:
        if url not in descriptions:
            raise ConfigError(f"instance {url} does not answer")
        return descriptions[url]

    monkeypatch.setattr(fleet, "describe", answer)


def test_a_file_may_name_instances_that_do_not_answer_or_do_not_fit(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fitting = {name: describe(instance_epoch=name) for name in ("http://b", "http://e")}
    others = {
        "http://a": describe(protocol_version=PROTOCOL_VERSION + 1, instance_epoch="a"),
        "http://c": describe(dtype="bfloat16", instance_epoch="c"),
    }
    _answers(monkeypatch, fitting | others)
    urls = [f"http://{letter}" for letter in "abcde"]
    with caplog.at_level(logging.WARNING):
        assert [instance.instance_id for instance in join_present(urls)] == ["http://b", "http://e"]
    assert [record.message for record in caplog.records] == [
        "instance http://d does not answer; it joins when that is over",
        f"instance http://a speaks protocol {PROTOCOL_VERSION + 1}, this front-end {PROTOCOL_VERSION}; it joins when that is over",
        "dtype differs: http://b has float32, http://c has bfloat16; it joins when that is over",
    ]
    with pytest.raises(ConfigError, match=r"^dtype differs: http://b has float32, http://c has bfloat16$"):
        join(["http://b", "http://c"])
    with pytest.raises(ConfigError, match=r"^none of 2 instances answers and fits; the first: instance http://d does not answer$"):
        join_present(["http://a", "http://d"])


def test_what_only_this_front_end_cannot_use_is_left_out_too(monkeypatch: pytest.MonkeyPatch) -> None:
    _answers(monkeypatch, {name: describe(instance_epoch=name) for name in ("http://a", "http://b")})

    def not_a(instance: Instance, others: Sequence[Instance]) -> None:
        assert not others
        if instance.instance_id == "http://a":
            raise ConfigError("not a")

    assert [instance.instance_id for instance in join_present(["http://a", "http://b"], not_a)] == ["http://b"]
    with pytest.raises(ConfigError, match=r"^not a$"):
        join(["http://a"], not_a)


def test_a_server_without_the_plugin_is_compared_with_what_has_it_wherever_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    _answers(monkeypatch, {"http://a": describe(stock=True, instance_epoch="", dtype="unknown"), "http://b": describe()})
    checked: dict[str, str] = {}

    def also_check(instance: Instance, _: Sequence[Instance]) -> None:
        checked[instance.instance_id] = instance.description.dtype

    assert [instance.instance_id for instance in join(["http://a", "http://b"], also_check)] == ["http://a", "http://b"]
    assert checked == dict.fromkeys(("http://a", "http://b"), "float32"), "also what such a server does not tell"
    with pytest.raises(ConfigError, match="none of the instances is a DynaServe instance"):
        join(["http://a"])


def test_a_front_end_has_the_vllm_of_its_instances_but_for_the_build() -> None:
    instance = Instance("http://b", describe(vllm_version="0.32.0+cpu"))
    check_version(instance, "0.32.0")
    with pytest.raises(ConfigError, match=r"^vllm_version differs: this front-end has 0\.32\.1, http://b has 0\.32\.0\+cpu$"):
        check_version(instance, "0.32.1")
