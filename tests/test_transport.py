"""One contract for all transports, over real sockets: between processes, and between two workers in one process."""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import os
import random
import signal
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import psutil
import pytest

from dynaserve.errors import ConfigError
from dynaserve.kv_transfer import same_host_transport
from dynaserve.kv_transfer.transport import KvLayers, PushNumber, Transport, TransportError, TransportUnavailable, WorkerEndpoint
from dynaserve.kv_transfer.transports import make_transport
from tests.cut_sockets import cut_sockets
from tests.device import DEVICE
from tests.transports import TRANSPORTS

torch = pytest.importorskip("torch")

from dynaserve.kv_transfer import torch_pair  # noqa: E402 - only where torch is
from dynaserve.kv_transfer.torch_channel import Channel  # noqa: E402
from dynaserve.kv_transfer.torch_transport import PIECE_BYTES, TorchTransport  # noqa: E402 - only where torch is

LAYERS, BLOCKS = 6, {"cpu": 64, "cuda": 256}[DEVICE]
SHAPE = (3, 32, 128)  # KV heads, block size, twice the head size: SmolLM2's


class PatientTransport(TorchTransport):
    """Its timeout is longer than any test: what ends in a test was ended, it did not time out."""

    name = "tests.test_transport:PatientTransport"

    def __init__(self, worker_id: str, host: str, kv: KvLayers) -> None:
        super().__init__(worker_id, host, kv, timeout_s=3600.0)


class BriefTransport(TorchTransport):
    name = "tests.test_transport:BriefTransport"
    timeout_s = 4.0

    def __init__(self, worker_id: str, host: str, kv: KvLayers) -> None:
        super().__init__(worker_id, host, kv, self.timeout_s)


class HastyTransport(TorchTransport):
    name = "tests.test_transport:HastyTransport"

    def __init__(self, worker_id: str, host: str, kv: KvLayers) -> None:
        super().__init__(worker_id, host, kv, timeout_s=15.0)


def make_kv(seed: int, dtype: Any = torch.float32) -> KvLayers:
    """As vLLM allocates it: one piece of memory, a tensor per layer, each block contiguous."""
    backing = torch.empty(LAYERS, BLOCKS, *SHAPE, dtype=dtype)
    backing.normal_(generator=torch.Generator().manual_seed(seed))
    backing = backing.to(DEVICE)
    return KvLayers([layer.reshape(BLOCKS, -1).view(torch.uint8) for layer in backing])


class Worker:
    """One worker's half: called in its own process through a pipe, or in this one."""

    def __init__(self, name: str, worker_id: str, seed: int, dtype: Any = torch.float32) -> None:
        self.kv = make_kv(seed, dtype)
        self.transport: Transport = make_transport(name, worker_id, "127.0.0.1", self.kv)
        self.endpoint = WorkerEndpoint(worker_id, f"tcp://{worker_id}", {name: self.transport.address()})

    def block(self, index: int) -> bytes:
        return b"".join(layer[index].cpu().numpy().tobytes() for layer in self.kv.layers)

    def call(self, method: str, *args: Any) -> Any:
        if method == "endpoint":
            return self.endpoint
        if method == "block":
            return self.block(*args)
        if method == "is_inside":
            return WatchedChannel.inside[args[0]] > 0
        return getattr(self.transport, method)(*args)


class WatchedChannel(Channel):
    """Counts the threads of this process that are in each of its methods."""

    inside: ClassVar[Counter[str]] = Counter()
    lock = threading.Lock()

    def send(self, tensor: Any) -> None:
        with self.counted("send"):
            super().send(tensor)

    def receive(self, tensor: Any) -> None:
        with self.counted("receive"):
            super().receive(tensor)

    @classmethod
    @contextlib.contextmanager
    def counted(cls, method: str) -> Iterator[None]:
        with cls.lock:
            cls.inside[method] += 1
        try:
            yield
        finally:
            with cls.lock:
                cls.inside[method] -= 1


torch_pair._CONNECT_SHARE = 1  # a short timeout shall not make Gloo's shorter still
torch_pair.Channel = WatchedChannel  # type: ignore[attr-defined]  # in the processes that load this file only


