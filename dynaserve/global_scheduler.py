"""The global scheduler: decides which instance computes which tokens of a request.

One of the doors to `dynaserve._core`; the contracts are in `cpp_scheduler/include/dynaserve/`.
"""

from __future__ import annotations

import re

from dynaserve._core import (
    CachedPrefix,
    Candidate,
    InstanceState,
    MicroRequest,
    Options,
    OtherRequest,
    Placement,
    PlacementReason,
    Policy,
    Prediction,
    Progress,
    RequestSpec,
    Revision,
    RevisionReason,
    Slo,
    predicts,
)
from dynaserve._core import Scheduler as GlobalScheduler

__all__ = [
    "CachedPrefix",
    "Candidate",
    "GlobalScheduler",
    "InstanceState",
    "MicroRequest",
    "Options",
    "OtherRequest",
    "Placement",
    "PlacementReason",
    "Policy",
    "Prediction",
    "Progress",
    "RequestSpec",
    "Revision",
    "RevisionReason",
    "Slo",
    "parse_policy",
    "predicts",
]

_FORMS = "'colocated', 'disaggregated', 'disaggregated:xPyD', 'fixed:RATIO' with a RATIO in [0, 1], 'dynamic' and 'paper'"


def parse_policy(text: str, num_instances: int | None = None) -> Options:
    """The scheduler options that a policy's text names.

    Raises ValueError, naming the text and the accepted forms, for anything else, or if `disaggregated:xPyD` is for another
    number of instances.
    """
    match text.split(":"):
        case ["colocated" | "disaggregated" | "dynamic" | "paper" as name]:
            return Options(Policy[name])
        case ["disaggregated", counts] if found := re.fullmatch(r"([1-9]\d{0,5})P([1-9]\d{0,5})D", counts):
            prefilling, decoding = int(found[1]), int(found[2])
            if num_instances is not None and prefilling + decoding != num_instances:
                raise ValueError(f"policy is {text!r}, for {prefilling + decoding} instances; there are {num_instances}")
            return Options(Policy.disaggregated, prefill_instances=prefilling)
        case ["fixed", ratio] if _is_ratio(ratio):
            return Options(Policy.fixed, float(ratio))
    raise ValueError(f"policy is {text!r}; accepted are {_FORMS}")


def _is_ratio(text: str) -> bool:
    try:
        return 0.0 <= float(text) <= 1.0
    except ValueError:
        return False
