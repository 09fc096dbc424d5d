"""A front-end's links to an instance's API process that is stopped, killed or busy: a process of its own, over real sockets."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import time
from collections.abc import Awaitable, Callable
from multiprocessing.connection import Connection
from typing import Any

import pytest
import zmq
import zmq.asyncio

from dynaserve.liveness import Health, Limits
from tests.test_fleet_links import Frontend, Gateway, until

BUSY_S = 4.0
"""Longer than a process may be silent that does not greet."""


def _serve(address: Connection) -> None:
    """An API process with this gateway; told to be busy, its event loop does nothing else."""

    async def serve() -> None:
        gateway = Gateway()
        gateway.start(zmq.asyncio.Context())
        address.send(gateway.address)
        while True:
            await asyncio.sleep(0.05)
            if address.poll():
                address.recv()
                time.sleep(BUSY_S)  # noqa: ASYNC251 - this is what is tested
                address.send("done")

    asyncio.run(serve())


def run(scenario: Callable[[Frontend, int, Connection], Awaitable[None]]) -> None:
    """With a front-end that has joined the process."""
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=_serve, args=(theirs,), daemon=True)
    process.start()
    assert ours.poll(60)
    gateway = Gateway()
    gateway.address = ours.recv()

    async def with_frontend() -> None:
        frontend = Frontend(gateway)
        try:
            await frontend.connect()
            assert process.pid is not None
            await scenario(frontend, process.pid, ours)
        finally:
            frontend.links.close()
        assert not frontend.faults

    try:
        asyncio.run(with_frontend())
    finally:
        process.kill()
        process.join()


def _look(gateway_address: str, healths: Connection) -> None:
    """A front-end; asked, it tells the states of its instance so far, and how many messages it has heard."""

    async def look() -> None:
        gateway = Gateway()
        gateway.address = gateway_address
        frontend = Frontend(gateway)
        await frontend.connect()
        frontend.links.liveness.limits = Limits()
        healths.send(None)
        while True:
            await asyncio.sleep(0.05)
            if healths.poll():
                healths.recv()
                healths.send(([health.value for health, _ in frontend.healths], len(frontend.messages)))

    asyncio.run(look())


def test_a_frontend_that_was_stopped_keeps_its_connections() -> None:
    async def scenario() -> None:
        gateway, context = Gateway(), zmq.asyncio.Context()
        gateway.start(context)
        ours, theirs = multiprocessing.Pipe()
        process = multiprocessing.get_context("spawn").Process(target=_look, args=(gateway.address, theirs), daemon=True)
        process.start()
        try:
            await until(ours.poll)
            ours.recv()
            assert process.pid is not None
            os.kill(process.pid, signal.SIGSTOP)
            before = gateway.pulses
            await asyncio.sleep(BUSY_S)
            meanwhile = gateway.pulses - before
            os.kill(process.pid, signal.SIGCONT)
            await asyncio.sleep(BUSY_S / 2)
            ours.send("tell")
            await until(ours.poll)
            healths, messages = ours.recv()
        finally:
            process.kill()
            process.join()
            gateway.cut()
            await asyncio.sleep(0)
            context.destroy(linger=0)
        assert Health.DEAD.value not in healths
        assert messages > meanwhile > 0, "what was said meanwhile was heard"

    asyncio.run(scenario())


@pytest.mark.parametrize("kind", [signal.SIGSTOP, signal.SIGKILL])
def test_a_process_that_is_stopped_or_killed_loses_its_connection(kind: signal.Signals) -> None:
    async def scenario(frontend: Frontend, pid: int, _: Any) -> None:
        frontend.links.liveness.limits = Limits()  # with which a hanging event loop has time
        os.kill(pid, kind)
        await until(lambda: (Health.DEAD, 1) in frontend.healths)
        assert ("connection was" if kind is signal.SIGKILL else "has not answered") in frontend.changes[-1].reason
        if kind is signal.SIGSTOP:
            os.kill(pid, signal.SIGCONT)
            await until(lambda: frontend.healths[-1] == (Health.UP, 2))

    run(scenario)


def test_a_busy_process_keeps_its_connection() -> None:
    async def scenario(frontend: Frontend, _: int, pipe: Connection) -> None:
        frontend.links.liveness.limits = Limits()
        pipe.send("be busy")
        await until(pipe.poll)
        await until(lambda: frontend.healths[-1] == (Health.UP, 1))
        assert Health.DEAD not in [health for health, _ in frontend.healths]

    run(scenario)


def test_a_busy_frontend_keeps_its_connection() -> None:
    async def scenario(frontend: Frontend, _: int, __: Any) -> None:
        time.sleep(BUSY_S)  # noqa: ASYNC251 - this is what is tested
        heard = len(frontend.messages)
        await until(lambda: len(frontend.messages) > heard + 10)
        assert Health.DEAD not in [health for health, _ in frontend.healths]

    run(scenario)
