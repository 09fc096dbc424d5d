"""The global scheduler: decides which instance computes which tokens of a request.

One of the two doors to `dynaserve._core`; the contracts are in `cpp_scheduler/include/dynaserve/`.
"""

from __future__ import annotations

from dynaserve._core import InstanceState, MicroRequest, Options, Placement, PlacementReason, Policy, RequestSpec
from dynaserve._core import Scheduler as GlobalScheduler

__all__ = [
    "GlobalScheduler",
    "InstanceState",
    "MicroRequest",
    "Options",
    "Placement",
    "PlacementReason",
    "Policy",
    "RequestSpec",
    "parse_policy",
]


def parse_policy(text: str) -> Options:
    """The scheduler options that a policy's text names: `colocated`, `disaggregated` or `fixed:RATIO`.

    Raises ValueError, naming the text and the accepted forms, for anything else.
    """
    match text.split(":"):
        case ["colocated"]:
            return Options(Policy.colocated)
        case ["disaggregated"]:
            return Options(Policy.disaggregated)
        case ["fixed", ratio] if _is_ratio(ratio):
            return Options(Policy.fixed, float(ratio))
    raise ValueError(f"policy is {text!r}; accepted are 'colocated', 'disaggregated' and 'fixed:RATIO' with a RATIO in [0, 1]")


def _is_ratio(text: str) -> bool:
    try:
        return 0.0 <= float(text) <= 1.0
    except ValueError:
        return False
