"""The options of `dynaserve simulate`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dynaserve.bench import options
from dynaserve.bench.capacity import SEARCH_OPTIONS, add_search
from dynaserve.errors import ConfigError
from workloads.trace import MOST_TOKENS

OVERHEAD_MS, COST_SCALE = 2.5, 1.0
"""Of the steps of a grid, unless options say otherwise."""
_MOST_RUNNING = 256
_USUAL: dict[str, Any] = {
    "drift_s": 5.0,
    "min_prefill_tokens": 16,
    "kv_token_bytes": 196608,
    "kv_transfer": "blocks",
    "hand_off_ms": 2.0,
    "kv_on_host": False,
    "fixed_hand_offs": False,
    "expect": "exact",
}
"""What is not given, of the options that are refused where they do nothing: the parser's default for them is None."""
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
patience and how its margin for steps that prefill follows errors: the simulator is first come, first served, with a margin by
--step-sigma, and with --drift-sigma by what instances have learnt.

exit status: 0 reported; 1 with --capacity, not even the least rate passed; 2 bad option."""


def parse(arguments: Sequence[str], *, alone: bool = False) -> argparse.Namespace:
    """Raises ConfigError, also for options that do nothing here.

    alone: the options are those of one command. Otherwise a search may follow without --capacity, and the fleet may be one of several that
    are compared by the same options, not all of which have SLO-aware batches.
    """
    args = _parser().parse_args(arguments)
    check_needed(args, "--drift-sigma", args.drift_sigma is not None, "--drift-s")
    check_needed(args, "--kv-gbytes-per-s", args.kv_gbytes_per_s is not None, "--kv-transfer", "--kv-token-bytes")
    if alone:
        check_needed(args, "--capacity", args.capacity, *SEARCH_OPTIONS)
        check_needed(args, "--batching slo", args.batching == "slo", "--min-prefill-tokens")
        hands_over = args.policy not in ("round-robin", "colocated")
        moving = ("--hand-off-ms", "--kv-gbytes-per-s", "--kv-on-host", "--fixed-hand-offs")
        check_needed(args, "a --policy that hands requests over", hands_over, *moving)
        check_needed(args, "a --policy that reads it", args.policy != "round-robin", "--expect")
    if args.max_running is None:
        args.max_running = min(_MOST_RUNNING, args.chunk)
    if args.max_running > args.chunk:
        raise ConfigError(f"--max-running {args.max_running} is more than --chunk {args.chunk}: a step takes a token of each")
    for name, value in _USUAL.items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    # What a replay needs and a simulation has not.
    args.url, args.model, args.api_key, args.extra_body, args.eos_token_id = ["http://simulated"], None, None, {}, None
    args.warmup, args.timeout_s, args.max_client_lag_ms, args.vocabulary = 0, 1.0, 1.0, range(1)
    return args


def check_needed(args: argparse.Namespace, needed: str, is_there: bool, *names: str) -> None:
    """Raises ConfigError, unless what these options need is there, for the first of them that is given."""
    for name in names:
        if not is_there and getattr(args, name.removeprefix("--").replace("-", "_")) is not None:
            raise ConfigError(f"{name} does nothing without {needed}")


def _parser() -> options.Parser:
    parser = options.Parser(
        prog="dynaserve simulate",
        description="Simulates a fleet on a virtual clock.",
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    latency = parser.add_argument_group("latency of steps")
    add_latency(latency, each=True)
    _add_noise(latency)
    _add_fleet(parser.add_argument_group("fleet"))
    options.add_workload(parser.add_argument_group("workload"))
    group = parser.add_argument_group("measurement")
    group.add_argument("--tbt-slo-ms", type=options.positive, default=100.0, metavar="MS", help="(default: %(default)s)")
    group.add_argument("--ttft-slo-ms", type=options.positive, metavar="MS", help="(default: none)")
    group.add_argument("--output", type=Path, metavar="FILE", help="the figures as JSON")
    searching = parser.add_argument_group("search")
    searching.add_argument("--capacity", action="store_true", help="search the highest sustained rate")
    add_search(searching, measured=False)
    return parser


def add_latency(group: Any, *, each: bool = False) -> None:
    """Options that say how long steps take (`simulate.table_of`, until which those that are not given are None). each: profiles may be
    those of each instance (`simulate.tables_of`)."""
    several: dict[str, Any] = {"nargs": "+"} if each else {}
    help_text = "of --dynaserve-profile: one, or one of each instance" if each else "of --dynaserve-profile"
    group.add_argument("--profile", type=Path, metavar="FILE", help=help_text, **several)
    group.add_argument("--gpu-grid", type=Path, metavar="FILE", help="CSV of measured steps")
    group.add_argument("--gpu-model", metavar="NAME", help="in the grid, as qwen2.5-14b")
    group.add_argument("--gpu", metavar="NAME", help="in the grid, as a100_sxm")
    group.add_argument(
        "--overhead-ms", type=options.not_negative, metavar="MS", help=f"of the host, a step of the grid (default: {OVERHEAD_MS:g})"
    )
    group.add_argument(
        "--cost-scale", type=options.positive, metavar="X", help=f"the grid's times are multiplied (default: {COST_SCALE:g})"
    )
    group.add_argument(
        "--roofline", metavar="O,T,K,P,D,C", help="overhead ms, ms a token, knee tokens, ms a pair, a decode, a context token"
    )


def _add_noise(group: Any) -> None:
    group.add_argument("--step-sigma", type=options.positive, default=0.02, metavar="X", help="log-normal noise of steps (default: 0.02)")
    group.add_argument(
        "--drift-sigma", type=options.positive, metavar="X", help="of the speed of each instance, log-normal (default: none)"
    )
    group.add_argument("--drift-s", type=options.positive, metavar="T", help=f"how long a speed lasts (default: {_USUAL['drift_s']})")


def _add_fleet(group: Any) -> None:
    group.add_argument("--instances", type=options.whole(1), default=2, metavar="N", help="(default: 2)")
    group.add_argument("--policy", default="round-robin", help="see below (default: round-robin)")
    group.add_argument("--batching", choices=("vllm", "slo"), default="vllm", help="(default: vllm)")
    count = options.whole(1, MOST_TOKENS)  # sums of what the core counts fit into 64 bits
    group.add_argument("--chunk", type=count, default=2048, metavar="N", help="most tokens of a step (default: 2048)")
    late = f"of a late step with --batching slo (default: {_USUAL['min_prefill_tokens']})"
    group.add_argument("--min-prefill-tokens", type=count, metavar="N", help=late)
    group.add_argument("--max-running", type=count, metavar="N", help=f"requests at a time (default: {_MOST_RUNNING}, or --chunk)")
    group.add_argument("--kv-tokens", type=count, default=219168, metavar="N", help="KV cache (default: 219168)")
    group.add_argument("--hand-off-ms", type=options.positive, metavar="MS", help=f"(default: {_USUAL['hand_off_ms']:g})")
    group.add_argument("--kv-gbytes-per-s", type=options.positive, metavar="X", help="of an instance's link (default: no limit)")
    group.add_argument("--kv-token-bytes", type=options.positive, metavar="N", help=f"of KV (default: {_USUAL['kv_token_bytes']})")
    group.add_argument(
        "--kv-on-host", action="store_true", default=None, help="moving KV takes the time of steps of both instances, as on CPUs"
    )
    moves = f"each block when it is full, or all at the end (default: {_USUAL['kv_transfer']})"
    group.add_argument("--kv-transfer", choices=("blocks", "end"), help=moves)
    group.add_argument("--fixed-hand-offs", action="store_true", default=None, help="a hand-off stays where the policy has placed it")
    group.add_argument("--expect", metavar="HOW", help="lengths of answers: exact | mean | fixed:N | lognormal:SIGMA (default: exact)")
    group.add_argument("--parameters", type=options.positive, metavar="N", help="of the model, for MFU")
    group.add_argument("--layers", type=options.whole(1), metavar="N")
    group.add_argument("--hidden", type=options.whole(1), metavar="N", help="query heads x head size")
    group.add_argument("--peak-tflops", type=options.positive, metavar="X", help="of the device")
