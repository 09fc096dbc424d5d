"""The options of `dynaserve bench replay`, most of which its sisters share."""

from __future__ import annotations

import argparse
import json
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from dynaserve.bench.endpoint import base_urls
from dynaserve.bench.measures import Slo
from dynaserve.errors import ConfigError
from workloads import arrivals, catalog

MOST_WHOLE, MOST_SEED = (1 << 63) - 1, (1 << 64) - 1
"""What the core's integers, and its generators' seeds, hold."""
_SHOWN = 40
"""Characters of a number that is refused."""
EXAMPLE = """\
example:
  dynaserve bench replay --url http://127.0.0.1:8000 --workload sample --rate 2 --requests 100 --output replay.json

The client sends each request at a time that is fixed before the start, whether or not earlier ones are answered. Prompts are
random token ids of exactly the workload's length, answers have exactly its length: by max_tokens and ignore_eos, which tell the
server how long they will be, or with --eos-token-id by that token, before which each could be as long as the longest. TBT has one
gap for each two consecutive tokens; of n tokens in one event the first has the gap, the others 0.

exit status: 0 reported; 1 no request finished; 2 bad option or server; 3 the figures cannot be trusted (the reason is one
sentence on stderr; --output is written all the same)."""


@dataclass(frozen=True)
class ReplayOptions:
    """urls: requests go to each in turn. eos_token_id None: max_tokens ends the answers. prompt_seed None: other prompts in each run."""

    urls: Sequence[str]
    model: str | None
    api_key: str | None
    extra_body: dict[str, Any]
    eos_token_id: int | None
    workload: str
    traces: Path | None
    tokenizer: Path | None
    skip_s: float | None
    scale: float
    drawn: bool
    max_total_tokens: int | None
    requests: int | None
    duration_s: float | None
    rate_per_s: float | None
    arrivals: str
    seed: int
    prompt_seed: int | None
    vocabulary: range
    warmup: int
    timeout_s: float
    slo: Slo
    max_client_lag_ms: float
    output: Path | None


