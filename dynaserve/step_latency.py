"""Latency of engine steps and the batch rule: what the front-end, the local scheduler and the simulator share.

One of the two doors to `dynaserve._core`; the contracts are in `cpp_scheduler/include/dynaserve/` (`cost_model.h`,
`profile_table.h`, `batch_rule.h`, `admission_margin.h`).
"""

from __future__ import annotations

from dynaserve._core import (
    AdmissionMargin,
    BatchLimits,
    BatchShape,
    BudgetReason,
    PrefillBudget,
    PrefillWork,
    ProfileBin,
    ProfileTable,
    Roofline,
    StepSample,
    choose_budget,
    fit_roofline,
    leaves_room_for_decode,
    prefill_pairs,
    profile_axes,
    shape_with,
)

__all__ = [
    "CONTEXT_BINS",
    "DECODE_BINS",
    "TOKEN_BINS",
    "AdmissionMargin",
    "BatchLimits",
    "BatchShape",
    "BudgetReason",
    "PrefillBudget",
    "PrefillWork",
    "ProfileBin",
    "ProfileTable",
    "Roofline",
    "StepSample",
    "choose_budget",
    "fit_roofline",
    "leaves_room_for_decode",
    "prefill_pairs",
    "profile_axes",
    "shape_with",
]

TOKEN_BINS, DECODE_BINS, CONTEXT_BINS = profile_axes()
