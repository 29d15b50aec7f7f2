"""A head and machines that join it, in one process over real connections; and who tries to get in
between."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re

import pytest
from msgspec import structs

from pipeinfer import host
from pipeinfer.errors import ProtocolError
from pipeinfer.nodes import read_nodes
from pipeinfer.supervise.join import agent as agents
from pipeinfer.supervise.join import messages as wire
from pipeinfer.supervise.join import roster as rosters
from pipeinfer.supervise.join import server as servers
from pipeinfer.supervise.join.agent import JoinRefused
from pipeinfer.supervise.join.offers import own_offer
from pipeinfer.supervise.join.roster import JoinedRoster
from pipeinfer.supervise.join.tokens import JoinToken, JoinTokens
from pipeinfer.supervise.launcher import Launcher
from tests.supervise.join.world import HEAD, OFFER, OWN, SECONDS, anyone

pytestmark = pytest.mark.anyio


async def test_a_machine_joins_leaves_and_comes_back_under_its_name(world):
    agent, task = await world.joined()
    (member,) = world.server.present
    assert (member.name, member.address, member.offer.cores) == ("box", "127.0.0.1", 4)
    # the head lists a machine before the machine has its answer
    await world.until(lambda: any("joined" in line and "as box" in line
                                  for line in world.members_said))
    await world.leaves(agent, task)
    await world.until(lambda: not world.server.present)
    assert world.server.members["m1"].gone == "it has left"
    await world.joined()
    assert [one.name for one in world.server.members.values()] == ["box"]


async def test_names_are_unique_and_the_heads_is_taken(world):
    for number, name in enumerate(["head", "box", "box", "b;x $(id)", "ü"]):
        assert await world.refused(offer=structs.replace(OFFER, launcher="other"))  # no member
        agent, task = await world.joined(member=f"m{number}",
                                         offer=structs.replace(OFFER, host=name))
        await world.leaves(agent, task)
        await world.until(lambda: not world.server.present)
        world.server.members[f"m{number}"].address = f"192.0.2.{number}"
    assert [one.name for one in world.server.members.values()] == [
        "head-2", "box", "box-2", "b-x-id", "host"]


@pytest.mark.parametrize(("change", "says"), [
    ({"pipeinfer": "2"}, "pipeinfer is 2 on box and 1 on head"),
    ({"digest": "e"}, "source is e on box"), ({"protocol": 2}, "protocol is 2"),
    ({"llama": "m"}, "llama.cpp is m on box and l on head"),
    ({"launcher": "MPICH 4"}, "launcher is MPICH 4")])
async def test_another_version_is_said_on_both_ends(world, change, says):
    assert says in await world.refused(offer=structs.replace(OFFER, **change))
    assert any(says in line for line in world.said)


async def test_a_machine_that_has_lost_its_id_takes_its_own_place(world):
    for member in ("m1", "m2", "m1"):
        agent, task = await world.joined(member=member)
        (found,) = world.server.members.values()
        assert (found.id, found.name) == (member, "box")
        await world.leaves(agent, task)
        await world.until(lambda: not world.server.present)


async def test_a_copied_id_is_refused_while_the_machine_that_has_it_is_here(world):
    await world.joined()
    world.server.present[0].address = "192.0.2.7"
    agent, task = world.join()
    await world.member_says("with the same id")
    assert len(world.server.present) == 1
    await world.leaves(agent, task)


async def test_a_second_agent_on_one_machine_is_refused(world):
    await world.joined()
    assert "has joined from the same machine" in await world.refused(member="m2")


async def test_the_own_machine_and_translated_addresses_are_refused(world):
    for field, says in (("dialled", "not the head's own address"), ("own", "it arrives from")):
        claim = wire.Claim(token=world.token.id, member="m9", secret="")
        offer = structs.replace(OFFER, **{"own": "127.0.0.1", "dialled": HEAD,
                                          field: "192.0.2.7"})
        with pytest.raises(servers._Refusal, match=says):
            world.server._check(claim, offer, "127.0.0.1", HEAD)
    with pytest.raises(servers._Refusal, match="the head's own machine"):
        world.server._check(claim, structs.replace(OFFER, own=HEAD, dialled=HEAD), HEAD, HEAD)


async def test_a_firewall_on_either_side_is_named_with_the_port(world, monkeypatch):
    async def dial(self, port):
        return "no answer in time"

    monkeypatch.setattr(agents.Agent, "_dial", dial)
    agent, task = world.join()
    await world.member_says("cannot reach port")
    assert not world.server.present
    assert any("firewall on head" in line for line in world.members_said)
    await world.leaves(agent, task)


# --- who tries to get in ----------------------------------------------------------------------


async def test_without_the_secret_nobody_gets_in(world):
    wrong = structs.replace(world.token, secret="00" * 16)
    assert "its token is wrong or revoked" in await world.refused(token=wrong)
    unknown = structs.replace(world.token, id="00" * 4)
    assert "its token is wrong or revoked" in await world.refused(token=unknown)
    assert not world.server.members
    assert world.token.secret not in "".join(world.said + world.members_said)


async def false_head(world, answer, port=0):
    """A server with a certificate of its own."""
    folder = world.tokens._folder / "evil"
    folder.mkdir()
    return await asyncio.start_server(answer, HEAD, port, ssl=JoinTokens(folder).context)


async def test_a_head_with_another_certificate_learns_nothing(world):
    """A man in the middle ends TLS himself and has a certificate of his own."""
    heard = []

    async def pass_on(reader, writer):
        heard.append(await reader.read(1000))
        writer.close()

    middle = await false_head(world, pass_on)
    port = middle.sockets[0].getsockname()[1]
    assert "another certificate" in await world.refused(port=port)
    await asyncio.sleep(0.1)
    assert b"".join(heard) == b""
    middle.close()


async def speak(world, *messages):
    """A TLS connection that sends these lines; the replies."""
    reader, writer = await asyncio.open_connection(HEAD, world.port, ssl=anyone())
    for message in messages:
        writer.write(message)
    with contextlib.suppress(OSError):
        found = await asyncio.wait_for(reader.read(), SECONDS)
        writer.close()
        return found
    return b""


def claim(token: JoinToken):
    return wire.encode(wire.Claim(token=token.id, member="m1", secret=token.secret))


@pytest.mark.parametrize("lines", [
    [b"GET / HTTP/1.1\r\n\r\n"], [b"{}\n"], [b"\xff" * 100 + b"\n"], [b"x" * (wire.MOST * 2)],
    [b'{"is":"offer"}\n'], [b'{"is":"claim","token":1}\n'], [b"[" * 10_000 + b"\n"]])
async def test_garbage_costs_only_its_own_connection(world, lines):
    await world.joined()
    assert await speak(world, *lines) == b""
    assert len(world.server.present) == 1


def offering(world, **more):
    """The lines of a machine that has the token, and offers this."""
    offer = json.loads(wire.encode(structs.replace(
        OFFER, own="127.0.0.1", dialled=HEAD, port=world.port)))
    return [claim(world.token), json.dumps(offer | more).encode() + b"\n"]


@pytest.mark.parametrize("more", [
    {"port": 0}, {"port": 70_000}, {"port": -1}, {"memory": 10**400}, {"cores": -4},
    {"host": "\x1b]0;title\x07"}, {"launcher": "a\nb"}, {"settings": {"device": 1}},
    {"numa_nodes": 0}, {"numa_nodes": 10**9}, {"mac": "aa:bb"},
    {"settings": {"role": "head"}}, {"settings": {"memory": 10**25}}, {"settings": {"threads": 0}},
    {"settings": {"threads = 1\n[defaults]\nthreads": 1}}])
async def test_offers_that_no_machine_makes_cost_only_their_own_connection(world, more, caplog):
    assert b"admitted" not in await speak(world, *offering(world, **more))
    assert not world.server.members
    assert world.said == []
    await world.close()
    assert caplog.text == ""


async def test_settings_of_members_are_their_tables_of_a_nodes_file(world, tmp_path):
    roster = JoinedRoster(world.server, "openmpi", tmp_path, "default")
    assert roster.nodes == ""
    await world.joined(offer=structs.replace(OFFER, settings=wire.OwnSettings(1 << 30, 3, "spare")))
    roster.take(roster.found(0))
    nodes = read_nodes(roster.nodes)
    assert nodes.tables == (("box", {"memory": 1 << 30, "threads": 3, "role": "spare"}),)


async def test_a_member_sleeps_by_its_own_command_and_is_woken(world, tmp_path, monkeypatch):
    """A file stands for its switch; it comes back after the second packet."""
    monkeypatch.setattr(agents, "_NAP", 0.2)
    woken, back = [], asyncio.Event()
    loop, connected = asyncio.get_running_loop(), agents.Agent._connected

    def wake(mac):
        woken.append(mac)
        if len(woken) == 2:
            loop.call_soon_threadsafe(back.set)

    @contextlib.asynccontextmanager
    async def reached(agent):
        if (tmp_path / "off").exists():
            await back.wait()
        async with connected(agent) as found:
            yield found

    monkeypatch.setattr(rosters.doctor_hosts, "wake", wake)
    monkeypatch.setattr(agents.Agent, "_connected", reached)
    roster = JoinedRoster(world.server, "openmpi", tmp_path, "default")
    roster.start()
    await world.joined(sleep=["touch", str(tmp_path / "off")])
    await asyncio.to_thread(roster.rest)
    await world.until(lambda: not world.server.present)
    assert world.server.members["m1"].gone == "it has left"
    await asyncio.to_thread(roster.ask)
    assert [entry.host for entry in roster.place.used[1:]] == ["127.0.0.1"]
    assert set(woken) == {"00:00:00:00:00:00"}
    assert any("the head has no work: touch" in line for line in world.members_said)
    count = len(woken)
    await asyncio.to_thread(roster.ask)  # another start wakes nothing
    assert len(woken) == count >= 2


@pytest.mark.parametrize(("sleep", "says"), [
    ((), None), (["/no/such/command"], "--sleep-command /no/such/command: No such file")])
async def test_a_member_without_a_command_stays(world, tmp_path, sleep, says):
    roster = JoinedRoster(world.server, "openmpi", tmp_path, "default")
    roster.start()
    world.join(sleep=sleep)
    await world.member_says("joined")
    (member,) = world.server.present
    assert bool(member.offer.mac) == bool(sleep)
    member.send(wire.Sleep())
    # an order after it is carried out
    assert await world.server.end_job(member.address, "none") == ""
    assert world.server.present == [member]
    assert says is None or any(line.startswith(says) for line in world.members_said)


async def test_a_machine_that_nothing_can_wake_does_not_sleep(world, monkeypatch):
    monkeypatch.setattr(agents, "card_of", lambda address: "")
    await world.joined(sleep=["true"])
    assert world.server.present[0].offer.mac == ""
    assert any("has no effect" in line for line in world.members_said)


@pytest.mark.parametrize("kind", ["openmpi", "hydra"])
async def test_a_machine_gets_a_rank_on_each_of_its_numa_nodes(world, tmp_path, kind):
    """So does the head; each rank stays on one, see tests/test_nodes.py."""
    world.server.own = structs.replace(OWN, numa_nodes=2)
    roster = JoinedRoster(world.server, kind, tmp_path, "default")
    assert (roster.place.ranks, roster.wanted) == (2, 2)
    await world.joined(offer=structs.replace(OFFER, numa_nodes=3))
    assert "4 cores on 3 NUMA nodes" in world.server.present[0].facts["has"]
    roster.take(roster.found(0))
    assert (roster.place.ranks, roster.wanted) == (5, 5)
    lines = roster.out.read_text().splitlines()  # one machine is both, so no file to read
    assert [int(re.split("[=:]", line)[-1]) for line in lines] == [2, 3]


def test_what_this_machine_offers_has_its_numa_nodes(monkeypatch):
    launcher = Launcher("/bin/false", "openmpi", "5.0.11")
    node = host.NumaNode(0, 8, 1 << 30, (10, 21))
    for nodes, count in (([], 1), ([node], 1), ([node, node._replace(number=1)], 2)):
        monkeypatch.setattr(host, "numa_nodes", lambda nodes=nodes: nodes)
        assert own_offer(launcher, wire.OwnSettings()).numa_nodes == count


async def test_who_does_not_end_tls_keeps_its_place_and_no_socket(world):
    """Else a few seconds of this would use up the head's open files."""
    links = []
    for _ in range(3 * servers._STRANGERS_EACH):
        with contextlib.suppress(OSError):
            _, writer = await asyncio.open_connection(HEAD, world.port, ssl=anyone())
            writer.write(b"{}\n")
            writer.transport.pause_reading()
            links.append(writer)
        assert len(world.server._open) <= servers._STRANGERS_EACH + 1
    assert len(links) <= servers._STRANGERS_EACH
    await world.until(lambda: not world.server._open)
    for writer in links:
        writer.transport.abort()


