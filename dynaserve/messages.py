"""What crosses between the front-end and an instance: msgpack over ZeroMQ, a header of ours and the engine's own frames.

A front-end talks to the gateway of each instance over one DEALER socket.  Engine payloads (`EngineCoreRequest`,
`EngineCoreOutputs`) are opaque here: `vllm_plugin` encodes them with vLLM's msgpack codec into the frames after the header.
Nothing on this wire is pickled.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from dynaserve.kv_transfer.transport import Name, WorkerEndpoint
from dynaserve.kv_transfer.wire import Reason, TransferId, cut_reason

PROTOCOL_VERSION = 14

LONGEST_FRAME_BYTES = 256 << 20
"""To an instance. A longer frame ends its connection, so front-ends refuse requests that would need one."""
LONGEST_ANSWER_FRAME_BYTES = 1 << 30
"""From an instance, whose prompt logprobs may be large."""
MOST_FRAMES = 1024
"""Of a message to an instance; the multimodal inputs of a request have some each."""
LONGEST_REQUEST_ID = 256
"""Characters, as the client's server names the request; `RequestId` adds which part of it, and of which front-end."""

RequestId = Annotated[str, Meta(min_length=1, max_length=2 * LONGEST_REQUEST_ID)]
Tokens = Annotated[int, Meta(ge=0, lt=1 << 31)]
Size = Annotated[int, Meta(ge=1, lt=1 << 31)]
StepTokens = Annotated[int, Meta(ge=0, lt=1 << 24)]
Count = Annotated[int, Meta(ge=0, lt=1 << 62)]
Milliseconds = Annotated[float, Meta(ge=0.0, le=1e12)]
"""No NaN: it is not in the range."""
Seconds = Annotated[float, Meta(ge=0.0, le=1e12)]
TokenIds = Annotated[list[Annotated[int, Meta(ge=0, lt=1 << 31)]], Meta(max_length=1 << 24)]


class Hello(msgspec.Struct, frozen=True, tag=True):
    """First message of a front-end on a new connection; `frontend_id` is new at every start of it.

    session: grows with every connection of this front-end; what ran for an earlier one is aborted.
    """

    frontend_id: Name
    protocol_version: int = PROTOCOL_VERSION
    session: Annotated[int, Meta(ge=0)] = 0


class SenderLost(msgspec.Struct, frozen=True, tag=True):
    """The instance of these workers is dead: end all transfers of this front-end from and to them that can be ended."""

    worker_ids: Annotated[list[Name], Meta(max_length=4096)]


class Run(msgspec.Struct, frozen=True, tag=True):
    """Run this request; stop at `hand_off_at` computed tokens and keep its blocks (None: run to the end). + engine frames.

    transfer_id: names the KV transfer to the beta; None where there is none. chunked: send KV while computing, not at the end.
    output_token_ids: what another instance, lost since, has sampled: they are computed anew, as output, and not told again.
    end_token: up to which token the request is expected to be computed; other front-ends hear of it (`Reserved`).
    """

    request_id: RequestId
    hand_off_at: Tokens | None = None
    transfer_id: TransferId | None = None
    chunked: bool = True
    output_token_ids: TokenIds = []
    end_token: Tokens = 0


class Announce(msgspec.Struct, frozen=True, tag=True):
    """Reserve blocks for `hand_off_at` tokens that `senders` will write; resume at `Continue`. + engine frames.

    senders: the alpha instance's workers by tensor-parallel rank. Answered by `Granted` or `Refused`; what is granted may grow
    (`Granted` again), and may be taken back until `Continue` (`Revoked`). end_token: as in `Run`.
    """

    request_id: RequestId
    hand_off_at: Tokens
    transfer_id: TransferId
    transport: Name
    senders: Annotated[list[WorkerEndpoint], Meta(max_length=4096)]
    end_token: Tokens = 0


