"""Simulated capacity against one property at a time: one command, one CSV, one plot.

    python -m benchmarks.sensitivity chunk --output chunk -- \\
        --roofline 10,0.2,16,0.00002,0.2,0.0005 --workload sample --rate 4 --requests 300

What follows `--` are options of `dynaserve simulate`. Each line of the plot is a system: round robin over vLLM's fixed chunks (2048
unless the sweep is over chunks), round robin over SLO-aware batches, disaggregation, and the two policies that predict. `split` has one
line only, from requests that are not cut over cuts ever later in them (of all their tokens) to `dynamic`. `mix` is over the share of
azure-code among requests of which the others are azure-conv (`--traces` names the folder of both), and needs no --workload.
The work of prefill and of decoding over the time of a trace: `python -m benchmarks.sensitivity.balance`.
"""

from __future__ import annotations

import argparse
import csv
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from dynaserve.bench import compare_plots, simulate
from dynaserve.bench.capacity import middle_rate
from dynaserve.errors import ConfigError
from dynaserve.files import check_replaceable

CUTS = ("round-robin", *(f"fixed:{tenths / 10:g}" for tenths in range(1, 10)), "dynamic")
MIXES = tuple(f"mixed:{share:g},azure-code,azure-conv" for share in (0, 0.25, 0.5, 0.75, 1))
SWEEPS = {
    "chunk": ("--chunk", ("128", "256", "384", "512", "1024", "2048")),
    "slo": ("--tbt-slo-ms", ("50", "75", "100", "150", "200", "400")),
    "instances": ("--instances", ("2", "4", "8", "16", "32")),
    "burstiness": ("--arrivals", ("gamma:0.5", "poisson", "gamma:2", "gamma:4")),
    "hand-off": ("--hand-off-ms", ("1", "10", "50", "200")),
    "kv-bandwidth": ("--kv-gbytes-per-s", ("0.25", "0.5", "1", "2", "5", "25")),
    "kv-transfer": ("--kv-transfer", ("blocks", "end")),
    "length-error": ("--expect", ("exact", "lognormal:0.2", "lognormal:0.5", "lognormal:1", "mean")),
    "split": ("--policy", CUTS),
    "mix": ("--workload", MIXES),
}
"""The option of `dynaserve simulate` that is swept, and its values."""
SYSTEMS = {
    "fixed chunk": ("--policy", "round-robin"),
    "SLO-aware": ("--policy", "round-robin", "--batching", "slo"),
    "disaggregated": ("--policy", "disaggregated"),
    "dynamic": ("--policy", "dynamic", "--batching", "slo"),
    "paper": ("--policy", "paper", "--batching", "slo"),
}

OTHER_SYSTEMS = {"split": {"SLO-aware": ("--batching", "slo")}}
"""Where the policy is what is swept."""

Row = tuple[str, str, float, float, float]


def main(arguments: Sequence[str]) -> None:
    """Ends with exit status 2 for bad options."""
    parser = argparse.ArgumentParser(
        prog="benchmarks.sensitivity", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("sweep", choices=SWEEPS)
    parser.add_argument("--output", type=Path, required=True, metavar="NAME", help="NAME.csv and NAME.png are written")
    # argparse gives what follows `--` to the positionals before it.
    end = list(arguments).index("--") if "--" in arguments else len(arguments)
    args = parser.parse_args(arguments[:end])
    try:
        compare_plots.check_installed()
        for kind in ("csv", "png"):
            check_replaceable(Path(f"{args.output}.{kind}"))
        rows = list(sweep(args.sweep, arguments[end + 1 :]))
        write(args.output, args.sweep, rows)
    except ConfigError as error:
        print(f"benchmarks.sensitivity: {error}", file=sys.stderr)
        raise SystemExit(2) from error


def systems_of(name: str) -> Mapping[str, tuple[str, ...]]:
    return OTHER_SYSTEMS.get(name, SYSTEMS)


def sweep(name: str, options: Sequence[str]) -> list[Row]:
    """(system, value, median, least, most capacity in requests/s) of each point. Raises ConfigError."""
    option, values = SWEEPS[name]
    rows: list[Row] = []
    for system, chosen in systems_of(name).items():
        for value in values:
            rates = [rate or 0.0 for rate in simulate.capacities([*options, *chosen, option, value])]
            rows.append((system, value, middle_rate(rates), min(rates), max(rates)))
            print(f"{system:14s} {option} {value:10s} {rows[-1][2]:.3g} requests/s", flush=True)
    return rows


def write(output: Path, name: str, rows: Sequence[Row]) -> None:
    """NAME.csv and NAME.png."""
    with Path(f"{output}.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["system", name, "capacity_per_s", "least_per_s", "most_per_s"])
        writer.writerows(rows)
    figure, axes = compare_plots.axes_of(name, "capacity, requests/s")
    values = [label_of(value) for value in SWEEPS[name][1]]
    for system in systems_of(name):
        axes.plot(values, [row[2] for row in rows if row[0] == system], "o-", label=system)
    axes.tick_params(axis="x", rotation=45 if max(map(len, values)) > 6 else 0)
    axes.legend()
    Path(f"{output}.png").write_bytes(compare_plots.png_of(figure))


def label_of(value: str) -> str:
    """Of the axis: of a mix its share."""
    return value.partition(",")[0].removeprefix("mixed:")


if __name__ == "__main__":
    main(sys.argv[1:])
