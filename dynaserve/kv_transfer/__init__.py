"""Streaming of KV blocks between workers: pure state machines, transports, and the agent that drives both."""
