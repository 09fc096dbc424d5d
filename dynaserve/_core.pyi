"""
The C++ scheduler core; import it through `dynaserve.global_scheduler`.
"""

from collections.abc import Sequence
import enum


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

class Policy(enum.Enum):
    """How requests are cut when nothing forces a cut."""

    colocated = 0

    disaggregated = 1

    fixed = 2

class InstanceState:
    """What an instance reports about itself."""

    def __init__(self, instance_id: str, accepts_new: bool = True) -> None: ...

    @property
    def instance_id(self) -> str: ...

    @property
    def accepts_new(self) -> bool: ...

    def __eq__(self, arg: object, /) -> bool: ...

    def __hash__(self) -> int: ...

    def __repr__(self) -> str: ...

class RequestSpec:
    """What the scheduler knows about a request."""

    def __init__(self, *, request_id: str, prompt_tokens: int, max_output_tokens: int, expected_output_tokens: int, forced_split: int | None = None, may_cut: bool = True) -> None: ...

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

class Placement:
    """Which instances run a request; whole if beta is None."""

    def __init__(self, alpha: MicroRequest, beta: MicroRequest | None, reason: PlacementReason) -> None: ...

    @property
    def alpha(self) -> MicroRequest: ...

    @property
    def beta(self) -> MicroRequest | None: ...

    @property
    def reason(self) -> PlacementReason: ...

    @property
    def split_token(self) -> int:
        """The end of alpha; the cut if there is a beta."""

    def __eq__(self, arg: object, /) -> bool: ...

    def __hash__(self) -> int: ...

    def __repr__(self) -> str: ...

class Options:
    """The policy; `ratio` is read by `fixed` only."""

    def __init__(self, policy: Policy, ratio: float = 0.5) -> None: ...

    @property
    def policy(self) -> Policy: ...

    @property
    def ratio(self) -> float: ...

    def __eq__(self, arg: object, /) -> bool: ...

    def __hash__(self) -> int: ...

    def __repr__(self) -> str: ...

class Scheduler:
    """
    Decides which instance computes which tokens of a request.  Not thread-safe.
    """

    def __init__(self, options: Options) -> None:
        """ValueError: the ratio is outside [0, 1]."""

    def observe(self, instance: InstanceState) -> None:
        """Adds the instance, or replaces what was known about it."""

    def remove(self, instance_id: str) -> None:
        """Forgets the instance; its requests stay reserved until `finish`."""

    def place(self, request: RequestSpec) -> Placement | None:
        """
        Chooses instances and cut and reserves their tokens; None: no instance accepts new work.
        ValueError: the request is already placed, or a token count is out of range.
        """

    def finish(self, request_id: str) -> None:
        """Releases what `place` reserved; unknown ids are ignored."""

    def reserved_tokens(self, instance_id: str) -> int:
        """Tokens of the unfinished micro-requests on the instance."""

    def check_invariants(self) -> None:
        """RuntimeError: a reservation is negative, orphaned or counted twice."""

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
        """Predicted latency; it never falls when an argument grows."""

    def observe(self, shape: BatchShape, measured_ms: float) -> None:
        """
        Learns from a step.
        ValueError: it has no tokens, or a time that is not positive.
        """

    def bins(self) -> list[ProfileBin]:
        """The bins that have learnt something, by index."""

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

def leaves_room_for_decode(table: ProfileTable, decodes: BatchShape, context_tokens: int, step_ms: float) -> bool:
    """
    Whether the decodes and one more of this context stay within the limit, by themselves.
    """
