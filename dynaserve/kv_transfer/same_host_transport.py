"""Between processes of one user on one machine: the sender writes from its cache into the receiver's, by `process_vm_writev(2)`.

For caches in the memory of the host. The core that sends does all the work, and the one that receives goes on with its steps: over
sockets it would copy each byte twice, beside the decodes that wait for it (`docs/decisions/0014-the-sender-copies-on-one-host.md`).

Who tells a worker where to write must not be able to name any memory of any process. So a peer is only named by a process and a
file descriptor, which has to be a memfd of that process, of a given name: its content says which worker this is, where its layers
are and how large. To make one is to be that process, or another one of this user that may trace it anyway.
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from dynaserve.kv_transfer.block_runs import Stretch, stretches
from dynaserve.kv_transfer.transport import KvLayers, OneSided, PushNumber, TransportError, TransportUnavailable, WorkerEndpoint

_MEMFD = "dynaserve-kv-layers"
_MOST_STRETCHES = 1024
"""Of one call: IOV_MAX of Linux."""
_MOST_BYTES = 256 << 20
"""Of one call: Linux moves 2 GiB less a page at most."""
_PR_SET_PTRACER, _ANY = 0x59616D61, 2 ** (8 * ctypes.sizeof(ctypes.c_ulong)) - 1
_YAMA = Path("/proc/sys/kernel/yama/ptrace_scope")


class _Address(msgspec.Struct, frozen=True):
    """A file descriptor of a process. host: of all processes that may reach each other."""

    host: str
    pid: int
    fd: int


class _Layout(msgspec.Struct, frozen=True):
    """What that file has. layers: address of block 0 in every layer, in that process; strides, widths: bytes, as `KvLayers` has them."""

    worker_id: str
    pid: int
    num_blocks: int
    layers: list[int]
    strides: list[int]
    widths: list[int]


class _IoVec(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


class SameHostTransport(OneSided):
    """See the module; `Transport` has the contract."""

    name = "same-host"
    late_write_s = 0.0

    def __init__(self, worker_id: str, host: str, kv: KvLayers) -> None:  # noqa: ARG002 - not over the network
        device = kv.layers[0].device.type
        if device != "cpu":
            raise TransportUnavailable(f"the same-host transport moves caches in the memory of the host, and this one is on {device}")
        self._write_into = _process_vm_writev()
        self._kv = kv
        self._layout = _layout_of(worker_id, kv)
        self._fd = os.memfd_create(_MEMFD)
        os.write(self._fd, msgspec.json.encode(self._layout))
        self._closed = False

    def address(self) -> str:
        return msgspec.json.encode(_Address(_host(), os.getpid(), self._fd)).decode()

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
            layout = _layout_at(address)
            if layout is None or (layout.worker_id, layout.pid) != (peer.worker_id, address.pid):
                raise TransportError(
                    f"push to worker {peer.worker_id} failed: there is no such worker among the processes of this user on this "
                    "machine, or in this container"
                )
            self._check_fits(peer, layout, remote_blocks)
            for some in _calls(stretches(self._kv, layout.layers, local_blocks, remote_blocks)):
                self._write(address.pid, some)
        except KeyError as error:
            raise TransportError(f"worker {peer.worker_id} has no address for the same-host transport") from error
        except (OSError, msgspec.MsgspecError) as error:
            raise TransportError(f"push to worker {peer.worker_id} in the memory of this machine failed: {error}") from error

    def _check_fits(self, peer: WorkerEndpoint, layout: _Layout, remote_blocks: Sequence[int]) -> None:
        """Raises TransportError where a write would lie outside the peer's cache."""
        if (layout.strides, layout.widths) != (self._layout.strides, self._layout.widths):
            raise TransportError(f"push to worker {peer.worker_id} failed: its blocks are laid out in another way")
        outside = [block for block in remote_blocks if not 0 <= block < layout.num_blocks]
        if outside:
            raise TransportError(
                f"push to worker {peer.worker_id} failed: its cache of {layout.num_blocks} blocks has no block {outside[0]}"
            )

    def _write(self, pid: int, some: Sequence[Stretch]) -> None:
        """Raises OSError."""
        sources, targets = (_IoVec * len(some))(), (_IoVec * len(some))()
        for index, (source, target, length) in enumerate(some):
            sources[index] = _IoVec(source, length)
            targets[index] = _IoVec(target, length)
        wanted = sum(length for _, _, length in some)
        written = self._write_into(pid, sources, len(some), targets, len(some), 0)
        if written < 0:
            raise _error(ctypes.get_errno())
        if written != wanted:
            raise OSError(errno.EFAULT, f"{written} of {wanted} bytes were written: the memory there has gone")

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            os.close(self._fd)