def worker_main(pipe: Connection, name: str, worker_id: str, seed: int) -> None:
    faulthandler.enable()  # a test that fails shows where a worker died or hung
    faulthandler.register(signal.SIGUSR1)
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

    def __init__(self, future: Future[Any], show_stacks: Callable[[], None]) -> None:
        self.future = future
        self.show_stacks = show_stacks

    def __call__(self) -> Any:
        if not wait([self.future], 60).done:
            self.show_stacks()
        return self.future.result(timeout=0)


class Numbers:
    """Counts pushes and receives, as agents do: a push and a receive that belong together have the same number."""

    def __init__(self) -> None:
        self.next: dict[tuple[str, str], PushNumber] = {}

    def take(self, kind: str, peer: WorkerEndpoint) -> PushNumber:
        """kind: "push" or "receive"."""
        taken = self.next.get((kind, peer.worker_id), PushNumber(0, 0))
        self.next[kind, peer.worker_id] = PushNumber(taken.session, taken.number + 1)
        return taken

    def begin_anew(self, kind: str, peer: WorkerEndpoint) -> None:
        self.next[kind, peer.worker_id] = PushNumber(self.take(kind, peer).session + 1, 0)

    def numbered(self, method: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
        kind = {"push": "push", "receive": "receive", "discard": "receive"}.get(method)
        return args if kind is None else (*args, self.take(kind, args[0]))


class Remote(Numbers):
    """A worker in a process of its own."""

    def __init__(self, name: str, worker_id: str, seed: int) -> None:
        super().__init__()
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process: BaseProcess = context.Process(target=worker_main, args=(theirs, name, worker_id, seed), daemon=True)
        self.process.start()
        theirs.close()
        assert self.pipe.recv() == "ready"
        self.futures: list[Future[Any]] = []
        self.ended: RuntimeError | None = None
        self.lock = threading.Lock()  # several threads of a test may call: a number belongs to one call
        threading.Thread(target=self.read, daemon=True).start()

    def read(self) -> None:
        with contextlib.suppress(EOFError, OSError):
            while True:
                number, value = self.pipe.recv()
                if isinstance(value, Exception):
                    self.futures[number].set_exception(value)
                else:
                    self.futures[number].set_result(value)
        self.process.join()
        with self.lock:
            self.ended = RuntimeError(f"the process has ended with {self.process.exitcode}")
            for future in self.futures:
                if not future.done():
                    future.set_exception(self.ended)

    def start(self, method: str, *args: Any) -> Call:
        future: Future[Any] = Future()
        with self.lock:
            if self.ended is not None:
                raise self.ended
            self.futures.append(future)
            self.pipe.send((len(self.futures) - 1, method, self.numbered(method, args)))
        return Call(future, self.show_stacks)

    def show_stacks(self) -> None:
        assert self.process.pid is not None
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.process.pid, signal.SIGUSR1)
            time.sleep(1)

    def call(self, method: str, *args: Any) -> Any:
        return self.start(method, *args)()

    def stop(self) -> None:
        with contextlib.suppress(OSError):  # it has ended
            self.pipe.send(None)
        self.process.join(10)
        self.process.kill()


class Local(Numbers):
    """A worker in this process, with the same face."""

    def __init__(self, name: str, worker_id: str, seed: int, dtype: Any = torch.float32) -> None:
        super().__init__()
        self.worker = Worker(name, worker_id, seed, dtype)
        self.threads = ThreadPoolExecutor(4)

    def start(self, method: str, *args: Any) -> Call:
        return Call(self.threads.submit(self.worker.call, method, *self.numbered(method, args)), faulthandler.dump_traceback)

    def call(self, method: str, *args: Any) -> Any:
        return self.start(method, *args)()

    def stop(self) -> None:
        self.worker.transport.close()
        self.threads.shutdown()


