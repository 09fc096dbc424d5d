"""SLO-aware batches against fixed chunks on one GPU: servers of one model, up together, each of which gets the same requests in turn.

Only the one that is measured has work. Latencies are learnt in its first replay, which is not counted. The model's folder needs a
configuration and a tokenizer; weights may be random (`--load-format dummy` after the `--`), and all servers have to fit on the GPU.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

import httpx

from benchmarks import provenance
from benchmarks.endings import ending
from benchmarks.goals import OURS, line
from benchmarks.parsers import parser_of, words
from benchmarks.runs import Trace, replay
from dynaserve import direct_http
from dynaserve.bench.options import positive, whole
from dynaserve.errors import ConfigError, DynaServeError
from dynaserve.files import check_replaceable
from dynaserve.local.children import Child, start_child, stop_children
from dynaserve.local.fleet import HOST, free_ports

START_TIMEOUT_S = 600.0
STEPS = "steps.csv"
"""Of the instance with SLO-aware batches."""


class NotHealthy(DynaServeError):
    """A server did not start."""


def main(arguments: Sequence[str]) -> None:
    """Ends with exit status 1 if something could not be measured, 2 for bad options, 130 when interrupted."""
    parser = _parser()
    own, for_vllm = _split(arguments)
    args = parser.parse_args(own)
    trace = Trace((*args.trace, "--drawn"), args.seed, args.duration_s, args.tbt_slo_ms)
    try:
        trace.check()
        check_replaceable(args.output / STEPS)
    except ConfigError as error:
        parser.error(str(error))
    print(provenance.text(provenance.of("benchmarks.gpu_batching", arguments)), flush=True)
    with ending("gpu_batching"):
        run(args, trace, for_vllm)


def run(args: argparse.Namespace, trace: Trace, for_vllm: Sequence[str]) -> None:
    """Raises DynaServeError."""
    log = args.output / STEPS
    log.unlink(missing_ok=True)
    slo = ("--dynaserve-batching", "slo", "--tbt-slo-ms", f"{args.tbt_slo_ms:g}", "--dynaserve-step-log", str(log.absolute()))
    systems: dict[str, tuple[str, ...]] = {f"chunk {tokens}": ("--max-num-batched-tokens", str(tokens)) for tokens in args.chunks}
    systems[OURS] = ("--plugin", "dynaserve", "--dynaserve-port", "0", *slo)
    with ExitStack() as stack:
        urls: dict[str, str] = {}
        children: list[Child] = []
        stack.callback(stop_children, children)
        for (name, own), port in zip(systems.items(), free_ports(len(systems)), strict=True):
            command = ["vllm", "serve", str(args.folder), "--host", HOST, "--port", str(port), *for_vllm, *own]
            child = start_child(name, command, args.output / f"{_file(name)}.log")
            children.append(child)
            urls[name] = f"http://{HOST}:{port}"
            _wait_healthy(child, urls[name])  # one at a time: vLLM looks at the memory that is free
        for name, url in urls.items():
            replay(trace, url, args.rates[0], args.output / f"{_file(name)}-warm-up.json")
        for rate, (name, url) in itertools.product(args.rates, urls.items()):
            one = replay(trace, url, rate, args.output / f"{_file(name)}-{rate:g}.json")
            print(f"{rate:g}/s  {line(name, one)}", flush=True)


def _wait_healthy(child: Child, url: str) -> None:
    until_s = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < until_s and child.exit_status is None:
        with suppress(httpx.TransportError):
            if direct_http.get(f"{url}/health", timeout_s=5).is_success:
                return
        time.sleep(1)
    raise NotHealthy(f"{child.name} did not start; {child.log} ends with:\n{child.last_lines()}")


def _file(name: str) -> str:
    return name.replace(" ", "-")


def _split(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Before and after the first `--`."""
    own = list(itertools.takewhile(lambda each: each != "--", arguments))
    return own, list(arguments[len(own) + 1 :])


def _parser() -> argparse.ArgumentParser:
    example = "llama-8b --chunks 8192 1024 512 --rates 8 12 16 --trace '--workload azure-code --traces traces' -- --load-format dummy"
    parser = parser_of("gpu_batching", __doc__, example)
    parser.usage = "python -m benchmarks.gpu_batching [options] FOLDER [-- options of vllm serve]"
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="of the model")
    parser.add_argument("--chunks", type=whole(1), nargs="+", default=[8192, 1024, 512], metavar="TOKENS", help="(default: 8192 1024 512)")
    parser.add_argument("--rates", type=positive, nargs="+", default=[8.0], metavar="R", help="requests per second (default: 8)")
    parser.add_argument(
        "--trace",
        type=words,
        default="--workload sample",
        metavar="ARGS",
        help="as for dynaserve bench replay (default: %(default)s)",
    )
    parser.add_argument("--duration-s", type=positive, default=20.0, metavar="T", help="of a replay (default: %(default)s)")
    parser.add_argument("--tbt-slo-ms", type=positive, default=50.0, metavar="MS", help="(default: %(default)s)")
    parser.add_argument("--seed", type=whole(0), default=1, metavar="N", help="(default: %(default)s)")
    parser.add_argument("--output", type=Path, default=Path("build/gpu-batching"), metavar="DIR", help="raw data (default: %(default)s)")
    return parser


if __name__ == "__main__":
    main(sys.argv[1:])
