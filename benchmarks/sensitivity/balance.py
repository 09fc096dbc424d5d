"""How the work of a trace is shared by prefill and decoding, minute by minute (the paper's Figure 3): one CSV, one plot.

    python -m benchmarks.sensitivity.balance azure-code azure-conv --traces DIR --output balance --profile profile.json

A prompt token costs its share of a step of 2048, an output token its share of a step of 32 decodes, by the latencies that are given as
to `dynaserve simulate`. Above one half of the work, prefill takes more of an instance than decoding: the plot has that line.
"""

from __future__ import annotations

import argparse
import csv
import io
import sys
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from statistics import fmean

from benchmarks import provenance
from dynaserve.bench import compare_plots, simulate, simulate_options
from dynaserve.errors import ConfigError
from dynaserve.files import check_replaceable, write_in_one_move
from dynaserve.step_latency import BatchShape, ProfileTable, prefill_pairs
from workloads import catalog
from workloads.trace import TraceRequest, WorkloadError

PREFILL_STEP_TOKENS = 2048
DECODES = 32


@dataclass(frozen=True)
class Minute:
    """minute: of the trace. prefill_ms, decode_ms: what its requests take of one instance."""

    workload: str
    minute: int
    prefill_ms: float
    decode_ms: float

    @property
    def prefill_share(self) -> float:
        return self.prefill_ms / (self.prefill_ms + self.decode_ms)


def minutes_of(workload: str, requests: Sequence[TraceRequest], table: ProfileTable) -> list[Minute]:
    """Those in which requests arrive, in their order. Raises WorkloadError if the workload tells no times, ConfigError if nothing of it
    takes any time."""
    timed = [(row.arrived_at_s, row) for row in requests if row.arrived_at_s is not None]
    if not timed:
        raise WorkloadError(f"workload {workload} has no arrival times of its own: it has no minutes")
    context = fmean(row.prompt_tokens + row.output_tokens / 2 for _, row in timed)
    prompt = BatchShape(prefill_tokens=PREFILL_STEP_TOKENS, prefill_pairs=prefill_pairs(PREFILL_STEP_TOKENS, 0))
    prompt_token_ms = table.step_ms(prompt) / PREFILL_STEP_TOKENS
    output_token_ms = table.step_ms(BatchShape(decodes=DECODES, decode_context_tokens=round(DECODES * context))) / DECODES
    if not prompt_token_ms + output_token_ms > 0:
        raise ConfigError("neither prefill nor decoding takes any time by these latencies: there is no balance")
    work: dict[int, list[float]] = {}
    for at_s, row in timed:
        of_minute = work.setdefault(int(at_s // 60), [0.0, 0.0])
        of_minute[0] += row.prompt_tokens * prompt_token_ms
        of_minute[1] += row.output_tokens * output_token_ms
    return [Minute(workload, minute, *work[minute]) for minute in sorted(work)]


def main(arguments: Sequence[str]) -> None:
    """Ends with exit status 2 for bad options."""
    args = _parser().parse_args(arguments)
    try:
        compare_plots.check_installed()
        for kind in ("csv", "provenance.json", "png"):
            check_replaceable(Path(f"{args.output}.{kind}"))
        told = provenance.of("benchmarks.sensitivity.balance", arguments)
        print(provenance.text(told), flush=True)
        table = simulate.table_of(args)
        found = [minutes_of(name, catalog.load(name, args.traces).requests, table) for name in args.workloads]
    except (ConfigError, WorkloadError) as error:
        print(f"benchmarks.sensitivity.balance: {error}", file=sys.stderr)
        raise SystemExit(2) from error
    for minutes in found:
        heavy = sum(minute.prefill_share > 0.5 for minute in minutes)
        print(f"{minutes[0].workload}: prefill takes more than decoding in {heavy} of {len(minutes)} minutes")
    provenance.keep(Path(f"{args.output}.csv"), told)
    write(args.output, found)


def write(output: Path, found: Sequence[Sequence[Minute]]) -> None:
    """NAME.csv and NAME.png."""
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow(["workload", "minute", "prefill_ms", "decode_ms", "prefill_share"])
    writer.writerows((*astuple(minute), minute.prefill_share) for minutes in found for minute in minutes)
    write_in_one_move(Path(f"{output}.csv"), text.getvalue().encode())
    figure, axes = compare_plots.axes_of("minute of the trace", "prefill's share of the work")
    for minutes in found:
        axes.plot([minute.minute for minute in minutes], [minute.prefill_share for minute in minutes], label=minutes[0].workload)
    axes.axhline(0.5, color="black", linestyle="--", linewidth=1)
    axes.set_ylim(0, 1)
    axes.legend()
    write_in_one_move(Path(f"{output}.png"), compare_plots.png_of(figure))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="benchmarks.sensitivity.balance", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("workloads", nargs="+", metavar="WORKLOAD", help="with arrival times, as azure-code")
    parser.add_argument("--traces", type=Path, metavar="DIR", help="folder of the trace files")
    parser.add_argument("--output", type=Path, required=True, metavar="NAME", help="NAME.csv, NAME.provenance.json, NAME.png are written")
    simulate_options.add_latency(parser.add_argument_group("latency of steps"))
    return parser


if __name__ == "__main__":
    main(sys.argv[1:])
