"""A table or figure of the DynaServe paper in the simulator, on A100 latencies: our value, the paper's, their ratio.

    python -m benchmarks.paper table1 --gpu-grid grid.csv.gz --traces traces

The grid is a CSV of measured steps as `dynaserve simulate --gpu-grid` reads it, with qwen2.5-14b, -32b and -72b on a100_sxm. Where
the paper prints no figures (its plots), only ours are shown.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from benchmarks import provenance
from benchmarks.paper import baselines, figures, oracle, setting, tables, why
from benchmarks.paper.setting import Bench, Row
from dynaserve.bench import options, simulated_policy
from dynaserve.bench.exit_status import INTERRUPTED
from dynaserve.errors import ConfigError
from dynaserve.files import check_replaceable
from workloads.trace import WorkloadError

COMMANDS: dict[str, Callable[[Bench], Iterable[Row]]] = {
    "table1": tables.table1,
    "table1-why": why.table1_why,
    "table2": tables.table2,
    "table2-why": why.table2_why,
    "table3": tables.table3,
    "table3-why": why.table3_why,
    "table4": tables.table4,
    "table4-why": why.table4_why,
    "figure3": figures.figure3,
    "figure5": figures.figure5,
    "figure5-why": why.figure5_why,
    "figure8": figures.figure8,
    "figure9": figures.figure9,
    "figure9-why": why.figure9_why,
    "figure10": figures.figure10,
    "figure10-why": why.figure10_why,
    "figure11": figures.figure11,
    "transfer": figures.transfer,
    "oracle": oracle.oracle,
    "plans": oracle.plans,
    "baselines": baselines.baselines,
    "overload": baselines.overload,
}

OVER_MANY = ("baselines", "oracle", "overload", "plans")
"""Those of which --workloads and --tbt-slo-ms take a part."""
SEARCHING = ("baselines", "figure9", "figure9-why", "oracle", "plans", "table2", "table2-why")
"""Those that search for capacities, so that they take --repetitions."""
OF_WHOLE_TRACES = ("figure3", "figure10", "figure10-why")
"""Those that take no --requests."""
REQUESTS, REPETITIONS = 2000, 1
"""Of each run and of each search, unless options say otherwise."""


def main(arguments: Sequence[str]) -> None:
    """Ends with exit status 2 for bad options, 130 when interrupted."""
    parser = _parser()
    args = parser.parse_args(arguments)
    if (refusal := _refusal(args)) is not None:
        parser.error(refusal)
    rows: list[Row] = []
    try:
        if args.output is not None:
            for path in (args.output, provenance.beside(args.output)):
                check_replaceable(path)
        bench = _bench(args)
        told = provenance.of("benchmarks.paper", arguments, seed=setting.SEED)
        print(provenance.text(told), file=sys.stderr, flush=True)
        for row in COMMANDS[args.what](bench):
            rows.append(row)
            print(f"{row.what}: {row.here:.4g}", file=sys.stderr, flush=True)
            if args.output is not None:
                provenance.keep(args.output, told)
                setting.write(args.output, rows)
    except (ConfigError, WorkloadError) as error:
        print(f"benchmarks.paper: {error}", file=sys.stderr)
        raise SystemExit(2) from error
    except KeyboardInterrupt as error:
        kept = f"; rows before it: {len(rows)}, in {args.output}" if rows and args.output is not None else ""
        print(f"benchmarks.paper: interrupted{kept}", file=sys.stderr)
        raise SystemExit(INTERRUPTED) from error
    setting.show(rows)


def _refusal(args: argparse.Namespace) -> str | None:
    """Of an option that does nothing for what is asked, or too little; None: there is none."""
    what = args.what
    if what not in OVER_MANY and (args.workloads or args.tbt_slo_ms):
        return f"--workloads and --tbt-slo-ms are of {', '.join(OVER_MANY)}, not of {what}"
    if what != "oracle" and (args.stride_tokens or args.seeds or args.expect):
        return f"--stride-tokens, --seeds and --expect are of oracle, not of {what}"
    if what not in SEARCHING and args.repetitions:
        return f"--repetitions is of {', '.join(SEARCHING)}, not of {what}"
    if what in OF_WHOLE_TRACES and args.requests:
        return f"--requests is not of {what}, which takes all that its traces have"
    if what == "oracle" and args.requests and args.requests < (least := oracle.LEAST_REQUESTS):
        return f"--requests {args.requests} is too few for oracle, which counts tokens while requests arrive: at least {least}"
    return None


def _bench(args: argparse.Namespace) -> Bench:
    return Bench(
        args.gpu_grid,
        args.traces,
        args.requests or REQUESTS,
        args.repetitions or REPETITIONS,
        workloads=args.workloads,
        slos_ms=args.tbt_slo_ms or setting.SLOS_MS,
        stride_tokens=args.stride_tokens or simulated_policy.USUAL_STRIDE_TOKENS,
        seeds=args.seeds or setting.SEEDS,
        expect=args.expect or setting.EXACT,
    )


def _parser() -> argparse.ArgumentParser:
    told = "\n".join(f"  {name:12s} {(command.__doc__ or '').splitlines()[0]}" for name, command in COMMANDS.items())
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.paper",
        description=f"{__doc__}\n{told}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("what", choices=COMMANDS, metavar="WHAT", help="one of the above")
    parser.add_argument("--gpu-grid", type=Path, required=True, metavar="FILE", help="CSV of measured steps")
    parser.add_argument("--traces", type=Path, metavar="DIR", help="folder of the trace files, for all that is not of one fixed shape")
    runs = f"of each run, but of {', '.join(OF_WHOLE_TRACES)} (default: {REQUESTS})"
    parser.add_argument("--requests", type=options.whole(1), metavar="N", help=runs)
    searches = f"of each search of {', '.join(SEARCHING)} (default: {REPETITIONS})"
    parser.add_argument("--repetitions", type=options.whole(1), metavar="N", help=searches)
    parts = f"of {', '.join(OVER_MANY)}"
    slos_ms = " ".join(setting.SLOS_MS)
    parser.add_argument("--workloads", nargs="+", choices=baselines.FIRST_PER_S, metavar="NAME", help=f"{parts} (default: all)")
    parser.add_argument("--tbt-slo-ms", nargs="+", metavar="MS", help=f"{parts} (default: {slos_ms})")
    stride, seeds = simulated_policy.USUAL_STRIDE_TOKENS, setting.SEEDS
    parser.add_argument("--stride-tokens", type=options.whole(1), metavar="N", help=f"of oracle: between its cuts (default: {stride})")
    parser.add_argument("--seeds", type=options.whole(2), metavar="N", help=f"of oracle: runs of each policy (default: {seeds})")
    known = "of oracle: what dynamic knows of lengths, as of dynaserve simulate"
    parser.add_argument("--expect", metavar="WHAT", help=f"{known} (default: {setting.EXACT})")
    parser.add_argument("--output", type=Path, metavar="FILE", help="the same as CSV, and of NAME.csv its origin as NAME.provenance.json")
    return parser


if __name__ == "__main__":
    main(sys.argv[1:])
