"""How the commands of `dynaserve bench` and `dynaserve simulate` end."""

from __future__ import annotations

import sys
from collections.abc import Callable

from dynaserve.errors import ConfigError, NotTrusted

NOTHING_TO_REPORT, BAD_INPUT, NOT_TRUSTED, INTERRUPTED = 1, 2, 3, 130
"""What was measured has nothing in it; bad options, or a server that does not do as asked; figures that cannot be trusted; Ctrl-C."""


def status_of(command: str, work: Callable[[], int]) -> int:
    """What the work returns, or the status of how it failed, with one sentence on stderr. command: after `dynaserve`."""
    try:
        return work()
    except NotTrusted as error:
        return say(command, f"not reported: {error}", NOT_TRUSTED)
    except ConfigError as error:
        return say(command, str(error), BAD_INPUT)
    except KeyboardInterrupt as error:
        return say(command, str(error) or "interrupted, nothing is reported", INTERRUPTED)


def say(command: str, sentence: str, status: int) -> int:
    """Returns the status."""
    print(f"dynaserve {command}: {sentence}", file=sys.stderr)
    return status