Pair = tuple[Remote | Local, Remote | Local]
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
    receiving = None if {"mooncake", "same-host"} & set(to_b.transports) else b.start("receive", from_a, remote)
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
    assert make_kv(0).block_bytes * BLOCKS > 2 * PIECE_BYTES[DEVICE]
    move(a, b, blocks, blocks[::-1])
    assert [b.call("block", i) for i in blocks[::-1]] == [a.call("block", i) for i in blocks]


@pytest.mark.parametrize("block_bytes", [64, 8, 12, 5])
@pytest.mark.parametrize("offset", [0, 16, 3])
def test_blocks_of_any_size_and_place_are_copied(block_bytes: int, offset: int) -> None:
    memory = torch.arange(offset + 2 * BLOCKS * block_bytes).to(torch.uint8).to(DEVICE)[offset:]
    kv = KvLayers(list(memory.view(2, BLOCKS, block_bytes)))
    before = memory.view(2, BLOCKS, block_bytes).clone()
    transport = TorchTransport("w", "127.0.0.1", kv)
    try:
        staging = torch.empty(3 * kv.block_bytes, dtype=torch.uint8)
        transport._scatter(transport._gather(staging, [5, 0, 2]), [7, 1, 8])
    finally:
        transport.close()
    sources = list(range(BLOCKS))
    sources[7], sources[1], sources[8] = 5, 0, 2
    assert torch.equal(memory.view(2, BLOCKS, block_bytes), before[:, sources])


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


@pytest.fixture(scope="module")
def apart() -> Iterator[tuple[Remote, Remote]]:
    """Two workers of a two-sided transport that never time out, each in its own process."""
    pair = Remote(PatientTransport.name, "worker-0", seed=0), Remote(PatientTransport.name, "worker-1", seed=1)
    yield pair
    for worker in pair:
        worker.stop()


def cut(worker: Remote) -> None:
    assert worker.process.pid is not None
    assert cut_sockets([worker.process.pid]) > 0


@pytest.mark.parametrize("victim", [0, 1])
def test_pushes_after_a_cut_arrive(apart: tuple[Remote, Remote], victim: int) -> None:
    a, b = apart
    for i in range(3):
        assert_moves(a, b, i, 10 + i)
        assert_moves(b, a, 20 + i, 30 + i)
        cut(apart[victim])
        assert_moves(a, b, 40 + i, 50 + i)
        assert_moves(b, a, 40 + i, 50 + i)


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("waiting", ["push", "receive"])
def test_what_waits_on_a_connection_that_is_cut_goes_on_with_the_next(apart: tuple[Remote, Remote], victim: int, waiting: str) -> None:
    a, b = apart
    assert_moves(a, b, 1, 2)
    push, receive = (a, "push", b.call("endpoint"), [1], [3]), (b, "receive", a.call("endpoint"), [3])
    first, second = (push, receive) if waiting == "push" else (receive, push)
    finish = first[0].start(*first[1:])
    wait_until_inside(first[0], "send" if waiting == "push" else "receive")
    cut(apart[victim])
    time.sleep(0.2)  # Gloo may forget a send of this very moment (`torch_channel.Channel`), and here nothing times out
    second[0].call(*second[1:])
    finish()
    assert_moves(a, b, 4, 5)


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("dropper", [0, 1])
def test_an_end_that_is_dropped_after_a_cut_keeps_the_pair_in_step(apart: tuple[Remote, Remote], victim: int, dropper: int) -> None:
    """The word of the drop is lost with the connection to the store."""
    a, b = apart
    for _ in range(2):
        assert_moves(a, b, 1, 2)
        cut(apart[victim])
        apart[dropper].call("drop", apart[1 - dropper].call("endpoint"))
        assert_moves(a, b, 4, 5)
        assert_moves(b, a, 4, 5)


@pytest.fixture(scope="module")
def hasty() -> Iterator[tuple[Remote, Remote]]:
    """As `apart`, with a short timeout: what one end has begun, and the other given up, ends by it."""
    pair = Remote(HastyTransport.name, "worker-0", seed=0), Remote(HastyTransport.name, "worker-1", seed=1)
    yield pair
    for worker in pair:
        worker.stop()


