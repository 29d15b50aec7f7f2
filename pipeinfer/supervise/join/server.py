"""The head's end: accepts machines that join, and passes the launcher's orders on to them."""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, assert_never

from pipeinfer.errors import ProtocolError, UsageError
from pipeinfer.server.orders import end_server
from pipeinfer.supervise.join import messages as wire
from pipeinfer.supervise.join import source
from pipeinfer.supervise.join.offers import own_addresses, words_of
from pipeinfer.supervise.join.tokens import JoinTokens

_PROVE = 10.0  #: seconds for TLS and the proof
_SETTLE = 20.0  #: seconds after that until a machine is a member
_TRY = 4.0  #: seconds for a connection to a machine's port, or back
_ORDER = 30.0  #: seconds for an order
_STRANGERS, _STRANGERS_EACH = 64, 8  #: connections without a proof, in all and of one address
_REFUSED = 100  #: refusals that are printed
_NO_NAME = re.compile(r"[^A-Za-z0-9.-]+")
_GOODBYE = 1.0  #: seconds for the other end to read the last message and to end TLS
#: also ssl's and too long lines; and the end of this server, for which asyncio prints a traceback
_LOST = (OSError, ValueError, ProtocolError, asyncio.IncompleteReadError, asyncio.CancelledError)


class _Refusal(Exception):
    """The machine cannot become a member."""

    def __init__(self, why: str, remedy: str, *, final: bool = True, **more: bool) -> None:
        super().__init__(why)
        self.message = wire.Rejected(why=why, remedy=remedy, final=final, **more)


@dataclass(slots=True, eq=False)
class Joiner:
    """A machine that has joined.

    id: its random id. token: the id of its token. name: here. address: as seen from here.
    since: seconds since 1970 when it came, or left. gone: why it is away, "" while it is here.
    """

    id: str
    token: str
    name: str
    address: str
    offer: wire.Offer
    since: float
    gone: str = ""
    writer: asyncio.StreamWriter | None = None
    orders: dict[int, asyncio.Future[str]] = field(default_factory=dict)

    def send(self, message: wire.FromHead) -> None:
        """Send a message, if it is here."""
        if self.writer is not None and not self.writer.is_closing():
            self.writer.write(wire.encode(message))

    @property
    def facts(self) -> dict[str, Any]:
        """Return what users see of it."""
        offer = self.offer
        return {"name": self.name, "address": self.address, "cores": offer.cores,
                "memory": offer.memory, "gpus": offer.gpus, "has": words_of(offer),
                "token": self.token, "since": self.since, "gone": self.gone}


