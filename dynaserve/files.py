"""Files as this project reads and writes them."""

from __future__ import annotations

import fcntl
import os
import secrets
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dynaserve.errors import ConfigError


def write_in_one_move(path: Path, content: bytes) -> None:
    """A reader finds the old file or the new one, also if the writer is killed. Makes the folders that are missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(f".{path.name}-{secrets.token_hex(8)}")
    try:
        with scratch.open("xb") as file:  # of the umask's mode, which `mkstemp` would not give it
            file.write(content)
        scratch.replace(path)
    except BaseException:
        scratch.unlink(missing_ok=True)
        raise


def check_replaceable(path: Path) -> None:
    """Raises ConfigError now, rather than after hours of work, where `write_in_one_move` could not write. Makes the missing folders."""
    try:
        if not path.parent.exists():
            path.parent.mkdir(parents=True)
        tempfile.TemporaryFile(dir=path.parent).close()
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error.strerror}") from error
    if path.exists() and not path.is_file():  # such as /dev/stdout, which the move would replace
        raise ConfigError(f"{path}: cannot be written: it is {'a folder' if path.is_dir() else 'no file'}")


@contextmanager
def only_writer(folder: Path) -> Iterator[None]:
    """Raises ConfigError while someone else is inside it, for the same folder, which is made. Whoever is killed is out."""
    folder.mkdir(parents=True, exist_ok=True)
    handle = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigError(f"{folder}: another process is writing into this folder") from error
        yield
    finally:
        os.close(handle)


def read_entries(option: str, path: Path) -> list[str]:
    """One a line; empty lines and those that begin with # are none. Raises ConfigError, which names the option, for an unreadable file."""
    try:
        lines = [line.strip() for line in path.read_text().splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{option} {path} cannot be read: {error}") from error
    return [line for line in lines if line and not line.startswith("#")]
