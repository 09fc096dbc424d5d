"""`make bench-copies`: how fast KV blocks are gathered, moved and scattered, on CUDA or on the CPU.

Tensors have the shapes of real models. Copies are of blocks in random places, through the transports' own code; beside them the
device's plain copy. A push goes from one process to another on this machine, both on the same device.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import multiprocessing
import platform
import random
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from typing import Any

import torch

from benchmarks.parsers import parser_of
from dynaserve.bench.options import whole
from dynaserve.kv_transfer import torch_transport
from dynaserve.kv_transfer.torch_transport import TorchTransport
from dynaserve.kv_transfer.transport import KvLayers, PushNumber, WorkerEndpoint
from dynaserve.kv_transfer.transports import make_transport

BLOCK_TOKENS = 16
"""vLLM's block on CUDA."""
LAYERS = {"8b": 32, "14b": 48, "32b": 64}
"""Each of 8 KV heads of 128, in 16 bits: Llama-3-8B, Qwen2.5-14B and Qwen2.5-32B."""
LAYER_BYTES = 2 * BLOCK_TOKENS * 8 * 128 * 2
REPETITIONS = 7
MIB = 1 << 20


def cache(model: str, num_blocks: int, device: str, seed: int) -> KvLayers:
    """As vLLM allocates it on CUDA: a tensor for each layer, of random bytes."""
    torch.manual_seed(seed)  # by itself every process begins with the same one
    shape = (num_blocks, LAYER_BYTES)
    return KvLayers([torch.randint(256, shape, dtype=torch.uint8, device=device) for _ in range(LAYERS[model])])


