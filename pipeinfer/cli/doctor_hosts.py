"""Checks over ssh, concurrently, whether the hosts of a hostfile answer and have the same
pipeinfer.

`doctor --hostfile` and `pipeinfer run --hosts` do this before mpirun, because mpirun reports
neither the host nor a remedy. It uses no MPI and changes nothing on a host, but wakes one that
sleeps and whose card's address is in the nodes file.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from subprocess import PIPE
from typing import Any

import psutil

from pipeinfer.errors import UsageError
from pipeinfer.host import package_version
from pipeinfer.llama.library import NO_LIBRARY, llama_version
from pipeinfer.nodes import HostEntry, Nodes, nodes_file_beside, ranks_of, read_hostfile, read_nodes

_CONNECT_SECONDS = 8
_ANSWER_SECONDS = 40
_AT_ONCE = 32
_THIS_HOST = "for this machine alone take hostfiles/localhost (one line: localhost slots=8)"
_MARK = "pipeinfer-facts "
_TCP_SECONDS = 5
WAKE_SECONDS, _WAKE_PORT = 180.0, 9  #: for a host to start; where packets that wake go by custom
#: settings with which messages may take another way than these connections
_OWN_WAY = ("PIPEINFER_IF", "OMPI_MCA_btl_tcp_port_min_v4", "MPIEXEC_PORT_RANGE")
#: what runs on a host, whatever its version of pipeinfer; its arguments are this host's address
#: ("": as ssh has it) and a port. It listens at another one until its input ends
_QUESTION = f"""
import json, os, socket, sys, pipeinfer, pipeinfer.host as own
from pipeinfer.llama.library import llama_version
ssh = os.environ.get("SSH_CONNECTION", "").split() or [""] * 4
address, port = sys.argv[1] or ssh[0], int(sys.argv[2])
version = getattr(own, "package_version", lambda: pipeinfer.__version__)()
six = socket.has_dualstack_ipv6()
family = socket.AF_INET6 if six else socket.AF_INET
with socket.create_server(("", 0), family=family, dualstack_ipv6=six) as listener:
    blocked = ""
    try:
        socket.create_connection((address, port), {_TCP_SECONDS}).close()
    except OSError as error:
        blocked = str(error)
    print({_MARK!r} + json.dumps(dict(
        host=socket.gethostname(), cores=os.cpu_count(), python=sys.version.split()[0],
        pipeinfer=version, llama=llama_version(), address=ssh[2],
        port=listener.getsockname()[1], blocked=blocked)), flush=True)
    sys.stdin.read()
