"""A profile table on disk: what comes back, and what is refused with the name of the field."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dynaserve.errors import ConfigError
from dynaserve.latency_profile import ProfileKey, load, save
from dynaserve.step_latency import CONTEXT_BINS, DECODE_BINS, BatchShape, ProfileTable, Roofline, prefill_pairs
from dynaserve.taught_table import settled

KEY = ProfileKey(model="m", dtype="float32", device="a laptop", parallelism="tp1", vllm_version="0.32.0")
SHAPES = [BatchShape(prefill_tokens=n, prefill_pairs=prefill_pairs(n, 7), decodes=3, decode_context_tokens=99) for n in (1, 50, 700)]

LARGER_STEP = 12 * len(DECODE_BINS) * len(CONTEXT_BINS)
"""A bin of more tokens than bin 0, the same otherwise."""


@pytest.fixture
def table() -> ProfileTable:
    table = ProfileTable(Roofline(overhead_ms=3.0, token_ms=0.1, knee_tokens=8.0, pair_ms=1e-6, decode_ms=0.5, context_ms=1e-3))
    for shape in SHAPES:
        table.observe(shape, 21.0)
    return table


@pytest.fixture
def path(tmp_path: Path, table: ProfileTable) -> Path:
    path = tmp_path / "profiles" / "m.json"
    save(path, table, KEY, "made by a test")
    return path


def change(path: Path, **fields: Any) -> None:
    content = json.loads(path.read_text())
    for name, value in fields.items():
        where, _, field = name.rpartition("__")
        target = content[where] if where else content
        if value is None:
            del target[field]
        else:
            target[field] = value
    path.write_text(json.dumps(content))


def test_a_table_comes_back_as_it_was_saved(path: Path, table: ProfileTable) -> None:
    loaded = load(path, KEY)
    kept = settled(table)  # without what the last few steps had in common
    assert [loaded.step_ms(shape) for shape in SHAPES] == [kept.step_ms(shape) for shape in SHAPES]
    assert (loaded.bins(), loaded.sigma, loaded.roofline) == (table.bins(), table.sigma, table.roofline)


def test_saving_again_replaces_the_file_and_leaves_no_other(path: Path, table: ProfileTable) -> None:
    table.observe(SHAPES[0], 400.0)
    save(path, table, KEY, "made by a test")
    assert load(path).bins() == table.bins()
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("field", ["model", "dtype", "device", "parallelism", "vllm_version"])
def test_a_table_of_something_else_is_refused(path: Path, field: str) -> None:
    change(path, **{f"key__{field}": "another"})
    with pytest.raises(ConfigError, match=f"measured with {field} 'another', not '{getattr(KEY, field)}'"):
        load(path, KEY)
    load(path)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"sigma": None}, "`sigma`"),
        ({"roofline__token_ms": None}, "`token_ms`"),
        ({"surprise": 1}, "`surprise`"),
        ({"roofline__pair_ms": -2.0}, "pair_ms is -2"),
        ({"sigma": -1.0}, "sigma is -1"),
        ({"bins": [[7, 0.1, 1.0], [3, 0.1, 1.0]]}, "bin 3 after bin 7"),
        ({"bins": [[7, "x", 1.0]]}, "bins"),
        ({"bins": [[-1, 0.0, 1.0]]}, r">= 0.*bins"),
        ({"log_scale": 1000.0}, "log_scale is 1000; it must lie between -300 and 300"),
        ({"log_scale": -1000.0}, "log_scale is -1000; it must"),
        ({"bins": [[3, 0.1, 1.0], [7, 1000.0, 1.0]]}, "bin 7: log_ratio is 1000; it must lie between -300 and 300"),
        ({"bins": [[0, 4.0, 1.0], [LARGER_STEP, -4.0, 1.0]]}, "bin 0: log_ratio 4 is not monotonic: by the other bins"),
        ({"token_bins": [5.0, 3.0]}, "token_bins"),
        ({"format_version": 99}, "format_version is 99"),
    ],
)
def test_a_bad_file_is_refused_with_the_name_of_the_field(path: Path, fields: dict[str, Any], message: str) -> None:
    change(path, **fields)
    with pytest.raises(ConfigError, match=message) as raised:
        load(path)
    assert str(path) in str(raised.value)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff\xfe"])
def test_a_file_that_is_no_profile_is_refused(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    with pytest.raises(ConfigError, match="is not a latency profile"):
        load(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.json: cannot be read"):
        load(tmp_path / "nowhere.json")