class JoinServer:
    """Accepts machines, and knows those that have joined.

    own: what a member must have in common with the head, and the head's host name.
    say: prints a line for the user. came, went: called when a machine has come, or is gone.
    """

    def __init__(self, tokens: JoinTokens, own: wire.Offer, say: Callable[[str], None],
                 came: Callable[[Joiner], None] = lambda _: None) -> None:
        self.tokens, self.own, self._say, self.came = tokens, own, say, came
        self.went: Callable[[Joiner], None] = lambda _: None
        self.members: dict[str, Joiner] = {}  #: by id, in the order in which they came first
        self.address = ""  #: of the head, at which its members are connected
        self.line = ""  #: what to call on the other machines
        self._server: asyncio.Server | None = None
        self._open: set[asyncio.Task[None]] = set()
        self._strangers: Counter[str] = Counter()
        self._refused: set[str] = set()
        self._numbers = 0

    async def start(self, host: str, port: int) -> None:
        """Listen. host: "" for all addresses. Raises UsageError if that is not possible."""
        try:
            self._server = await asyncio.start_server(self._accept, host or None, port,
                                                      limit=wire.MOST, backlog=256)
        except (OSError, UnicodeError) as error:
            why = str(getattr(error, "strerror", None) or error).rpartition(": ")[2]
            raise UsageError(f"--join: cannot listen at {host or '*'}:{port}: {why}; give another "
                             "port or address of this machine, such as --join=:7701") from error
        number = self._server.sockets[0].getsockname()[1]
        first, *others = [host] if host else own_addresses()
        # the others need the same version: where this one is a checkout, theirs are
        command = "launch/join" if (source.ROOT / source.LAUNCHER).is_file() else "pipeinfer join"
        self.line = f"{command} {f'[{first}]' if ':' in first else first}:{number}"
        if others:
            self._say(f"if the others reach this machine at another address, join there: "
                      f"{', '.join(others)}")

    async def close(self) -> None:
        await end_server(self._server, self._open)

    @property
    def present(self) -> list[Joiner]:
        return [one for one in self.members.values() if not one.gone]

    @property
    def listens(self) -> bool:
        return self._server is not None and self._server.is_serving()

    def at(self, address: str) -> Joiner | None:
        """Return the member at an address, None if there is none now."""
        return next((one for one in self.present if one.address == address), None)

    def tell(self, text: str) -> None:
        """Show a line to the users of all members."""
        for member in self.present:
            member.send(wire.Note(text=text))

    def revoke(self, id: str) -> bool:
        """Take a token back, and with it all members that have joined by it; return whether there
        was one. Raises UsageError if that cannot be stored."""
        found = self.tokens.revoke(id)
        for member in self.present:
            if member.token == id:
                self._drop(member, "its token is revoked")
        return found

    async def start_daemon(self, address: str, job: str, kind: str, arguments: list[str]) -> str:
        """Start the launcher's daemon on a member; return the error, "" if none."""
        return await self._order(address, lambda number: wire.StartDaemon(
            order=number, job=job, kind=kind, arguments=arguments))

    async def end_job(self, address: str, job: str) -> str:
        """End all processes of a job on a member; return the error, "" if none."""
        return await self._order(address, lambda number: wire.ClearJob(order=number, job=job))

    async def _order(self, address: str, order: Callable[[int], wire.FromHead]) -> str:
        if (member := self.at(address)) is None:
            return f"{address} has not joined"
        return await self._ask(member, order, _ORDER)

    async def _ask(self, member: Joiner, order: Callable[[int], wire.FromHead], seconds: float
                   ) -> str:
        self._numbers += 1
        number = self._numbers
        answer: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        member.orders[number] = answer
        member.send(order(number))
        try:
            # a member that hangs must not hold the launcher
            async with asyncio.timeout(seconds):
                return await answer
        except TimeoutError:
            return f"{member.name} has not answered within {seconds:g} s"
        finally:
            member.orders.pop(number, None)

    # --- one connection -----------------------------------------------------------------------

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._open.add(task)
        peer = str((writer.get_extra_info("peername") or [""])[0])
        stranger = (self._strangers.total() < _STRANGERS
                    and self._strangers[peer] < _STRANGERS_EACH)
        self._strangers[peer] += stranger
        member: Joiner | None = None
        try:
            if stranger:
                # strangers keep a place only so long
                async with asyncio.timeout(_PROVE):
                    await writer.start_tls(self.tokens.context)
                    claim = await self._claim(reader)
                # the member waits for an answer to its token before it tells what it has
                writer.write(wire.encode(wire.Beat()))
                stranger = self._known(peer)
                # the check of both ways through firewalls is a part of it
                async with asyncio.timeout(_SETTLE):
                    offer = wire.from_member(await reader.readline())
                    if not isinstance(offer, wire.SourceWanted):
                        member = await self._admit(reader, writer, claim, offer)
                if member is not None:
                    await self._attend(reader, member)
                else:
                    async with asyncio.timeout(source.SECONDS):
                        await self._give_source(reader, writer)
        except _Refusal as refusal:
            self._say_refused(peer, refusal.message.why)
            writer.write(wire.encode(refusal.message))
        except UsageError as error:  # a full disk, a damaged file; strangers get no paths
            self._say_refused(peer, str(error))
            writer.write(wire.encode(wire.Rejected(
                why="it cannot use its tokens", remedy="its own messages say why", final=False)))
        except _LOST:
            pass
        finally:
            if member is not None and member.writer is writer:
                self._drop(member, "the connection is lost")
            writer.close()
            with contextlib.suppress(*_LOST):
                async with asyncio.timeout(_GOODBYE):
                    await writer.wait_closed()
            # ssl would wait half a minute for an end that does not come; Python 3.11 raises this
            # where that end has come already
            with contextlib.suppress(AttributeError):
                writer.transport.abort()
            if stranger:
                self._known(peer)
            self._open.discard(task)

    def _known(self, peer: str) -> bool:
        """Count a connection without a proof less; return False."""
        self._strangers[peer] -= 1
        self._strangers += Counter()  # forgets those without connections
        return False

    def _say_refused(self, peer: str, why: str) -> None:
        """Tell the user about a refusal; not again about the same one, so that nobody fills a
        log."""
        line = f"{peer} was not let in: {why}"
        if line not in self._refused and len(self._refused) < _REFUSED:
            self._refused.add(line)
            self._say(line)

    async def _claim(self, reader: asyncio.StreamReader) -> wire.Claim:
        """Read and check the other end's token."""
        claim = wire.from_member(await reader.readline())
        if not isinstance(claim, wire.Claim):
            raise ProtocolError("no claim")
        if claim.version != wire.VERSION:
            raise _Refusal("it speaks another version of the protocol for joining",
                           "install the same pipeinfer on both machines")
        issued = self.tokens.find(claim.token)
        if issued is None or not issued.proves(claim.secret):
            raise _Refusal("its token is wrong or revoked",
                           "`pipeinfer tokens --new` on the head makes another one", token=True)
        if not issued.admits(claim.member, time.time()):
            raise _Refusal("its token has ended",
                           "`pipeinfer tokens --new` on the head makes another one", token=True)
        return claim

    async def _admit(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter,
                     claim: wire.Claim, offer: wire.FromMember) -> Joiner:
        """Make the machine a member."""
        if not isinstance(offer, wire.Offer):
            raise ProtocolError("no offer")
        peer, here = (str(writer.get_extra_info(name)[0]) for name in ("peername", "sockname"))
        self._check(claim, offer, peer, here)
        for one in list(self.members.values()):
            if one.address == peer and one.id != claim.member:
                del self.members[one.id]  # the same machine, before it lost its id
        member = Joiner(claim.member, claim.token, self._name(claim.member, offer.host), peer,
                        offer, time.time(), writer=writer)
        await self._try_ports(reader, member, here)
        self._check(claim, offer, peer, here)  # another one may have come meanwhile
        self.tokens.joined(claim.token, claim.member)
        former = self.members.get(member.id)
        if former is not None and not former.gone:
            self._drop(former, "it has connected again")
        self.address, self.members[member.id] = here, member
        member.send(wire.Admitted(name=member.name, address=peer))
        self._say(f"{member.name} ({peer}) has joined: {words_of(offer)}")
        self.came(member)
        return member

    async def _give_source(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
                           ) -> None:
        data = await asyncio.to_thread(source.archive)
        if data is None:
            raise _Refusal(f"{self.own.host} has pipeinfer as a package, without its source",
                           f"pip install pipeinfer=={self.own.pipeinfer}")
        writer.write(wire.encode(wire.Source(size=len(data), digest=self.own.digest)) + data)
        await reader.read(1)  # until the other end has it and closes

    def _check(self, claim: wire.Claim, offer: wire.Offer, peer: str, here: str) -> None:
        """Raise _Refusal if this machine cannot be a member."""
        own = self.own
        for name, theirs, ours in (
                ("pipeinfer", offer.pipeinfer, own.pipeinfer),
                ("pipeinfer's source", offer.digest[:12], own.digest[:12]),
                ("the ranks' protocol", str(offer.protocol), str(own.protocol)),
                ("llama.cpp", offer.llama, own.llama),
                ("the launcher", offer.launcher, own.launcher)):
            if theirs != ours:
                raise _Refusal(f"{name} is {theirs} on {offer.host} and {ours} on {own.host}",
                               "`pipeinfer join --same-version` takes the head's, or install the "
                               "same release or commit on both", version=True)
        if offer.dialled.partition("%")[0] != here.partition("%")[0]:
            raise _Refusal(
                f"it reaches this head as {offer.dialled}, which is not the head's own address "
                f"({here}): a router translates addresses between them, and ranks must reach each "
                "other", f"join at an address of the head itself, such as {here}, or connect both "
                "by a VPN")
        if offer.own.partition("%")[0] != peer.partition("%")[0]:
            raise _Refusal(
                f"its own address is {offer.own}, but it arrives from {peer}: a router translates "
                "addresses between them, and ranks must reach each other",
                "use a network without translation, or connect both by a VPN")
        if peer == here:
            raise _Refusal("it is the head's own machine", "join from another machine; the head "
                           "takes part already")
        if self.present and here != self.address:
            raise _Refusal(
                f"the other machines have joined at {self.address}, this one at {here}: they "
                "could not reach each other", f"join at {self.address}")
        known = self.members.get(claim.member)
        if known is not None and not known.gone and known.address != peer:
            raise _Refusal(
                f"{known.name} at {known.address} is here with the same id",
                "wait for half a minute if its address has changed; if its disk was copied, remove "
                "~/.local/state/pipeinfer/up/.join on one", final=False)
        other = self.at(peer)
        if other is not None and other.id != claim.member:
            raise _Refusal(f"{other.name} has joined from the same machine",
                           "`pipeinfer leave` ends the other one")

    def _name(self, id: str, host: str) -> str:
        """Return a name that no other member has, nor the head."""
        wanted = _NO_NAME.sub("-", host).strip("-.")[:60] or "host"
        taken = {self.own.host, *(one.name for one in self.members.values() if one.id != id)}
        return next(name for name in (wanted, *(f"{wanted}-{i}" for i in range(2, 10_000)))
                    if name not in taken)

    async def _try_ports(self, reader: asyncio.StreamReader, member: Joiner, here: str) -> None:
        """Raise _Refusal unless any port of each end can be reached from the other, as MPI
        needs."""
        remedy = ("ranks connect to each other at ports that the system chooses: let {} accept all "
                  "TCP and UDP from the machines of the cluster (ufw allow from {})")
        try:
            async with asyncio.timeout(_TRY):
                _, probe = await asyncio.open_connection(member.address, member.offer.port)
            probe.close()
        except OSError:  # TimeoutError is one
            raise _Refusal(
                f"this head cannot reach port {member.offer.port} of {member.address}: a firewall "
                f"on {member.name} is in the way",
                remedy.format(member.name, here), final=False) from None
        listener = await asyncio.start_server(lambda _, writer: writer.close(), here, 0)
        port = listener.sockets[0].getsockname()[1]
        try:
            member.send(wire.Dial(order=0, port=port))
            # beats may come before the answer
            while not isinstance(answer := wire.from_member(await reader.readline()), wire.Done):
                pass
        finally:
            listener.close()
        if answer.error:
            raise _Refusal(
                f"{member.name} cannot reach port {port} of this head ({answer.error}): a firewall "
                f"on {self.own.host} is in the way",
                remedy.format(self.own.host, member.address), final=False)

    async def _attend(self, reader: asyncio.StreamReader, member: Joiner) -> None:
        """Handle a member's messages until it leaves or is lost."""
        beating = asyncio.create_task(self._beat(member))
        try:
            while True:
                async with asyncio.timeout(wire.SILENT):
                    line = await reader.readline()
                match wire.from_member(line):
                    case wire.Done() as done:
                        self._done(member, done)
                    case wire.Depart():
                        self._drop(member, "it has left")
                        return
                    case wire.Beat():
                        pass
                    case wire.Claim() | wire.Offer() | wire.SourceWanted() as late:
                        raise ProtocolError(f"{type(late).__name__} after the start")
                    case other:
                        assert_never(other)
        finally:
            beating.cancel()

    async def _beat(self, member: Joiner) -> None:
        while True:
            await asyncio.sleep(wire.BEAT)
            member.send(wire.Beat())

    def _done(self, member: Joiner, done: wire.Done) -> None:
        answer = member.orders.get(done.order)
        if answer is not None and not answer.done():
            answer.set_result(done.error)

    def _drop(self, member: Joiner, why: str) -> None:
        """Count a member as gone."""
        if member.writer is not None:
            member.writer.close()
        member.writer, member.gone, member.since = None, why, time.time()
        for answer in member.orders.values():
            if not answer.done():
                answer.set_result(f"{member.name} is gone: {why}")
        self._say(f"{member.name} ({member.address}) is gone: {why}")
        self.went(member)