def start_dropping(worker: Remote | Local, peer: Remote | Local, method: str, *blocks: list[int]) -> Future[bool]:
    """As an agent does: a call that fails drops the peer. Whether it went well."""

    def run() -> bool:
        try:
            worker.call(method, peer.call("endpoint"), *blocks)
        except TransportError:
            worker.call("drop", peer.call("endpoint"))
            return False
        return True

    done: Future[bool] = Future()
    threading.Thread(target=lambda: done.set_result(run()), daemon=True).start()
    return done


@pytest.mark.parametrize("victim", [0, 1])
def test_a_push_that_is_cut_in_the_middle_harms_no_later_one(hasty: tuple[Remote, Remote], victim: int) -> None:
    a, b = hasty
    rng, in_time = random.Random(victim), 0
    blocks = list(range(BLOCKS))
    for _ in range(60):  # at moments of many a push, of which the first may be too late, or too early
        assert_moves(a, b, 1, 2)
        both = start_dropping(b, a, "receive", blocks), start_dropping(a, b, "push", blocks, blocks)
        time.sleep(0.03 * rng.random())
        cut(hasty[victim])
        well = [end.result(timeout=60) for end in both]
        in_time += not all(well)
        if in_time == 2:
            break
    assert in_time, "no cut came in time"


@pytest.mark.parametrize("victim", [0, 1])
def test_a_receive_that_gave_up_before_its_push_began_harms_no_later_one(hasty: tuple[Remote, Remote], victim: int) -> None:
    a, b = hasty
    assert_moves(a, b, 1, 2)
    receiving = start_dropping(b, a, "receive", [3])
    wait_until_inside(b, "receive")
    cut(hasty[victim])
    assert not receiving.result(timeout=60)
    assert not start_dropping(a, b, "push", [1], [3]).result(timeout=60)
    for target in (4, 5, 6):
        receiving = start_dropping(b, a, "receive", [target])
        time.sleep(0.05)
        pushing = start_dropping(a, b, "push", [7], [target])
        assert pushing.result(timeout=60)
        assert receiving.result(timeout=60)
        assert b.call("block", target) == a.call("block", 7)


@pytest.mark.parametrize("is_cut", [False, True])
def test_pushes_to_a_stopped_peer_end_and_later_ones_arrive(monkeypatch: pytest.MonkeyPatch, is_cut: bool) -> None:
    a, b = Local(BriefTransport.name, "worker-15", 15), Remote(BriefTransport.name, "worker-16", 16)
    assert_moves(a, b, 1, 2)
    peer, stopped = b.call("endpoint"), psutil.Process(b.process.pid)
    suspend(stopped)
    try:
        if is_cut:
            cut(b)
        with monkeypatch.context() as brief:
            brief.setattr("dynaserve.kv_transfer.torch_pair._STORE_TIMEOUT_S", 0.5)
            for _ in range(3):
                with pytest.raises(TransportError, match="worker-16"):
                    a.call("push", peer, [1], [3])
                a.call("drop", peer)
    finally:
        stopped.resume()
    late = [start_dropping(b, a, "receive", [3]).result(timeout=60) for _ in range(3)]  # what it had been told of by then
    assert late == [False, False, False]
    assert_moves(a, b, 5, 6)
    a.stop()
    b.stop()


def drop_until_it_ends(worker: Remote | Local, peer: Remote | Local, ending: Future[bool]) -> None:
    """A drop before the call has begun does nothing to it."""
    until_s = time.monotonic() + 60
    while not wait([ending], 0.3).done and time.monotonic() < until_s:
        worker.call("drop", peer.call("endpoint"))
    assert not ending.result(timeout=0)


@pytest.mark.parametrize("is_open", [False, True])
def test_what_waits_for_a_peer_that_does_not_come_ends_when_it_is_dropped(apart: tuple[Remote, Remote], is_open: bool) -> None:
    a, b = apart
    assert_moves(a, b, 1, 2)
    for waiting, peer, call in ((b, a, ("receive", [3])), (a, b, ("push", [1], [3]))):
        if not is_open:
            waiting.call("drop", peer.call("endpoint"))
            peer.call("drop", waiting.call("endpoint"))
        ending = start_dropping(waiting, peer, *call)
        drop_until_it_ends(waiting, peer, ending)
        other = a if waiting is b else b
        other.take("push" if waiting is b else "receive", waiting.call("endpoint"))  # what was never made
        assert_moves(a, b, 4, 5)


