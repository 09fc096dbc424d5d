"""How far requests are, as the front-end tells its scheduler."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from dynaserve.request_flow import State
from dynaserve.request_placer import RequestProgress
from vllm_plugin.live import Live


def of_instance(lives: Iterable[Live], instance: str, begun: Mapping[str, int] | None) -> Iterator[RequestProgress]:
    """Of those that the instance has told, or that answer.

    begun: computed tokens by internal id, of all that have begun there, so that what it does not name has not begun, or is a beta; None:
    the instance has not told.
    """
    for live in lives:
        flow, record, name = live.flow, live.flow.record, live.internal_id
        part = record.beta if flow.state is State.BETA else record.alpha
        runs = flow.state in (State.WHOLE, State.BETA) or (flow.state is State.ALPHA and flow.parked_at is None)
        if not runs or part is None or part.instance != instance:
            continue
        replayed = record.lost_attempts[-1].output_tokens if record.lost_attempts else 0
        if begun is not None and name in begun:
            yield RequestProgress(name, begun[name], record.output_tokens)
        elif record.output_tokens > replayed:
            yield RequestProgress(name, record.prompt_tokens + record.output_tokens - 1, record.output_tokens)
        elif begun is not None and flow.state is not State.BETA:
            yield RequestProgress(name, 0, 0, begun=False)