"""
#: text in ssh's output, its meaning, the remedy; {0} is the host
_SSH_TROUBLE = (
    ("Permission denied", "refuses the ssh key", "ssh-copy-id {0}, then try `ssh {0} hostname`"),
    ("Host key verification failed", "has an unknown or changed host key",
     "run `ssh {0}` once by hand and compare the key"),
    ("Could not resolve", "has no address", "correct the name, or add it to DNS or /etc/hosts"),
    ("Connection refused", "answers, but runs no ssh server there",
     "start sshd on {0}, or give its port in ~/.ssh/config"),
    ("timed out", "does not answer", "is {0} switched on, is the cable in, does a firewall drop "
     "port 22?"),
    ("No route", "is not reachable", "is {0} switched on and in the same network?"),
    ("unreachable", "is not reachable", "is {0} switched on and in the same network?"),
)


@dataclass(frozen=True, slots=True)
class HostAnswer:
    """The facts of a host; or the problem and its remedy."""

    entry: HostEntry
    facts: dict[str, Any]
    trouble: str = ""
    remedy: str = ""


def check_hosts(hostfile: str, n_ranks: int = 0) -> list[Finding]:
    """Return findings about every host of `hostfile`.

    n_ranks: number of ranks to place; 0 does not compare slots with ranks.
    Raises UsageError when the hostfile or the nodes file next to it cannot be used.
    """
    entries = read_hostfile(hostfile)
    beside = nodes_file_beside(hostfile)
    nodes = read_nodes(beside) if beside else None
    slots = sum(entry.slots for entry in entries)
    found = [Finding("ok", "hostfile", f"{len(entries)} hosts with {slots} slots"
                     + (f", settings in {beside}" if beside else ""))]
    ranks = {entry.host: entry.slots for entry in entries}
    if n_ranks:
        try:
            ranks = dict(Counter(ranks_of(entries, n_ranks, hostfile)))
        except UsageError as error:
            found.append(Finding("fail", "slots", str(error)))
    if not is_here(entries[0].host):
        found.append(Finding(
            "warn", "hostfile",
            f"rank 0 will run on {entries[0].host}, not on this host: -f, the models and the "
            "nodes file are read there",
            "start the job on that host, or list this host first"))
    asked = [entry for entry in entries if entry.host in ranks]
    judged = [finding for _, finding in _ask_all(asked, ranks, nodes)]
    if judged and all(finding.level == "fail" for finding in judged):
        judged.append(Finding("fail", "hostfile", f"{hostfile} names no host that can run ranks",
                              f"write your own hosts into it; {_THIS_HOST}"))
    return found + judged


def living(hostfile: str) -> tuple[list[HostEntry], dict[str, Finding]]:
    """Return the hosts that can run ranks now, and the problems of the others.

    Raises UsageError when a file cannot be used, or rank 0's host is not among them.
    """
    entries = read_hostfile(hostfile)
    beside = nodes_file_beside(hostfile)
    judged = _ask_all(entries, {entry.host: entry.slots for entry in entries},
                      read_nodes(beside) if beside else None)
    gone = {entry.host: finding for entry, finding in judged if finding.level == "fail"}
    found = [entry for entry, finding in judged if finding.level != "fail"]
    if entries[0] not in found:
        none = "" if found else f": no host of {hostfile} can run ranks; {_THIS_HOST}"
        first = gone[entries[0].host]
        raise UsageError(f"{first.what}, on which rank 0 runs, {first.detail}{none}")
    return found, gone


def troubles(entries: Sequence[HostEntry]) -> dict[str, str]:
    """Return the problem of each of these hosts, "" if it can run ranks."""
    judged = _ask_all(entries, {entry.host: entry.slots for entry in entries}, None)
    return {entry.host: finding.detail if finding.level == "fail" else ""
            for entry, finding in judged}


def _ask_all(entries: Sequence[HostEntry], ranks: dict[str, int], nodes: Nodes | None
             ) -> list[tuple[HostEntry, Finding]]:
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        answers = list(pool.map(ask, entries))
        macs = {answer.entry.host: mac for answer in answers if not answer.facts and nodes
                and (mac := nodes.of(answer.entry.host).mac)}
        if macs:
            sys.stderr.write(f"pipeinfer: waking {', '.join(macs)}\n")
            answers = list(pool.map(lambda answer: _woken(answer, macs), answers))
    mine, seen = _own_facts(), dict[str, str]()
    return [(answer.entry, _judge(answer, ranks[answer.entry.host], mine, seen, nodes))
            for answer in answers]


def ask(entry: HostEntry) -> HostAnswer:
    """Return a host's facts, over ssh unless it is this one."""
    if is_here(entry.host):
        return HostAnswer(entry, _own_facts())
    name = f"{entry.user}@{entry.host}" if entry.user else entry.host
    with _listener() as listener:
        port = listener.getsockname()[1]
        command = ["ssh", "-o", "BatchMode=yes", "-o", f"ConnectTimeout={_CONNECT_SECONDS}",
                   *shlex.split(os.environ.get("PIPEINFER_SSH_ARGS", "")), name,
                   shlex.join([sys.executable, "-c", _QUESTION, _address_for(entry.host),
                               str(port)])]
        try:
            process = subprocess.Popen(command, stdin=PIPE, stdout=PIPE, stderr=PIPE, text=True)
        except OSError as error:
            return HostAnswer(
                entry, {}, f"cannot be checked: this host has no ssh ({error.strerror})",
                "install an ssh client (Debian and Ubuntu: apt install openssh-client)")
        late = threading.Timer(_ANSWER_SECONDS, process.kill)
        late.start()
        with process:
            assert process.stdout is not None
            line = next((line for line in process.stdout if line.startswith(_MARK)), "")
            facts: dict[str, Any] = json.loads(line.removeprefix(_MARK)) if line else {}
            trouble = _blocked(entry.host, facts, port) if "port" in facts else ("", "")
            _, said = process.communicate()
            late.cancel()
    if facts:
        return HostAnswer(entry, facts, *trouble)
    if process.returncode == -signal.SIGKILL:
        return HostAnswer(entry, {}, f"did not answer within {_ANSWER_SECONDS} s",
                      f"log in by hand and check whether {entry.host} is busy or one of its file "
                      "systems hangs")
    return HostAnswer(entry, {}, *_explain(entry.host, process.returncode, said))


