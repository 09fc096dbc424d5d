"""
The C++ scheduler core; import it through `dynaserve.global_scheduler`.
"""

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
