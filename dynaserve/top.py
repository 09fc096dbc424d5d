"""`dynaserve top`: what a front-end shows of itself (`GET /dynaserve/snapshot`), in the terminal."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from dynaserve import direct_http
from dynaserve.errors import ConfigError, NoInstance
from dynaserve.fleet_view import InstanceView, RequestView, SloView, Snapshot
from dynaserve.frontend_at import TIMEOUT_S, add_key_arguments, frontend_at

EXAMPLE = """\
example:
  dynaserve top --url http://127.0.0.1:8000 --interval 2"""
SNAPSHOT = "/dynaserve/snapshot"
MOST_REQUESTS = 20
NARROWEST = 120
"""Columns of a frame that is printed to a file."""


def main(argv: list[str]) -> None:
    """Until Ctrl-C. Exit status 2: it cannot look as asked; 1: nobody answers. A front-end that goes away later is waited for."""
    args = _parser().parse_args(argv)
    try:
        frontend = frontend_at(args.url, args)
        with direct_http.client(TIMEOUT_S) as http:
            first = frontend.ask(http, SNAPSHOT, Snapshot)
            if args.once:
                console = Console()
                Console(width=max(console.width, NARROWEST)).print(frame(first))
                return
            follow(lambda: frontend.ask(http, SNAPSHOT, Snapshot), first, args.interval)
    except (ConfigError, NoInstance) as error:
        print(f"dynaserve top: {error}", file=sys.stderr)
        raise SystemExit(2 if isinstance(error, ConfigError) else 1) from error
    except KeyboardInterrupt:
        return


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="dynaserve top",
        description="Show instances and recent requests of a fleet in the terminal.",
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="of the front-end (default: %(default)s)")
    parser.add_argument("--interval", type=_seconds, default=1.0, metavar="S", help="seconds between two looks (default: %(default)s)")
    parser.add_argument("--once", action="store_true", help="print one frame and end")
    add_key_arguments(parser)
    return parser


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0 < seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not a number of seconds above 0")
    return seconds


def follow(ask: Callable[[], Snapshot], first: Snapshot, interval_s: float) -> None:
    """Draws a frame every interval_s seconds, for ever; raises what `ask` does but NoInstance, which is shown."""
    shown = first
    with Live(frame(shown), screen=True, auto_refresh=False) as live:
        while True:
            time.sleep(interval_s)
            away = ""
            try:
                shown = ask()
            except NoInstance as error:
                away = str(error)
            live.update(frame(shown, away), refresh=True)


# -- a frame -------------------------------------------------------------------------------------------------------------


def frame(now: Snapshot, away: str = "") -> RenderableType:
    """away: why this is not what is now, in one sentence."""
    clock = time.strftime("%H:%M:%S", time.localtime(now.at_s))
    title = Text(f"{clock}  {now.running_requests} running, {now.waiting_requests} wait for their first token  {_attainment(now.slo)}")
    parts: list[RenderableType] = [title, _instances(now.instances), _requests(now.requests)]
    return Group(*([Text(away, style="bold red")] if away else []), *parts)


def _attainment(slo: SloView) -> str:
    ttft = f", TTFT {_share(slo.first_tokens_in_slo, slo.first_tokens)}" if slo.first_tokens else ""
    return f"in SLO: TBT {_share(slo.gaps_in_slo, slo.gaps)}{ttft}"


def _instances(instances: list[InstanceView]) -> Table:
    table = _table("instance", "health", "running", "waiting", "KV taken", "last step")
    for one in instances:
        last = one.recent_steps[-1] if one.recent_steps else None
        table.add_row(
            Text(one.name),
            Text(one.health, style="" if one.health == "up" else "bold red"),
            _or_dash(one.running_requests),
            _or_dash(one.waiting_requests),
            Text("-" if one.kv_usage is None else f"{one.kv_usage:.1%}"),
            Text("-" if last is None else f"{last.prefill_tokens} prompt tokens + {last.decodes} decodes, {last.measured_ms:.1f} ms"),
        )
    return table


def _requests(requests: list[RequestView]) -> Table:
    table = _table("request", "state", "tokens", "cut at", "alpha", "beta", "KV", "first token", "gaps in SLO", "end")
    for one in requests[:MOST_REQUESTS]:
        table.add_row(
            Text(_printable(one.request_id), no_wrap=True, overflow="ellipsis"),
            Text(one.state),
            Text(f"{one.prompt_tokens} + {one.output_tokens}"),
            Text("lifted") if one.lifted is not None else _or_dash(one.split_token),
            _or_dash(None if one.alpha is None else one.alpha.instance),
            _or_dash(None if one.beta is None else one.beta.instance),
            Text("-" if one.kv is None else f"{one.kv.bytes / 1e6:.1f} MB"),
            Text(f"{one.marks_ms['first_token']:.0f} ms" if "first_token" in one.marks_ms else "-"),
            Text("-" if one.gaps is None else _share(one.gaps.in_slo, one.gaps.count)),
            _or_dash(one.finish_reason),
        )
    return table


def _table(*columns: str) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for column in columns:
        table.add_column(column)
    return table


def _printable(text: str) -> str:
    """A client chooses the ids of its requests: they must not steer the terminal."""
    return "".join(character if character.isprintable() else "?" for character in text)


def _or_dash(value: object) -> Text:
    return Text("-" if value is None else str(value))


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.1%}" if whole else "-"
