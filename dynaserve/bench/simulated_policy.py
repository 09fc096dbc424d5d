"""The policies of a simulated fleet: those that serve, and what they are measured against."""

from __future__ import annotations

import re

from dynaserve.errors import ConfigError
from dynaserve.global_scheduler import Options, Policy, parse_policy

FORMS = "'round-robin', 'fixed:RATIO:one-way', 'dynamic:gather=K' and 'exhaustive[:gather=K][:stride=TOKENS]'"
USUAL_STRIDE_TOKENS = Options(Policy.exhaustive).stride_tokens
"""Between the cuts that `exhaustive` tries."""


def parse(text: str, instances: int, hand_off_ms: float, kv_token_ms: float, kv_token_work_ms: float) -> Options | None:
    """None: round robin. The scheduler knows what a hand-off costs. Raises ConfigError, naming the text and the accepted forms."""
    if text == "round-robin":
        return None
    gathering, stride_tokens = None, USUAL_STRIDE_TOKENS
    if found := re.fullmatch(r"fixed:(0?\.\d+|0|1):one-way", text, re.ASCII):
        policy, ratio, prefilling = Policy.fixed, float(found[1]), max(1, instances // 2)
    elif found := re.fullmatch(r"(dynamic|exhaustive)(?::gather=(\d{1,6}))?(?::stride=(\d{1,6}))?", text, re.ASCII):
        policy, ratio, prefilling = Policy[found[1]], 0.5, 0
        if found[2] is not None and (gathering := int(found[2])) >= instances:
            raise ConfigError(f"policy is {text!r}: of {instances} instances at most {instances - 1} can gather decodes")
        if found[3] is not None and policy is not Policy.exhaustive:
            raise ConfigError(f"policy is {text!r}: only exhaustive tries cuts at a stride")
        if found[3] is not None and (stride_tokens := int(found[3])) < 1:
            raise ConfigError(f"policy is {text!r}: cuts are one token apart or more")
    else:
        try:
            known = parse_policy(text, instances)
        except ValueError as error:
            raise ConfigError(f"{error}, {FORMS}") from error
        policy, ratio, prefilling = known.policy, known.ratio, known.prefill_instances
    return Options(
        policy,
        ratio,
        prefill_instances=prefilling,
        hand_off_ms=hand_off_ms,
        kv_token_ms=kv_token_ms,
        kv_token_work_ms=kv_token_work_ms,
        gathering=gathering,
        stride_tokens=stride_tokens,
    )
