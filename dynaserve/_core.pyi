"""
The C++ scheduler core; import it through `dynaserve.global_scheduler`.
"""

from collections.abc import Sequence
import enum
from typing import Final


class BatchShape:
    """
    What one engine step computes; `prefill_pairs` sums `prefill_pairs(tokens, context_tokens)` over its prefills.
    """

    def __init__(self, *, prefill_tokens: int = 0, prefill_pairs: float = 0.0, decodes: int = 0, decode_context_tokens: int = 0) -> None: ...

    @property
    def prefill_tokens(self) -> int: ...

    @property
    def prefill_pairs(self) -> float: ...

    @property
    def decodes(self) -> int: ...

    @property
    def decode_context_tokens(self) -> int: ...

    @property
    def tokens(self) -> int: ...

    def __eq__(self, arg: object, /) -> bool: ...

    def __hash__(self) -> int: ...

    def __repr__(self) -> str: ...

class StepSample:
    """A measured engine step."""

    def __init__(self, shape: BatchShape, measured_ms: float) -> None: ...

    @property
    def shape(self) -> BatchShape: ...

    @property
    def measured_ms(self) -> float: ...

class Roofline:
    """Latency of a step in five terms; non-decreasing in all of them."""

    def __init__(self, *, overhead_ms: float, token_ms: float, knee_tokens: float, pair_ms: float, decode_ms: float, context_ms: float) -> None: ...

    @property
    def overhead_ms(self) -> float: ...

    @property
    def token_ms(self) -> float: ...

    @property
    def knee_tokens(self) -> float: ...

    @property
    def pair_ms(self) -> float: ...

    @property
    def decode_ms(self) -> float: ...

    @property
    def context_ms(self) -> float: ...

    def step_ms(self, shape: BatchShape) -> float: ...

    def __eq__(self, arg: object, /) -> bool: ...

    def __hash__(self) -> int: ...

    def __repr__(self) -> str: ...

def prefill_pairs(tokens: int, context_tokens: int) -> float:
    """Pairs of (new token, token it attends to) of one prefill."""

def fit_roofline(samples: Sequence[StepSample]) -> Roofline:
    """
    The roofline of least mean squared relative error.
    ValueError: no sample, or one without tokens or with a time that is not positive.
    """

class ProfileBin:
    """What one bin of a profile table has learnt."""

    def __init__(self, index: int, log_ratio: float, weight: float) -> None: ...

    @property
    def index(self) -> int: ...

    @property
    def log_ratio(self) -> float: ...

    @property
    def weight(self) -> float: ...

    def __eq__(self, arg: object, /) -> bool: ...

    def __hash__(self) -> int: ...

    def __repr__(self) -> str: ...

class ProfileTable:
    """
    Predicts the latency of engine steps and learns from measured ones.  Not thread-safe.
    """

    def __init__(self, roofline: Roofline) -> None:
        """
        ValueError: a coefficient is negative or not finite, or the knee is below 1.
        """

    def step_ms(self, shape: BatchShape) -> float:
        """
        Predicted latency; it never falls when tokens, pairs, decodes or the mean context grow.
        """

    def observe(self, shape: BatchShape, measured_ms: float) -> None:
        """
        Learns from a step.
        ValueError: it has no tokens, or a time that is not positive.
        """

    def bins(self) -> list[ProfileBin]:
        """The bins that have learnt something, by index."""

    def worst_contradiction(self) -> tuple[int, float]:
        """
        (index of the bin that others contradict most, factor between it and what is read there).
        """

    def restore(self, bins: Sequence[ProfileBin], log_scale: float, sigma: float) -> None:
        """
        Replaces what was learnt.
        ValueError: an index is out of range or order, a number is not finite, or a weight or sigma is negative.
        """

    @property
    def roofline(self) -> Roofline: ...

    @property
    def log_scale(self) -> float: ...

    @property
    def sigma(self) -> float:
        """Standard deviation of log(measured / predicted) over recent steps."""

    @property
    def observed(self) -> int: ...

def profile_axes() -> list[list[float]]:
    """
    Where a table has its bins: tokens of a step, decodes, mean context of a decode.
    """

class BudgetReason(enum.Enum):
    """What kept a prefill budget from being larger."""

    all_work = 0

    max_tokens = 1

    step_limit = 2

    efficiency = 3

    minimum_share = 4

