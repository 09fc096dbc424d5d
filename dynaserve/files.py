"""Files that others read while they are written."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def write_in_one_move(path: Path, content: bytes) -> None:
    """A reader finds the old file or the new one, also if the writer is killed. Makes the folders that are missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, scratch = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        Path(scratch).replace(path)
    except BaseException:
        Path(scratch).unlink(missing_ok=True)
        raise
