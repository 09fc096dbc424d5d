"""The options of `dynaserve simulate`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dynaserve.bench import options
from dynaserve.bench.capacity import add_search

EXAMPLE = """\
example:
  dynaserve simulate --roofline 10,0.2,16,0.00002,0.2,0.0005 --workload sample --rate 4 --requests 200 --instances 2 --batching slo

Latencies of steps: --profile (what an instance has kept with --dynaserve-profile), --gpu-grid with --gpu-model and --gpu, or
--roofline. The batch rule of --batching slo is the one that serves. With --capacity it searches the highest rate that is
sustained, as `dynaserve bench capacity` does, from --rate on, but one run decides about a rate: take --requests by the thousand.

--expect says what policies that predict know of the answers' lengths; by default they know them exactly. Without
--kv-gbytes-per-s the KV moves at no cost but --hand-off-ms. Policies beside those of `dynaserve serve`: round-robin;
exhaustive, which is dynamic with every cut tried at each 16th token, or as far apart as exhaustive:stride=TOKENS says;
dynamic:gather=K and exhaustive:gather=K, where K instances gather decodes whatever the fleet plan says; fixed:RATIO:one-way, where
the first half of the instances begins all requests.

Not modelled: prefix caches, the front-end's time; of the local scheduler its order by TTFT SLO and overtaking, its ten seconds of
patience and how its margin follows errors: the simulator is first come, first served, with a margin by --step-sigma, and with
--drift-sigma by what instances have learnt.

exit status: 0 reported; 1 with --capacity, not even the least rate passed; 2 bad option."""


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Raises ConfigError."""
    args = _parser().parse_args(arguments)
    # What a replay needs and a simulation has not.
    args.url, args.model, args.api_key, args.extra_body = ["http://simulated"], None, None, {}
    args.warmup, args.timeout_s, args.max_client_lag_ms, args.vocabulary = 0, 1.0, 1.0, range(1)
    return args


def _parser() -> options.Parser:
    parser = options.Parser(
        prog="dynaserve simulate",
        description="Simulates a fleet on a virtual clock.",
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    latency = parser.add_argument_group("latency of steps")
    add_latency(latency)
    _add_noise(latency)
    _add_fleet(parser.add_argument_group("fleet"))
    options.add_workload(parser.add_argument_group("workload"))
    group = parser.add_argument_group("measurement")
    group.add_argument("--tbt-slo-ms", type=options.positive, default=100.0, metavar="MS", help="(default: %(default)s)")
    group.add_argument("--ttft-slo-ms", type=options.positive, metavar="MS", help="(default: none)")
    group.add_argument("--output", type=Path, metavar="FILE", help="the figures as JSON")
    searching = parser.add_argument_group("search")
    searching.add_argument("--capacity", action="store_true", help="search the highest sustained rate")
    add_search(searching, with_runs=False)
    return parser


def add_latency(group: Any) -> None:
    """Options of which one says how long steps take (`simulate.table_of`)."""
    group.add_argument("--profile", type=Path, metavar="FILE", help="of --dynaserve-profile")
    group.add_argument("--gpu-grid", type=Path, metavar="FILE", help="CSV of measured steps")
    group.add_argument("--gpu-model", metavar="NAME", help="in the grid, as qwen2.5-14b")
    group.add_argument("--gpu", metavar="NAME", help="in the grid, as a100_sxm")
    group.add_argument(
        "--overhead-ms", type=options.positive, default=2.5, metavar="MS", help="of the host, a step of the grid (default: 2.5)"
    )
    group.add_argument("--cost-scale", type=options.positive, default=1.0, metavar="X", help="the grid's times are multiplied (default: 1)")
    group.add_argument(
        "--roofline", metavar="O,T,K,P,D,C", help="overhead ms, ms a token, knee tokens, ms a pair, a decode, a context token"
    )


def _add_noise(group: Any) -> None:
    group.add_argument("--step-sigma", type=options.positive, default=0.02, metavar="X", help="log-normal noise of steps (default: 0.02)")
    group.add_argument(
        "--drift-sigma", type=options.positive, metavar="X", help="of the speed of each instance, log-normal (default: none)"
    )
    group.add_argument("--drift-s", type=options.positive, default=5.0, metavar="T", help="how long a speed lasts (default: %(default)s)")


def _add_fleet(group: Any) -> None:
    group.add_argument("--instances", type=options.whole(1), default=2, metavar="N", help="(default: 2)")
    group.add_argument("--policy", default="round-robin", help="see below (default: round-robin)")
    group.add_argument("--batching", choices=("vllm", "slo"), default="vllm", help="(default: vllm)")
    group.add_argument("--chunk", type=options.whole(1), default=2048, metavar="N", help="most tokens of a step (default: 2048)")
    group.add_argument("--min-prefill-tokens", type=options.whole(1), default=16, metavar="N", help="of a late step (default: 16)")
    group.add_argument("--max-running", type=options.whole(1), default=256, metavar="N", help="requests at a time (default: 256)")
    group.add_argument("--kv-tokens", type=options.whole(1), default=219168, metavar="N", help="KV cache (default: 219168)")
    group.add_argument("--hand-off-ms", type=options.positive, default=2.0, metavar="MS", help="(default: 2)")
    group.add_argument("--kv-gbytes-per-s", type=options.positive, metavar="X", help="of an instance's link (default: no limit)")
    group.add_argument("--kv-token-bytes", type=options.positive, default=196608, metavar="N", help="of KV (default: 196608)")
    group.add_argument("--kv-on-host", action="store_true", help="moving KV takes the time of steps of both instances, as on CPUs")
    group.add_argument(
        "--kv-transfer", choices=("blocks", "end"), default="blocks", help="each block when it is full, or all at the end (default: blocks)"
    )
    group.add_argument("--fixed-hand-offs", action="store_true", help="a hand-off stays where the policy has placed it")
    group.add_argument(
        "--expect", default="exact", metavar="HOW", help="lengths of answers: exact | mean | fixed:N | lognormal:SIGMA (default: exact)"
    )
    group.add_argument("--parameters", type=options.positive, metavar="N", help="of the model, for MFU")
    group.add_argument("--layers", type=options.whole(1), metavar="N")
    group.add_argument("--hidden", type=options.whole(1), metavar="N", help="query heads x head size")
    group.add_argument("--peak-tflops", type=options.positive, metavar="X", help="of the device")
