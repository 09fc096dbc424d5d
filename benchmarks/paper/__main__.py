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

from benchmarks.paper import baselines, figures, oracle, setting, tables, why
from benchmarks.paper.setting import Bench, Row
from dynaserve.bench import options, simulated_policy
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
    "figure8": figures.figure8,
    "figure9": figures.figure9,
    "figure9-why": why.figure9_why,
    "figure10": figures.figure10,
    "figure11": figures.figure11,
    "transfer": figures.transfer,
    "oracle": oracle.oracle,
    "plans": oracle.plans,
    "baselines": baselines.baselines,
    "overload": baselines.overload,
}

OVER_MANY = ("baselines", "oracle", "overload", "plans")
"""Those of which --workloads and --tbt-slo-ms take a part."""


def main(arguments: Sequence[str]) -> None:
    """Ends with exit status 2 for bad options."""
    told = "\n".join(f"  {name:11s} {(command.__doc__ or '').splitlines()[0]}" for name, command in COMMANDS.items())
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.paper",
        description=f"{__doc__}\n{told}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("what", choices=COMMANDS, metavar="WHAT", help="one of the above")
    parser.add_argument("--gpu-grid", type=Path, required=True, metavar="FILE", help="CSV of measured steps")
    parser.add_argument("--traces", type=Path, metavar="DIR", help="folder of the trace files, for all that is not of one fixed shape")
    parser.add_argument("--requests", type=options.whole(1), default=2000, metavar="N", help="of each run (default: 2000)")
    parser.add_argument("--repetitions", type=options.whole(1), default=1, metavar="N", help="of each search (default: 1)")
    tables = f"of {', '.join(OVER_MANY)}"
    parser.add_argument("--workloads", nargs="+", choices=baselines.FIRST_PER_S, metavar="NAME", help=f"{tables} (default: all)")
    parser.add_argument("--tbt-slo-ms", nargs="+", metavar="MS", help=f"{tables} (default: 100 50)")
    stride, seeds = simulated_policy.USUAL_STRIDE_TOKENS, setting.SEEDS
    parser.add_argument("--stride-tokens", type=options.whole(1), metavar="N", help=f"of oracle: between its cuts (default: {stride})")
    parser.add_argument("--seeds", type=options.whole(2), metavar="N", help=f"of oracle: runs of each policy (default: {seeds})")
    parser.add_argument("--output", type=Path, metavar="FILE", help="the same as CSV")
    args = parser.parse_args(arguments)
    if args.what not in OVER_MANY and (args.workloads or args.tbt_slo_ms):
        parser.error(f"--workloads and --tbt-slo-ms are {tables}, not of {args.what}")
    if args.what != "oracle" and (args.stride_tokens or args.seeds):
        parser.error(f"--stride-tokens and --seeds are of oracle, not of {args.what}")
    slos_ms = args.tbt_slo_ms or setting.SLOS_MS
    rows: list[Row] = []
    try:
        if args.output is not None:
            check_replaceable(args.output)
        bench = Bench(
            args.gpu_grid,
            args.traces,
            args.requests,
            args.repetitions,
            workloads=args.workloads,
            slos_ms=slos_ms,
            stride_tokens=args.stride_tokens or stride,
            seeds=args.seeds or seeds,
        )
        for row in COMMANDS[args.what](bench):
            rows.append(row)
            print(f"{row.what}: {row.here:.4g}", file=sys.stderr, flush=True)
            if args.output is not None:
                setting.write(args.output, rows)
    except (ConfigError, WorkloadError) as error:
        print(f"benchmarks.paper: {error}", file=sys.stderr)
        raise SystemExit(2) from error
    setting.show(rows)


if __name__ == "__main__":
    main(sys.argv[1:])
