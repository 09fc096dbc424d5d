"""What a `RequestFlow` is told (events) and what it asks for (instructions)."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from dynaserve.messages import Ended, Granted, Lifted, Moved, Parked, Refused, Resumed, Revoked

ENGINE_GAVE_UP = ("abort", "error")
"""Finish reasons after which an instance may never say `Ended`: its scheduler may not even have seen the request."""


class Side(enum.Enum):
    """Which of the two micro-requests."""

    ALPHA = "alpha"
    BETA = "beta"


@dataclass(frozen=True, slots=True)
class Tokens:
    """Sampled tokens of one step; `finish_reason` is the engine's, None while the request goes on."""

    token_ids: list[int]
    finish_reason: str | None


@dataclass(frozen=True, slots=True)
class ClientGone:
    """The client left."""


@dataclass(frozen=True, slots=True)
class StopString:
    """The front-end found one in the text, and ended the answer there."""


@dataclass(frozen=True, slots=True)
class InstanceDied:
    """Nothing of this instance is heard any more, nor will be in this life.

    may_write: it might still write KV that was granted to it (a one-sided transport): what has arrived cannot be used yet.
    """

    instance_id: str
    reason: str
    may_write: bool = False


@dataclass(frozen=True, slots=True)
class InstanceStopping:
    """It finishes what it runs, or aborts it, and does not stay for a beta that has not resumed."""

    instance_id: str


Event = (
    Tokens
    | Granted
    | Refused
    | Revoked
    | Lifted
    | Parked
    | Resumed
    | Moved
    | Ended
    | ClientGone
    | StopString
    | InstanceDied
    | InstanceStopping
)


@dataclass(frozen=True, slots=True)
class SendRun:
    """output_token_ids: sampled elsewhere, to be computed anew."""

    instance_id: str
    hand_off_at: int | None
    output_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class SendAnnounce:
    instance_id: str
    hand_off_at: int


@dataclass(frozen=True, slots=True)
class SendContinue:
    instance_id: str
    hand_off_at: int
    output_token_ids: list[int]
    alpha_lost: bool = False


@dataclass(frozen=True, slots=True)
class SendPrepare:
    instance_id: str


@dataclass(frozen=True, slots=True)
class SendMove:
    """hand_off_at: None lifts the alpha's hand-off."""

    side: Side
    instance_id: str
    hand_off_at: int | None


@dataclass(frozen=True, slots=True)
class SendCut:
    """A request that runs whole there becomes an alpha."""

    instance_id: str
    hand_off_at: int


@dataclass(frozen=True, slots=True)
class SendRelease:
    instance_id: str


@dataclass(frozen=True, slots=True)
class SendAbort:
    instance_id: str


@dataclass(frozen=True, slots=True)
class Forward:
    """Pass the engine output that carried these tokens on to the client."""


@dataclass(frozen=True, slots=True)
class Fail:
    """End the client's stream with an error; the sentence goes to the log."""

    reason: str


@dataclass(frozen=True, slots=True)
class PlaceAgain:
    """Find another instance and call `place_again`, or end the request with `give_up` if there is none."""


@dataclass(frozen=True, slots=True)
class Unavailable:
    """End the client's request with this HTTP status; the sentence is for the client."""

    reason: str
    status: int


ToSend = SendRun | SendAnnounce | SendPrepare | SendContinue | SendMove | SendCut | SendRelease | SendAbort
Instruction = PlaceAgain | Unavailable | ToSend | Forward | Fail