class PrefillWork:
    """A prompt, or the rest of one, that waits."""

    def __init__(self, tokens: int, context_tokens: int = 0) -> None: ...

    @property
    def tokens(self) -> int: ...

    @property
    def context_tokens(self) -> int: ...

    def __eq__(self, arg: object, /) -> bool: ...

    def __hash__(self) -> int: ...

    def __repr__(self) -> str: ...

class BatchLimits:
    """What one step may not exceed."""

    def __init__(self, *, step_ms: float, max_tokens: int, min_prefill_tokens: int = 0) -> None: ...

    @property
    def step_ms(self) -> float: ...

    @property
    def max_tokens(self) -> int: ...

    @property
    def min_prefill_tokens(self) -> int: ...

    def __eq__(self, arg: object, /) -> bool: ...

    def __hash__(self) -> int: ...

    def __repr__(self) -> str: ...

class PrefillBudget:
    """Prefill tokens of the next step, and why."""

    @property
    def tokens(self) -> int: ...

    @property
    def step_ms(self) -> float: ...

    @property
    def reason(self) -> BudgetReason: ...

    @property
    def within(self) -> int: ...

    def __eq__(self, arg: object, /) -> bool: ...

    def __hash__(self) -> int: ...

    def __repr__(self) -> str: ...

def shape_with(decodes: BatchShape, waiting: Sequence[PrefillWork], prefill_tokens: int) -> BatchShape:
    """
    The step that computes this much of the waiting work, in order, beside the decodes.
    """

def choose_budget(table: ProfileTable, decodes: BatchShape, waiting: Sequence[PrefillWork], limits: BatchLimits) -> PrefillBudget:
    """
    The prefill budget within the limits that costs least per token.
    ValueError: a limit is negative, or waiting work has no tokens.
    """

class AdmissionMargin:
    """
    How far within the TBT SLO a step of decodes alone has to stay, by prediction, for one more of them to begin; follows what is late.
    """

    def __init__(self) -> None: ...

    def observe(self, gaps: int, late: int, left: int) -> None:
        """
        gaps: between tokens, that ended with a step; late: of these; left: decodes that will have no more of them here.
        ValueError: not 0 <= late <= gaps, or left is negative.
        """

    def share(self, sigma: float) -> float:
        """
        Of the SLO.  sigma: of the logarithm of measured over predicted latency.
        """

    @property
    def sigmas(self) -> float: ...

    MOST_SIGMAS: Final[float] = ...
    """(arg: object, /) -> float"""

    LEAST_SIGMAS: Final[float] = ...
    """(arg: object, /) -> float"""

def leaves_room_for_decode(table: ProfileTable, decodes: BatchShape, context_tokens: int, step_ms: float) -> bool:
    """
    Whether the decodes and one more of this context stay within the limit, by themselves.
    """

class VirtualRequest:
    """
    One micro-request as an instance sees it: prefill in chunks, then one decode token a step.
    """

    def __init__(self, *, key: int, context_tokens: int = 0, prefill_tokens: int = 0, decode_tokens: int = 0, ready_ms: float = 0.0, is_beta: bool = False) -> None: ...

    @property
    def key(self) -> int: ...

    @property
    def context_tokens(self) -> int: ...

    @property
    def prefill_tokens(self) -> int: ...

    @property
    def decode_tokens(self) -> int: ...

    @property
    def ready_ms(self) -> float: ...

    @property
    def is_beta(self) -> bool: ...

    def __eq__(self, arg: object, /) -> bool: ...

    def __hash__(self) -> int: ...

    def __repr__(self) -> str: ...

class InstanceLimits:
    """What an instance may run at once."""

    def __init__(self, *, max_requests: int = 256, max_step_tokens: int = 8192, min_prefill_tokens: int = 16, kv_tokens: int = 1099511627776, step_ms: float = float('inf'), admit_ms: float = 0.0) -> None: ...

    @property
    def max_requests(self) -> int: ...

    @property
    def max_step_tokens(self) -> int: ...

    @property
    def min_prefill_tokens(self) -> int: ...

    @property
    def kv_tokens(self) -> int: ...

    @property
    def step_ms(self) -> float: ...

    @property
    def admit_ms(self) -> float: ...

    def __eq__(self, arg: object, /) -> bool: ...

    def __hash__(self) -> int: ...

    def __repr__(self) -> str: ...

