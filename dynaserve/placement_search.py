"""The parts of the dynamic policy, one by one, for the simulator and the tests.

One of the doors to `dynaserve._core`; the contracts are in `cpp_scheduler/include/dynaserve/` (`objective.h`,
`fleet_planner.h`, `split_search.h`, `hand_off_revision.h`, `paper_search.h`).
"""

from __future__ import annotations

from dynaserve._core import (
    BalancedSplit,
    Choice,
    FleetDemand,
    FleetPlan,
    Outcome,
    PendingHandOff,
    SearchInstance,
    SearchOptions,
    SearchRequest,
    SplitSearch,
    find_balanced_split,
    objective_ms,
    others_wait_ms,
    plan_fleet,
    prefill_rate,
    revise_hand_off,
    revised_objective_ms,
)

__all__ = [
    "BalancedSplit",
    "Choice",
    "FleetDemand",
    "FleetPlan",
    "Outcome",
    "PendingHandOff",
    "SearchInstance",
    "SearchOptions",
    "SearchRequest",
    "SplitSearch",
    "find_balanced_split",
    "objective_ms",
    "others_wait_ms",
    "plan_fleet",
    "prefill_rate",
    "revise_hand_off",
    "revised_objective_ms",
]