class Parser(argparse.ArgumentParser):
    """Raises ConfigError instead of ending the process."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)


def parse(arguments: Sequence[str]) -> ReplayOptions:
    """Raises ConfigError in one sentence."""
    return replay_options(_parser().parse_args(arguments))


def replay_options(args: argparse.Namespace) -> ReplayOptions:
    """From the options of `add_server`, `add_workload` and `add_measurement`."""
    return ReplayOptions(
        urls=base_urls(args.url),
        model=args.model,
        api_key=_api_key(args.api_key),
        extra_body=args.extra_body,
        eos_token_id=args.eos_token_id,
        workload=args.workload,
        traces=args.traces,
        tokenizer=args.tokenizer,
        skip_s=args.skip_s,
        scale=args.scale,
        drawn=args.drawn,
        max_total_tokens=args.max_total_tokens,
        requests=args.requests,
        duration_s=args.duration_s,
        rate_per_s=args.rate,
        arrivals=args.arrivals,
        seed=args.seed,
        prompt_seed=args.prompt_seed,
        vocabulary=args.vocabulary,
        warmup=args.warmup,
        timeout_s=args.timeout_s,
        slo=Slo(args.tbt_slo_ms, args.ttft_slo_ms),
        max_client_lag_ms=args.max_client_lag_ms,
        output=args.output,
    )


def _api_key(chosen: str | None) -> str | None:
    """Raises ConfigError, without the key, for one that no header can hold."""
    key = chosen or os.environ.get("OPENAI_API_KEY") or None
    if key is not None and not (key.isascii() and key.isprintable()):
        source = "--api-key" if chosen else "the environment variable OPENAI_API_KEY"
        raise ConfigError(f"{source}: a key has printable ASCII characters only")
    return key


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="dynaserve bench replay",
        description="Replays a workload against any OpenAI-compatible server and measures the answers.",
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add_server(parser.add_argument_group("server"))
    workload = parser.add_argument_group("workload")
    add_workload(workload)
    workload.add_argument(
        "--prompt-seed",
        type=seed,
        metavar="N",
        help="of the prompts' tokens (default: a new one, as a prefix cache would serve prompts that were sent before; it is recorded)",
    )
    add_measurement(parser.add_argument_group("measurement"))
    return parser


def add_server(group: Any, *, with_url: bool = True) -> None:
    if with_url:
        group.add_argument(
            "--url", action="append", required=True, help="of the server, with or without /v1; of several, requests go to each in turn"
        )
    group.add_argument("--model", metavar="NAME", help="(default: the one that the server lists)")
    group.add_argument("--api-key", metavar="KEY", help="(default: the environment variable OPENAI_API_KEY)")
    group.add_argument("--extra-body", type=_json_object, default={}, metavar="JSON", help="fields for each request's body")
    add_eos_token_id(group)
    group.add_argument(
        "--vocabulary",
        type=_vocabulary,
        default="1000:20000",
        metavar="LOW:HIGH",
        help="token ids of prompts, LOW <= id < HIGH (default: %(default)s, which lies above the control tokens and below the end"
        " of the vocabularies in use)",
    )


def add_eos_token_id(group: Any) -> None:
    """The option --eos-token-id."""
    group.add_argument(
        "--eos-token-id",
        type=whole(0),
        metavar="N",
        help="end answers by this token, which the server is kept from and then forced to, as it does not know their lengths; needs vLLM's"
        " min_tokens (default: by max_tokens)",
    )


def add_workload(group: Any) -> None:
    """prompt_seed is None, unless an option says otherwise."""
    group.add_argument("--workload", required=True, metavar="NAME", help=" | ".join(catalog.NAMES))
    group.add_argument("--traces", type=Path, metavar="DIR", help="folder of the trace files")
    group.add_argument("--tokenizer", type=Path, metavar="FILE", help="tokenizer.json that counts the tokens of sharegpt:PATH")
    group.add_argument("--skip-s", type=positive, metavar="T", help="leave out the first T seconds of the trace")
    group.add_argument("--rate", type=positive, metavar="R", help="requests per second on average; trace arrivals have their own")
    group.add_argument(
        "--arrivals",
        default="poisson",
        metavar="HOW",
        help=f"{' | '.join(arrivals.PROCESSES)} (default: %(default)s)",
    )
    group.add_argument("--requests", type=whole(1), metavar="N", help="only the first N")
    group.add_argument("--duration-s", type=positive, metavar="T", help="only those sent in the first T seconds")
    group.add_argument("--scale", type=positive, default=1.0, metavar="X", help="lengths times X, at least 1 token (default: 1)")
    group.add_argument("--drawn", action="store_true", help="each request is a random one of the workload, by the seed; for ever")
    group.add_argument("--max-total-tokens", type=whole(2), metavar="N", help="leave out requests that are longer, after scaling")
    group.add_argument("--seed", type=seed, default=1, metavar="N", help="of arrival times and --drawn (default: %(default)s)")
    group.set_defaults(prompt_seed=None)


def add_measurement(group: Any, output: tuple[str, str] = ("FILE", "raw data as JSON")) -> None:
    """output: metavar and help of --output."""
    group.add_argument("--warmup", type=whole(0), default=0, metavar="N", help="requests sent before, one by one, and not counted")
    group.add_argument("--timeout-s", type=positive, default=600.0, metavar="T", help="for one request (default: %(default)s)")
    group.add_argument("--tbt-slo-ms", type=positive, default=100.0, metavar="MS", help="(default: %(default)s)")
    group.add_argument("--ttft-slo-ms", type=positive, metavar="MS", help="(default: none)")
    group.add_argument(
        "--max-client-lag-ms",
        type=positive,
        default=10.0,
        metavar="MS",
        help="the P99 of how late this client may send, and wake up; more is not reported (default: %(default)s, a tenth of the"
        " usual TBT SLO)",
    )
    metavar, told = output
    group.add_argument("--output", type=Path, metavar=metavar, help=told)


def positive(text: str) -> float:
    value = _float(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return value


def not_negative(text: str) -> float:
    value = _float(text)
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least 0")
    return value


def _float(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def whole(least: int, most: int = MOST_WHOLE) -> Callable[[str], int]:
    """A parser's type: a whole number in [least, most], in ASCII digits."""

    def whole(text: str) -> int:
        is_number, digits = text.isascii() and text.isdigit(), text.lstrip("0") or "0"
        # Digits are counted first: int() takes the square of their number.
        if is_number and (len(digits) > len(str(most)) or int(digits) > most):
            raise argparse.ArgumentTypeError(f"{_shown(text)} is more than {most}")
        if not (is_number and int(digits) >= least):
            raise argparse.ArgumentTypeError(f"{_shown(text)} is not a whole number of at least {least}")
        return int(digits)

    return whole


def seed(text: str) -> int:
    """A parser's type: what the core, and what is recorded, take for a seed."""
    return whole(0, MOST_SEED)(text)


def _shown(text: str) -> str:
    return repr(text if len(text) <= _SHOWN else f"{text[:_SHOWN]}...")


def _vocabulary(text: str) -> range:
    low, _, high = text.partition(":")
    try:
        ids = range(whole(0)(low), whole(0)(high))
    except argparse.ArgumentTypeError:
        ids = range(0)
    if not ids:
        raise argparse.ArgumentTypeError(f"{_shown(text)} is not LOW:HIGH with LOW < HIGH, at most {MOST_WHOLE}")
    return ids


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is not a JSON object")
    return value
