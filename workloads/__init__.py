"""Workloads: traces, arrival processes and length distributions.  Imports nothing of `dynaserve` or `vllm_plugin`."""
