"""Workloads by name, and what may be done to their lengths."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from workloads import formats, lengths, trace
from workloads.lengths import JointLengths, LogNormal
from workloads.trace import MOST_TOKENS, TraceRequest, WorkloadError

SAMPLE = Path(__file__).parent / "data" / "sample.csv"
TRACE_FILES = {
    "azure-code": "azure_code_2023.csv",
    "azure-conv": "azure_conv_2023.csv",
    "bursty-chat": "servegen_bursty_chat.csv.gz",
    "arxiv-summarization": "arxiv_summarization_lengths.csv.gz",
    "r1-reasoning": "servegen_r1_reasoning.csv.gz",
    "r1-short-prompt": "servegen_r1_short_prompt.csv.gz",
    "sharegpt-lengths": "sharegpt_lengths.csv.gz",
    "mooncake": "mooncake_conversation.csv.gz",
    "mooncake-synthetic": "mooncake_synthetic.csv.gz",
}
"""Workloads that are not part of this package, and the files that hold them."""
SHAPES = {"table1-prefill": "8192,32", "table1-balanced": "2048,512", "table1-decode": "219,1467"}
"""The fixed shapes of the paper's Table 1."""
GENERATED_REQUESTS = 10_000
MINI_REASONING = JointLengths(LogNormal.of_mean(219, 0.6, 8, 2048), LogNormal.of_mean(1467, 0.5, 16, 8192))
"""The means of the paper's Mini Reasoning data set; its spread is not published, the one here is assumed."""
NAMES = (
    "sample",
    "fixed:PROMPT,OUTPUT",
    "normal:PROMPT,OUTPUT,SIGMA",
    "file:PATH",
    *(f"{kind}:PATH" for kind in formats.FORMATS),
    "fitted:NAME",
    "mini-reasoning",
    *SHAPES,
    "hybrid",
    "mixed:SHARE,NAME,NAME",
    *TRACE_FILES,
)


@dataclass(frozen=True)
class Workload:
    """Requests in their order; at least one. endless: after the last one the first comes again."""

    name: str
    requests: tuple[TraceRequest, ...]
    endless: bool = False


def load(name: str, traces: Path | None = None, tokenizer: Path | None = None) -> Workload:
    """The workload of that name (one of NAMES), the same each time. Raises WorkloadError.

    traces: the folder that holds TRACE_FILES. tokenizer: the `tokenizer.json` that counts what a file has as text.
    """
    kind, colon, rest = name.partition(":")
    if colon and kind == "fixed":
        return Workload(name, (_fixed(name, rest),), endless=True)
    if colon and kind == "normal":
        return _normal(name, rest)
    if colon and kind == "file":
        return Workload(name, tuple(trace.read(Path(rest))))
    if colon and kind in formats.FORMATS:
        return Workload(name, tuple(formats.read(kind, Path(rest), None if tokenizer is None else formats.tokenizer(tokenizer))))
    if colon and kind == "mixed":
        return _mixed(name, rest, traces, tokenizer)
    if colon and kind == "fitted":
        return _generated(name, lengths.fit(load(rest, traces, tokenizer).requests))
    if name in SHAPES:
        return Workload(name, (_fixed(name, SHAPES[name]),), endless=True)
    if name == "sample":
        return Workload(name, tuple(trace.read(SAMPLE)))
    if name == "mini-reasoning":
        return _generated(name, MINI_REASONING)
    if name == "hybrid":
        return _alternating(name, load("bursty-chat", traces), load("azure-code", traces))
    return Workload(name, tuple(trace.read(_trace_file(name, traces))))


def _trace_file(name: str, traces: Path | None) -> Path:
    if name not in TRACE_FILES:
        raise WorkloadError(f"no workload {name!r}; there is {', '.join(NAMES)}")
    if traces is None:
        raise WorkloadError(f"workload {name} is not part of the package: name the folder that holds {TRACE_FILES[name]} with --traces")
    return traces / TRACE_FILES[name]


def _generated(name: str, distribution: JointLengths) -> Workload:
    return Workload(name, tuple(distribution.draw(GENERATED_REQUESTS, np.random.default_rng(0))), endless=True)


def _alternating(name: str, *parts: Workload) -> Workload:
    """One request of each at a time, without arrival times, until the first part ends; labelled by their workload. Which one comes first is
    drawn each time: in turn, servers that take turns would have one part each."""
    rng = np.random.default_rng(0)
    mixed: list[TraceRequest] = []
    for rows in zip(*(part.requests for part in parts), strict=False):
        labelled = [replace(row, arrived_at_s=None, label=part.name) for row, part in zip(rows, parts, strict=True)]
        mixed += [labelled[index] for index in rng.permutation(len(parts))]
    return Workload(name, tuple(mixed))


