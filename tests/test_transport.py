"""One contract for all transports, over real sockets: between processes, and between two workers in one process."""

from __future__ import annotations

import contextlib
import multiprocessing
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import psutil
import pytest

from dynaserve.errors import ConfigError
from dynaserve.kv_transfer.transport import KvLayers, Transport, TransportError, TransportUnavailable, WorkerEndpoint
from dynaserve.kv_transfer.transports import make_transport

torch = pytest.importorskip("torch")

from dynaserve.kv_transfer.torch_transport import PIECE_BYTES, TorchTransport  # noqa: E402 - only where torch is

LAYERS, BLOCKS = 6, 64
SHAPE = (3, 32, 128)  # KV heads, block size, twice the head size: SmolLM2's


class PatientTransport(TorchTransport):
    """Its timeout is longer than any test: what ends in a test was ended, it did not time out."""

    name = "tests.test_transport:PatientTransport"

    def __init__(self, worker_id: str, host: str, kv: KvLayers) -> None:
        super().__init__(worker_id, host, kv, timeout_s=3600.0)


def make_kv(seed: int, dtype: Any = torch.float32) -> KvLayers:
    """As vLLM allocates it: one piece of memory, a tensor per layer, each block contiguous."""
    backing = torch.empty(LAYERS, BLOCKS, *SHAPE, dtype=dtype)
    backing.normal_(generator=torch.Generator().manual_seed(seed))
    return KvLayers([layer.reshape(BLOCKS, -1).view(torch.uint8) for layer in backing])


class Worker:
    """One worker's half: called in its own process through a pipe, or in this one."""

    def __init__(self, name: str, worker_id: str, seed: int, dtype: Any = torch.float32) -> None:
        self.kv = make_kv(seed, dtype)
        self.transport: Transport = make_transport(name, worker_id, "127.0.0.1", self.kv)
        self.endpoint = WorkerEndpoint(worker_id, f"tcp://{worker_id}", {name: self.transport.address()})

    def block(self, index: int) -> bytes:
        return b"".join(layer[index].numpy().tobytes() for layer in self.kv.layers)

    def call(self, method: str, *args: Any) -> Any:
        if method == "endpoint":
            return self.endpoint
        if method == "block":
            return self.block(*args)
        if method == "is_inside":
            return is_inside(*args)
        return getattr(self.transport, method)(*args)


def is_inside(method: str) -> bool:
    """Whether a thread of this process is in this method of `torch_channel`."""
    stacks = [[frame.f_code for frame, _ in traceback.walk_stack(top)] for top in sys._current_frames().values()]
    return any(code.co_name == method and code.co_filename.endswith("torch_channel.py") for stack in stacks for code in stack)


def worker_main(pipe: Connection, name: str, worker_id: str, seed: int) -> None:
    worker = Worker(name, worker_id, seed)
    threads: list[threading.Thread] = []
    pipe.send("ready")

    def run(number: int, method: str, args: tuple[Any, ...]) -> None:
        try:
            answer: Any = worker.call(method, *args)
        except TransportError as error:
            answer = error
        except Exception:  # noqa: BLE001 - it is raised again in the test's process
            answer = RuntimeError(traceback.format_exc())
        with lock:
            pipe.send((number, answer))

    lock = threading.Lock()
    while (job := pipe.recv()) is not None:
        threads.append(threading.Thread(target=run, args=job, daemon=True))
        threads[-1].start()
    worker.transport.close()


class Call:
    """A call under way on a worker; calling it waits for its result."""

    def __init__(self, future: Future[Any]) -> None:
        self.future = future

    def __call__(self) -> Any:
        return self.future.result(timeout=60)


class Remote:
    """A worker in a process of its own."""

    def __init__(self, name: str, worker_id: str, seed: int) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process: BaseProcess = context.Process(target=worker_main, args=(theirs, name, worker_id, seed), daemon=True)
        self.process.start()
        theirs.close()
        assert self.pipe.recv() == "ready"
        self.futures: list[Future[Any]] = []
        threading.Thread(target=self.read, daemon=True).start()

    def read(self) -> None:
        with contextlib.suppress(EOFError, OSError):
            while True:
                number, value = self.pipe.recv()
                if isinstance(value, Exception):
                    self.futures[number].set_exception(value)
                else:
                    self.futures[number].set_result(value)

    def start(self, method: str, *args: Any) -> Call:
        self.futures.append(Future())
        self.pipe.send((len(self.futures) - 1, method, args))
        return Call(self.futures[-1])

    def call(self, method: str, *args: Any) -> Any:
        return self.start(method, *args)()

    def stop(self) -> None:
        if self.process.is_alive():
            self.pipe.send(None)
        self.process.join(10)
        self.process.kill()