class Continue(msgspec.Struct, frozen=True, tag=True):
    """The alpha has stopped at `hand_off_at` computed tokens, having sampled `output_token_ids`: resume once the KV is there.

    alpha_lost: nobody knows where it has stopped, and KV of later tokens may be on its way."""

    request_id: RequestId
    hand_off_at: Tokens
    output_token_ids: TokenIds
    alpha_lost: bool = False


class Prepare(msgspec.Struct, frozen=True, tag=True):
    """The alpha of this beta is about to stop: an instance that is at rest wakes up, so that the beta's first step is not its first."""

    request_id: RequestId


class Expect(msgspec.Struct, frozen=True, tag=True):
    """The alpha of this beta, which stops in the answer, will stop in about so long: a step without decodes that runs then is
    short. The last one counts."""

    request_id: RequestId
    in_ms: Annotated[float, Meta(ge=0.0, le=1e9)]


class Move(msgspec.Struct, frozen=True, tag=True):
    """Change the hand-off point.

    To an alpha: stop there, or as soon as possible if it is computed already; ignored once the alpha stands (`Parked` says
    where). None lifts it, so that the instance finishes the request alone. To a beta: reserve up to there.
    """

    request_id: RequestId
    hand_off_at: Tokens | None


class Cut(msgspec.Struct, frozen=True, tag=True):
    """Make an alpha of a request that runs whole: it stops at `hand_off_at`, or as soon as possible if that is computed already, and its
    KV leaves from now on. Ignored once it is over, or if it was an alpha before."""

    request_id: RequestId
    hand_off_at: Tokens
    transfer_id: TransferId


class Release(msgspec.Struct, frozen=True, tag=True):
    """The beta has resumed: the alpha may free its blocks. Nothing more is sent for it but `Ended`."""

    request_id: RequestId


class Abort(msgspec.Struct, frozen=True, tag=True):
    """Stop these requests and free what they hold."""

    request_ids: Annotated[list[RequestId], Meta(max_length=1 << 20)]


class AddLora(msgspec.Struct, frozen=True, tag=True):
    """Load a LoRA adapter from a path of the instance's machine; requests name it by `lora_int_id`. Answered by `LoraAdded`."""

    lora_name: Name
    lora_int_id: int
    lora_path: Name
    load_inplace: bool = False
    is_3d_lora_weight: bool = False


class Bye(msgspec.Struct, frozen=True, tag=True):
    """The front-end is leaving: abort everything of its."""


ToInstance = Hello | SenderLost | Run | Announce | Continue | Prepare | Expect | Move | Cut | Release | Abort | AddLora | Bye


class Granted(msgspec.Struct, frozen=True, tag=True):
    """Blocks are reserved for the first `granted_tokens` tokens; `cached_tokens` of them come from the instance's own prefix
    cache and will not be sent. Said again when the reservation has grown."""

    request_id: RequestId
    cached_tokens: Tokens
    granted_tokens: Tokens = 0


class Refused(msgspec.Struct, frozen=True, tag=True):
    """The request, or the reservation of its blocks, is not taken; nothing is held for it."""

    request_id: RequestId
    reason: Reason

    def __post_init__(self) -> None:
        cut_reason(self)


class Revoked(msgspec.Struct, frozen=True, tag=True):
    """The reservation is taken back, or cannot hold what the alpha has computed; `Ended` follows when its blocks are free."""

    request_id: RequestId
    reason: Reason

    def __post_init__(self) -> None:
        cut_reason(self)


class Lifted(msgspec.Struct, frozen=True, tag=True):
    """The alpha has stood at its hand-off point for too long, or too many do: the instance goes on with it alone."""

    request_id: RequestId
    reason: Reason

    def __post_init__(self) -> None:
        cut_reason(self)


class Parked(msgspec.Struct, frozen=True, tag=True):
    """The alpha stands at its hand-off point with all its blocks; `cached_tokens` came from its prefix cache."""

    request_id: RequestId
    computed_tokens: Tokens
    cached_tokens: Tokens = 0


