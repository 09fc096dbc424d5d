"""LoRA adapters of a fleet: one adapter is the same number on every instance, and is loaded everywhere before it is used."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field

import msgspec
from vllm.lora.request import LoRARequest

from dynaserve.messages import AddLora, LoraAdded

logger = logging.getLogger("vllm.dynaserve.frontend")

_LOAD_TIMEOUT_S = 120.0
LONGEST_NAME = 4096
"""Characters of an adapter's name, and of its path (`AddLora`): instances throw away a message with a longer one, and answer nothing."""


def adapter_id(name: str, path: str) -> int:
    """From name and path, in [2^30, 2^31): vLLM counts adapters per server, and the wrong one would answer."""
    digest = hashlib.sha256(f"{name}\0{path}".encode()).digest()
    return 1 << 30 | int.from_bytes(digest[:4], "big") >> 2


@dataclass
class AdapterLoader:
    """The front-end's side. send: carries a message to an instance. offered: what clients may name now; None: not known yet."""

    send: Callable[[str, AddLora], Awaitable[None]]
    offered: Callable[[], Iterable[LoRARequest]] | None = None
    loaded: dict[int, AddLora] = field(default_factory=dict)
    """What every instance has, or is told when it comes back, unless it has been unloaded meanwhile."""
    numbers: dict[str, int] = field(default_factory=dict)
    """Of each name, that of its newest load which was not in place: one that is keeps the number, as in vLLM
    (openai/models/serving.py:180), so that requests under way go on with the new weights, and the old files may go."""
    pending: dict[tuple[str, int], list[asyncio.Future[str | None]]] = field(default_factory=dict)
    """Who waits for which instance to load which adapter. Each waits for itself: one that is cancelled takes nobody else's answer."""
    _ever_loaded: set[int] = field(default_factory=set)
    _putting_back: set[asyncio.Task[None]] = field(default_factory=set)

    async def load(self, lora: LoRARequest, instances: Collection[str]) -> None:
        """Returns when every instance has it. Raises ValueError, which names the instances that cannot load it and why, or what is too
        long."""
        for what, text in (("name", lora.lora_name), ("path", lora.lora_path)):
            if len(text) > LONGEST_NAME:
                raise ValueError(f"the {what} of a LoRA adapter has {len(text)} characters, at most {LONGEST_NAME} are taken")
        number = self.number_of(lora) if lora.load_inplace else adapter_id(lora.lora_name, lora.lora_path)
        number_before = self.numbers.get(lora.lora_name)
        # Instances do not hear of what is unloaded, and keep the weights that they have of a number unless they are told to read them anew.
        anew = lora.load_inplace or number in self._ever_loaded
        self._ever_loaded.add(number)
        message = AddLora(lora.lora_name, number, lora.lora_path, anew, lora.is_3d_lora_weight)
        before = self.loaded.get(number)  # of no other load that goes on: vLLM has one at a time of a name (`lora_resolver_lock`)
        self.loaded[number] = message  # an instance that joins meanwhile is told as well
        self.numbers[lora.lora_name] = number
        try:
            if faults := await self._ask(message, list(instances)):
                raise ValueError(f"LoRA adapter {lora.lora_name} at {lora.lora_path} cannot be loaded by {'; '.join(faults)}")
        except BaseException:  # also where the caller is cancelled: not every instance has it
            self.loaded.pop(number, None)
            if before is not None:
                self.loaded[number] = before
                self._put_back(before, list(instances))
            self.numbers.pop(lora.lora_name)
            if number_before is not None:
                self.numbers[lora.lora_name] = number_before
            raise

    def number_of(self, lora: LoRARequest) -> int:
        return self.numbers.get(lora.lora_name, adapter_id(lora.lora_name, lora.lora_path))

    def with_fleet_id(self, lora: LoRARequest) -> LoRARequest:
        """vLLM keeps `load_inplace` with an adapter that was loaded so; in a request it would have weights read from disk in every step."""
        return msgspec.structs.replace(lora, lora_int_id=self.number_of(lora), load_inplace=False)

    async def load_all(self, instance: str) -> list[str]:
        """Tells an instance that has come back what the others have. Returns why it cannot load it; empty: it has everything."""
        self._forget_unloaded()
        return [fault for message in list(self.loaded.values()) for fault in await self._ask(message, [instance])]

    def _forget_unloaded(self) -> None:
        """vLLM does not tell its engine of adapters that are unloaded (openai/models/serving.py:243), and whose files may be gone."""
        if self.offered is None:
            return
        needed, awaited = {(lora.lora_name, lora.lora_path) for lora in self.offered()}, {number for _, number in self.pending}
        kept = {number: one for number, one in self.loaded.items() if (one.lora_name, one.lora_path) in needed or number in awaited}
        self.loaded = kept
        self.numbers = {name: number for name, number in self.numbers.items() if number in kept}

    def _put_back(self, before: AddLora, instances: Sequence[str]) -> None:
        """Some of them may have other weights of that number by now."""

        async def put_back() -> None:
            if faults := await self._ask(msgspec.structs.replace(before, load_inplace=True), instances):
                logger.error("LoRA adapter %s was not replaced, and %s is not back: %s", before.lora_name, before.lora_path, faults)

        task = asyncio.create_task(put_back())
        self._putting_back.add(task)
        task.add_done_callback(self._putting_back.discard)

    async def _ask(self, message: AddLora, instances: Sequence[str]) -> list[str]:
        number = message.lora_int_id
        answers: dict[str, asyncio.Future[str | None]] = {name: asyncio.get_running_loop().create_future() for name in instances}
        for name, answer in answers.items():
            self.pending.setdefault((name, number), []).append(answer)
        try:
            for name in answers:
                await self.send(name, message)
            missing = (await asyncio.wait(answers.values(), timeout=_LOAD_TIMEOUT_S))[1] if answers else ()
        finally:
            for name, answer in answers.items():
                self._wait_no_more(name, number, answer)
        faults = []
        for name, answer in answers.items():
            fault = f"no answer for {_LOAD_TIMEOUT_S:g} s" if answer in missing else answer.result()
            if fault is not None:
                faults.append(f"{name}: {fault}")
        return faults

    def _wait_no_more(self, instance: str, number: int, answer: asyncio.Future[str | None]) -> None:
        waiting = self.pending[instance, number]
        waiting.remove(answer)
        if not waiting:
            del self.pending[instance, number]

    def answered(self, instance: str, answer: LoraAdded) -> None:
        for waiting in self.pending.get((instance, answer.lora_int_id), ()):
            if not waiting.done():
                waiting.set_result(answer.error)

    def lost(self, instance: str) -> None:
        """Nobody waits for an instance that has died: it is told again when it comes back."""
        for name, number in list(self.pending):
            if name == instance:
                self.answered(instance, LoraAdded(number, None))