def test_a_push_that_comes_too_late_is_not_taken_for_another(apart: tuple[Remote, Remote]) -> None:
    """The same block is waited for twice."""
    a, b = apart
    assert_moves(a, b, 1, 2)
    for one, other in ((a, b), (b, a)):
        one.call("drop", other.call("endpoint"))
    drop_until_it_ends(b, a, start_dropping(b, a, "receive", [3]))
    receiving = start_dropping(b, a, "receive", [3])
    assert not start_dropping(a, b, "push", [1], [3]).result(timeout=60)
    assert start_dropping(a, b, "push", [7], [3]).result(timeout=60)
    assert receiving.result(timeout=60)
    assert b.call("block", 3) == a.call("block", 7)


def test_a_push_without_its_receive_harms_no_later_one(apart: tuple[Remote, Remote]) -> None:
    a, b = apart
    assert_moves(a, b, 1, 2)
    b.take("receive", a.call("endpoint"))
    pushing = start_dropping(a, b, "push", [1], [3])
    wait_until_inside(a, "send")
    receiving = start_dropping(b, a, "receive", [6])
    assert not pushing.result(timeout=60)
    assert start_dropping(a, b, "push", [5], [6]).result(timeout=60)
    assert receiving.result(timeout=60)
    assert b.call("block", 6) == a.call("block", 5)
    assert_moves(a, b, 8, 9)


@pytest.mark.parametrize("is_open", [False, True])
def test_an_end_that_gives_up_ends_what_the_other_waits_for(apart: tuple[Remote, Remote], is_open: bool) -> None:
    a, b = apart
    for giving, waiting, method, waits in ((a, b, "give_up_push", ("receive", [3])), (b, a, "give_up_receive", ("push", [1], [3]))):
        assert_moves(a, b, 1, 2)
        peer = waiting.call("endpoint")
        if not is_open:
            giving.call("drop", peer)
        number = giving.take("push" if giving is a else "receive", peer)
        if method == "give_up_receive":
            giving.call(method, peer, number)
            giving.call("drop", peer)  # as an agent does
        ending = start_dropping(waiting, giving, *waits)
        if method == "give_up_push":
            giving.call(method, peer, number)
        assert not ending.result(timeout=60)
        assert_moves(a, b, 4, 5)


def test_ends_that_were_forgotten_begin_anew(apart: tuple[Remote, Remote]) -> None:
    a, b = apart
    assert_moves(a, b, 1, 2)
    a.call("forget", b.call("endpoint"))
    a.begin_anew("push", b.call("endpoint"))
    b.begin_anew("receive", a.call("endpoint"))
    assert_moves(a, b, 3, 4)
    assert_moves(b, a, 3, 4)
    b.call("forget", a.call("endpoint"))
    a.call("forget", b.call("endpoint"))
    for one, other in ((a, b), (b, a)):
        one.begin_anew("push", other.call("endpoint"))
        one.begin_anew("receive", other.call("endpoint"))
    assert_moves(a, b, 5, 6)
    assert_moves(b, a, 5, 6)


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


def test_a_peer_that_never_comes_keeps_no_other_waiting() -> None:
    """On a two-sided transport; one-sided nobody is waited for."""
    a, b = Local(PatientTransport.name, "worker-5", 5), Local(PatientTransport.name, "worker-6", 6)
    absent = WorkerEndpoint("absent", "tcp://absent", {PatientTransport.name: "127.0.0.1:1"})
    waiting = b.start("receive", absent, [1])
    assert_moves(a, b, 1, 2)
    while not wait([waiting.future], 0.3).done:
        b.call("drop", absent)
    with pytest.raises(TransportError, match="absent"):
        waiting()
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
    while not all(is_stopped(thread.id) for thread in process.threads()):
        time.sleep(0.001)


