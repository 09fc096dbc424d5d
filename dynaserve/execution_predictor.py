"""The execution predictor: the virtual batches that an instance is going to run (the paper, section 4.1).

One of the doors to `dynaserve._core`; the contract is in `cpp_scheduler/include/dynaserve/execution_predictor.h`.
"""

from __future__ import annotations

from dynaserve._core import ExecutionPredictor, Forecast, Horizon, InstanceLimits, VirtualRequest

__all__ = ["ExecutionPredictor", "Forecast", "Horizon", "InstanceLimits", "VirtualRequest"]
