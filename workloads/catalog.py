"""Workloads by name, and what may be done to their lengths."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path

from workloads import trace
from workloads.trace import TraceRequest, WorkloadError

SAMPLE = Path(__file__).parent / "data" / "sample.csv"
TRACE_FILES = {
    "azure-code": "azure_code_2023.csv",
    "azure-conv": "azure_conv_2023.csv",
    "bursty-chat": "servegen_bursty_chat.csv.gz",
    "arxiv-summarization": "arxiv_summarization_lengths.csv.gz",
    "r1-reasoning": "servegen_r1_reasoning.csv.gz",
    "mooncake": "mooncake_conversation.csv.gz",
}
"""Workloads that are not part of this package, and the files that hold them."""
NAMES = ("sample", "fixed:PROMPT,OUTPUT", "file:PATH", *TRACE_FILES)


@dataclass(frozen=True)
class Workload:
    """Requests in their order; at least one. endless: after the last one the first comes again."""

    name: str
    requests: tuple[TraceRequest, ...]
    endless: bool = False


def load(name: str, traces: Path | None = None) -> Workload:
    """The workload of that name (one of NAMES). traces: the folder that holds TRACE_FILES. Raises WorkloadError."""
    kind, colon, rest = name.partition(":")
    if colon and kind == "fixed":
        return Workload(name, (_fixed(name, rest),), endless=True)
    if colon and kind == "file":
        return Workload(name, tuple(trace.read(Path(rest))))
    if name == "sample":
        return Workload(name, tuple(trace.read(SAMPLE)))
    if name not in TRACE_FILES:
        raise WorkloadError(f"no workload {name!r}; there is {', '.join(NAMES)}")
    if traces is None:
        raise WorkloadError(f"workload {name} is not part of the package: name the folder that holds {TRACE_FILES[name]} with --traces")
    return Workload(name, tuple(trace.read(traces / TRACE_FILES[name])))


def scaled(workload: Workload, scale: float) -> Workload:
    """All lengths times `scale`, rounded, at least 1 token; prefix blocks shrink with their prompts."""

    def length(tokens: int) -> int:
        return max(1, round(tokens * scale))

    if not scale > 0:
        raise WorkloadError(f"lengths can be scaled by more than 0, not by {scale}")
    if scale == 1:
        return workload
    requests = (
        replace(
            request,
            prompt_tokens=length(request.prompt_tokens),
            output_tokens=length(request.output_tokens),
            prefix_block_tokens=length(request.prefix_block_tokens),
        )
        for request in workload.requests
    )
    return replace(workload, requests=tuple(requests))


def limited(workload: Workload, max_total_tokens: int) -> Workload:
    """Without the requests whose prompt and output together are longer than that; the others keep their arrival times.

    Leaving out keeps the shape of each request; cutting would make a heap of equal ones at the limit.
    """
    kept = tuple(request for request in workload.requests if request.total_tokens <= max_total_tokens)
    if not kept:
        shortest = min(request.total_tokens for request in workload.requests)
        raise WorkloadError(f"workload {workload.name} has no request of at most {max_total_tokens} tokens: the shortest has {shortest}")
    return replace(workload, requests=kept)


def _fixed(name: str, lengths: str) -> TraceRequest:
    match = re.fullmatch(r"([1-9][0-9]*),([1-9][0-9]*)", lengths, re.ASCII)
    if match is None:
        raise WorkloadError(f"workload {name!r} is not fixed:PROMPT,OUTPUT with two token counts of at least 1, as fixed:512,64")
    return TraceRequest(None, int(match[1]), int(match[2]))