class Forecast:
    """
    What becomes of a micro-request; absolute milliseconds, infinity for what was not simulated.
    """

    @property
    def start_ms(self) -> float: ...

    @property
    def prefill_end_ms(self) -> float: ...

    @property
    def end_ms(self) -> float: ...

    @property
    def last_prefill_tokens(self) -> int: ...

    @property
    def first_prefill_end_ms(self) -> float: ...

    def __eq__(self, arg: object, /) -> bool: ...

    def __hash__(self) -> int: ...

    def __repr__(self) -> str: ...

class Horizon(enum.Enum):
    """How far a prediction goes."""

    prefill_end = 0

    end = 1

class ExecutionPredictor:
    """
    The virtual batches that one instance is going to run.  Times never go back.  Not thread-safe.
    """

    def __init__(self, table: ProfileTable, limits: InstanceLimits) -> None:
        """ValueError: a limit is out of range."""

    def predict(self, newcomer: VirtualRequest, now_ms: float, horizon: Horizon = Horizon.end) -> Forecast:
        """
        What would become of a request that came now.
        ValueError: it has no tokens, or a negative count.
        """

    def add(self, request: VirtualRequest, now_ms: float) -> None:
        """
        Adds a request to the waiting ones.
        ValueError: as `predict`.
        """

    def remove(self, key: int, now_ms: float) -> bool:
        """Takes a request out; False: it is not there (any more)."""

    def replace(self, running: Sequence[VirtualRequest], waiting: Sequence[VirtualRequest], now_ms: float) -> None:
        """
        Replaces what was predicted by what is.
        ValueError: as `predict`; nothing changes.
        """

    def set_cost_scale(self, cost_scale: float, now_ms: float) -> None:
        """
        Every later latency is the table's times this.
        ValueError: it is not positive.
        """

    @property
    def cost_scale(self) -> float: ...

    def prefill_free_ms(self, now_ms: float) -> float:
        """
        When the first prefill token of a request that came now could be computed.
        """

    def prefill_tokens(self, now_ms: float, before: int | None = None, enough: int = 9223372036854775807) -> int:
        """
        Prefill tokens that are admitted or wait, before those of the request of that key; counts no further than to `enough`.
        """

    def find(self, key: int, now_ms: float) -> VirtualRequest | None:
        """A request as it stands now; None: it is not there (any more)."""

    def predict_rest(self, key: int, now_ms: float) -> Forecast | None:
        """
        What would become of it from now on if nothing else came; None: it is not there (any more).
        """

    def change(self, changed: VirtualRequest, now_ms: float) -> bool:
        """
        Gives the request of that key other work, in its place; a beta that is ready later waits again.  False: it is not there, or decodes already and is to compute prefill.
        ValueError: as `predict`.
        """

    def predict_change(self, changed: VirtualRequest, now_ms: float, horizon: Horizon = Horizon.end) -> Forecast | None:
        """What would become of it then; None where `change` returns False."""

    def play_out(self, now_ms: float) -> list[tuple[int, Forecast]]:
        """Plays everything to its end: (key, forecast) of each, as they end."""

class PlacementReason(enum.Enum):
    """Why a request was cut, or runs whole."""

    forced = 0

    policy = 1

    colocated = 2

    single_instance = 3

    not_cuttable = 4

    split_at_start = 5

    split_at_end = 6

    prompt_too_short = 7

    whole_is_best = 8

    levels_prefill = 9

    gathers_decodes = 10

    balanced = 11

    whole_only = 12

class RevisionReason(enum.Enum):
    """Why a hand-off was changed on the way."""

    alone_is_better = 0

    later_is_better = 1

    earlier_is_better = 2

    gathers_decodes = 3

class Policy(enum.Enum):
    """How requests are cut when nothing forces a cut."""

    colocated = 0

    disaggregated = 1

    fixed = 2

    dynamic = 3

    paper = 4

    exhaustive = 5

def predicts(policy: Policy) -> bool:
    """Whether the policy goes by a latency profile."""

class InstanceState:
    """What an instance reports about itself."""

    def __init__(self, instance_id: str, accepts_new: bool = True, limits: InstanceLimits = ..., whole_only: bool = False) -> None: ...

    @property
    def instance_id(self) -> str: ...

    @property
    def accepts_new(self) -> bool: ...

    @property
    def limits(self) -> InstanceLimits: ...

    @property
    def whole_only(self) -> bool: ...

    def __eq__(self, arg: object, /) -> bool: ...

    def __hash__(self) -> int: ...

    def __repr__(self) -> str: ...

