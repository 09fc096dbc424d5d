"""Between processes of one user on one machine: the sender writes from its cache into the receiver's, by `process_vm_writev(2)`.

For caches in the memory of the host. The core that sends does all the work, and the one that receives goes on with its steps: over
sockets it would copy each byte twice, beside the decodes that wait for it (`docs/decisions/0014-the-sender-copies-on-one-host.md`).

Who tells a worker where to write must not be able to name any memory of any process. So a peer is only named by a process and a
file descriptor, which has to be a memfd of that process, of a given name: its content says which worker this is, and where its layers
are. To make one is to be that process, or another one of this user that may trace it anyway.
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from dynaserve.kv_transfer.block_runs import Stretch, stretches
from dynaserve.kv_transfer.transport import KvLayers, PushNumber, TransportError, TransportUnavailable, WorkerEndpoint

_MEMFD = "dynaserve-kv-layers"
_MOST_STRETCHES = 1024
"""Of one call: IOV_MAX of Linux."""
_PR_SET_PTRACER, _ANY = 0x59616D61, ctypes.c_ulong(-1)
_ONE_SIDED = "writes into the memory of a peer are one-sided"
_NOT_HERE = "there is no such worker among the processes of this user on this machine, or in this container"


class _Address(msgspec.Struct, frozen=True):
    """A file descriptor of a process."""

    pid: int
    fd: int


class _Layout(msgspec.Struct, frozen=True):
    """What that file has. layers: address of block 0 in every layer, in that process."""

    worker_id: str
    layers: list[int]


class _IoVec(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


class SameHostTransport:
    """See the module; `Transport` has the contract."""

    name = "same-host"
    one_sided = True
    late_write_s = 0.0

    def __init__(self, worker_id: str, host: str, kv: KvLayers) -> None:  # noqa: ARG002 - not over the network
        device = kv.layers[0].device.type
        if device != "cpu":
            raise TransportUnavailable(f"the same-host transport moves caches in the memory of the host, and this one is on {device}")
        self._libc: Any = ctypes.CDLL(None, use_errno=True)
        if not (hasattr(self._libc, "process_vm_writev") and hasattr(os, "memfd_create")):
            raise TransportUnavailable("the same-host transport needs process_vm_writev and memfd_create, which Linux has")
        # Where Yama lets nobody trace a process but its parents, it has to say that others may; elsewhere this means nothing.
        self._libc.prctl(_PR_SET_PTRACER, _ANY, 0, 0, 0)
        self._kv = kv
        layout = _Layout(worker_id, [layer.data_ptr() for layer in kv.layers])
        self._fd = os.memfd_create(_MEMFD)
        os.write(self._fd, msgspec.json.encode(layout))
        self._closed = False

    def address(self) -> str:
        return msgspec.json.encode(_Address(os.getpid(), self._fd)).decode()

    def push(
        self,
        peer: WorkerEndpoint,
        local_blocks: Sequence[int],
        remote_blocks: Sequence[int],
        number: PushNumber | None,  # noqa: ARG002 - one-sided
    ) -> None:
        if self._closed:
            raise TransportError(f"push to worker {peer.worker_id} failed: this transport is closed")
        try:
            # Each time: the number of a process that has ended is that of another one some day.
            address = msgspec.json.decode(peer.transports[self.name], type=_Address)
            layers = _layers_of(address, peer.worker_id)
            pieces = list(stretches(self._kv, layers, local_blocks, remote_blocks))
            for first in range(0, len(pieces), _MOST_STRETCHES):
                self._write(address.pid, pieces[first : first + _MOST_STRETCHES])
        except KeyError as error:
            raise TransportError(f"worker {peer.worker_id} has no address for the same-host transport") from error
        except (OSError, ValueError, msgspec.MsgspecError) as error:
            raise TransportError(f"push to worker {peer.worker_id} in the memory of this machine failed: {error}") from error

    def _write(self, pid: int, some: Sequence[Stretch]) -> None:
        """Raises OSError."""
        sources, targets = (_IoVec * len(some))(), (_IoVec * len(some))()
        for index, (source, target, length) in enumerate(some):
            sources[index] = _IoVec(source, length)
            targets[index] = _IoVec(target, length)
        wanted = sum(length for _, _, length in some)
        size = ctypes.c_ulong(len(some))
        write = self._libc.process_vm_writev
        write.restype = ctypes.c_ssize_t
        written = write(ctypes.c_int(pid), sources, size, targets, size, ctypes.c_ulong(0))
        if written < 0:
            code = ctypes.get_errno()
            hint = ": this container or kernel lets no process write into another" if code in (errno.EPERM, errno.ENOSYS) else ""
            raise OSError(code, f"{os.strerror(code)}{hint}")
        if written != wanted:
            raise OSError(errno.EFAULT, f"{written} of {wanted} bytes were written: the memory there has gone")

    def receive(self, peer: WorkerEndpoint, local_blocks: Sequence[int], number: PushNumber) -> None:
        raise NotImplementedError(_ONE_SIDED)

    def discard(self, peer: WorkerEndpoint, num_blocks: int, number: PushNumber) -> None:
        raise NotImplementedError(_ONE_SIDED)

    def give_up_push(self, peer: WorkerEndpoint, number: PushNumber) -> None:
        raise NotImplementedError(_ONE_SIDED)

    def give_up_receive(self, peer: WorkerEndpoint, number: PushNumber) -> None:
        raise NotImplementedError(_ONE_SIDED)

    def drop(self, peer: WorkerEndpoint) -> None:
        """There is no channel, and a write ends by itself."""

    def forget(self, peer: WorkerEndpoint) -> None:
        """Nothing of it is kept."""

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            os.close(self._fd)


def _layers_of(address: _Address, worker_id: str) -> list[int]:
    """Of the worker of this id. Raises OSError where the process or its file is not (or no longer) there, or not of this user."""
    path = Path(f"/proc/{address.pid}/fd/{address.fd}")
    try:
        if not str(path.readlink()).startswith(f"/memfd:{_MEMFD} "):
            raise OSError(errno.ESRCH, _NOT_HERE)
        with path.open("rb") as file:
            if os.fstat(file.fileno()).st_uid != os.geteuid():
                raise OSError(errno.ESRCH, _NOT_HERE)
            layout = msgspec.json.decode(file.read(), type=_Layout)
    except (FileNotFoundError, ProcessLookupError, PermissionError) as error:
        raise OSError(errno.ESRCH, _NOT_HERE) from error
    if layout.worker_id != worker_id:
        raise OSError(errno.ESRCH, _NOT_HERE)
    return layout.layers
