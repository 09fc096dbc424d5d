"""A transport that flips one exponent bit of one block of every push: what the exactness tests must notice."""

from __future__ import annotations

import random
from collections.abc import Sequence

from dynaserve.kv_transfer.torch_transport import TorchTransport
from dynaserve.kv_transfer.transport import PushNumber, WorkerEndpoint

_EXPONENT_BIT = 0x40
_FLOAT32_BYTES = 4


class BitFlip(TorchTransport):
    """Damages the first block of each push, after it has arrived and before anybody reads it."""

    name = "tests.e2e.bit_flip:BitFlip"

    def receive(self, peer: WorkerEndpoint, local_blocks: Sequence[int], number: PushNumber) -> None:
        super().receive(peer, local_blocks, number)
        rng = random.Random(local_blocks[0])
        layer = rng.choice(self._kv.layers)
        # In the values of the first head, the second quarter of a block of two heads: each token's value has some weight in
        # the attention, while a damaged key may give its token a weight of exactly zero, which may be what it has anyway.
        numbers = layer.shape[1] // _FLOAT32_BYTES
        damaged = rng.randrange(numbers // 4, numbers // 2)
        layer[local_blocks[0], _FLOAT32_BYTES * damaged + _FLOAT32_BYTES - 1] ^= _EXPONENT_BIT