class Resumed(msgspec.Struct, frozen=True, tag=True):
    """The beta has its KV and its tokens; the alpha is not needed any more.

    step_rest_ms: how long `Continue` waited for the end of the step that was running.
    """

    request_id: RequestId
    step_rest_ms: Milliseconds = 0.0


class Moved(msgspec.Struct, frozen=True, tag=True):
    """KV blocks left (`kind="sent"`) or arrived (`kind="received"`); see `kv_transfer.results.TransferReport`."""

    request_id: RequestId
    kind: Name
    blocks: Count
    bytes: Count
    before_end: bool
    age_ms: Milliseconds
    took_ms: Milliseconds = 0.0


class Ended(msgspec.Struct, frozen=True, tag=True):
    """The micro-request is over on this instance, for whatever reason.

    computed_tokens: run through the model here, repeats included. cached_tokens: taken from the local prefix cache.
    """

    request_id: RequestId
    computed_tokens: Count
    cached_tokens: Count


Event = Granted | Refused | Revoked | Lifted | Parked | Resumed | Moved | Ended


class MeasuredStep(msgspec.Struct, frozen=True, array_like=True):
    """What an engine step computed (`BatchShape` of `cost_model.h`) and how long it took.

    draft_tokens: of `prefill_tokens`, those that decodes speculated.
    """

    prefill_tokens: StepTokens
    prefill_pairs: Annotated[float, Meta(ge=0.0, le=1e18)]
    decodes: StepTokens
    decode_context_tokens: Count
    measured_ms: Annotated[float, Meta(gt=0.0, le=1e12)]
    draft_tokens: StepTokens = 0

    def __post_init__(self) -> None:
        if self.prefill_tokens + self.decodes < 1:
            raise ValueError("a step has tokens")
        if self.draft_tokens > self.prefill_tokens:
            raise ValueError(f"a step has {self.prefill_tokens} tokens of prefill and speculation, not {self.draft_tokens} of speculation")


class PromptProgress(msgspec.Struct, frozen=True, array_like=True):
    """A prompt that is being computed. computed_tokens: from the start of the request, at the end of the last step."""

    request_id: RequestId
    computed_tokens: Tokens


class Load(msgspec.Struct, frozen=True):
    """How busy an instance is, as its scheduler counts. steps: measured since the last load that had any; each is told once.

    prompts: all of this front-end's that have begun and are not over; None: this load does not tell. step_share: of the time until its
    first decode is due, what a step may take by prediction. admitting_share: and what a step of decodes alone may take of their TBT SLO,
    with one more that is to begin; None: the same.
    """

    running_requests: Count
    waiting_requests: Count
    kv_cache_usage: Annotated[float, Meta(ge=0.0, le=1.0)]
    steps: Annotated[list[MeasuredStep], Meta(max_length=1 << 20)] = []
    prompts: Annotated[list[PromptProgress], Meta(max_length=1 << 20)] | None = None
    step_share: Annotated[float, Meta(gt=0.0, le=1.0)] | None = None
    admitting_share: Annotated[float, Meta(gt=0.0, le=1.0)] | None = None


class Step(msgspec.Struct, frozen=True, tag=True):
    """One engine step: all events and all tokens of this front-end's requests. + engine frames if there are tokens.

    sent_at_s: monotonic clock of the instance, seconds, to translate the engine's timestamps.
    """

    events: Annotated[list[Event], Meta(max_length=1 << 20)]
    load: Load | None
    sent_at_s: Seconds


class Welcome(msgspec.Struct, frozen=True, tag=True):
    """Answer to `Hello`: the front-end's messages will be obeyed. instance_epoch: new at every start of the instance."""

    instance_epoch: Name


class Holding(msgspec.Struct, frozen=True):
    """What an instance keeps for others: alphas that stand at their hand-off points, blocks that are granted to betas, and those of betas
    that are over, which a sender may still write to."""

    parked: Count = 0
    reserved_blocks: Count = 0
    quarantined_blocks: Count = 0


