"""A profile table as a JSON file: what an instance has learnt about its steps, kept for the next start and the simulator.

A table is of use only to the same model on the same device: the file says what it was measured on, and `load` refuses
any other.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import msgspec

from dynaserve.errors import ConfigError
from dynaserve.files import write_in_one_move
from dynaserve.step_latency import CONTEXT_BINS, DECODE_BINS, TOKEN_BINS, ProfileBin, ProfileTable, Roofline

FORMAT_VERSION = 1
MOST_LOG = 300.0
"""Of the logarithms that were learnt: the product of two such factors is still a number. What files of older versions hold may be that
far, since bins that contradicted each other drifted apart there."""


MOST_CONTRADICTION = 2.0
"""A factor: what steps of any kind teach a table stays within 1.5 of what is read from it (`ProfileTable::NotFarFromRead`)."""


class ProfileKey(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the latencies of a table hold for. device: its name. parallelism: as `tp1` or `tp2pp2`."""

    model: str
    dtype: str
    device: str
    parallelism: str
    vllm_version: str


class _Roofline(msgspec.Struct, forbid_unknown_fields=True):
    overhead_ms: float
    token_ms: float
    knee_tokens: float
    pair_ms: float
    decode_ms: float
    context_ms: float


class _Bin(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    index: Annotated[int, msgspec.Meta(ge=0)]
    log_ratio: float
    weight: float


class _File(msgspec.Struct, forbid_unknown_fields=True):
    format_version: int
    key: ProfileKey
    provenance: str
    token_bins: list[float]
    decode_bins: list[float]
    context_bins: list[float]
    roofline: _Roofline
    log_scale: float
    sigma: float
    bins: list[_Bin]


def save(path: Path, table: ProfileTable, key: ProfileKey, provenance: str) -> None:
    """Writes the file in one move: a reader finds the old one or the new one.

    provenance: how the table came about, in words (command, machine, date).
    """
    roofline = {name: getattr(table.roofline, name) for name in _Roofline.__struct_fields__}
    bins = [_Bin(b.index, b.log_ratio, b.weight) for b in table.bins()]
    content = _File(
        FORMAT_VERSION, key, provenance, TOKEN_BINS, DECODE_BINS, CONTEXT_BINS, _Roofline(**roofline), table.log_scale, table.sigma, bins
    )
    write_in_one_move(path, msgspec.json.format(msgspec.json.encode(content), indent=1))


def load(path: Path, key: ProfileKey | None = None) -> ProfileTable:
    """The table in the file; with a `key`, only if it was measured on just that.

    Raises ConfigError, naming the file and the field, for a file that cannot be read, lacks a field or has one too many,
    holds an impossible number, says that larger steps take less time, or was measured on something else.
    """
    content = _read(path)
    if content.format_version != FORMAT_VERSION:
        raise ConfigError(f"{path}: format_version is {content.format_version}, this version of DynaServe reads {FORMAT_VERSION}")
    if key is not None:
        compare(path, content.key, key)
    for name, axis in {"token_bins": TOKEN_BINS, "decode_bins": DECODE_BINS, "context_bins": CONTEXT_BINS}.items():
        if getattr(content, name) != axis:
            raise ConfigError(f"{path}: {name} are {getattr(content, name)}, this version of DynaServe has {axis}")
    _check_logs(path, content)
    try:
        table = ProfileTable(Roofline(**_fields(content.roofline)))
        table.restore([ProfileBin(b.index, b.log_ratio, b.weight) for b in content.bins], content.log_scale, content.sigma)
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{path}: {error}") from error
    _check_monotonic(path, table)
    return table


def _check_monotonic(path: Path, table: ProfileTable) -> None:
    index, factor = table.worst_contradiction()
    if factor > MOST_CONTRADICTION:
        log_ratio = next(learnt.log_ratio for learnt in table.bins() if learnt.index == index)
        told = "is not monotonic: by the other bins, smaller steps take longer or larger ones less time"
        raise ConfigError(f"{path}: bin {index}: log_ratio {log_ratio:g} {told}, by a factor of {factor:.1f}")


def _check_logs(path: Path, content: _File) -> None:
    logs = [("log_scale", content.log_scale), *((f"bin {b.index}: log_ratio", b.log_ratio) for b in content.bins)]
    for name, value in logs:
        if not abs(value) <= MOST_LOG:  # nor is it one that is not a number
            raise ConfigError(f"{path}: {name} is {value:g}; it must lie between -{MOST_LOG:g} and {MOST_LOG:g}")


def key_of(path: Path) -> ProfileKey:
    """What the table in the file was measured on. Raises ConfigError as `load`."""
    return _read(path).key


def compare(path: Path, measured: ProfileKey, wanted: ProfileKey) -> None:
    """Raises ConfigError, naming the file and the field, if they differ."""
    for name in ProfileKey.__struct_fields__:
        was, should_be = getattr(measured, name), getattr(wanted, name)
        if was != should_be:
            raise ConfigError(f"{path}: measured with {name} {was!r}, not {should_be!r}")


def _read(path: Path) -> _File:
    try:
        return msgspec.json.decode(path.read_bytes(), type=_File)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: is not a latency profile: {error}") from error


def _fields(struct: Any) -> dict[str, float]:
    return {name: getattr(struct, name) for name in struct.__struct_fields__}
