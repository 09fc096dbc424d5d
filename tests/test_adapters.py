"""Which LoRA adapters an instance is told of, and how."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.lora.request import LoRARequest

from dynaserve.messages import AddLora, LoraAdded
from vllm_plugin.adapters import AdapterLoader, adapter_id

FIRST, SECOND = LoRARequest("first", 1, "/first"), LoRARequest("second", 2, "/second", is_3d_lora_weight=True)
NUMBER = adapter_id(FIRST.lora_name, FIRST.lora_path)


class Instances:
    """Load whatever they are told to, and tell so, but for those that are silent."""

    def __init__(self, *silent: str) -> None:
        self.told: list[tuple[str, str]] = []
        self.messages: list[tuple[str, AddLora]] = []
        self.silent = silent
        self.loader = AdapterLoader(self.send)

    async def send(self, instance: str, message: AddLora) -> None:
        self.told.append((instance, message.lora_name))
        self.messages.append((instance, message))
        if instance not in self.silent:
            self.loader.answered(instance, LoraAdded(message.lora_int_id, None))


async def waits(asking: asyncio.Task[Any]) -> bool:
    """Whether it goes on waiting: nothing else than an answer is to come."""
    for _ in range(20):
        await asyncio.sleep(0)
    return not asking.done()


async def cancel(asking: asyncio.Task[Any]) -> None:
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking


def test_an_instance_that_comes_back_is_not_told_of_adapters_that_were_unloaded() -> None:
    async def scenario() -> None:
        instances = Instances()
        for lora in (FIRST, SECOND):
            await instances.loader.load(lora, ["a"])
        assert await instances.loader.load_all("b") == []
        instances.loader.offered = lambda: [FIRST]
        assert await instances.loader.load_all("c") == []
        moved = LoRARequest(FIRST.lora_name, 1, "/elsewhere")
        instances.loader.offered = lambda: [moved, SECOND]
        assert await instances.loader.load_all("d") == []
        assert instances.told == [("a", "first"), ("a", "second"), ("b", "first"), ("b", "second"), ("c", "first")]

    asyncio.run(scenario())


def test_an_adapter_that_is_being_loaded_is_not_taken_for_unloaded() -> None:
    """Its server offers it only once every instance has it."""

    async def scenario() -> None:
        instances = Instances()
        loader = instances.loader
        loader.offered = list
        answered = loader.answered
        loader.answered = lambda *_: None  # type: ignore[method-assign]
        loading = asyncio.create_task(loader.load(FIRST, ["slow"]))
        await asyncio.sleep(0)
        loader.answered = answered  # type: ignore[method-assign]
        assert await loader.load_all("joined") == []
        answered("slow", LoraAdded(adapter_id("first", "/first"), None))
        await loading
        assert instances.told == [("slow", "first"), ("joined", "first")]

    asyncio.run(scenario())


def test_an_instance_that_died_while_it_loaded_and_is_back_is_waited_for() -> None:
    async def scenario() -> None:
        instances = Instances("b")
        loader = instances.loader
        await loader.load(FIRST, ["a"])
        loading = asyncio.create_task(loader.load_all("b"))
        assert await waits(loading)
        loading.cancel()  # as the front-end does with an instance's death, before it says so
        loader.lost("b")
        with pytest.raises(asyncio.CancelledError):
            await loading
        again = asyncio.create_task(loader.load_all("b"))
        assert await waits(again)
        loader.answered("b", LoraAdded(NUMBER, None))
        assert await again == []
        assert instances.told == [("a", "first"), ("b", "first"), ("b", "first")]
        assert not loader.pending

    asyncio.run(scenario())


def test_an_instance_that_comes_back_while_others_still_load_is_waited_for() -> None:
    async def scenario() -> None:
        instances = Instances("a", "b")
        loader = instances.loader
        loading = asyncio.create_task(loader.load(FIRST, ["a", "b"]))
        assert await waits(loading)
        loader.lost("b")
        back = asyncio.create_task(loader.load_all("b"))
        assert await waits(back)
        loader.answered("a", LoraAdded(NUMBER, None))
        await loading
        assert await waits(back), "what a load no longer waits for, another may"
        loader.answered("b", LoraAdded(NUMBER, None))
        assert await back == []

    asyncio.run(scenario())


def test_a_load_that_is_cancelled_takes_no_answer_from_an_instance_that_joins() -> None:
    async def scenario() -> None:
        loader = Instances("a").loader
        loading, joining = asyncio.create_task(loader.load(FIRST, ["a"])), asyncio.create_task(loader.load_all("a"))
        assert await waits(joining)
        await cancel(loading)
        assert await waits(joining)
        loader.answered("a", LoraAdded(NUMBER, None))
        assert await joining == []
        assert not loader.pending

    asyncio.run(scenario())


def test_an_adapter_whose_load_was_cancelled_is_not_taken_for_loaded() -> None:
    async def scenario() -> None:
        instances = Instances("a")
        loader = instances.loader
        loading = asyncio.create_task(loader.load(FIRST, ["a"]))
        assert await waits(loading)
        await cancel(loading)
        assert not loader.pending
        assert await loader.load_all("b") == []
        assert instances.told == [("a", "first")]

    asyncio.run(scenario())


@pytest.mark.parametrize("how", ["refused", "cancelled"])
def test_an_adapter_that_was_loaded_stays_so_where_it_cannot_be_loaded_anew(how: str) -> None:
    async def scenario() -> None:
        instances = Instances()
        loader = instances.loader
        await loader.load(FIRST, ["a"])
        before = dict(loader.loaded)
        instances.silent = ("a",)
        anew = asyncio.create_task(loader.load(LoRARequest("first", 1, "/first", load_inplace=True), ["a"]))
        assert await waits(anew)
        if how == "cancelled":
            await cancel(anew)
        else:
            loader.answered("a", LoraAdded(NUMBER, "its file is gone"))
            with pytest.raises(ValueError, match=r"^LoRA adapter first at /first cannot be loaded by a: its file is gone$"):
                await anew
        assert loader.loaded == before

    asyncio.run(scenario())


@pytest.mark.parametrize("how", ["refused", "cancelled"])
def test_instances_that_have_replaced_an_adapter_put_it_back_where_another_cannot(how: str) -> None:
    async def scenario() -> None:
        instances = Instances()
        loader = instances.loader
        await loader.load(FIRST, ["a", "b"])
        instances.silent, instances.messages = ("b",), []
        anew = asyncio.create_task(loader.load(LoRARequest("first", 1, "/better", load_inplace=True), ["a", "b"]))
        assert await waits(anew)
        if how == "cancelled":
            await cancel(anew)
        else:
            loader.answered("b", LoraAdded(NUMBER, "there is no such file"))
            with pytest.raises(ValueError, match="there is no such file"):
                await anew
        await asyncio.sleep(0)
        assert [(name, one.lora_path, one.load_inplace) for name, one in instances.messages[2:]] == [
            ("a", "/first", True),
            ("b", "/first", True),
        ]
        loader.answered("b", LoraAdded(NUMBER, None))

    asyncio.run(scenario())


def test_an_adapter_that_was_unloaded_and_is_loaded_again_is_read_again() -> None:
    """Instances do not hear of the first, and its files may be others by now."""

    async def scenario() -> None:
        instances = Instances()
        for _ in range(2):
            await instances.loader.load(FIRST, ["a"])
        assert [(one.lora_int_id, one.load_inplace) for _, one in instances.messages] == [(NUMBER, False), (NUMBER, True)]

    asyncio.run(scenario())


def test_no_request_has_weights_read_anew() -> None:
    assert not Instances().loader.with_fleet_id(LoRARequest("first", 1, "/first", load_inplace=True)).load_inplace


def test_a_fleet_changes_an_adapters_number_only() -> None:
    loader = Instances().loader
    renumbered = loader.with_fleet_id(SECOND)
    assert (renumbered.lora_path, renumbered.is_3d_lora_weight) == ("/second", True)
    assert renumbered.lora_int_id == adapter_id("second", "/second") != loader.with_fleet_id(FIRST).lora_int_id


def test_an_adapter_that_is_loaded_in_place_keeps_its_number_and_one_that_is_loaded_anew_gets_another() -> None:
    async def scenario() -> None:
        instances = Instances()
        loader = instances.loader
        await loader.load(FIRST, ["a"])
        await loader.load(LoRARequest("first", 1, "/better", load_inplace=True), ["a"])
        (message,) = loader.loaded.values()
        assert (message.lora_int_id, message.lora_path) == (NUMBER, "/better")
        for path in ("/first", "/better"):  # of a request under way, and of a new one
            assert loader.with_fleet_id(LoRARequest("first", 7, path)).lora_int_id == NUMBER
        loader.offered = lambda: [LoRARequest("first", 1, "/better")]
        assert await loader.load_all("b") == []
        assert instances.told[-1] == ("b", "first")
        instances.silent = ("a",)
        refused = asyncio.create_task(loader.load(LoRARequest("first", 1, "/third"), ["a"]))
        assert await waits(refused)
        loader.answered("a", LoraAdded(adapter_id("first", "/third"), "there is no such file"))
        with pytest.raises(ValueError, match="there is no such file"):
            await refused
        assert loader.with_fleet_id(FIRST).lora_int_id == NUMBER
        instances.silent = ()
        await loader.load(LoRARequest("first", 1, "/third"), ["a"])
        assert loader.with_fleet_id(LoRARequest("first", 9, "/third")).lora_int_id == adapter_id("first", "/third")

    asyncio.run(scenario())
