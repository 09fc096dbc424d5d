"""What the engine's thread hears from the transfer agent of its worker."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec


class TransferReport(msgspec.Struct, frozen=True):
    """News of one transfer.

    kind: "sent" (blocks have left), "received" (blocks have arrived), "failed" (what has not arrived will not come) or
    "delivered" (the receiver has all that it needs). before_end: sent while the sender was still computing. took_ms: to send.
    at_s: monotonic clock of the worker's machine, seconds. age_ms: how long ago that was when the report was taken.
    """

    transfer_id: str
    kind: str
    at_s: float
    age_ms: float = 0.0
    blocks: int = 0
    bytes: int = 0
    before_end: bool = False
    took_ms: float = 0.0


@dataclass
class Results:
    """What happened since the last `ResultBox.take`. lost_blocks: ids of local blocks that were granted and never arrived."""

    sending_stopped: list[str] = field(default_factory=list)
    received: list[str] = field(default_factory=list)
    lost_blocks: list[int] = field(default_factory=list)
    reports: list[TransferReport] = field(default_factory=list)


class ResultBox:
    """Filled by the agent's control thread, emptied by the engine's. block_bytes: of one block over all layers."""

    def __init__(self, block_bytes: int) -> None:
        self._block_bytes = block_bytes
        self._lock = threading.Lock()
        self._results = Results()

    def take(self) -> Results:
        with self._lock:
            results, self._results = self._results, Results()
        now_s = time.monotonic()
        results.reports = [msgspec.structs.replace(report, age_ms=1e3 * (now_s - report.at_s)) for report in results.reports]
        return results

    def wakes(self) -> bool:
        """Whether it holds what an idle engine should be woken for."""
        with self._lock:
            results = self._results
            return bool(results.sending_stopped or results.received or any(report.kind == "failed" for report in results.reports))

    def add_report(self, transfer_id: str, kind: str, blocks: int = 0, *, before_end: bool = False, took_ms: float = 0.0) -> None:
        report = TransferReport(transfer_id, kind, time.monotonic(), 0.0, blocks, blocks * self._block_bytes, before_end, took_ms)
        with self._lock:
            self._results.reports.append(report)

    def add_sending_stopped(self, transfer_id: str) -> None:
        with self._lock:
            self._results.sending_stopped.append(transfer_id)

    def add_received(self, transfer_id: str, lost_blocks: Iterable[int]) -> None:
        with self._lock:
            self._results.received.append(transfer_id)
            self._results.lost_blocks.extend(lost_blocks)