class Slo:
    """Service-level objectives of a request; infinity: none."""

    def __init__(self, *, ttft_ms: float = float('inf'), tbt_ms: float = float('inf')) -> None: ...

    @property
    def ttft_ms(self) -> float: ...

    @property
    def tbt_ms(self) -> float: ...

    def __eq__(self, arg: object, /) -> bool: ...

    def __hash__(self) -> int: ...

    def __repr__(self) -> str: ...

class CachedPrefix:
    """What an instance's prefix cache has of a prompt."""

    def __init__(self, instance_id: str, tokens: int) -> None: ...

    @property
    def instance_id(self) -> str: ...

    @property
    def tokens(self) -> int: ...

    def __eq__(self, arg: object, /) -> bool: ...

    def __hash__(self) -> int: ...

    def __repr__(self) -> str: ...

class RequestSpec:
    """What the scheduler knows about a request."""

    def __init__(self, *, request_id: str, prompt_tokens: int, max_output_tokens: int, expected_output_tokens: int, forced_split: int | None = None, may_cut: bool = True, likely_output_tokens: int = 0, slo: Slo = ..., cached: Sequence[CachedPrefix] = [], fits_whole_only: bool = False) -> None: ...

    @property
    def request_id(self) -> str: ...

    @property
    def prompt_tokens(self) -> int: ...

    @property
    def max_output_tokens(self) -> int: ...

    @property
    def expected_output_tokens(self) -> int: ...

    @property
    def forced_split(self) -> int | None: ...

    @property
    def may_cut(self) -> bool: ...

    @property
    def likely_output_tokens(self) -> int: ...

    @property
    def slo(self) -> Slo: ...

    @property
    def cached(self) -> tuple[CachedPrefix, ...]: ...

    @property
    def fits_whole_only(self) -> bool: ...

    def __eq__(self, arg: object, /) -> bool: ...

    def __hash__(self) -> int: ...

    def __repr__(self) -> str: ...

class MicroRequest:
    """One instance's part: the tokens [start_token, end_token)."""

    def __init__(self, instance_id: str, start_token: int, end_token: int) -> None: ...

    @property
    def instance_id(self) -> str: ...

    @property
    def start_token(self) -> int: ...

    @property
    def end_token(self) -> int: ...

    def __eq__(self, arg: object, /) -> bool: ...

    def __hash__(self) -> int: ...

    def __repr__(self) -> str: ...

class Candidate:
    """A placement that was predicted exactly; whole if beta is None."""

    @property
    def alpha(self) -> str: ...

    @property
    def beta(self) -> str | None: ...

    @property
    def split_token(self) -> int: ...

    @property
    def ttft_ms(self) -> float: ...

    @property
    def objective_ms(self) -> float: ...

    def __eq__(self, arg: object, /) -> bool: ...

    def __hash__(self) -> int: ...

    def __repr__(self) -> str: ...

class Prediction:
    """
    What a policy that predicts expected of its choice; milliseconds, from the decision on.
    """

    @property
    def ttft_ms(self) -> float: ...

    @property
    def hand_off_ms(self) -> float: ...

    @property
    def decode_step_ms(self) -> float: ...

    @property
    def objective_ms(self) -> float: ...

    @property
    def whole_objective_ms(self) -> float: ...

    @property
    def probes(self) -> int: ...

    @property
    def gathering(self) -> int: ...

    @property
    def candidates(self) -> tuple[Candidate, ...]:
        """What was tried, in that order."""

    def __eq__(self, arg: object, /) -> bool: ...

    def __hash__(self) -> int: ...

    def __repr__(self) -> str: ...

class Placement:
    """Which instances run a request; whole if beta is None."""

    def __init__(self, alpha: MicroRequest, beta: MicroRequest | None, reason: PlacementReason, prediction: Prediction | None = None) -> None: ...

    @property
    def alpha(self) -> MicroRequest: ...

    @property
    def beta(self) -> MicroRequest | None: ...

    @property
    def reason(self) -> PlacementReason: ...

    @property
    def prediction(self) -> Prediction | None: ...

    @property
    def split_token(self) -> int:
        """The end of alpha; the cut if there is a beta."""

    @property
    def end_token(self) -> int:
        """Up to where the request is expected to be computed."""

    def __eq__(self, arg: object, /) -> bool: ...

    def __hash__(self) -> int: ...

    def __repr__(self) -> str: ...

