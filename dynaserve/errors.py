"""Errors that a person sees, each one sentence that names the values.

DynaServeError
├── ConfigError        a command cannot start as asked (exit status 2)
│   └── NotTrusted     what a benchmark measured is no figure (exit status 3)
├── BadRequest         the request can never run as asked (HTTP 400)
├── Overloaded         the fleet cannot answer in time (HTTP 429)
└── NoInstance         no instance takes new work (HTTP 503)
"""

from __future__ import annotations


class DynaServeError(Exception):
    """Base class; `status` is the HTTP status."""

    status = 500


class ConfigError(DynaServeError):
    """An option, or an instance named by it, does not fit."""


class NotTrusted(ConfigError):
    """The client was late, or the server counted otherwise, so that there is no figure."""


class BadRequest(DynaServeError):
    """A value in the request is outside its range."""

    status = 400


class Overloaded(DynaServeError):
    """Too many wait already, or the first token would come too late."""

    status = 429


class NoInstance(DynaServeError):
    """No instance of the fleet accepts new requests."""

    status = 503
