"""One contract for all transports, between real processes over real sockets."""

from __future__ import annotations

import multiprocessing
import threading
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import pytest

from dynaserve.errors import ConfigError
from dynaserve.kv_transfer.transport import KvLayers, Transport, TransportError, TransportUnavailable, WorkerEndpoint
from dynaserve.kv_transfer.transports import make_transport

torch = pytest.importorskip("torch")

LAYERS, BLOCKS = 4, 64
SHAPE = (2, 32, 128)  # KV heads, block size, twice the head size


def make_kv(seed: int, dtype: Any = None) -> KvLayers:
    """As vLLM allocates it: one piece of memory, a tensor per layer, each block contiguous."""
    backing = torch.empty(LAYERS, BLOCKS, *SHAPE, dtype=dtype or torch.float32)
    backing.normal_(generator=torch.Generator().manual_seed(seed))
    return KvLayers([layer.reshape(BLOCKS, -1).view(torch.uint8) for layer in backing])


class Worker:
    """One worker's half: called in its own process through a pipe, or in this one."""

    def __init__(self, name: str, worker_id: str, seed: int) -> None:
        self.kv = make_kv(seed)
        self.transport: Transport = make_transport(name, worker_id, "127.0.0.1", self.kv)
        self.endpoint = WorkerEndpoint(worker_id, f"tcp://{worker_id}", {name: self.transport.address()})

    def block(self, index: int) -> bytes:
        return b"".join(layer[index].numpy().tobytes() for layer in self.kv.layers)

    def call(self, method: str, *args: Any) -> Any:
        if method == "endpoint":
            return self.endpoint
        if method == "block":
            return self.block(*args)
        return getattr(self.transport, method)(*args)


def worker_main(pipe: Connection, name: str, worker_id: str, seed: int) -> None:
    worker = Worker(name, worker_id, seed)
    threads: list[threading.Thread] = []
    pipe.send("ready")

    def run(number: int, method: str, args: tuple[Any, ...]) -> None:
        try:
            answer: Any = worker.call(method, *args)
        except TransportError as error:
            answer = error.with_traceback(None)  # its frames would keep a dropped channel alive
        except Exception:  # noqa: BLE001 - it is raised again in the test's process
            answer = RuntimeError(traceback.format_exc())
        with lock:
            pipe.send((number, answer))

    lock = threading.Lock()
    while (job := pipe.recv()) is not None:
        threads.append(threading.Thread(target=run, args=job, daemon=True))
        threads[-1].start()
    worker.transport.close()


class Remote:
    """A worker in a process of its own; `start` begins a call, the returned function waits for its result."""

    def __init__(self, name: str, worker_id: str, seed: int) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process: BaseProcess = context.Process(target=worker_main, args=(theirs, name, worker_id, seed), daemon=True)
        self.process.start()
        theirs.close()
        assert self.pipe.recv() == "ready"
        self.answers: dict[int, Any] = {}
        self.calls = 0

    def start(self, method: str, *args: Any) -> Callable[[], Any]:
        number = self.calls = self.calls + 1
        self.pipe.send((number, method, args))

        def result() -> Any:
            while number not in self.answers:
                assert self.pipe.poll(60), f"{method} has not returned"
                key, value = self.pipe.recv()
                self.answers[key] = value
            value = self.answers.pop(number)
            if isinstance(value, Exception):
                raise value
            return value

        return result

    def call(self, method: str, *args: Any) -> Any:
        return self.start(method, *args)()

    def stop(self) -> None:
        if self.process.is_alive():
            self.pipe.send(None)
        self.process.join(10)
        self.process.kill()


@pytest.fixture(scope="module", params=["torch", pytest.param("mooncake", marks=pytest.mark.mooncake)])
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def pair(name: str) -> Iterator[tuple[Remote, Remote]]:
    """Two workers; starting one takes seconds, so the tests share them and each leaves the channels in step."""
    workers = (Remote(name, "worker-0", seed=0), Remote(name, "worker-1", seed=1))
    yield workers
    for worker in workers:
        worker.stop()


def move(name: str, a: Remote, b: Remote, local: list[int], remote: list[int]) -> None:
    receiving = b.start("receive", a.call("endpoint"), remote) if name == "torch" else None
    a.call("push", b.call("endpoint"), local, remote)
    if receiving is not None:
        receiving()