class Options:
    """The policy, and what only some policies read."""

    def __init__(self, policy: Policy, ratio: float = 0.5, *, prefill_instances: int = 0, hand_off_ms: float = 5.0, kv_token_ms: float = 0.0, kv_token_work_ms: float = 0.0, tolerance_ms: float = 5.0, gathering: int | None = None, stride_tokens: int = 16) -> None: ...

    @property
    def policy(self) -> Policy: ...

    @property
    def ratio(self) -> float: ...

    @property
    def prefill_instances(self) -> int: ...

    @property
    def hand_off_ms(self) -> float: ...

    @property
    def kv_token_ms(self) -> float: ...

    @property
    def kv_token_work_ms(self) -> float: ...

    @property
    def tolerance_ms(self) -> float: ...

    @property
    def gathering(self) -> int | None: ...

    @property
    def stride_tokens(self) -> int: ...

    def __eq__(self, arg: object, /) -> bool: ...

    def __hash__(self) -> int: ...

    def __repr__(self) -> str: ...

class Progress:
    """How far a request is on an instance, as far as the caller knows."""

    def __init__(self, *, request_id: str, computed_tokens: int, expected_output_tokens: int, begun: bool = True) -> None: ...

    @property
    def request_id(self) -> str: ...

    @property
    def computed_tokens(self) -> int: ...

    @property
    def expected_output_tokens(self) -> int: ...

    @property
    def begun(self) -> bool:
        """False: it waits for its first step."""

    def __eq__(self, arg: object, /) -> bool: ...

    def __hash__(self) -> int: ...

    def __repr__(self) -> str: ...

class OtherRequest:
    """
    A micro-request that another front-end has on an instance: it computes [computed_tokens, end_token).
    """

    def __init__(self, *, computed_tokens: int, prompt_tokens: int, end_token: int, waits: bool = False) -> None: ...

    @property
    def computed_tokens(self) -> int: ...

    @property
    def prompt_tokens(self) -> int: ...

    @property
    def end_token(self) -> int: ...

    @property
    def waits(self) -> bool:
        """For the KV of its first half."""

    def __eq__(self, arg: object, /) -> bool: ...

    def __hash__(self) -> int: ...

    def __repr__(self) -> str: ...

class Scheduler:
    """
    Decides which instance computes which tokens of a request.  Not thread-safe.
    """

    def __init__(self, options: Options, table: ProfileTable | None = None) -> None:
        """
        table: copied; a policy that predicts does as colocated until it has one.
        ValueError: the ratio is outside [0, 1], or another number is negative or not finite.
        """

    def observe(self, instance: InstanceState) -> None:
        """
        Adds the instance, or replaces what was known about it.
        ValueError: impossible limits.
        """

    def learn(self, table: ProfileTable, now_ms: float) -> None:
        """Policies that predict do so by this table from now on."""

    def remove(self, instance_id: str) -> None:
        """Forgets the instance; its requests stay reserved until `finish`."""

    def place(self, request: RequestSpec, now_ms: float = 0.0) -> Placement | None:
        """
        Chooses instances and cut and reserves their tokens; None: no instance accepts new work.
        ValueError: the request is already placed, or a token count is out of range.
        """

    def finish(self, request_id: str, now_ms: float = 0.0) -> None:
        """Releases what `place` reserved; unknown ids are ignored."""

    def learn_length(self, output_tokens: int, expected_tokens: int) -> None:
        """
        An answer has ended by itself or at its limit; expected_tokens: what would be expected of it now.
        ValueError: a number is not in [1, 2^40].
        """

    def report(self, instance_id: str, progress: Sequence[Progress], now_ms: float) -> None:
        """Actual progress on an instance replaces the predicted."""

    def report_others(self, instance_id: str, others: Sequence[OtherRequest], now_ms: float) -> None:
        """
        All that other front-ends have on the instance now.
        ValueError: a token count is negative or above 2^40.
        """

    def predict_end_ms(self, request_id: str, now_ms: float) -> float | None:
        """
        When a placed request would end if others came as they did lately; None under policies that do not predict, or where it should have ended.
        """

    def predict_hand_off_ms(self, request_id: str, now_ms: float) -> float | None:
        """
        When the alpha of a placed request would reach its cut, as instances are now; None under policies that do not predict, or where it is not cut.
        """

    def revise(self, request_id: str, now_ms: float) -> Revision | None:
        """
        Whether the hand-off of a request should come elsewhere, or not at all, or one that decodes whole be cut, and enters it; None: it stays.
        """

    def recut(self, request_id: str, split_token: int | None, now_ms: float) -> None:
        """
        The caller has moved the hand-off, or lifted it (None): it is not revised any more.
        ValueError: the token is out of range.
        """

    def cut_whole(self, request_id: str, beta: str, split_token: int, now_ms: float) -> None:
        """
        The caller cuts a request that runs whole.
        ValueError: the token is out of range.
        """

    def parked(self, request_id: str, computed_tokens: int, now_ms: float) -> None:
        """
        The alpha stands at its hand-off point.
        ValueError: the token is out of range.
        """

    def observe_step(self, instance_id: str, shape: BatchShape, measured_ms: float, now_ms: float) -> None:
        """
        A measured step moves the instance's cost scale.
        ValueError: it has no tokens, or a time that is not positive.
        """

    def set_kv_token_ms(self, kv_token_ms: float, *, work_ms: float) -> None:
        """
        What it takes to move the KV of a token, as transfers told, and of the steps of either instance.
        ValueError: one is negative or not finite.
        """

    def cost_scale(self, instance_id: str) -> float:
        """
        Latency of the instance's steps over the table's, as observed steps tell.
        """

    def reserved_tokens(self, instance_id: str) -> int:
        """Tokens of the unfinished micro-requests on the instance."""

    def check_invariants(self) -> None:
        """RuntimeError: a reservation is negative, orphaned or counted twice."""

