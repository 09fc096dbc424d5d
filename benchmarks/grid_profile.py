"""Learns a latency profile from a grid of measured steps: what `dynaserve simulate --profile` reads, with where it comes from.

    python -m benchmarks.grid_profile benchmarks/h200/steps.csv --model qwen2.5-14b --system h200 --device "NVIDIA H200" \\
        --vllm-version 0.25.1 --date 2026-11-26 --output benchmarks/h200/qwen2.5-14b.json
"""

from __future__ import annotations

import argparse
import shlex
import statistics
import sys
from pathlib import Path

from dynaserve import latency_profile
from dynaserve.bench import latency_tables
from dynaserve.errors import ConfigError
from dynaserve.latency_profile import ProfileKey


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("grid", type=Path)
    parser.add_argument("--model", required=True, help="as in the grid")
    parser.add_argument("--system", required=True, help="as in the grid")
    parser.add_argument("--device", required=True, help="its name")
    parser.add_argument("--vllm-version", required=True)
    parser.add_argument("--date", required=True, help="of the measurement")
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()
    try:
        table = latency_tables.from_grid(args.grid, args.model, args.system, overhead_ms=0.0, cost_scale=1.0)
        samples = latency_tables.samples(args.grid, args.model, args.system)
    except ConfigError as error:
        sys.exit(str(error))
    key = ProfileKey(args.model, "bfloat16", args.device, "tp1pp1", args.vllm_version)
    command = shlex.join(["python", "-m", "benchmarks.grid_profile", *sys.argv[1:]])
    latency_profile.save(args.output, table, key, f"{command}; {args.device}, {args.date}, steps by vllm_plugin/stock_sweep.py")
    errors = sorted(abs(table.step_ms(sample.shape) / sample.measured_ms - 1) for sample in samples)
    print(
        f"{args.output}: {len(errors)} steps, error {statistics.mean(errors):.1%} in the mean, {errors[int(0.9 * len(errors))]:.1%} at P90"
    )


if __name__ == "__main__":
    main()
