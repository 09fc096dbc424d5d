"""Command lines that are kept beside figures, and passed on with them."""

from __future__ import annotations

from collections.abc import Collection, Sequence


def without_secrets(arguments: Sequence[str], secrets: Collection[str]) -> list[str]:
    """With `***` for the values of these options, which may have underscores inside, as vLLM's may."""
    shown = list(arguments)
    for index, argument in enumerate(arguments):
        name, equals, _ = argument.partition("=")
        if name.replace("_", "-") not in secrets:
            continue
        if equals:
            shown[index] = f"{name}=***"
        elif index + 1 < len(shown):
            shown[index + 1] = "***"
    return shown