class FleetDemand:
    """
    What the fleet has to do now: decodes that run on average; prompt and output tokens that arrive per millisecond, the latter with its standard error, and the mean context of a decode of these; how long the KV of a token takes to move; and what a step of those that gather now costs over one of the fleet, in (0, 1].
    """

    def __init__(self, *, instances: int, decodes: float, mean_context_tokens: float, prompt_tokens: int, prefill_rate: float = 0.0, output_rate: float = 0.0, output_rate_error: float = 0.0, answer_context_tokens: float = 0.0, kv_token_ms: float = 0.0, gathering_cost: float = 1.0) -> None: ...

class FleetPlan:
    """
    How many instances gather the decodes (0: none in particular), and the prefill rate of the fleet, in tokens per millisecond.
    """

    @property
    def gathering(self) -> int: ...

    @property
    def is_short_of_room(self) -> bool: ...

    @property
    def is_short_of_steps(self) -> bool: ...

    @property
    def prefill_rate(self) -> float: ...

    @property
    def colocated_rate(self) -> float: ...

    @property
    def lost_share(self) -> float: ...

    def __eq__(self, arg: object, /) -> bool: ...

    def __hash__(self) -> int: ...

    def __repr__(self) -> str: ...

def prefill_rate(table: ProfileTable, limits: InstanceLimits, decodes: int, mean_context_tokens: float, prompt_tokens: int) -> float:
    """Prefill tokens per millisecond of one instance beside these decodes."""

def plan_fleet(table: ProfileTable, limits: InstanceLimits, demand: FleetDemand, current: int, *, forced: int | None = None) -> FleetPlan:
    """
    The plan of the highest prefill rate; `current` stays among equals. forced: so many gather.
    """

class Outcome:
    """What a placement is predicted to do."""

    def __init__(self, *, ttft_ms: float = 0.0, others_wait_ms: float = 0.0, lost_prefill_ms: float = 0.0, hand_off_ms: float = 0.0, gap_ms: float = 0.0, decode_step_ms: float = 0.0, decode_tokens: float = 0.0, overflow_tokens: float = 0.0, token_ms: float = 0.0, decodes_late_ms: float = 0.0, alpha_decode_step_ms: float = 0.0, alpha_decode_tokens: float = 0.0, alpha_decodes_late_ms: float = 0.0) -> None: ...

    @property
    def ttft_ms(self) -> float: ...

    @property
    def others_wait_ms(self) -> float: ...

    @property
    def lost_prefill_ms(self) -> float: ...

    @property
    def hand_off_ms(self) -> float: ...

    @property
    def gap_ms(self) -> float: ...

    @property
    def decode_step_ms(self) -> float: ...

    @property
    def decode_tokens(self) -> float: ...

    @property
    def overflow_tokens(self) -> float: ...

    @property
    def token_ms(self) -> float: ...

    @property
    def decodes_late_ms(self) -> float: ...

    @property
    def alpha_decode_step_ms(self) -> float: ...

    @property
    def alpha_decode_tokens(self) -> float: ...

    @property
    def alpha_decodes_late_ms(self) -> float: ...

    def __eq__(self, arg: object, /) -> bool: ...

    def __hash__(self) -> int: ...

    def __repr__(self) -> str: ...

