"""Which LoRA adapters an instance is told of, and how."""

from __future__ import annotations

import asyncio

import pytest

pytest.importorskip("vllm")

from vllm.lora.request import LoRARequest

from dynaserve.messages import AddLora, LoraAdded
from vllm_plugin.adapters import AdapterLoader, adapter_id, with_fleet_id

FIRST, SECOND = LoRARequest("first", 1, "/first"), LoRARequest("second", 2, "/second", is_3d_lora_weight=True)


class Instances:
    """Load whatever they are told to, and tell so."""

    def __init__(self) -> None:
        self.told: list[tuple[str, str]] = []
        self.loader = AdapterLoader(self.send)

    async def send(self, instance: str, message: AddLora) -> None:
        self.told.append((instance, message.lora_name))
        self.loader.answered(instance, LoraAdded(message.lora_int_id, None))


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


def test_a_fleet_changes_an_adapters_number_only() -> None:
    renumbered = with_fleet_id(SECOND)
    assert (renumbered.lora_path, renumbered.is_3d_lora_weight) == ("/second", True)
    assert renumbered.lora_int_id == adapter_id("second", "/second") != with_fleet_id(FIRST).lora_int_id