async def test_tokens_that_cannot_be_read_are_said_and_the_head_goes_on(world, tmp_path, caplog):
    (tmp_path / "tokens.json").write_text("{")
    agent, task = world.join()
    await world.member_says("cannot use its tokens")
    assert any("tokens.json cannot be read" in line for line in world.said)
    await world.leaves(agent, task)
    await world.close()
    assert caplog.text == ""


async def test_the_end_of_the_head_leaves_no_traceback(world, caplog):
    await world.joined()
    await world.server.close()
    await world.close()
    assert caplog.text == ""


async def test_a_thousand_silent_and_slow_connections_do_not_keep_a_machine_out(world, monkeypatch):
    """Eight of one address may be open without a proof; the others are closed at once."""
    monkeypatch.setattr(servers, "_PROVE", 1.0)
    links = []
    for number in range(1000):
        reader, writer = await asyncio.open_connection(
            HEAD, world.port, local_addr=("127.0.0.3", 0))
        links.append((reader, writer))
        if number % 100 == 0:
            writer.write(b"\x16")  # of a handshake, and no more
    await world.joined()
    await world.until(lambda: not world.server._strangers.total())
    assert len(world.server._open) == 1
    for _, writer in links:
        writer.close()


async def test_a_revoked_token_sends_its_machines_away(world):
    _, task = await world.joined()
    assert world.server.revoke(world.token.id)
    assert not world.server.present
    with pytest.raises(JoinRefused, match="wrong or revoked"):
        await asyncio.wait_for(task, SECONDS)