class Pulse(msgspec.Struct, frozen=True):
    """A sign of life of the engine core, from a thread beside its steps.

    number: of this pulse. step: how many have begun. step_running_s: since when the one in progress runs; None: none does.
    step_predicted_ms: how long it is expected to take, where a latency profile knows.
    """

    number: Count
    step: Count = 0
    step_running_s: Seconds | None = None
    step_predicted_ms: Milliseconds | None = None
    holding: Holding = Holding()


class Reserved(msgspec.Struct, frozen=True, array_like=True):
    """A micro-request of another front-end: the instance is expected to compute its tokens [computed_tokens, end_token).

    computed_tokens: from the start of the request, as far as its output tells, or the instance (`PromptProgress`). waits: for its KV.
    """

    computed_tokens: Tokens
    prompt_tokens: Tokens
    end_token: Tokens
    waits: bool = False


class Beat(msgspec.Struct, frozen=True, tag=True):
    """A sign of life of the API process. pulse: the newest of its engine core; None: none has come yet.

    draining: the instance finishes what it runs and takes nothing new. others: all that other front-ends have on it.
    """

    pulse: Pulse | None
    draining: bool = False
    others: Annotated[list[Reserved], Meta(max_length=1 << 20)] = []


class Dropped(msgspec.Struct, frozen=True, tag=True):
    """The front-end is not known here, or has a newer connection: nothing runs for this one any more. It may say hello anew."""


class LoraAdded(msgspec.Struct, frozen=True, tag=True):
    """error: why the adapter is not loaded; None: it is."""

    lora_int_id: int
    error: Reason | None

    def __post_init__(self) -> None:
        cut_reason(self, "error")


FromInstance = Step | Welcome | Beat | Dropped | LoraAdded


class WorkerDescription(msgspec.Struct, frozen=True):
    """One worker process. kv_layout: what must be equal for two workers to exchange raw blocks."""

    endpoint: WorkerEndpoint
    kv_layout: Name
    block_bytes: Size


class InstanceDescription(msgspec.Struct, frozen=True):
    """What `GET /dynaserve/instance` tells; a front-end compares it with the other instances and with itself."""

    protocol_version: int
    instance_epoch: Name
    gateway: Name
    model: Name
    served_model_names: Annotated[list[Name], Meta(min_length=1, max_length=4096)]
    vllm_version: Name
    dtype: Name
    block_size: Size
    max_model_len: Size
    max_num_seqs: Size
    max_num_batched_tokens: Size
    num_blocks: Size
    prefix_caching: bool
    tensor_parallel_size: Size
    device: Name
    parallelism: Name
    """device, parallelism: as in its latency profile (`dynaserve.latency_profile.ProfileKey`)."""
    tbt_slo_ms: Annotated[float, Meta(gt=0.0, le=1e12)] | None
    """What the steps of its SLO-aware batches stay within, and it tells how long they took (`Load.steps`). None: its batches are
    vLLM's own, and it does not."""
    min_prefill_tokens: Tokens
    """Of a step with SLO-aware batches, however late it is."""
    cut_obstacle: Name | None
    """Why no request can be cut on this instance (speculative decoding, several KV groups ...); None: it can."""
    workers: Annotated[list[WorkerDescription], Meta(max_length=4096)]
    secured: bool = False
    """Its sockets hear only who has the fleet secret."""
    reasoning_parser: Name | None = None
    """Which decides where in an answer a grammar begins."""
    read_by_server: Annotated[dict[Name, Name], Meta(max_length=256)] = {}
    """Options of the engine that vLLM reads in its API server, which is the front-end's here: their values as JSON."""
    computes_on_host: bool = False
    """On a CPU: what moves KV there takes the time of steps."""
    stock: bool = False
    """A vLLM server without the plugin, which is asked over HTTP (`dynaserve.stock`); gateway is its URL then."""
