"""What was learnt is there at the next start."""

from __future__ import annotations

from pathlib import Path

import pytest

from dynaserve import latency_profile
from dynaserve.errors import ConfigError
from dynaserve.latency_profile import ProfileKey
from dynaserve.live_profile import KNOWN_STEPS
from dynaserve.profile_keeper import REST_INTERVAL_S, SAVE_INTERVAL_S, ProfileKeeper
from dynaserve.step_latency import BatchShape

KEY = ProfileKey(model="m", dtype="float32", device="d", parallelism="tp1", vllm_version="0.32.0")
STEP = BatchShape(prefill_tokens=100)


DECODE = BatchShape(decodes=1, decode_context_tokens=100)


def learn(keeper: ProfileKeeper, steps: int = KNOWN_STEPS) -> None:
    for number in range(steps):
        keeper.profile.observe(*((STEP, 25.0) if number % 2 else (DECODE, 10.0)))


def test_the_next_start_knows_what_the_last_one_learnt(tmp_path: Path) -> None:
    keeper = ProfileKeeper(tmp_path / "p.json", KEY)
    learn(keeper)
    keeper.close()
    again = ProfileKeeper(tmp_path / "p.json", KEY)
    assert again.profile.table is not None
    assert again.profile.table.step_ms(STEP) == pytest.approx(25.0, rel=0.05)
    again.close()


def test_it_is_saved_while_the_engine_runs_but_not_each_step(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    keeper = ProfileKeeper(path, KEY)
    keeper.save_now_and_then(0.0, resting=False)
    learn(keeper)
    keeper.save_now_and_then(SAVE_INTERVAL_S / 2, resting=False)
    assert not path.exists()
    keeper.save_now_and_then(SAVE_INTERVAL_S, resting=False)
    assert keeper._saving is not None
    keeper._saving.result(timeout=30)
    assert latency_profile.load(path, KEY).step_ms(STEP) == pytest.approx(25.0, rel=0.05)
    keeper.close()


def test_what_was_learnt_is_saved_before_a_rest(tmp_path: Path) -> None:
    keeper = ProfileKeeper(tmp_path / "p.json", KEY)
    keeper.save_now_and_then(0.0, resting=False)
    learn(keeper)
    keeper.save_now_and_then(0.5, resting=True)
    assert keeper._saving is not None
    keeper._saving.result(timeout=30)
    assert (tmp_path / "p.json").exists()
    first = keeper._saving
    keeper.save_now_and_then(0.5 + REST_INTERVAL_S / 2, resting=True)
    assert keeper._saving is first, "too soon"
    keeper.close()


def test_what_a_few_steps_taught_is_not_kept(tmp_path: Path) -> None:
    """It would be taken for a table that was measured, and not be fitted any more."""
    path = tmp_path / "p.json"
    keeper = ProfileKeeper(path, KEY)
    learn(keeper, KNOWN_STEPS - 1)
    assert keeper.profile.table is not None
    keeper.save_now_and_then(0.0, resting=True)
    keeper.save_now_and_then(SAVE_INTERVAL_S, resting=True)
    assert keeper._saving is None
    learn(keeper, 1)
    keeper.save_now_and_then(SAVE_INTERVAL_S, resting=True)
    assert keeper._saving is not None
    keeper.close()
    assert path.exists()


def test_nor_is_what_steps_of_one_kind_taught(tmp_path: Path) -> None:
    keeper = ProfileKeeper(tmp_path / "p.json", KEY)
    for _ in range(4 * KNOWN_STEPS):
        keeper.profile.observe(DECODE, 10.0)
    keeper.close()
    assert not (tmp_path / "p.json").exists()


def test_what_was_kept_is_kept_again(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    keeper = ProfileKeeper(path, KEY)
    learn(keeper)
    keeper.close()
    path.with_name("old.json").write_bytes(path.read_bytes())
    again = ProfileKeeper(path, KEY)
    learn(again, 10)
    again.close()
    assert path.read_bytes() != path.with_name("old.json").read_bytes()


def test_an_engine_that_learnt_nothing_leaves_no_file(tmp_path: Path) -> None:
    ProfileKeeper(tmp_path / "p.json", KEY).close()
    assert not (tmp_path / "p.json").exists()


def test_another_ones_profile_is_refused_and_kept(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    keeper = ProfileKeeper(path, KEY)
    learn(keeper)
    keeper.close()
    content = path.read_bytes()
    other = ProfileKey(model="other", dtype="float32", device="d", parallelism="tp1", vllm_version="0.32.0")
    with pytest.raises(ConfigError, match="model"):
        ProfileKeeper(path, other)
    assert path.read_bytes() == content


def test_a_folder_that_cannot_be_written_disturbs_nobody(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    keeper = ProfileKeeper(tmp_path / "file" / "p.json", KEY)
    learn(keeper)
    keeper.close()
    assert "cannot be saved" in caplog.text
