"""Keeps what an engine has learnt about its steps in a file, without delaying a step."""

from __future__ import annotations

import logging
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from dynaserve import latency_profile
from dynaserve.latency_profile import ProfileKey
from dynaserve.live_profile import LiveProfile
from dynaserve.step_latency import ProfileTable
from dynaserve.taught_table import settled

logger = logging.getLogger("vllm.dynaserve.profile")

SAVE_INTERVAL_S = 30.0
REST_INTERVAL_S = 1.0
"""Before a rest it is saved sooner: vLLM may be killed at its end before it says so to its scheduler."""


class ProfileKeeper:
    """`profile` begins with the file's table, if there is a file.

    Raises ConfigError for a file that cannot be read or was measured on something else: it is not overwritten.
    """

    def __init__(self, path: Path, key: ProfileKey) -> None:
        self.profile = LiveProfile(latency_profile.load(path, key) if path.exists() else None)
        self._path, self._key = path, key
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="dynaserve-profile")
        self._saving: Future[None] | None = None
        self._saved_s: float | None = None

    def save_now_and_then(self, now_s: float, *, resting: bool) -> None:
        """Called while steps are taken; writes a copy in a thread, at most each `SAVE_INTERVAL_S`.

        resting: no step will follow soon.
        """
        if self._saved_s is None:
            self._saved_s = now_s - REST_INTERVAL_S  # the first rest may come at once
        interval_s = REST_INTERVAL_S if resting else SAVE_INTERVAL_S
        if now_s - self._saved_s < interval_s or (self._saving and not self._saving.done()):
            return
        if self.profile.table is None or not self.profile.is_worth_keeping:
            return
        self._saved_s = now_s
        self._saving = self._thread.submit(self._save, settled(self.profile.table))

    def close(self) -> None:
        """Saves a last time."""
        self._thread.shutdown()
        if self.profile.table is not None and self.profile.is_worth_keeping:
            self._save(self.profile.table)

    def _save(self, table: ProfileTable) -> None:
        try:
            latency_profile.save(self._path, table, self._key, "learnt by a running instance")
        except OSError as error:  # the engine goes on without
            logger.warning("the latency profile cannot be saved to %s: %s", self._path, error.strerror)
