"""A request that the front-end has in hand."""

from __future__ import annotations

import math
from dataclasses import dataclass

from vllm.v1.engine import EngineCoreRequest

from dynaserve.request_flow import RequestFlow


@dataclass(eq=False)
class Live:
    """A flow with what is needed to act on it. request: vLLM's, as it is sent to both instances. expect_again_ms: when to look again at
    when its hand-off, which shows, will come. may_cut: nothing in the request stands against a cut."""

    flow: RequestFlow
    request: EngineCoreRequest
    transport: str
    transfer_id: str
    arrived_s: float
    chunked: bool
    may_cut: bool = True
    expect_again_ms: float = -math.inf

    @property
    def internal_id(self) -> str:
        """The id that AsyncLLM knows."""
        return str(self.request.request_id)
