"""DynaServe serves LLM requests elastically: a request may be cut at any token and run on two instances.

The package is engine-neutral and never imports vLLM; `vllm_plugin` does.
"""
