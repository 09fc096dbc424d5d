"""Environment variables of ours that more than one package reads or sets."""

NO_BUSY_WAIT = "DYNASERVE_NO_BUSY_WAIT"
"""1: the processes of an engine, stock or ours, sleep while they wait for each other (`vllm_plugin.patches`)."""