def is_stopped(thread_id: int) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return bool(psutil.Process(thread_id).status() == psutil.STATUS_STOPPED)
    return True  # it has ended


@pytest.mark.mooncake
def test_a_one_sided_push_to_a_stopped_peer_ends_and_later_ones_arrive(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = Local("mooncake", "worker-13", 13), Remote("mooncake", "worker-14", 14)
    assert_moves(a, b, 1, 2)
    peer, stopped = b.call("endpoint"), psutil.Process(b.process.pid)
    suspend(stopped)
    try:
        with monkeypatch.context() as brief:
            brief.setattr("dynaserve.kv_transfer.mooncake_transport.PUSH_TIMEOUT_S", 1.0)
            with pytest.raises(TransportError, match=r"push to worker worker-14 at .* failed: nothing came back for 1 s"):
                a.call("push", peer, [3], [4])
    finally:
        stopped.resume()
    assert_moves(a, b, 5, 6)
    a.stop()
    b.stop()


MEMFD = same_host_transport._MEMFD


def told(endpoint: WorkerEndpoint) -> tuple[dict[str, Any], dict[str, Any]]:
    """The address of a worker, and what is there."""
    address = msgspec.json.decode(endpoint.transports["same-host"])
    content = Path(f"/proc/{address['pid']}/fd/{address['fd']}").read_bytes()
    return address, msgspec.json.decode(content)


def named(worker_id: str, address: dict[str, Any]) -> WorkerEndpoint:
    return WorkerEndpoint(worker_id, "tcp://nowhere", {"same-host": msgspec.json.encode(address).decode()})


@contextlib.contextmanager
def memfd(name: str, content: dict[str, Any]) -> Iterator[int]:
    fd = os.memfd_create(name)
    os.write(fd, msgspec.json.encode(content))
    try:
        yield fd
    finally:
        os.close(fd)


@pytest.mark.skipif(DEVICE != "cpu", reason="same-host moves caches on CPUs")
class TestSameHost:
    """What is its own."""

    def test_a_stopped_peer_is_written_to(self) -> None:
        a, b = Local("same-host", "worker-15", 15), Remote("same-host", "worker-16", 16)
        peer, stopped = b.call("endpoint"), psutil.Process(b.process.pid)
        suspend(stopped)
        try:
            a.call("push", peer, [3], [4])
        finally:
            stopped.resume()
        assert b.call("block", 4) == a.call("block", 3)
        a.stop()
        b.stop()

    def test_more_stretches_than_one_call_takes_arrive(self) -> None:
        kv = [KvLayers(list(torch.randint(256, (3, 3000, 8), dtype=torch.uint8))) for _ in range(2)]
        a, b = (make_transport("same-host", f"worker-{i}", "127.0.0.1", kv[i]) for i in range(2))
        sources, targets = list(range(0, 3000, 2)), list(range(2999, 0, -2))
        before = kv[1].layers[2][::2].clone()
        a.push(WorkerEndpoint("worker-1", "tcp://nowhere", {"same-host": b.address()}), sources, targets, None)
        for source, target in zip(kv[0].layers, kv[1].layers, strict=True):
            assert torch.equal(source[sources], target[targets])
        assert torch.equal(kv[1].layers[2][::2], before)
        a.close()
        b.close()

    def test_only_a_process_that_has_made_itself_a_target_is_written_to(self) -> None:
        a, b = Local("same-host", "worker-17", 17), Remote("same-host", "worker-18", 18)
        true, layout = told(b.call("endpoint"))
        with memfd("another-name", layout) as forged, memfd(MEMFD, layout | {"pid": os.getpid()}) as other_process:
            for false in (
                true | {"fd": 0},
                true | {"pid": os.getpid(), "fd": forged},
                true | {"pid": os.getpid(), "fd": 9999},
                true | {"pid": 2**22 + 1},
            ):
                with pytest.raises(TransportError, match="there is no such worker among the processes of this user on this machine"):
                    a.call("push", named("worker-18", false), [1], [2])
            # As after a fork, and as where the number of a process that has ended is another one's.
            with pytest.raises(TransportError, match="no such worker"), memfd(MEMFD, layout) as copied:
                a.call("push", named("worker-18", true | {"pid": os.getpid(), "fd": copied}), [1], [2])
            with pytest.raises(TransportError, match="no such worker"):
                a.call("push", named("worker-19", true | {"pid": os.getpid(), "fd": other_process}), [1], [2])
        with pytest.raises(TransportError, match="worker-18 in the memory of this machine failed"):
            a.call("push", WorkerEndpoint("worker-18", "tcp://nowhere", {"same-host": "somewhere"}), [1], [2])
        assert_moves(a, b, 1, 2)
        a.stop()
        b.stop()

    @pytest.mark.parametrize("block", [-1, BLOCKS, 1 << 30])
    def test_no_block_outside_the_cache_is_written(self, block: int) -> None:
        a, b = Local("same-host", "worker-22", 22), Local("same-host", "worker-23", 23)
        before = [b.call("block", i) for i in range(BLOCKS)]
        with pytest.raises(TransportError, match=f"worker-23 failed: its cache of {BLOCKS} blocks has no block {block}"):
            a.call("push", b.call("endpoint"), [1, 2], [3, block])
        assert [b.call("block", i) for i in range(BLOCKS)] == before
        a.stop()
        b.stop()

    @pytest.mark.parametrize("change", [{"strides": [8] * LAYERS}, {"widths": [8] * LAYERS}, {"strides": []}])
    def test_a_peer_with_other_blocks_is_not_written_to(self, change: dict[str, Any]) -> None:
        a = Local("same-host", "worker-24", 24)
        mine, layout = told(a.call("endpoint"))
        with memfd(MEMFD, layout | {"worker_id": "worker-25"} | change) as fd, pytest.raises(TransportError, match="in another way"):
            a.call("push", named("worker-25", mine | {"fd": fd}), [1], [2])
        a.stop()

    def test_memory_that_is_not_there_fails_the_push(self) -> None:
        a = Local("same-host", "worker-20", 20)
        mine, layout = told(a.call("endpoint"))
        gone = layout | {"worker_id": "worker-21", "layers": [*layout["layers"][:-1], 4096]}
        before = a.call("block", 2)
        with memfd(MEMFD, gone) as fd, pytest.raises(TransportError, match=r"worker-21 in the memory of this machine failed: .* written"):
            a.call("push", named("worker-21", mine | {"fd": fd}), [1], [2])
        assert a.call("block", 2) != before  # what came before it was written
        a.stop()

    def test_a_push_of_more_bytes_than_one_call_takes_arrives(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(same_host_transport, "_MOST_BYTES", 1000)
        a, b = Local("same-host", "worker-26", 26), Local("same-host", "worker-27", 27)
        move(a, b, [3, 4, 9], [60, 61, 7])
        assert [b.call("block", i) for i in (60, 61, 7)] == [a.call("block", i) for i in (3, 4, 9)]
        a.stop()
        b.stop()

    def test_a_cache_on_another_device_is_refused(self) -> None:
        kv = KvLayers([torch.empty(4, 8, dtype=torch.uint8, device="meta")])
        with pytest.raises(TransportUnavailable, match="moves caches in the memory of the host, and this one is on meta"):
            make_transport("same-host", "w", "127.0.0.1", kv)


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
    with pytest.raises(ConfigError, match="'pigeon' is neither one of torch, same-host, mooncake nor a module:Class"):
        make_transport("pigeon", "w", "127.0.0.1", make_kv(0))


def test_a_cache_on_another_device_is_refused() -> None:
    kv = KvLayers([torch.empty(4, 8, dtype=torch.uint8, device="meta")])
    with pytest.raises(TransportUnavailable, match="moves caches on cpu and cuda, and this one is on meta"):
        make_transport("torch", "w", "127.0.0.1", kv)


def test_a_missing_library_names_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "mooncake.engine", None)
    with pytest.raises(TransportUnavailable, match="apt-get install libibverbs1"):
        make_transport("mooncake", "w", "127.0.0.1", make_kv(0))