class Local:
    """A worker in this process, with the same face."""

    def __init__(self, name: str, worker_id: str, seed: int, dtype: Any = torch.float32) -> None:
        self.worker = Worker(name, worker_id, seed, dtype)
        self.threads = ThreadPoolExecutor(4)

    def start(self, method: str, *args: Any) -> Call:
        return Call(self.threads.submit(self.worker.call, method, *args))

    def call(self, method: str, *args: Any) -> Any:
        return self.start(method, *args)()

    def stop(self) -> None:
        self.worker.transport.close()
        self.threads.shutdown()


Pair = tuple[Remote | Local, Remote | Local]
TRANSPORTS = ["torch", pytest.param("mooncake", marks=pytest.mark.mooncake)]
WORKERS = {"processes": Remote, "one process": Local}


def two_workers(name: str, where: str) -> Iterator[Pair]:
    workers = (WORKERS[where](name, "worker-0", seed=0), WORKERS[where](name, "worker-1", seed=1))
    yield workers
    for worker in workers:
        worker.stop()


@pytest.fixture(scope="module", params=TRANSPORTS)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module", params=WORKERS)
def where(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def pair(name: str, where: str) -> Iterator[Pair]:
    """Two workers; starting one takes seconds, so the tests share them and each leaves the channels in step."""
    yield from two_workers(name, where)


@pytest.fixture(scope="module")
def patient_pair(where: str) -> Iterator[Pair]:
    """Two workers of a two-sided transport, which never time out."""
    yield from two_workers(PatientTransport.name, where)


def start_move(a: Remote | Local, b: Remote | Local, local: list[int], remote: list[int]) -> Callable[[], None]:
    from_a, to_b = a.call("endpoint"), b.call("endpoint")
    receiving = None if "mooncake" in to_b.transports else b.start("receive", from_a, remote)
    pushing = a.start("push", to_b, local, remote)

    def finish() -> None:
        pushing()
        if receiving is not None:
            receiving()

    return finish


def move(a: Remote | Local, b: Remote | Local, local: list[int], remote: list[int]) -> None:
    start_move(a, b, local, remote)()


def wait_until_inside(worker: Remote | Local, method: str) -> None:
    """Returns once a thread of the worker waits in this method of its channel."""
    while not worker.call("is_inside", method):
        time.sleep(0.01)


def assert_moves(a: Remote | Local, b: Remote | Local, source: int, target: int) -> None:
    """A push arrives, and so each end is where the other believes it to be."""
    move(a, b, [source], [target])
    assert b.call("block", target) == a.call("block", source)


def test_blocks_arrive_bit_for_bit_and_nothing_else_changes(pair: Pair) -> None:
    a, b = pair
    before = [b.call("block", i) for i in range(BLOCKS)]
    local, remote = [3, 4, 5, 9, 40], [60, 61, 62, 7, 8]
    move(a, b, local, remote)
    for source, target in zip(local, remote, strict=True):
        assert b.call("block", target) == a.call("block", source)
    for index in set(range(BLOCKS)) - set(remote):
        assert b.call("block", index) == before[index]


def test_bfloat16_blocks_arrive_bit_for_bit(name: str) -> None:
    a, b = Local(name, "half-0", 0, torch.bfloat16), Local(name, "half-1", 1, torch.bfloat16)
    assert_moves(a, b, 5, 50)
    a.stop()
    b.stop()


def test_pushes_follow_each_other(pair: Pair) -> None:
    a, b = pair
    for i in range(20):
        assert_moves(a, b, i, BLOCKS - 1 - i)


def test_a_push_larger_than_a_piece_arrives(pair: Pair) -> None:
    a, b = pair
    blocks = list(range(BLOCKS))
    assert make_kv(0).block_bytes * BLOCKS > 2 * PIECE_BYTES
    move(a, b, blocks, blocks[::-1])
    assert [b.call("block", i) for i in blocks[::-1]] == [a.call("block", i) for i in blocks]


def test_two_workers_push_into_each_other_at_once(pair: Pair) -> None:
    a, b = pair
    sources, targets = list(range(32)), list(range(32, 64))
    want_b, want_a = [a.call("block", i) for i in sources], [b.call("block", i) for i in sources]
    for _ in range(5):
        for finish in [start_move(a, b, sources, targets), start_move(b, a, sources, targets)]:
            finish()
    assert [b.call("block", i) for i in targets] == want_b
    assert [a.call("block", i) for i in targets] == want_a


def test_several_peers_push_and_are_pushed_to_at_once(name: str, pair: Pair) -> None:
    a, b = pair
    c = Local(name, "worker-3", seed=3)
    for finish in [start_move(a, b, [0], [20]), start_move(a, c, [1], [21]), start_move(c, b, [2], [22]), start_move(b, c, [3], [23])]:
        finish()
    for sender, receiver, source, target in [(a, b, 0, 20), (a, c, 1, 21), (c, b, 2, 22), (b, c, 3, 23)]:
        assert receiver.call("block", target) == sender.call("block", source)
    c.stop()


def test_a_killed_peer_ends_its_pushes_and_no_others(name: str, pair: Pair) -> None:
    a, b = pair
    doomed = Remote(name, "worker-2", seed=2)
    assert_moves(a, b, 1, 2)
    assert_moves(a, doomed, 1, 2)
    lost = doomed.call("endpoint")
    doomed.process.kill()
    doomed.process.join()
    for _ in range(2):  # on the open channel, and when opening a new one
        with pytest.raises(TransportError, match="worker-2"):
            a.call("push", lost, [1], [3])
        a.call("drop", lost)
    assert_moves(a, b, 5, 6)


def test_a_dropped_channel_is_opened_again(pair: Pair) -> None:
    a, b = pair
    for droppers in [[a], [b], [a, b]]:
        assert_moves(a, b, 1, 2)
        for dropper in droppers:
            dropper.call("drop", (b if dropper is a else a).call("endpoint"))
        assert_moves(a, b, 3, 4)
        assert_moves(b, a, 3, 4)


def test_a_discarded_push_keeps_the_channel_in_step(patient_pair: Pair) -> None:
    a, b = patient_pair
    before = b.call("block", 10)
    discarding = b.start("discard", a.call("endpoint"), 2)
    a.call("push", b.call("endpoint"), [1, 2], [10, 11])
    discarding()
    assert b.call("block", 10) == before
    assert_moves(a, b, 1, 10)


@pytest.mark.parametrize("sent", [[10], [10, 11, 12]])
def test_a_push_meant_for_other_blocks_is_refused(patient_pair: Pair, sent: list[int]) -> None:
    """Gloo by itself ends the process that gets more bytes than it expects."""
    a, b = patient_pair
    assert_moves(a, b, 1, 2)
    before = b.call("block", 20)
    receiving = b.start("receive", a.call("endpoint"), [20])
    pushing = a.start("push", b.call("endpoint"), [1] * len(sent), sent)
    with pytest.raises(TransportError, match=rf"num_blocks={len(sent)}.*is expected with .*num_blocks=1"):
        receiving()
    b.call("drop", a.call("endpoint"))
    with pytest.raises(TransportError):
        pushing()
    assert b.call("block", 20) == before
    a.call("drop", b.call("endpoint"))
    assert_moves(a, b, 1, 10)


@pytest.mark.parametrize("dropper", ["sender", "receiver"])
def test_a_drop_ends_a_push_that_waits_for_its_receiver(patient_pair: Pair, dropper: str) -> None:
    a, b = patient_pair
    assert_moves(a, b, 1, 2)
    pushing = a.start("push", b.call("endpoint"), [1], [3])
    if dropper == "sender":
        wait_until_inside(a, "send")
        a.call("drop", b.call("endpoint"))
        with pytest.raises(TransportError, match="push to worker worker-1"):
            pushing()
        with pytest.raises(TransportError, match="given up push"):
            b.call("receive", a.call("endpoint"), [3])
    else:  # the push is still to come for the receiver, which takes it in the next generation
        wait_until_inside(a, "send")
        b.call("drop", a.call("endpoint"))
        b.call("receive", a.call("endpoint"), [3])
        pushing()
    assert_moves(a, b, 4, 5)


@pytest.mark.parametrize("dropper", ["sender", "receiver"])
def test_a_drop_ends_a_receive_that_waits_for_its_push(patient_pair: Pair, dropper: str) -> None:
    a, b = patient_pair
    assert_moves(a, b, 1, 2)
    receiving = b.start("receive", a.call("endpoint"), [3])
    if dropper == "receiver":
        wait_until_inside(b, "receive")
        b.call("drop", a.call("endpoint"))
        with pytest.raises(TransportError, match="receive from worker worker-0"):
            receiving()
        with pytest.raises(TransportError):
            a.call("push", b.call("endpoint"), [1], [3])
        a.call("drop", b.call("endpoint"))
    else:  # the sender has not begun that push: it sends it in the next generation
        wait_until_inside(b, "receive")
        a.call("drop", b.call("endpoint"))
        a.call("push", b.call("endpoint"), [1], [3])
        receiving()
    assert_moves(a, b, 4, 5)


def test_a_killed_sender_ends_the_receive(patient_pair: Pair) -> None:
    _, b = patient_pair
    doomed = Remote(PatientTransport.name, "worker-2", seed=2)
    assert_moves(doomed, b, 1, 2)
    lost = doomed.call("endpoint")
    receiving = b.start("receive", lost, [3])
    wait_until_inside(b, "receive")
    doomed.process.kill()
    doomed.process.join()
    with pytest.raises(TransportError, match="worker-2"):
        receiving()
    b.call("drop", lost)


def test_a_peer_that_never_comes_keeps_no_other_waiting(name: str) -> None:
    if name == "mooncake":
        pytest.skip("one-sided: nobody is waited for")
    a, b = Local(name, "worker-5", 5), Local(name, "worker-6", 6)
    absent = WorkerEndpoint("absent", "tcp://absent", {name: "127.0.0.1:1"})
    waiting = b.start("receive", absent, [1])
    done = threading.Event()
    moving = threading.Thread(target=lambda: (assert_moves(a, b, 1, 2), done.set()))
    moving.start()
    with pytest.raises(TransportError, match="absent"):
        waiting()
    assert done.is_set()
    moving.join()
    a.stop()
    b.stop()


def test_a_closed_transport_refuses_to_push(name: str) -> None:
    a, b = Local(name, "worker-7", 7), Local(name, "worker-8", 8)
    assert_moves(a, b, 1, 2)
    a.call("close")
    a.call("close")
    with pytest.raises(TransportError, match="closed"):
        a.call("push", b.call("endpoint"), [1], [2])
    a.stop()
    b.stop()


def test_a_push_into_nowhere_is_refused(name: str) -> None:
    a = Local(name, "worker-9", 9)
    with pytest.raises(TransportError, match="worker-10"):
        a.call("push", WorkerEndpoint("worker-10", "tcp://nowhere", {}), [1], [2])
    a.stop()


def suspend(process: psutil.Process) -> None:
    """Stop it, and return once every thread has stopped: until one of them takes the signal, the others run on."""
    process.suspend()
    while any(psutil.Process(thread.id).status() != psutil.STATUS_STOPPED for thread in process.threads()):
        time.sleep(0.001)


@pytest.mark.mooncake
def test_a_one_sided_push_to_a_stopped_peer_ends_and_later_ones_arrive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dynaserve.kv_transfer.mooncake_transport.PUSH_TIMEOUT_S", 1.0)
    a, b = Local("mooncake", "worker-13", 13), Remote("mooncake", "worker-14", 14)
    assert_moves(a, b, 1, 2)
    peer, stopped = b.call("endpoint"), psutil.Process(b.process.pid)
    suspend(stopped)
    try:
        with pytest.raises(TransportError, match=r"push to worker worker-14 at .* failed: nothing came back for 1 s"):
            a.call("push", peer, [3], [4])
    finally:
        stopped.resume()
    assert_moves(a, b, 5, 6)
    a.stop()
    b.stop()


def listening() -> set[Any]:
    return {c.laddr for c in psutil.Process().net_connections("inet") if c.status == psutil.CONN_LISTEN}


def test_the_torch_transport_listens_on_its_host_only() -> None:
    before = listening()
    a, b = Local("torch", "worker-11", 11), Local("torch", "worker-12", 12)
    assert_moves(a, b, 1, 2)
    assert {address.ip for address in listening() - before} == {"127.0.0.1"}
    a.stop()
    b.stop()


def test_an_unknown_transport_is_refused() -> None:
    with pytest.raises(ConfigError, match="'pigeon' is neither one of torch, mooncake nor a module:Class"):
        make_transport("pigeon", "w", "127.0.0.1", make_kv(0))


def test_a_missing_library_names_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "mooncake.engine", None)
    with pytest.raises(TransportUnavailable, match="apt-get install libibverbs1"):
        make_transport("mooncake", "w", "127.0.0.1", make_kv(0))
