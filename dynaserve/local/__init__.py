"""The embedded default: what runs the real thing on one machine without accelerator."""
