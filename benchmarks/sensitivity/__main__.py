"""Simulated capacity against one property at a time: one command, one CSV, one plot.

    python -m benchmarks.sensitivity chunk --output chunk -- \\
        --roofline 10,0.2,16,0.00002,0.2,0.0005 --workload sample --rate 4 --requests 300

What follows `--` are options of `dynaserve simulate`, but for those that the sweep gives: --policy, --batching, and what is swept. Each
line of the plot is a system: round robin over vLLM's fixed chunks (2048, and 384, unless the sweep is over chunks), round robin over
SLO-aware batches, disaggregation with fixed chunks, and the two policies that predict. `split` has one line only, from requests that are
not cut over cuts ever later in them (of all their tokens) to `dynamic`. `mix` is over the share of azure-code among requests of which the
others are bursty-chat; a half of each is `hybrid` (`--traces` names the folder of both). `kv-transfer` needs --kv-gbytes-per-s. The table
is written after each point, the plot at the end.
The work of prefill and of decoding over the time of a trace: `python -m benchmarks.sensitivity.balance`.
"""

from __future__ import annotations

import argparse
import csv
import io
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import provenance
from dynaserve.bench import compare_plots, simulate, simulate_options
from dynaserve.bench.capacity import middle_rate
from dynaserve.bench.exit_status import INTERRUPTED
from dynaserve.errors import ConfigError
from dynaserve.files import check_replaceable, write_in_one_move

CUTS = ("round-robin", *(f"fixed:{tenths / 10:g}" for tenths in range(1, 10)), "dynamic")
MIXES = tuple(f"mixed:{share:g},azure-code,bursty-chat" for share in (0, 0.25, 0.5, 0.75, 1))
SWEEPS = {
    "chunk": ("--chunk", ("128", "256", "384", "512", "1024", "2048")),
    "slo": ("--tbt-slo-ms", ("50", "75", "100", "150", "200", "400")),
    "instances": ("--instances", ("2", "4", "8", "16", "32")),
    "burstiness": ("--arrivals", ("gamma:0.5", "poisson", "gamma:2", "gamma:4")),
    "hand-off": ("--hand-off-ms", ("1", "10", "50", "200")),
    "kv-bandwidth": ("--kv-gbytes-per-s", ("0.25", "0.5", "1", "2", "5", "25")),
    "kv-transfer": ("--kv-transfer", ("blocks", "end")),
    "step-noise": ("--step-sigma", ("0.02", "0.05", "0.1", "0.2")),
    "length-error": ("--expect", ("exact", "lognormal:0.2", "lognormal:0.5", "lognormal:1", "mean")),
    "split": ("--policy", CUTS),
    "mix": ("--workload", MIXES),
}
"""The option of `dynaserve simulate` that is swept, and its values."""
SYSTEMS: Mapping[str, tuple[str, ...]] = {
    "fixed chunk": ("--policy", "round-robin", "--batching", "vllm"),
    "chunk 384": ("--policy", "round-robin", "--batching", "vllm", "--chunk", "384"),
    "SLO-aware": ("--policy", "round-robin", "--batching", "slo"),
    "disaggregated": ("--policy", "disaggregated", "--batching", "vllm"),
    "dynamic": ("--policy", "dynamic", "--batching", "slo"),
    "paper": ("--policy", "paper", "--batching", "slo"),
}

OTHER_SYSTEMS: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "split": {"SLO-aware": ("--batching", "slo")},
    "chunk": {name: options for name, options in SYSTEMS.items() if name != "chunk 384"},
}
"""Where what makes a system is what is swept."""
OF_SYSTEMS = ("--policy", "--batching")
"""What makes a system."""
NEEDED = {"kv-transfer": "--kv-gbytes-per-s"}
"""The option without which all points of a sweep are one."""

Row = tuple[str, str, float, float, float]
"""System, value, median, least, most capacity in requests/s."""


@dataclass(frozen=True)
class Point:
    """options: of `dynaserve simulate`."""

    system: str
    value: str
    options: Sequence[str]