def objective_ms(outcome: Outcome, slo: Slo) -> float:
    """
    What a placement costs, in milliseconds: the number that the dynamic policy minimises.
    """

def others_wait_ms(queue_ms: float, work_ms: float, arrivals_per_ms: float) -> float:
    """What later requests wait longer for this work, in sum."""

class SearchInstance:
    """One instance that accepts new work."""

    def __init__(self, predictor: ExecutionPredictor, *, keeps_free: bool = False, cached_tokens: int = 0, promised_tokens: int = 0, own_key: int | None = None) -> None: ...

class SearchRequest:
    """What the search knows about a request."""

    def __init__(self, *, prompt_tokens: int, expected_output_tokens: int, likely_output_tokens: int, may_cut: bool = True, slo: Slo = ...) -> None: ...

    @property
    def prompt_tokens(self) -> int: ...

    @property
    def expected_output_tokens(self) -> int: ...

    @property
    def slo(self) -> Slo: ...

class SearchOptions:
    """What the search knows beside the instances."""

    def __init__(self, *, hand_off_ms: float = 5.0, kv_token_ms: float = 0.0, kv_token_work_ms: float = 0.0, hand_off_price_ms: float = 20.0, hand_off_price_share: float = 0.05, least_part_tokens: int = 16, least_cut_prompt_tokens: int = 32, arrivals_per_ms: float = 0.0, lost_share: float = 0.0, prefill_pressure: float = 0.0, mean_context_tokens: float = 0.0, level_step_ms: float = float('inf')) -> None: ...

class Choice:
    """Indices of the instances, the cut, and what it is predicted to cost."""

    @property
    def alpha(self) -> int: ...

    @property
    def beta(self) -> int | None: ...

    @property
    def split_token(self) -> int: ...

    @property
    def outcome(self) -> Outcome: ...

    @property
    def objective_ms(self) -> float: ...

    @property
    def whole_objective_ms(self) -> float: ...

    @property
    def alpha_start_ms(self) -> float: ...

    @property
    def hand_off_ms(self) -> float: ...

    @property
    def beta_start_ms(self) -> float: ...

    @property
    def probes(self) -> int: ...

    def __eq__(self, arg: object, /) -> bool: ...

    def __hash__(self) -> int: ...

    def __repr__(self) -> str: ...

class SplitSearch:
    """The choice for one request; reserves nothing."""

    def __init__(self) -> None: ...

    def find(self, instances: Sequence[SearchInstance], request: SearchRequest, options: SearchOptions, now_ms: float) -> Choice:
        """The lowest objective that was found, whole or cut."""

    def try_whole(self, instances: Sequence[SearchInstance], index: int, request: SearchRequest, options: SearchOptions, now_ms: float) -> Choice: ...

    def try_cut(self, instances: Sequence[SearchInstance], alpha: int, beta: int, split_token: int, request: SearchRequest, options: SearchOptions, now_ms: float) -> Choice: ...

class PendingHandOff:
    """A hand-off that is still to come."""

    def __init__(self, *, alpha: SearchInstance, beta: SearchInstance, alpha_key: int, beta_key: int, split_token: int, waited_ms: float = 0.0) -> None: ...

class Revision:
    """Another cut, or none (None), and what it and the old one cost."""

    def __init__(self, split_token: int | None, reason: RevisionReason, *, objective_ms: float, kept_objective_ms: float, hand_off_ms: float = 0.0, probes: int = 0, beta: str | None = None) -> None: ...

    @property
    def split_token(self) -> int | None: ...

    @property
    def beta(self) -> str | None:
        """Of a request that ran whole."""

    @property
    def reason(self) -> RevisionReason: ...

    @property
    def objective_ms(self) -> float: ...

    @property
    def kept_objective_ms(self) -> float: ...

    @property
    def hand_off_ms(self) -> float: ...

    @property
    def probes(self) -> int: ...

    def __eq__(self, arg: object, /) -> bool: ...

    def __hash__(self) -> int: ...

    def __repr__(self) -> str: ...

