"""DynaServe inside vLLM: `vllm serve MODEL --plugin dynaserve`.

The only package that imports vLLM.  vLLM calls `register` in every one of its processes wherever this package is
installed; without the flag, and without `DYNASERVE_NO_BUSY_WAIT`, that adds some lines to `--help` and changes nothing else.
"""

from __future__ import annotations

import os

from dynaserve.environment import NO_BUSY_WAIT


def register() -> None:
    """Entry point `vllm.general_plugins`; idempotent, imports nothing heavy (it runs on the way to `--help`)."""
    from vllm_plugin import patches

    patches.install_command_line()
    if os.environ.get(NO_BUSY_WAIT) == "1":
        patches.install_waits_that_sleep()