def _woken(answer: HostAnswer, macs: Mapping[str, str]) -> HostAnswer:
    """Return a host's answer after it was woken; the old one where that is not to be tried."""
    host, deadline = answer.entry.host, time.monotonic() + WAKE_SECONDS
    while host in macs and not answer.facts and time.monotonic() < deadline:
        wake(macs[host])  # again each time: a packet may be lost, or come while the host goes down
        time.sleep(1.0)
        answer = ask(answer.entry)
    return answer


def wake(mac: str) -> None:
    """Send the packet that switches on the host of this network card, to all networks here."""
    packet = b"\xff" * 6 + bytes.fromhex(mac.replace(":", "").replace("-", "")) * 16
    for card in psutil.net_if_addrs().values():
        for one in card:
            if one.family == socket.AF_INET and one.broadcast:
                with contextlib.suppress(OSError), socket.socket(
                        socket.AF_INET, socket.SOCK_DGRAM) as sender:
                    sender.setsockopt(socket.SOL_SOCKET, socket.SO_BROADCAST, 1)
                    sender.sendto(packet, (one.broadcast, _WAKE_PORT))


def _listener() -> socket.socket:
    """Return a socket that listens on every address at a port that the system chooses. The system
    completes connections to it."""
    six = socket.has_dualstack_ipv6()
    return socket.create_server(("", 0), family=socket.AF_INET6 if six else socket.AF_INET,
                                dualstack_ipv6=six)


def _address_for(host: str) -> str:
    """Return the address of this host from which it reaches another; "" if that has no address."""
    with contextlib.suppress(OSError, UnicodeError):
        family, kind, proto, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, proto) as probe:
            probe.connect(address)  # sends nothing
            return str(probe.getsockname()[0])
    return ""


def _blocked(host: str, facts: Mapping[str, Any], port: int) -> tuple[str, str]:
    """Connect to a host that listens; return what blocks one of the two ways, and its remedy."""
    ways, there = [], facts["port"]
    try:
        address = host if _address_for(host) else facts["address"]
        socket.create_connection((address, there), _TCP_SECONDS).close()
    except OSError as error:
        ways.append(f"its TCP port {there} from here: {error}")
    if facts["blocked"]:
        ways.append(f"TCP port {port} of this host from there: {facts['blocked']}")
    if not ways:
        return "", ""
    return (f"does not let ranks connect ({'; '.join(ways)})",
            "a firewall? Let all TCP ports pass between the hosts, or bound them "
            "(docs/clusters.md, Firewalls)")


def _explain(host: str, code: int, said: str) -> tuple[str, str]:
    """Return the problem and its remedy, from ssh's exit status and error output."""
    for sign, trouble, remedy in _SSH_TROUBLE:
        if code == 255 and sign in said:
            return trouble, remedy.format(host)
    last = (said.strip().splitlines() or ["no message"])[-1]
    if code in (126, 127):
        return (f"has no {sys.executable}",
                "install pipeinfer there under the same path (run the same launch/ script once, "
                "or share this directory by NFS)")
    if "PackageNotFoundError" in said or "ModuleNotFoundError" in said:
        return f"has {sys.executable} without pipeinfer ({last})", "run launch/demo there once"
    return f"cannot be used: {last}", f"try `ssh {host} {sys.executable} -m pipeinfer doctor`"


def _judge(answer: HostAnswer, ranks: int, mine: dict[str, Any], seen: dict[str, str],
           nodes: Nodes | None) -> Finding:
    """Return one host's finding. ranks: that it is to run. seen: collects host names by their
    own name."""
    entry, facts = answer.entry, answer.facts
    what = f"host {entry.host}"
    if answer.trouble and not (facts and any(name in os.environ for name in _OWN_WAY)):
        return Finding("fail", what, answer.trouble, answer.remedy)
    if facts["llama"].startswith(NO_LIBRARY) and facts["llama"] != mine["llama"]:
        return Finding("fail", what, "runs no llama.cpp", facts["llama"].removeprefix(NO_LIBRARY))
    for key, program in (("pipeinfer", "pipeinfer"), ("llama", "llama.cpp")):
        if facts[key] != mine[key]:
            return Finding("fail", what, f"has {program} {facts[key]}, this host has {mine[key]}",
                           "install the same version on every host")
    own = str(facts["host"])
    if own in seen:
        return Finding(
            "fail", what, f"has the host name {own}, as {seen[own]} does",
            "if they are one machine, keep one line with slots=N; if not, give each its own host "
            "name (hostnamectl set-hostname), or MPI's daemons collide")
    seen[own] = entry.host
    if nodes is not None and nodes.of(own) != nodes.of(entry.host):
        return Finding(
            "warn", what, f"has the host name {own}, for which {nodes.path} has other settings",
            f"name the table after the output of `hostname` there: [node.\"{own}\"]")
    if answer.trouble:
        return Finding("warn", what, answer.trouble, answer.remedy)
    if ranks > facts["cores"]:
        return Finding("warn", what, f"{ranks} ranks share {facts['cores']} cores",
                       "this is fine for a trial; for speed start one stage per host")
    return Finding("ok", what, f"{entry.slots} slots, {facts['cores']} cores, pipeinfer "
                   f"{facts['pipeinfer']}, Python {facts['python']}")


