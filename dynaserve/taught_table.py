"""Latency tables that learn steps which were measured in no order of time: those of a grid, or of a sweep."""

from __future__ import annotations

import random
from collections.abc import Sequence

from dynaserve.step_latency import ProfileTable, StepSample, fit_roofline

_PASSES = 6
"""Over all samples: the error of a table that has hardly seen any says nothing about the one that is kept."""


def taught(samples: Sequence[StepSample], rng: random.Random) -> ProfileTable:
    """Raises ValueError without samples.

    rng: of their order: what neighbours have in common, one after the other, would pass for the speed of the machine.
    """
    table, in_turns = ProfileTable(fit_roofline(list(samples))), list(samples)
    for _ in range(_PASSES):
        rng.shuffle(in_turns)
        for sample in in_turns:
            table.observe(sample.shape, sample.measured_ms)
    return settled(table)


def settled(table: ProfileTable) -> ProfileTable:
    """A copy, without what the last few steps had in common: for who goes by it later, or elsewhere."""
    copy = ProfileTable(table.roofline)
    copy.restore(table.bins(), table.log_scale, table.sigma)
    return copy