def test_blocks_arrive_bit_for_bit_and_nothing_else_changes(name: str, pair: tuple[Remote, Remote]) -> None:
    a, b = pair
    before = [b.call("block", i) for i in range(BLOCKS)]
    local, remote = [3, 4, 5, 9, 40], [60, 61, 62, 7, 8]
    move(name, a, b, local, remote)
    for source, target in zip(local, remote, strict=True):
        assert b.call("block", target) == a.call("block", source)
    for index in set(range(BLOCKS)) - set(remote):
        assert b.call("block", index) == before[index]


def test_pushes_follow_each_other(name: str, pair: tuple[Remote, Remote]) -> None:
    a, b = pair
    for i in range(20):
        move(name, a, b, [i], [BLOCKS - 1 - i])
        assert b.call("block", BLOCKS - 1 - i) == a.call("block", i)


def test_a_push_larger_than_a_piece_arrives(name: str, pair: tuple[Remote, Remote]) -> None:
    a, b = pair
    blocks = list(range(BLOCKS))
    move(name, a, b, blocks, blocks[::-1])
    assert [b.call("block", i) for i in blocks[::-1]] == [a.call("block", i) for i in blocks]


def test_two_workers_push_into_each_other_at_once(name: str, pair: tuple[Remote, Remote]) -> None:
    a, b = pair
    to_a, to_b = list(range(32, 64)), list(range(32, 64))
    want_b, want_a = [a.call("block", i) for i in range(32)], [b.call("block", i) for i in range(32)]
    ends = [a.call("endpoint"), b.call("endpoint")]
    waiting = [a.start("push", ends[1], list(range(32)), to_b), b.start("push", ends[0], list(range(32)), to_a)]
    if name == "torch":
        waiting += [a.start("receive", ends[1], to_a), b.start("receive", ends[0], to_b)]
    for result in waiting:
        result()
    assert [b.call("block", i) for i in to_b] == want_b
    assert [a.call("block", i) for i in to_a] == want_a


def test_a_killed_peer_ends_its_pushes_and_no_others(name: str, pair: tuple[Remote, Remote]) -> None:
    a, b = pair
    doomed = Remote(name, "worker-2", seed=2)
    move(name, a, b, [1], [2])
    move(name, a, doomed, [1], [2])
    lost = doomed.call("endpoint")
    doomed.process.kill()
    doomed.process.join()
    with pytest.raises(TransportError, match="worker-2"):
        a.call("push", lost, [1], [3])
    a.call("drop", lost)
    move(name, a, b, [5], [6])
    assert b.call("block", 6) == a.call("block", 5)


def test_a_dropped_channel_is_opened_again(name: str, pair: tuple[Remote, Remote]) -> None:
    a, b = pair
    move(name, a, b, [1], [2])
    a.call("drop", b.call("endpoint"))
    b.call("drop", a.call("endpoint"))
    move(name, a, b, [3], [4])
    assert b.call("block", 4) == a.call("block", 3)


def test_a_discarded_push_keeps_the_channel_in_step(pair: tuple[Remote, Remote], name: str) -> None:
    if name == "mooncake":
        pytest.skip("one-sided: nothing to take off a channel")
    a, b = pair
    before = b.call("block", 10)
    discarding = b.start("discard", a.call("endpoint"), 2)
    a.call("push", b.call("endpoint"), [1, 2], [10, 11])
    discarding()
    assert b.call("block", 10) == before
    move(name, a, b, [1], [10])
    assert b.call("block", 10) == a.call("block", 1)


def test_a_push_meant_for_other_blocks_is_refused(pair: tuple[Remote, Remote], name: str) -> None:
    if name == "mooncake":
        pytest.skip("one-sided: the sender writes where it was granted")
    a, b = pair
    receiving = b.start("receive", a.call("endpoint"), [20])
    pushing = a.start("push", b.call("endpoint"), [1], [10])
    with pytest.raises(TransportError, match=r"sends blocks \[10\], \[20\] are expected"):
        receiving()
    b.call("drop", a.call("endpoint"))
    with pytest.raises(TransportError):
        pushing()
    a.call("drop", b.call("endpoint"))
    move(name, a, b, [1], [10])
    assert b.call("block", 10) == a.call("block", 1)


def test_an_unknown_transport_is_refused() -> None:
    with pytest.raises(ConfigError, match="'pigeon' is neither one of torch, mooncake nor a module:Class"):
        make_transport("pigeon", "w", "127.0.0.1", make_kv(0))


def test_a_missing_library_names_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "mooncake.engine", None)
    with pytest.raises(TransportUnavailable, match="apt-get install libibverbs1"):
        make_transport("mooncake", "w", "127.0.0.1", make_kv(0))