def piece_blocks(model: str, piece_mib: int) -> int:
    """How many blocks are a piece: at least one."""
    return max(1, piece_mib * MIB // (LAYERS[model] * LAYER_BYTES))


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def median_s(call: Callable[[], Any], device: str) -> float:
    times = []
    for _ in range(REPETITIONS + 1):
        synchronize(device)
        before = time.perf_counter()
        call()
        synchronize(device)
        times.append(time.perf_counter() - before)
    return statistics.median(times[1:])


def copies(model: str, num_blocks: int, device: str, piece_mib: int) -> dict[str, float]:
    """GB/s of one piece, read once and written once, and of the device's plain copy of as much."""
    torch_transport.PIECE_BYTES[device] = piece_mib * MIB
    kv = cache(model, num_blocks, device, seed=1)
    transport = TorchTransport("copies", "127.0.0.1", kv)
    try:
        size = piece_blocks(model, piece_mib)
        blocks = random.Random(1).sample(range(num_blocks), size)
        on_device = torch.empty(size * kv.block_bytes, dtype=torch.uint8, device=device)
        staged = torch.empty(on_device.numel(), dtype=torch.uint8, pin_memory=device == "cuda")
        calls: dict[str, Callable[[], Any]] = {
            "gather": lambda: transport._gather(on_device, blocks),
            "scatter": lambda: transport._scatter(on_device, blocks),
            "gather to host": lambda: transport._gather(staged, blocks),
            "scatter from host": lambda: transport._scatter(staged, blocks),
            "plain copy": lambda: on_device.clone(),
            "plain to host": lambda: staged.copy_(on_device),
        }
        transport._gather(staged, blocks)
        for row, block in zip(_rows(kv, staged, size), blocks, strict=True):
            assert row == b"".join(layer[block].cpu().numpy().tobytes() for layer in kv.layers), "a block was gathered wrongly"
        return {name: on_device.numel() / median_s(call, device) / 1e9 for name, call in calls.items()}
    finally:
        transport.close()


def _rows(kv: KvLayers, piece: torch.Tensor, size: int) -> Iterator[bytes]:
    layers = piece.view(len(kv.layers), size, -1)
    for index in range(size):
        yield b"".join(layer[index].numpy().tobytes() for layer in layers)


def serve(pipe: Connection, worker_id: str, model: str, num_blocks: int, piece_mib: int, device: str, seed: int) -> None:
    torch_transport.PIECE_BYTES[device] = piece_mib * MIB
    kv = cache(model, num_blocks, device, seed)
    transport: Any = make_transport("torch", worker_id, "127.0.0.1", kv)
    pipe.send(WorkerEndpoint(worker_id, "tcp://127.0.0.1:1", {"torch": transport.address()}))
    numbers = itertools.count()
    while (job := pipe.recv()) is not None:
        method, *args = job
        if method == "digest":
            pipe.send(digest(kv, *args))
        else:
            getattr(transport, method)(*args, PushNumber(0, next(numbers)))
            pipe.send("done")
    transport.close()


def digest(kv: KvLayers, blocks: list[int]) -> bytes:
    content = hashlib.blake2b()
    for layer in kv.layers:
        content.update(layer[blocks].cpu().numpy().tobytes())
    return content.digest()


def _digest_of(pipe: Connection, blocks: list[int]) -> bytes:
    pipe.send(("digest", blocks))
    return bytes(pipe.recv())


def push(model: str, num_blocks: int, piece_mib: int, device: str) -> float:
    """GB/s from one process to another."""
    context = multiprocessing.get_context("spawn")
    pipes, processes, endpoints = [], [], []
    for seed, worker_id in enumerate(("sender", "receiver")):
        ours, theirs = context.Pipe()
        process = context.Process(target=serve, args=(theirs, worker_id, model, num_blocks, piece_mib, device, seed), daemon=True)
        process.start()
        pipes.append(ours)
        processes.append(process)
    try:
        endpoints = [pipe.recv() for pipe in pipes]
        chosen = random.Random(1).sample(range(num_blocks), num_blocks // 2)
        assert _digest_of(pipes[0], chosen) != _digest_of(pipes[1], chosen), "the caches are equal before anything was sent"
        times = []
        for _ in range(REPETITIONS + 1):
            before = time.perf_counter()
            pipes[1].send(("receive", endpoints[0], chosen))
            pipes[0].send(("push", endpoints[1], chosen, chosen))
            for pipe in pipes:
                assert pipe.recv() == "done"
            times.append(time.perf_counter() - before)
        assert _digest_of(pipes[0], chosen) == _digest_of(pipes[1], chosen), "other bytes arrived than were sent"
        for pipe in pipes:
            pipe.send(None)
        return len(chosen) * LAYERS[model] * LAYER_BYTES / statistics.median(times[1:]) / 1e9
    finally:
        for process in processes:
            process.join(10)
            process.kill()


def main(arguments: Sequence[str]) -> None:
    parser = parser_of("kv_copies", __doc__, "--device cuda --models 8b 14b 32b")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="(default: %(default)s)")
    parser.add_argument("--models", nargs="+", choices=LAYERS, default=["8b"], help="(default: 8b)")
    parser.add_argument(
        "--blocks", type=whole(2), default=128, metavar="N", help="of a cache; a push is of half as many (default: %(default)s)"
    )
    parser.add_argument("--piece-mib", nargs="+", type=whole(1), default=[8, 32], metavar="N", help="(default: 8 32)")
    args = parser.parse_args(arguments)
    cases = list(itertools.product(args.models, args.piece_mib))
    for model, piece_mib in cases:
        if (size := piece_blocks(model, piece_mib)) > args.blocks:
            parser.error(f"--piece-mib {piece_mib} is {size} blocks of {model}, more than the {args.blocks} of a cache (--blocks)")
    where = torch.cuda.get_device_name() if args.device == "cuda" else platform.processor() or platform.machine()
    print(f"{shlex.join(['python', '-m', 'benchmarks.kv_copies', *arguments])}; seed 1; {where}; torch {torch.__version__}")
    for model, piece_mib in cases:
        rates = copies(model, args.blocks, args.device, piece_mib)
        rates["push"] = push(model, args.blocks, piece_mib, args.device)
        print(json.dumps({"model": model, "piece_mib": piece_mib, **{k: round(v, 2) for k, v in rates.items()}}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
