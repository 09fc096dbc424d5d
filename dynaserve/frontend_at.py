"""A running front-end as its operator's commands see it: where it is, with which key, and what it answers."""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import httpx
import msgspec

from dynaserve.errors import ConfigError, NoInstance
from dynaserve.serve import read_api_keys
from dynaserve.urls import http_url

TIMEOUT_S = 5.0

Answer = TypeVar("Answer")


@dataclass(frozen=True)
class FrontendAt:
    """url: without a trailing slash. api_key: None where it needs none."""

    url: str
    api_key: str | None

    def ask(self, http: httpx.Client, path: str, answer_type: type[Answer]) -> Answer:
        """Raises NoInstance where nobody answers, and ConfigError where who answers will not, or is no front-end."""
        headers = {} if self.api_key is None else {"authorization": f"Bearer {self.api_key}"}
        try:
            answer = http.get(f"{self.url}{path}", headers=headers)
        except httpx.TransportError as error:
            raise NoInstance(f"{self.url} does not answer: {error or type(error).__name__}") from error
        if answer.status_code == httpx.codes.UNAUTHORIZED:
            wanted = "another API key" if self.api_key else "an API key: name one with --api-key-file or --api-key-env"
            raise ConfigError(f"{self.url} wants {wanted}")
        if answer.status_code == httpx.codes.NOT_FOUND:
            raise ConfigError(f"{self.url} is not a front-end (dynaserve serve), or one of an older version")
        if answer.is_error:
            raise NoInstance(f"{self.url} answers HTTP {answer.status_code}: {answer.text[:200]}")
        try:
            return msgspec.json.decode(answer.content, type=answer_type)
        except msgspec.MsgspecError as error:
            raise ConfigError(f"{self.url} describes itself in another format (version mismatch?): {error}") from error


def add_key_arguments(parser: argparse.ArgumentParser) -> None:
    """Never the key itself: everybody on a machine reads command lines."""
    key = parser.add_mutually_exclusive_group()
    key.add_argument("--api-key-file", type=Path, metavar="FILE", help="its first line that is a key")
    key.add_argument("--api-key-env", metavar="NAME", help="the environment variable that has the key")


def frontend_at(url: str, args: Any) -> FrontendAt:
    """args: parsed by a parser with `add_key_arguments`. Raises ConfigError."""
    return FrontendAt(http_url(url), _api_key(args))


def _api_key(args: Any) -> str | None:
    if args.api_key_file is not None:
        return read_api_keys(args.api_key_file)[0]
    if args.api_key_env is None:
        return None
    if not (key := os.environ.get(args.api_key_env)):
        raise ConfigError(f"the environment variable {args.api_key_env} has no key")
    return key
