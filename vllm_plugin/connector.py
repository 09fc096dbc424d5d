"""The KV connector of an instance: vLLM's interface on top of `dynaserve.kv_transfer`.

vLLM builds it twice, in two processes.  The *scheduler half* turns scheduled steps into commands (which blocks of an
alpha are ready, which blocks a beta expects).  The *worker half* hands them to the transfer agent and reports back.
Nothing is ever loaded or saved inside a step.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)

from dynaserve.kv_transfer.agent import PeerLost
from dynaserve.kv_transfer.results import TransferReport
from dynaserve.kv_transfer.sender import Ready
from dynaserve.messages import WorkerDescription
from vllm_plugin.micro_requests import Command

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

    from vllm_plugin.kv_worker import KvWorker
    from vllm_plugin.scheduler import CutScheduler


@dataclass
class WorkerHandshake(KVConnectorHandshakeMetadata):
    """What a worker tells its own engine core at start. bell: address at which it signals news (see `wake`)."""

    description: WorkerDescription
    bell: str


@dataclass
class StepCommands(KVConnectorMetadata):
    """Scheduler half to worker half, once per step.

    commands: (request id, command). preempted: transfers whose alpha's blocks are overwritten in this step. number: under which
    its time is told; None: nobody asks.
    """

    commands: list[tuple[str, Command]]
    preempted: list[str]
    number: int | None = None


@dataclass
class WorkerReports(KVConnectorWorkerMetadata):
    """Worker half to scheduler half, once per step; tensor-parallel ranks are concatenated.

    device_ms: (number, milliseconds) of steps that have ended (`StepTimer.take`).
    """

    reports: list[TransferReport] = field(default_factory=list)
    device_ms: list[tuple[int, float]] = field(default_factory=list)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> WorkerReports:
        assert isinstance(other, WorkerReports)
        return WorkerReports(self.reports + other.reports, self.device_ms + other.device_ms)


class DynaServeConnector(KVConnectorBase_V1, SupportsHMA):
    """See the module. `bind` must be called on the scheduler half before the first step."""

    scheduler: CutScheduler
    worker: KvWorker

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.block_size = vllm_config.cache_config.block_size
        self.workers: list[WorkerDescription] = []
        self.bells: list[str] = []
        if role == KVConnectorRole.WORKER:
            from vllm_plugin import patches

            patches.install_worker_patches()

    # -- scheduler half ------------------------------------------------------------------------------------------------

    def bind(self, scheduler: CutScheduler) -> None:
        self.scheduler = scheduler
        self.micro = scheduler.micro

    def set_xfer_handshake_metadata(self, metadata: dict[int, WorkerHandshake]) -> None:
        self.workers = [metadata[rank].description for rank in sorted(metadata)]
        self.bells = [metadata[rank].bell for rank in sorted(metadata)]
        self.micro.num_workers = len(self.workers)

    def has_pending_block_frees(self) -> bool:
        return self.scheduler.revoked_blocks_are_due()

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int, bool]:
        """Nothing ever comes this way: a beta has its KV before it is asked for, and recomputes after a preemption."""
        return 0, False

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        """Allocation needs no action: reservations are commanded by the scheduler."""

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> StepCommands:
        preempted = [transfer for request_id in scheduler_output.preempted_req_ids or () if (transfer := self.micro.preempt(request_id))]
        cached = scheduler_output.scheduled_cached_reqs
        before = {new.req_id: new.num_computed_tokens for new in scheduler_output.scheduled_new_reqs}
        before.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        for request_id, tokens in scheduler_output.num_scheduled_tokens.items():
            hand_off = self.micro.hand_off_of(request_id)
            if hand_off is not None:
                block_ids = scheduler_output.kv_connector_block_state.get_block_ids(request_id)[0]
                self._mark_ready(request_id, before[request_id] + tokens, hand_off, block_ids)
        accounts = self.scheduler.accounts
        number = accounts.next_number if accounts is not None and scheduler_output.total_num_scheduled_tokens else None
        return StepCommands(self.micro.take_commands(), preempted, number)

    def _mark_ready(self, request_id: str, computed: int, hand_off: int, block_ids: list[int]) -> None:
        """Whole blocks leave as they fill; the partly filled last one leaves once, when the alpha stands at the hand-off."""
        micro = self.micro.by_id[request_id]
        final = computed == hand_off
        if not (micro.plan.chunked or final):
            return
        until = -(-computed // self.block_size) if final else computed // self.block_size
        if until > micro.ready_blocks or final:
            ready = tuple(block_ids[micro.ready_blocks : until])
            assert micro.plan.transfer_id is not None
            self.micro.command(request_id, Ready(micro.plan.transfer_id, micro.ready_blocks, ready, final))
            micro.ready_blocks = max(until, micro.ready_blocks)
            micro.complete |= final

    def take_reports(self, connector_output: KVConnectorOutput) -> None:
        """Before the outputs of the step: a beta may end in its first one, and is forgotten then."""
        meta = connector_output.kv_connector_worker_meta
        if not isinstance(meta, WorkerReports):
            return
        if meta.device_ms and self.scheduler.accounts is not None:
            self.scheduler.accounts.told(meta.device_ms)
        for report in meta.reports:
            if failed := self.micro.report(report):
                self.scheduler.revoke(failed, "its KV transfer has failed")

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        # vLLM asserts that a request that has received waits for it; a beta that resumed by its workers' reports does not.
        received = {r for r in connector_output.finished_recving or () if self.micro.awaits_workers(r)}
        connector_output.finished_recving = received
        for request_id in received:
            micro = self.micro.by_id[request_id]
            micro.received = True
            if micro.ended:
                self.micro.settle(request_id)
        for request_id in connector_output.finished_sending or ():
            self.micro.settle(request_id)
        if received or connector_output.finished_sending:
            self.scheduler.blocks_came_free()

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(self, request: Request, block_ids: tuple[list[int], ...]) -> tuple[bool, dict[str, Any] | None]:
        # Of steps that are under way (asynchronous scheduling): their tokens are thrown away.
        return self.micro.end(request.request_id, request.num_in_flight_tokens), None

    # -- worker half ---------------------------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        from vllm_plugin.kv_worker import KvWorker

        self.worker = KvWorker(self._vllm_config, kv_caches)

    def get_handshake_metadata(self) -> WorkerHandshake | None:
        return WorkerHandshake(self.worker.description, self.worker.bell.address)

    def bind_connector_metadata(self, connector_metadata: StepCommands) -> None:
        super().bind_connector_metadata(connector_metadata)
        # Before the forward pass: a grant must not wait for it.
        self.worker.submit([c for c in connector_metadata.commands if not isinstance(c[1], Ready)])

    def handle_preemptions(self, kv_connector_metadata: StepCommands) -> None:
        """Called before this step overwrites blocks, and before its metadata is bound."""
        if kv_connector_metadata.preempted:
            # Pushes to the lost must not hold this up. They are told again in their turn: a beta may have been reserved just before, whose
            # blocks cannot be granted yet.
            self.worker.submit([c for c in kv_connector_metadata.commands if isinstance(c[1], PeerLost)])
            self.worker.agent.retract(kv_connector_metadata.preempted)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Blocks arrive outside of steps."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Blocks arrive outside of steps."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Whole blocks are sent, once the step is over."""

    def wait_for_save(self) -> None:
        metadata = self._get_connector_metadata()
        self.worker.submit([c for c in metadata.commands if isinstance(c[1], Ready)])
        if metadata.number is not None:
            self.worker.launched(metadata.number)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        return self.worker.take_finished()

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self.worker.take_lost_blocks()

    def build_connector_worker_meta(self) -> WorkerReports | None:
        reports, device_ms = self.worker.take_reports(), self.worker.take_device_ms()
        return WorkerReports(reports, device_ms) if reports or device_ms else None

    def shutdown(self) -> None:
        if self._role == KVConnectorRole.WORKER:
            self.worker.close()
