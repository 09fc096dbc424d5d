"""The discrete-event simulation of a fleet: one of the doors to `dynaserve._core`; the contract is in `simulator.h`."""

from __future__ import annotations

from dynaserve._core import (
    Batching,
    EngineOptions,
    InstanceUse,
    SimulatedOutcome,
    SimulatedRequest,
    SimulationOptions,
    SimulationResult,
    gap_bin_ms,
    simulate,
)

__all__ = [
    "Batching",
    "EngineOptions",
    "InstanceUse",
    "SimulatedOutcome",
    "SimulatedRequest",
    "SimulationOptions",
    "SimulationResult",
    "gap_bin_ms",
    "simulate",
]