@pytest.mark.parametrize(("line", "known"), [
    (b'{"is":"startdaemon","order":1,"job":"j","kind":"openmpi","arguments":[]}\n', False),
    (b'{"is":"endjob","order":1,"job":"--after"}\n', True),
    (b'{"is":"dial","order":1,"port":70000}\n', True),
    (b'{"is":"note","text":"\\u001b]0;title\\u0007"}\n', True)])
async def test_orders_that_no_head_gives_end_the_connection(world, line, known):
    agent = world.agent(mpirun="/bin/true")
    agent._name = "box" * known
    with pytest.raises(ProtocolError):
        await agent._handle(wire.from_head(line), None)
    assert not agent._daemons


async def test_a_false_head_sends_away_no_machine_that_has_been_let_in(world):
    _, task = await world.joined()
    await world.server.close()
    false = await false_head(world, lambda *_: None, world.port)
    world.said.clear()
    await world.member_says("cannot be reached")
    await asyncio.sleep(1.5)
    assert not task.done()
    false.close()
    await false.wait_closed()
    await world.server.start(HEAD, world.port)
    await world.until(lambda: world.server.present)


# --- orders -----------------------------------------------------------------------------------


def programs(folder, daemon):
    """A launcher, whose path is returned, and a daemon beside it that does this."""
    (folder / "bin").mkdir()
    for name, text in (("mpirun", "exit 1"), ("prted", daemon)):
        path = folder / "bin" / name
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o700)
    return str(folder / "bin" / "mpirun")