def _own_facts() -> dict[str, Any]:
    return {"host": socket.gethostname(), "cores": os.cpu_count(), "pipeinfer":
            package_version(), "python": sys.version.split()[0], "llama": llama_version()}


def is_here(name: str) -> bool:
    """Whether `name` is this host: its own name, or one of an address that is its own."""
    own = socket.gethostname().lower()
    if name.lower() in ("localhost", own, own.partition(".")[0]):
        return True
    try:
        found = socket.getaddrinfo(name, 0, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return False
    return any(_is_own(*place) for place in found)


def _is_own(family: int, kind: int, proto: int, _: str, address: Any) -> bool:
    """Whether an address is of this host: a socket can be bound to it."""
    with contextlib.suppress(OSError), socket.socket(family, kind, proto) as probe:
        probe.bind(address)
        return True
    return bool(ipaddress.ip_address(address[0].partition("%")[0]).is_loopback)  # IPv6 is off


def name_for_launcher(name: str) -> str:
    """Return the name by which a launcher recognises a host. Open MPI takes this host for another
    one, to which it logs in, under all names but `localhost` and its own."""
    return socket.gethostname() if name != "localhost" and is_here(name) else name


def common_network(entries: Sequence[HostEntry]) -> str:
    """Return the network of this host that contains every other host's address, such as
    10.0.0.0/24.

    It is "" if there is none or more than one. MPI would try all interfaces of a host, also those
    of container bridges that lead nowhere.
    """
    try:
        addresses = {ipaddress.IPv4Address(socket.gethostbyname(entry.host))
                     for entry in entries if not is_here(entry.host)}
    except (OSError, ValueError):
        return ""
    fitting = [net for net, _ in _networks() if addresses and all(a in net for a in addresses)]
    return str(fitting[0]) if len(fitting) == 1 else ""


def network_of(address: str) -> str:
    """Return the network of this host in which it has an address, "" if none. For IPv6 the name of
    the interface: Open MPI takes no networks of it."""
    found: dict[str, str] = {one.address.partition("%")[0]: name for name, interface in
                             psutil.net_if_addrs().items() for one in interface}
    found |= {own: str(net) for net, own in _networks()}
    return found.get(address.partition("%")[0], "")


def _networks() -> set[tuple[ipaddress.IPv4Network, str]]:
    """Return this host's networks, and its address in each."""
    return {(ipaddress.IPv4Network((own.address, own.netmask), strict=False), own.address)
            for interface in psutil.net_if_addrs().values() for own in interface
            if own.family == socket.AF_INET and own.netmask}


def hydra_hostfile(entries: Sequence[HostEntry]) -> str:
    """Return the hostfile of these hosts for MPICH's launcher."""
    names = [name_for_launcher(entry.host) for entry in entries]
    return "".join((f"[{name}]" if ":" in name else name) + f":{entry.slots}"
                   + (f" user={entry.user}" if entry.user else "") + "\n"
                   for name, entry in zip(names, entries, strict=True))


def check_head(hostfile: str) -> None:
    """Raise UsageError unless the first host is this one."""
    first = read_hostfile(hostfile)[0].host
    if not is_here(first):
        raise UsageError(f"the first host of {hostfile} is {first}, which is not this one: rank 0 "
                         "and the HTTP process run here, so list this host first, call this there, "
                         "or leave out --hosts to use this machine alone")


def openmpi_hostfile(entries: Sequence[HostEntry]) -> str:
    """Return the hostfile of these hosts in Open MPI's format, with all numbers of slots."""
    return "".join(f"{entry.user + '@' if entry.user else ''}{name_for_launcher(entry.host)} "
                   f"slots={entry.slots}\n" for entry in entries)


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report. level: ok, warn or fail."""

    level: str
    what: str
    detail: str
    remedy: str = ""