def _mixed(name: str, parts: str, traces: Path | None, tokenizer: Path | None) -> Workload:
    """Requests of two workloads, drawn at random, without arrival times and shared prefixes; a share of them is of the first. Labelled by
    their workload."""
    match = re.fullmatch(r"(1(?:\.0*)?|0(?:\.[0-9]*)?|\.[0-9]+),([^,]+),([^,]+)", parts, re.ASCII)
    if match is None:
        told = "with a share in [0, 1] and two names without a comma, as mixed:0.25,azure-code,azure-conv"
        raise WorkloadError(f"workload {name!r} is not mixed:SHARE,NAME,NAME {told}")
    first = round(float(match[1]) * GENERATED_REQUESTS)
    rng = np.random.default_rng(0)
    rows: list[TraceRequest] = []
    for part, number in ((match[2], first), (match[3], GENERATED_REQUESTS - first)):
        requests = lengths.drawn(load(part, traces, tokenizer).requests, number, rng)
        # Ids of blocks are those of one trace.
        rows += [replace(row, arrived_at_s=None, prefix_hashes=(), label=part) for row in requests]
    order = rng.permutation(len(rows)).tolist()
    return Workload(name, tuple(rows[index] for index in order), endless=True)


def drawn(workload: Workload, count: int, rng: np.random.Generator) -> Workload:
    """That many requests of the workload, each drawn at random, without arrival times; then the same again, for ever."""
    rows = lengths.drawn(workload.requests, count, rng)
    return Workload(workload.name, tuple(replace(row, arrived_at_s=None) for row in rows), endless=True)


def since(workload: Workload, start_s: float) -> Workload:
    """Without what arrives before that time of the trace; the rest keeps its times. Raises WorkloadError if nothing is left."""
    if all(request.arrived_at_s is None for request in workload.requests):
        raise WorkloadError(f"workload {workload.name} has no arrival times of its own: nothing of it is before {start_s:g} s")
    kept = tuple(request for request in workload.requests if request.arrived_at_s is not None and request.arrived_at_s >= start_s)
    if not kept:
        raise WorkloadError(f"workload {workload.name} has no request that arrives at {start_s:g} s or later")
    return replace(workload, requests=kept)


def scaled(workload: Workload, scale: float) -> Workload:
    """All lengths times `scale`, rounded, at least 1 token; prefix blocks shrink with their prompts. Raises WorkloadError if `scale` is not
    above 0, or makes a length of more than MOST_TOKENS."""

    def length(tokens: int) -> int:
        return max(1, round(tokens * scale))

    if not scale > 0:
        raise WorkloadError(f"lengths can be scaled by more than 0, not by {scale}")
    if scale == 1:
        return workload
    longest = max(max(request.prompt_tokens, request.output_tokens) for request in workload.requests)
    if longest * scale > MOST_TOKENS:
        raise WorkloadError(f"workload {workload.name} has a length of {longest} tokens, which times {scale:g} is more than {MOST_TOKENS}")
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
    return TraceRequest(None, _length(name, match[1]), _length(name, match[2]))


def _length(name: str, digits: str) -> int:
    """Raises WorkloadError."""
    if (length := trace.length_of(digits)) is None:
        raise WorkloadError(f"workload {name!r}: {digits} tokens are more than {MOST_TOKENS}")
    return length


def _normal(name: str, lengths: str) -> Workload:
    """One prompt length; answers drawn from a normal distribution, rounded, at least one token and at most MOST_TOKENS."""
    match = re.fullmatch(r"([1-9][0-9]*),([1-9][0-9]*),([0-9]+(?:\.[0-9]+)?)", lengths, re.ASCII)
    if match is None:
        raise WorkloadError(
            f"workload {name!r} is not normal:PROMPT,OUTPUT,SIGMA with two token counts of at least 1, as normal:219,1467,50"
        )
    prompt_tokens, mean_tokens, sigma = _length(name, match[1]), _length(name, match[2]), float(match[3])
    if sigma > MOST_TOKENS:
        raise WorkloadError(f"workload {name!r}: a sigma of {match[3]} tokens is more than {MOST_TOKENS}")
    outputs = np.random.default_rng(0).normal(mean_tokens, sigma, GENERATED_REQUESTS)
    requests = (TraceRequest(None, prompt_tokens, min(MOST_TOKENS, max(1, round(output)))) for output in outputs.tolist())
    return Workload(name, tuple(requests), endless=True)
