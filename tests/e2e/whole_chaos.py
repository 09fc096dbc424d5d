"""`make test-chaos`: rounds of violence against one of three instances, a stopped sender, and the ends of the front-end and of all.

Every line but the last two is told by assertions; those two tell how long it took.
"""

from __future__ import annotations

import argparse
import shlex
import sys
import tempfile
import time
from pathlib import Path

from tests.e2e.chaos import INSTANCES, VIOLENCE, ChaosFleet, chaos, chaos_fleet, kill_all, kill_frontend
from tests.e2e.stopped_sender import stop_before_hand_over
from tests.transports import OFFERED


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.e2e.whole_chaos",
        description=__doc__.partition("\n")[0],
        epilog="Example: python -m tests.e2e.whole_chaos --rounds 2 --requests 50 --violence cut stop --seed 1",
    )
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--requests", type=int, default=200, help="of each round")
    parser.add_argument("--questions", type=int, default=60)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--violence", nargs="+", choices=VIOLENCE, default=list(VIOLENCE), metavar="KIND", help="in turn: %(choices)s")
    parser.add_argument("--instances", type=int, default=INSTANCES)
    parser.add_argument("--logs", type=Path, default=None, help="folder for the logs (default: a temporary one)")
    args = parser.parse_args()
    print(f"command: {shlex.join(sys.argv)}; seed {args.seed}", flush=True)
    kinds = [args.violence[number % len(args.violence)] for number in range(args.rounds)]
    with tempfile.TemporaryDirectory() as logs, chaos_fleet(args.logs or Path(logs), args.instances) as fleet:
        run = chaos(fleet, args.seed, kinds, args.requests, args.questions)
        print(
            f"{args.rounds} rounds of {args.requests} requests: none failed or hung, no token differs, nothing is held; "
            f"{run.placed_again} were placed again, {run.continued_without_alpha} continued without their alpha",
            flush=True,
        )
        _endings(fleet, args.seed)


def _endings(fleet: ChaosFleet, seed: int) -> None:
    for transport in OFFERED:
        kept_blocks = stop_before_hand_over(fleet, seed, transport)
        print(
            f"a sender over {transport} stopped before it handed over: no token differs; {kept_blocks} blocks were kept from others",
            flush=True,
        )
    print(f"front-end killed: its clients had an error at once, and the instances had freed everything within {kill_frontend(fleet):.1f} s")
    fleet.local.start_frontend()
    answer, ended_s = kill_all(fleet)
    told = f"HTTP {answer.status_code}, Retry-After {answer.headers['retry-after']}"
    print(f"all instances killed: what ran had ended after {ended_s:.1f} s; who asks then is told {told}")


if __name__ == "__main__":
    main()
