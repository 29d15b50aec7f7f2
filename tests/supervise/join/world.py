"""A head and machines that join it, in one process over real connections, for tests."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import time

import pytest
from msgspec import structs

from pipeinfer.supervise.join import messages as wire
from pipeinfer.supervise.join.agent import Agent, JoinRefused
from pipeinfer.supervise.join.server import JoinServer
from pipeinfer.supervise.join.tokens import JoinTokens
from pipeinfer.supervise.launcher import Launcher

HEAD = "127.0.0.2"  #: so that a member, which arrives from 127.0.0.1, is another machine
OFFER = wire.Offer(host="box", cores=4, memory=8 << 30, gpus=0, dialled="", own="", port=0,
                   pipeinfer="1", digest="d", protocol=1, llama="l", python="3.11",
                   launcher="Open MPI 5.0.11")
OWN = structs.replace(OFFER, host="head")
SECONDS = 10.0


def anyone():
    """TLS that accepts every certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


class World:
    """A head, and what it and its members print."""

    def __init__(self, folder):
        self.said, self.members_said = [], []
        self.tokens = JoinTokens(folder)
        self.token = self.tokens.token(self.tokens.usable())
        self.server = JoinServer(self.tokens, OWN, self.said.append)
        self.running = []

    async def start(self):
        await self.server.start(HEAD, 0)
        self.port = int(self.server.line.rpartition(":")[2])

    async def close(self):
        for agent, task in self.running:
            with contextlib.suppress(Exception):
                await asyncio.wait_for(self.leaves(agent, task), SECONDS)
        await self.server.close()

    def agent(self, *, token=None, member="m1", offer=OFFER, port=0, mpirun="/bin/false", sleep=()):
        launcher = Launcher(mpirun, "openmpi", "5.0.11")
        return Agent((HEAD, port or self.port), token or self.token, member, offer, launcher, {},
                     self.members_said.append, sleep)

    def join(self, **more):
        agent = self.agent(**more)
        task = asyncio.ensure_future(agent.run())
        self.running.append((agent, task))
        return agent, task

    async def joined(self, **more):
        """The same, once the head lists it."""
        agent, task = self.join(**more)
        await self.until(lambda: self.server.present)
        return agent, task

    async def leaves(self, agent, task):
        agent.stop()
        await task

    async def until(self, condition):
        deadline = time.monotonic() + SECONDS
        while not condition():
            assert time.monotonic() < deadline, (self.said, self.members_said)
            await asyncio.sleep(0.01)

    async def member_says(self, text):
        """Wait until a member has printed a line with this text."""
        await self.until(lambda: any(text in line for line in self.members_said))

    async def refused(self, **more):
        """The reason why the head, or the machine, does not want the other."""
        with pytest.raises(JoinRefused) as found:
            await asyncio.wait_for(self.agent(**more).run(), SECONDS)
        return str(found.value)