def are_together(addresses: Sequence[str]) -> bool:
    """Whether workers of these addresses may reach each other; not those of which one is no address."""
    try:
        return len({msgspec.json.decode(address, type=_Address).host for address in addresses}) <= 1
    except msgspec.MsgspecError:
        return False


def _host() -> str:
    """The same for two processes only if a number of a process means the same to both."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {Path('/proc/self/ns/pid').readlink()}"


def _process_vm_writev() -> Any:
    """Raises TransportUnavailable where it is not there or not allowed."""
    libc: Any = ctypes.CDLL(None, use_errno=True)
    if not (hasattr(libc, "process_vm_writev") and hasattr(os, "memfd_create")):
        raise TransportUnavailable("the same-host transport needs process_vm_writev and memfd_create, which Linux has")
    # Yama at 1 lets nobody trace a process but its parents, unless it says that others may; at 2 and 3 that means nothing.
    scope = int(_YAMA.read_text()) if _YAMA.exists() else 0
    if scope > 1:
        raise TransportUnavailable(f"the same-host transport may not write into other processes here: {_YAMA} is {scope}")
    libc.prctl(ctypes.c_int(_PR_SET_PTRACER), ctypes.c_ulong(_ANY), ctypes.c_ulong(0), ctypes.c_ulong(0), ctypes.c_ulong(0))
    write = libc.process_vm_writev
    write.restype = ctypes.c_ssize_t
    write.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_ulong)
    tried = (ctypes.c_char * 1)()
    own = (_IoVec * 1)(_IoVec(ctypes.addressof(tried), 1))
    if write(os.getpid(), own, 1, own, 1, 0) != 1:  # a container may forbid it
        raise TransportUnavailable(f"the same-host transport may not write into other processes here: {_error(ctypes.get_errno())}")
    return write


def _error(code: int) -> OSError:
    return OSError(code, os.strerror(code))


def _layout_of(worker_id: str, kv: KvLayers) -> _Layout:
    layers = kv.layers
    return _Layout(
        worker_id,
        os.getpid(),
        kv.num_blocks,
        [layer.data_ptr() for layer in layers],
        [layer.stride(0) for layer in layers],
        [layer.shape[1] for layer in layers],
    )


def _layout_at(address: _Address) -> _Layout | None:
    """None where the process, or such a file, is not (or no longer) there, or not of this user. Raises OSError where the process may not be
    looked into, msgspec.MsgspecError where the file has something else."""
    path = Path(f"/proc/{address.pid}/fd/{address.fd}")
    try:
        if not str(path.readlink()).startswith(f"/memfd:{_MEMFD} "):
            return None
        with path.open("rb") as file:
            mine = os.fstat(file.fileno()).st_uid == os.geteuid()
            return msgspec.json.decode(file.read(), type=_Layout) if mine else None
    except (FileNotFoundError, ProcessLookupError):
        return None


def _calls(pieces: Iterator[Stretch]) -> Iterator[list[Stretch]]:
    """As many as one call takes."""
    some: list[Stretch] = []
    size = 0
    for source, target, length in pieces:
        for start in range(0, length, _MOST_BYTES):
            part = min(_MOST_BYTES, length - start)
            if some and (len(some) == _MOST_STRETCHES or size + part > _MOST_BYTES):
                yield some
                some, size = [], 0
            some.append((source + start, target + start, part))
            size += part
    if some:
        yield some
