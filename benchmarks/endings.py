"""How a benchmark ends that cannot go on."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from dynaserve.bench.exit_status import INTERRUPTED
from dynaserve.errors import DynaServeError

FAILED = 1


@contextmanager
def ending(name: str) -> Iterator[None]:
    """Ends the process with one sentence on stderr where the work raises a DynaServeError (exit status 1), or is interrupted (130)."""
    try:
        yield
    except DynaServeError as error:
        print(f"{name}: {error}", file=sys.stderr)
        raise SystemExit(FAILED) from error
    except KeyboardInterrupt as error:
        print(f"{name}: {str(error) or 'interrupted'}", file=sys.stderr)
        raise SystemExit(INTERRUPTED) from error
