"""A machine that joins a cluster: stays connected to the head, and starts its launcher's daemons.

It connects outward and takes orders from this head alone; of the network's ports it opens one,
while the head checks for firewalls. Its daemons and their ranks end with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import shlex
import socket
import ssl
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from typing import Any, assert_never

from msgspec import structs

from pipeinfer.cluster import cleanup
from pipeinfer.errors import PipeinferError, ProtocolError, UsageError
from pipeinfer.host import HOST_NAME
from pipeinfer.supervise.join import messages as wire
from pipeinfer.supervise.join import source
from pipeinfer.supervise.join.daemon import command_of, environment_of
from pipeinfer.supervise.join.offers import card_of
from pipeinfer.supervise.join.tokens import JoinToken, fingerprint
from pipeinfer.supervise.launcher import Launcher

_CONNECT = 8.0  #: seconds for a connection, and for the proofs
_LONGEST = 30.0  #: most seconds between two tries
_AWAY = 120.0  #: seconds without the head after which its daemons end
_NAP = 10.0  #: seconds away after an order to sleep, which may take effect only after a moment
_DIAL = 4.0  #: seconds to reach a port of the head
_LOST = (OSError, ValueError, ProtocolError, asyncio.IncompleteReadError)


class JoinRefused(PipeinferError):
    """The head does not let this machine in. final: trying again is useless. version: another
    version of something may help. token: another token may."""

    exit_code = 2

    def __init__(self, why: str, *, final: bool, version: bool = False, token: bool = False
                 ) -> None:
        super().__init__(why)
        self.final, self.version, self.token = final, version, token


class Agent:
    """This machine's end.

    head: address and port. member: random id of this machine. offer: what it has; the fields that
    a connection decides are filled in. environ: of the daemons. say: prints a line for the user.
    sleep: the command of this machine's owner for when there is no work, () for none.
    """

    def __init__(self, head: tuple[str, int], token: JoinToken, member: str, offer: wire.Offer,
                 launcher: Launcher, environ: dict[str, str], say: Callable[[str], None],
                 sleep: Sequence[str] = ()) -> None:
        self._sleep_command = sleep
        self._head, self._token, self._member = head, token, member
        self._offer, self._launcher, self._say = offer, launcher, say
        self._environ = environment_of(launcher, environ)
        self._stopping = asyncio.Event()
        self._writer: asyncio.StreamWriter | None = None
        self._daemons: list[subprocess.Popen[bytes]] = []
        self._guards: dict[str, subprocess.Popen[bytes]] = {}  #: by job: ends it when this ends
        self._tasks: set[asyncio.Task[object]] = set()
        self._name = ""
        self._known = False  #: whether the head has let this machine in once

    def stop(self) -> None:
        """Leave the cluster, and end."""
        self._stopping.set()

    async def run(self) -> None:
        """Stay a member until `stop`. Raises JoinRefused if that can never be."""
        pause, away = 1.0, None
        clock = asyncio.get_running_loop().time
        try:
            # the head or the network may be away for days: it comes back by itself
            while not self._stopping.is_set():
                why = ""
                try:
                    async with self._connected() as (reader, writer):
                        await self._stay(reader, writer)
                except JoinRefused as refusal:
                    if refusal.final:
                        raise
                    why = str(refusal)
                except _LOST as error:
                    why = _words(error)
                if self._stopping.is_set():
                    break
                if self._name or away is None:
                    away, pause = clock(), 1.0
                    self._say(f"{self._at} cannot be reached ({why}): trying again")
                self._name = ""
                if clock() - away > _AWAY and self._guards:
                    self._say("the head is away for long: its processes here end")
                    await self._end_jobs()
                with contextlib.suppress(TimeoutError):
                    # not all machines at the same moment, when a head is back
                    async with asyncio.timeout(pause * random.uniform(0.8, 1.2)):
                        await self._stopping.wait()
                pause = min(2 * pause, _LONGEST)
        finally:
            await self._end_jobs()

    @property
    def _at(self) -> str:
        host, port = self._head
        return f"{f'[{host}]' if ':' in host else host}:{port}"

    # --- a connection -------------------------------------------------------------------------

    async def source(self, taken: str) -> tuple[str, bytes]:
        """Return the digest of the head's own source, and an archive. Raises JoinRefused if it has
        none, or only the one with the digest `taken`."""
        try:
            async with self._connected() as (reader, writer):
                writer.write(wire.encode(wire.SourceWanted()))
                # so long a slow network may take for a checkout
                async with asyncio.timeout(source.SECONDS):
                    found = await self._next(reader)
                    if not isinstance(found, wire.Source) or found.size > source.MOST:
                        raise ProtocolError("no source")
                    if found.digest == taken:
                        raise JoinRefused(f"{self._at} has the same source: what differs is not "
                                          "pipeinfer's own", final=True)
                    return found.digest, await reader.readexactly(found.size)
        except _LOST as error:
            raise JoinRefused(f"{self._at} did not send its source: {_words(error)}",
                              final=True) from error

    @contextlib.asynccontextmanager
    async def _connected(self) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
        """A connection to the head that made the token."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # the token pins it
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        async with asyncio.timeout(_CONNECT):
            reader, writer = await asyncio.open_connection(*self._head, ssl=context,
                                                           limit=wire.MOST)
        try:
            async with asyncio.timeout(_CONNECT):
                await self._claim(reader, writer)
            yield reader, writer
        finally:
            self._writer = None
            writer.close()

    async def _claim(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Check the head's certificate, send the token, and wait until it is accepted."""
        link: ssl.SSLObject = writer.get_extra_info("ssl_object")
        if fingerprint(link.getpeercert(binary_form=True) or b"") != self._token.fingerprint:
            raise JoinRefused(
                f"{self._at} has another certificate than the head that made this token: ask for "
                "a token of this head, and make sure that nobody is between", token=True,
                final=not self._known)  # else a false head could send all machines away
        writer.write(wire.encode(wire.Claim(
            token=self._token.id, member=self._member, secret=self._token.secret)))
        await self._next(reader)

    async def _next(self, reader: asyncio.StreamReader) -> wire.FromHead:
        if not (line := await reader.readline()):
            raise ConnectionResetError("it has closed the connection")
        message = wire.from_head(line)
        if isinstance(message, wire.Rejected):
            raise JoinRefused(f"{self._at} did not let this machine in: {message.why}: "
                              f"{message.remedy}", final=message.final, version=message.version,
                              token=message.token)
        return message

    async def _stay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Offer this machine, and handle orders until the connection ends or `stop`."""
        own = str(writer.get_extra_info("sockname")[0])
        mac = card_of(own.partition("%")[0]) if self._sleep_command else ""
        if self._sleep_command and not mac:
            self._say(f"--sleep-command has no effect: {own} is not a network card's address, so "
                      "nothing could wake this machine")
        probe = await asyncio.start_server(lambda _, other: other.close(), own, 0)
        writer.write(wire.encode(structs.replace(
            self._offer, own=own, mac=mac, dialled=str(writer.get_extra_info("peername")[0]),
            port=probe.sockets[0].getsockname()[1])))
        self._writer = writer
        beating = asyncio.create_task(self._beat())
        leaving = asyncio.create_task(self._stopping.wait())
        try:
            while True:
                reading = asyncio.create_task(self._next(reader))
                # a cut link says nothing: without a limit the daemons would outlive the head's job
                done, _ = await asyncio.wait((reading, leaving), timeout=wire.SILENT,
                                             return_when=asyncio.FIRST_COMPLETED)
                if reading not in done:
                    reading.cancel()
                    if leaving not in done:
                        raise TimeoutError(f"silent for {wire.SILENT:g} s")
                    writer.write(wire.encode(wire.Depart()))
                    await writer.drain()
                    return
                await self._handle(reading.result(), probe)
        finally:
            beating.cancel()
            leaving.cancel()
            probe.close()

    async def _handle(self, message: wire.FromHead, probe: asyncio.Server) -> None:
        match message:
            case wire.Admitted(name=name, address=address):
                probe.close()
                self._name, self._known = name, True
                self._say(f"joined {self._at} as {name} ({address}); Ctrl-C leaves")
            case wire.Note(text=text):
                self._say(text)
            case wire.Dial(order=order, port=port):
                self._do(order, self._dial(port))
            case wire.StartDaemon() | wire.ClearJob() | wire.Sleep() if not self._name:
                raise ProtocolError("an order before this machine was let in")
            case wire.StartDaemon(order=order):
                self._answer(order, self._start(message))
            case wire.ClearJob(order=order, job=job):
                self._do(order, self._end_job(job))
            case wire.Sleep():
                await self._sleep()
            case wire.Beat():
                pass
            case wire.Rejected() | wire.Source():
                raise ProtocolError(f"{type(message).__name__} after the start")
            case _:
                assert_never(message)

    def _do(self, order: int, work: Any) -> None:
        """Carry out an order beside others, and answer it."""
        async def run() -> None:
            self._answer(order, await work)

        self._spawn(run())

    def _spawn(self, work: Coroutine[Any, Any, object]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _answer(self, order: int, error: str) -> None:
        if self._writer is not None:
            self._writer.write(wire.encode(wire.Done(order=order, error=error[:2000])))

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(wire.BEAT)
            if self._writer is not None:
                self._writer.write(wire.encode(wire.Beat()))

    # --- orders -------------------------------------------------------------------------------

    async def _dial(self, port: int) -> str:
        try:
            async with asyncio.timeout(_DIAL):
                _, writer = await asyncio.open_connection(self._head[0], port)
            writer.close()
        except OSError as error:
            return _words(error)
        return ""

    def _start(self, order: wire.StartDaemon) -> str:
        """Start the launcher's daemon; return the error, "" if none."""
        self._daemons = [one for one in self._daemons if one.poll() is None]
        try:
            command = command_of(self._launcher, order.kind, order.arguments)
            for former in [job for job in self._guards if job != order.job]:
                self._spawn(self._end_job(former))  # of a head that was killed
            if order.job not in self._guards:  # the daemon would outlive a killed agent
                # before the daemon: from its first moment something ends it with this process
                self._guards[order.job] = subprocess.Popen(
                    [sys.executable, "-P", "-m", "pipeinfer.cluster.cleanup", "--after", order.job],
                    stdin=subprocess.PIPE, start_new_session=True)
            self._daemons.append(subprocess.Popen(
                command, stdin=subprocess.DEVNULL, start_new_session=True,
                cwd=os.path.expanduser("~"),
                env=self._environ | {cleanup.VARIABLE: order.job, HOST_NAME: self._name}))
        except UsageError as error:
            self._say(f"an order of the head was not carried out: {error}")
            return str(error)
        except OSError as error:
            return f"cannot start {self._launcher.kind}'s daemon: {error.strerror}"
        self._say("a job of the head starts here")
        return ""

    async def _sleep(self) -> None:
        """Run the owner's command for when there is no work, if there is one, and stay away for a
        moment: a machine that is about to sleep must not get a part of the next job."""
        if not self._sleep_command or self._writer is None:
            return
        self._say(f"the head has no work: {(command := shlex.join(self._sleep_command))}")
        try:
            await asyncio.create_subprocess_exec(
                *self._sleep_command, stdin=subprocess.DEVNULL, start_new_session=True)
        except OSError as error:
            self._say(f"--sleep-command {command}: {error.strerror}")
            return
        self._writer.write(wire.encode(wire.Depart()))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_NAP):
                await self._stopping.wait()
        raise ConnectionAbortedError("this machine was to sleep")

    async def _end_job(self, job: str) -> str:
        """End all processes of a job."""
        if (guard := self._guards.pop(job, None)) is not None:
            await asyncio.to_thread(guard.communicate)
        await asyncio.to_thread(cleanup.end, job)  # the guard may have been killed
        return ""

    async def _end_jobs(self) -> None:
        for job in list(self._guards):
            await self._end_job(job)
        for daemon in self._daemons:
            daemon.kill()  # amid an exec a process has no environment by which it is found
            daemon.wait()
        self._daemons.clear()


def _words(error: BaseException) -> str:
    if isinstance(error, socket.gaierror):
        return "there is no such address"
    if isinstance(error, TimeoutError):
        return str(error) or "no answer in time"
    return getattr(error, "strerror", None) or str(error) or type(error).__name__
