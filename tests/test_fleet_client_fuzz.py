"""Whatever an instance says, the front-end goes on, and requests on other instances are served."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import inspect as kinds

pytest.importorskip("vllm")

from vllm.v1.engine import FinishReason

from dynaserve import frontend_metrics
from dynaserve.fleet_profile import FleetProfile
from dynaserve.global_scheduler import GlobalScheduler, Options, Policy
from dynaserve.length_predictor import LengthPredictor
from dynaserve.messages import Beat, FromInstance, LoraAdded, Step, Welcome
from dynaserve.request_placer import RequestPlacer
from dynaserve.step_latency import ProfileTable
from tests.test_fleet_client import NAMES, Fleet, run
from tests.test_request_placer import ROOFLINE
from tests.test_wire_limits import almost

WIRE_ID = "the wire's name of the request"


def mostly(common: st.SearchStrategy[Any], rare: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.integers(0, 9).flatmap(lambda number: common if number < 9 else rare)


def encodable(kind: kinds.Type) -> st.SearchStrategy[Any]:
    """What msgpack can carry as a value of this type, also out of its range, as builtin objects."""
    match kind:
        case kinds.IntType():
            return mostly(st.integers(0, 40), st.sampled_from([-1, 1 << 31, 1 << 32, 1 << 63]))
        case kinds.FloatType():
            return mostly(st.floats(0.0, 1.0), st.floats())
        case kinds.BoolType():
            return st.booleans()
        case kinds.StrType():
            return mostly(st.just(WIRE_ID), st.text(max_size=3))
        case kinds.NoneType():
            return st.none()
        case kinds.ListType(item_type=item):
            return st.lists(encodable(item), max_size=3)
        case kinds.UnionType(types=parts):
            return st.one_of([encodable(part) for part in parts])
        case kinds.StructType(fields=fields, array_like=True):
            return st.tuples(*(encodable(field.type) for field in fields))
        case kinds.StructType(fields=fields, tag=tag):
            members = {field.name: encodable(field.type) for field in fields}
            return st.fixed_dictionaries(members if tag is None else members | {"type": st.just(tag)})
        case _:
            raise TypeError(f"no strategy for {kind}")


messages = mostly(*(encodable(kinds.type_info(kind)) for kind in (Step, Beat | Welcome | LoraAdded)))
"""All but a goodbye, after which nothing is heard."""
payloads = mostly(st.just([]), st.lists(st.binary(max_size=30), max_size=2))


def encoded(message: Any, wire_id: str) -> bytes:
    def with_id(value: Any) -> Any:
        match value:
            case str():
                return wire_id if value == WIRE_ID else value
            case dict():
                return {name: with_id(member) for name, member in value.items()}
            case list() | tuple():
                return [with_id(item) for item in value]
        return value

    return message if isinstance(message, bytes) else msgspec.msgpack.encode(with_id(message))


@settings(max_examples=50, deadline=None)
@given(said=st.lists(st.tuples(messages | messages | almost(FromInstance), payloads), min_size=1, max_size=20), predicts=st.booleans())
def test_what_one_instance_says_disturbs_no_other(said: list[tuple[Any, list[bytes]]], predicts: bool) -> None:
    async def scenario(fleet: Fleet) -> None:
        before = failed()
        wrong = await fleet.start("wrong")
        (right,) = set(NAMES) - {wrong}
        name = "right 0"
        while await fleet.start(name) != right:
            await fleet.client.abort_requests_async([name])
            name = f"right {int(name.split()[1]) + 1}"
        wire_id, gateway = fleet.runs(wrong, "wrong")[-1].request_id, fleet.gateways[wrong]
        for message, payload in said:
            await gateway.socket.send_multipart([gateway.identities[-1], encoded(message, wire_id), *payload])
        await fleet.sample(right, fleet.runs(right, name)[-1].request_id, [7], FinishReason.LENGTH)
        while (output := await fleet.output()).request_id != name:
            assert output.request_id == "wrong"
        assert output.new_token_ids == [7]
        assert failed() == before
        assert not fleet.client.resources.engine_dead

    if predicts:
        placer = RequestPlacer(
            GlobalScheduler(Options(Policy.dynamic), ProfileTable(ROOFLINE)), LengthPredictor(), predicts=True, profile=FleetProfile()
        )
        run(scenario, placer=placer)
    else:
        run(scenario)


def failed() -> float:
    """Messages that were read, and then raised an exception."""
    return sum(frontend_metrics.FAILED.labels(name)._value.get() for name in NAMES)