def main(arguments: Sequence[str]) -> None:
    """Ends with exit status 2 for bad options, 130 when interrupted."""
    # argparse gives what follows `--` to the positionals before it.
    end = list(arguments).index("--") if "--" in arguments else len(arguments)
    args = _parser().parse_args(arguments[:end])
    try:
        compare_plots.check_installed()
        planned = points(args.sweep, arguments[end + 1 :])
        seed = simulate_options.parse(planned[0].options).seed
        for path in (_table(args.output), provenance.beside(_table(args.output)), _picture(args.output)):
            check_replaceable(path)
        told = provenance.of("benchmarks.sensitivity", arguments, seed=seed)
        print(provenance.text(told), flush=True)
        run(args.output, args.sweep, planned, told)
    except ConfigError as error:
        print(f"benchmarks.sensitivity: {error}", file=sys.stderr)
        raise SystemExit(2) from error
    except KeyboardInterrupt as error:
        print(f"benchmarks.sensitivity: {str(error) or 'interrupted'}", file=sys.stderr)
        raise SystemExit(INTERRUPTED) from error


def systems_of(name: str) -> Mapping[str, tuple[str, ...]]:
    return OTHER_SYSTEMS.get(name, SYSTEMS)


def points(name: str, options: Sequence[str]) -> list[Point]:
    """Of a sweep over a fleet with these options. Raises ConfigError if by them a point would not be what it is called."""
    option, values = SWEEPS[name]
    for ours, why in {**dict.fromkeys(OF_SYSTEMS, "makes its systems"), option: "is what it is over"}.items():
        if (found := _given(ours, options)) is not None:
            raise ConfigError(f"{found!r} cannot be among the options of sweep {name}: {ours} {why}")
    if (needed := NEEDED.get(name)) is not None and _given(needed, options) is None:
        raise ConfigError(f"sweep {name} needs {needed} among its options: without it {' and '.join(values)} are the same")
    return [Point(system, value, [*options, *chosen, option, value]) for system, chosen in systems_of(name).items() for value in values]


def _given(option: str, options: Sequence[str]) -> str | None:
    """As it stands there, with its value; None: it does not."""
    for index, argument in enumerate(options):
        if argument == option:
            return " ".join(options[index : index + 2])
        if argument.startswith(f"{option}="):
            return argument
    return None


def run(output: Path, name: str, planned: Sequence[Point], told: Mapping[str, Any]) -> None:
    """Keeps the rows as they come, and draws them at the end. told: where they come from. Raises ConfigError and KeyboardInterrupt, with
    what is kept."""
    rows: list[Row] = []
    try:
        for row in sweep(SWEEPS[name][0], planned):
            rows.append(row)
            _picture(output).unlink(missing_ok=True)  # an earlier one is not of this table
            provenance.keep(_table(output), told)
            write(_table(output), name, rows)
        draw(_picture(output), name, rows)
    except (ConfigError, KeyboardInterrupt) as error:
        if not rows:
            raise
        kept = f"points measured before it: {len(rows)} of {len(planned)}, in {_table(output)}"
        raise type(error)(f"{str(error) or 'interrupted'}; {kept}") from error


def sweep(option: str, planned: Sequence[Point]) -> Iterator[Row]:
    """Of each point when it is measured. Raises ConfigError."""
    for point in planned:
        rates = [rate or 0.0 for rate in simulate.capacities(point.options)]
        middle = middle_rate(rates)
        print(f"{point.system:14s} {option} {point.value:10s} {middle:.3g} requests/s", flush=True)
        yield point.system, point.value, middle, min(rates), max(rates)


def write(table: Path, name: str, rows: Sequence[Row]) -> None:
    """As CSV."""
    text = io.StringIO(newline="")
    writer = csv.writer(text)
    writer.writerow(["system", name, "capacity_per_s", "least_per_s", "most_per_s"])
    writer.writerows(rows)
    write_in_one_move(table, text.getvalue().encode())


def draw(picture: Path, name: str, rows: Sequence[Row]) -> None:
    """As PNG."""
    figure, axes = compare_plots.axes_of(name, "capacity, requests/s")
    values = [label_of(value) for value in SWEEPS[name][1]]
    for system in systems_of(name):
        axes.plot(values, [row[2] for row in rows if row[0] == system], "o-", label=system)
    axes.tick_params(axis="x", rotation=45 if max(map(len, values)) > 6 else 0)
    axes.legend()
    write_in_one_move(picture, compare_plots.png_of(figure))


def _table(output: Path) -> Path:
    return Path(f"{output}.csv")


def _picture(output: Path) -> Path:
    return Path(f"{output}.png")


def label_of(value: str) -> str:
    """Of the axis: of a mix its share."""
    return value.partition(",")[0].removeprefix("mixed:")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="benchmarks.sensitivity", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("sweep", choices=SWEEPS)
    parser.add_argument("--output", type=Path, required=True, metavar="NAME", help="NAME.csv, NAME.provenance.json, NAME.png are written")
    return parser


if __name__ == "__main__":
    main(sys.argv[1:])
