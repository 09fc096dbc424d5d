"""The transports by name; those that need a library are imported only when they are asked for."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module

from dynaserve.errors import ConfigError
from dynaserve.kv_transfer.same_host_transport import SameHostTransport, are_together
from dynaserve.kv_transfer.transport import KvLayers, Transport

TRANSPORTS = {
    "torch": "dynaserve.kv_transfer.torch_transport:TorchTransport",
    "same-host": "dynaserve.kv_transfer.same_host_transport:SameHostTransport",
    "mooncake": "dynaserve.kv_transfer.mooncake_transport:MooncakeTransport",
}

TWO_SIDED = frozenset({"torch"})
"""Those whose pushes land only with the receiver's help: nothing is written once it has dropped the channel."""


def reach_each_other(name: str, addresses: Sequence[str]) -> bool:
    """Whether workers of these addresses do, over this transport, as far as these tell. Not known is yes: the first push tells."""
    return name != SameHostTransport.name or are_together(addresses)


def make_transport(name: str, worker_id: str, host: str, kv: KvLayers) -> Transport:
    """The transport of this name, or of this `module:Class`. Raises ConfigError; TransportUnavailable from its constructor."""
    module, colon, attribute = TRANSPORTS.get(name, name).partition(":")
    if not colon:
        raise ConfigError(f"transport {name!r} is neither one of {', '.join(TRANSPORTS)} nor a module:Class")
    try:
        transport_class = getattr(import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"transport {name!r} cannot be loaded: {error}") from error
    transport: Transport = transport_class(worker_id, host, kv)
    return transport