def revise_hand_off(search: SplitSearch, pending: PendingHandOff, request: SearchRequest, options: SearchOptions, now_ms: float, least_gain_ms: float = 20.0, least_gain_share: float = 0.1) -> Revision | None:
    """
    Whether a pending hand-off should come elsewhere, or not at all; None: it stays.
    """

def revised_objective_ms(search: SplitSearch, pending: PendingHandOff, split_token: int | None, request: SearchRequest, options: SearchOptions, now_ms: float) -> float:
    """
    What keeping, moving or lifting (None) a hand-off costs; infinity: it cannot be done.
    """

class BalancedSplit:
    """Where the paper's Algorithm 1 cuts."""

    @property
    def split_token(self) -> int: ...

    @property
    def imbalance_ms(self) -> float: ...

    @property
    def probes(self) -> int: ...

def find_balanced_split(alpha: ExecutionPredictor, beta: ExecutionPredictor, prompt_tokens: int, end_token: int, tolerance_ms: float, now_ms: float) -> BalancedSplit:
    """
    The paper's Algorithm 1: a binary search for equal completion times.
    ValueError: there is nothing to compute.
    """

class Batching(enum.Enum):
    """How a simulated instance forms its steps."""

    fixed_chunk = 0

    slo = 1

class EngineOptions:
    """A simulated instance."""

    def __init__(self, *, batching: Batching, max_step_tokens: int, max_running: int, kv_tokens: int, min_prefill_tokens: int, slo_ms: float, margin: float) -> None: ...

class SimulatedRequest:
    """A request of a simulation."""

    def __init__(self, arrival_ms: float, prompt_tokens: int, output_tokens: int, expected_output_tokens: int) -> None: ...

class SimulationOptions:
    """A simulated fleet."""

    def __init__(self, *, instances: int, round_robin: bool, placement: Options, engine: EngineOptions, hand_off_ms: float, kv_token_ms: float = 0.0, kv_token_work_ms: float = 0.0, kv_block_tokens: int = 16, streams_kv: bool = True, report_every_ms: float = 200.0, revises: bool = True, step_sigma: float, drift_sigma: float = 0.0, drift_ms: float = 5000.0, tbt_slo_ms: float, ttft_slo_ms: float = float('inf'), seed: int) -> None: ...

class SimulatedOutcome:
    """What became of a request; absolute times."""

    @property
    def first_token_ms(self) -> float: ...

    @property
    def end_ms(self) -> float: ...

    @property
    def longest_gap_ms(self) -> float: ...

    @property
    def late_gaps(self) -> int: ...

    @property
    def split_token(self) -> int: ...

    @property
    def hand_off_wait_ms(self) -> float: ...

class InstanceUse:
    """What an instance did in all."""

    @property
    def steps(self) -> int: ...

    @property
    def busy_ms(self) -> float: ...

    @property
    def tokens(self) -> float: ...

    @property
    def attention_pairs(self) -> float: ...

    @property
    def kv_token_ms(self) -> float: ...

    @property
    def most_kv_tokens(self) -> int: ...

    @property
    def preemptions(self) -> int: ...

class SimulationResult:
    """By request, by instance, by bin of gaps."""

    @property
    def outcomes(self) -> list[SimulatedOutcome]: ...

    @property
    def uses(self) -> list[InstanceUse]: ...

    @property
    def gap_counts(self) -> list[int]: ...

    @property
    def moved(self) -> int:
        """Hand-offs, after their placement."""

    @property
    def lifted(self) -> int: ...

    @property
    def cut_late(self) -> int:
        """Requests that had been placed whole."""

    @property
    def end_ms(self) -> float: ...

def gap_bin_ms(bin: int) -> float:
    """The lower end of a bin of gap_counts."""

def simulate(tables: Sequence[ProfileTable], requests: Sequence[SimulatedRequest], options: SimulationOptions) -> SimulationResult:
    """
    Plays all requests, in order of arrival, to their end.
    tables: of each instance, or one for all.
    ValueError: tables, options or requests that cannot be.
    """