async def test_a_daemon_is_started_with_the_heads_arguments_and_ends_with_the_agent(
        world, tmp_path):
    mpirun = programs(tmp_path, 'echo "$PIPEINFER_JOB $PIPEINFER_HOST_NAME $@" '
                                f">{tmp_path}/ran; exec sleep 1000")
    agent, task = await world.joined(mpirun=mpirun)
    refused = await world.server.start_daemon("127.0.0.1", "job-1", "hydra", [])
    assert "this machine's of the kind openmpi" in refused
    assert await world.server.start_daemon(
        "127.0.0.1", "job-1", "openmpi", ["--prtemca", "ess", "env"]) == ""
    await world.until(lambda: (tmp_path / "ran").exists() and (tmp_path / "ran").read_text())
    assert (tmp_path / "ran").read_text() == "job-1 box --prtemca ess env\n"
    daemon = agent._daemons[0]
    await world.leaves(agent, task)
    assert daemon.poll() is not None
    assert "has not joined" in await world.server.start_daemon("127.0.0.1", "j", "openmpi", [])


async def test_what_a_job_has_left_is_ended_by_order(world, tmp_path):
    mpirun = programs(tmp_path, "exec sleep 1000")
    agent, _ = await world.joined(mpirun=mpirun)
    assert await world.server.start_daemon("127.0.0.1", "job-2", "openmpi", []) == ""
    daemon = agent._daemons[0]
    assert await world.server.end_job("127.0.0.1", "job-2") == ""
    assert daemon.wait(SECONDS) < 0


async def test_a_job_of_another_head_ends_what_the_former_has_left(world, tmp_path):
    """A head that was killed has another job when it is started again."""
    agent, _ = await world.joined(mpirun=programs(tmp_path, "exec sleep 1000"))
    assert await world.server.start_daemon("127.0.0.1", "job-3", "openmpi", []) == ""
    assert await world.server.start_daemon("127.0.0.1", "job-4", "openmpi", []) == ""
    former, later = agent._daemons
    await world.until(lambda: former.poll() is not None)
    assert list(agent._guards) == ["job-4"]
    assert later.poll() is None


@pytest.mark.parametrize("daemon", ["sleep 1000", "env -i sleep 1000"])  # by which none is found
async def test_processes_whose_guard_was_killed_end_with_the_agent(world, tmp_path, daemon):
    agent, task = await world.joined(mpirun=programs(tmp_path, f"exec {daemon}"))
    assert await world.server.start_daemon("127.0.0.1", "job-5", "openmpi", []) == ""
    agent._guards["job-5"].kill()
    agent.stop()
    await asyncio.wait_for(task, SECONDS)
