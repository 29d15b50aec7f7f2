"""What is said about hosts that do not answer, with an ssh that fails as the real one does."""

from __future__ import annotations

import json
import os
import socket
import stat
import sys
from types import SimpleNamespace

import psutil
import pytest

from pipeinfer import __version__
from pipeinfer.cli import doctor_hosts
from pipeinfer.cli.doctor_hosts import check_hosts, common_network, is_here
from pipeinfer.errors import UsageError
from pipeinfer.nodes import HostEntry
from tests.kit import launch

OWN = doctor_hosts._own_facts()


@pytest.fixture
def fake_ssh(tmp_path, monkeypatch):
    """Answers of hosts: host -> (exit status, standard output, standard error)."""
    answers = {}
    folder = tmp_path / "bin"
    folder.mkdir()
    table = tmp_path / "answers.json"

    def install(more):
        answers.update(more)
        table.write_text(json.dumps(answers))

    script = folder / "ssh"
    script.write_text(
        f"#!{sys.executable}\nimport json, sys\n"
        f"table = json.load(open({str(table)!r}))\n"
        "host = sys.argv[-2]\ncode, out, err = table[host]\n"
        "print('a banner')\nprint(out)\nprint(err, file=sys.stderr)\nsys.exit(code)\n")
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(doctor_hosts, "is_here", lambda name: name == "head")
    return install


def facts(**changed):
    return [0, doctor_hosts._MARK + json.dumps(OWN | changed), ""]


def write(tmp_path, text, name="hosts"):
    path = tmp_path / name
    path.write_text(text)
    return str(path)


def test_hosts_that_answer(tmp_path, fake_ssh):
    fake_ssh({"a": facts(host="a"), "ann@b": facts(host="b.lab")})
    path = write(tmp_path, "head slots=1\na slots=2\nann@b\n")
    found = check_hosts(path, 4)
    assert {f.level for f in found} == {"ok"}
    assert len(found) == 4


def test_a_host_that_sleeps_is_woken(tmp_path, monkeypatch, capsys):
    """A listener stands for its card: the host answers from the second packet on."""
    monkeypatch.setattr(doctor_hosts, "is_here", lambda name: name == "head")
    monkeypatch.setattr(doctor_hosts.time, "sleep", lambda _: None)
    monkeypatch.setattr(doctor_hosts.psutil, "net_if_addrs", lambda: {"lo": [SimpleNamespace(
        family=socket.AF_INET, broadcast="127.255.255.255")]})
    write(tmp_path, '[node.a]\nmac = "aa:bb:cc:00:11:22"\n', "hosts.toml")
    path = write(tmp_path, "head\na\nb\n")
    seen, asked = [], []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as card:
        card.bind(("", 0))
        card.settimeout(10)
        monkeypatch.setattr(doctor_hosts, "_WAKE_PORT", card.getsockname()[1])

        def ask(entry):
            asked.append(entry.host)
            if asked.count("a") > 1 and entry.host == "a":
                seen.append(card.recv(200))
            if entry.host == "head" or len(seen) > 1:
                return doctor_hosts.HostAnswer(entry, OWN | {"host": entry.host})
            return doctor_hosts.HostAnswer(entry, {}, "does not answer", "is it switched on?")

        monkeypatch.setattr(doctor_hosts, "ask", ask)
        found, gone = doctor_hosts.living(path)
    assert [entry.host for entry in found] == ["head", "a"]
    assert list(gone) == ["b"]
    assert seen == [b"\xff" * 6 + bytes.fromhex("aabbcc001122") * 16] * 2
    assert asked.count("b") == 1  # nobody has named its card
    assert "waking a\n" in capsys.readouterr().err


@pytest.mark.parametrize(("answer", "says", "cure"), [
    ([255, "", "root@a: Permission denied (publickey)."], "refuses the ssh key", "ssh-copy-id a"),
    ([255, "", "Host key verification failed."], "host key", "once by hand"),
    ([255, "", "ssh: Could not resolve hostname a: Name or service not known"],
     "has no address", "/etc/hosts"),
    ([255, "", "ssh: connect to host a port 22: Connection refused"], "no ssh server", "sshd"),
    ([255, "", "ssh: connect to host a port 22: Connection timed out"], "does not answer",
     "switched on"),
    ([255, "", "ssh: connect to host a port 22: No route to host"], "not reachable",
     "switched on"),
    ([255, "", "kex_exchange_identification: read: Connection reset"], "cannot be used: kex",
     "try `ssh a"),
    ([127, "", "bash: line 1: python: No such file or directory"], "has no ", "same path"),
    ([1, "", "importlib.metadata.PackageNotFoundError: pipeinfer"], "without pipeinfer",
     "launch/demo"),
    ([1, "", ""], "cannot be used: no message", "doctor"),
    (facts(host="a", pipeinfer="0.0.9"), "has pipeinfer 0.0.9, this host has", "same version"),
    (facts(host="a", pipeinfer=f"{__version__} (source 0123abcd)"),
     f"has pipeinfer {__version__} (source 0123abcd), this host has {__version__} (source ",
     "same version"),
    (facts(host="a", port=9, address="", blocked="timed out"), "of this host from there: timed out",
     "Firewalls"),
    (facts(host="a", llama="none: no AVX2: compile"), "runs no llama.cpp", "no AVX2: compile"),
    (facts(host="a", llama="0.1"), "has llama.cpp 0.1", "same version"),
    (facts(host=OWN["host"]), f"has the host name {OWN['host']}, as head does", "slots=N"),
])
def test_hosts_that_do_not(tmp_path, fake_ssh, answer, says, cure):
    fake_ssh({"a": answer})
    finding = check_hosts(write(tmp_path, "head\na\n"), 2)[-1]
    assert finding.level == "fail"
    assert finding.what == "host a"
    assert says in finding.detail
    assert cure in finding.remedy


def test_only_hosts_that_are_used_are_asked(tmp_path, fake_ssh):
    fake_ssh({"a": facts(host="a")})  # no answer for b: asking it would fail
    found = check_hosts(write(tmp_path, "head\na\nb\n"), 2)
    assert [f.what for f in found] == ["hostfile", "host head", "host a"]


def test_too_few_slots_and_other_names(tmp_path, fake_ssh):
    fake_ssh({"a": facts(host="alpha", cores=1)})
    path = write(tmp_path, "head\na slots=2\n")
    found = check_hosts(path, 4)
    assert ("fail", "slots") in {(f.level, f.what) for f in found}
    assert "have 3 slots" in found[1].detail
    assert found[-1].level == "warn"
    assert "2 ranks share 1 cores" in found[-1].detail
    write(tmp_path, "[node.a]\nthreads = 3\n", "hosts.toml")
    finding = check_hosts(path, 3)[-1]
    assert finding.level == "warn"
    assert "has the host name alpha" in finding.detail
    assert '[node."alpha"]' in finding.remedy


def test_a_head_elsewhere(tmp_path, fake_ssh):
    fake_ssh({"a": facts(host="a")})
    finding = check_hosts(write(tmp_path, "a\nhead\n"), 2)[1]
    assert finding.level == "warn"
    assert "rank 0 will run on a, not on this host" in finding.detail


def test_a_bad_hostfile(tmp_path):
    with pytest.raises(UsageError, match="listed twice"):
        check_hosts(write(tmp_path, "a\na\n"))


def test_this_host_and_others():
    assert is_here("localhost")
    assert is_here("127.0.0.1")
    assert is_here(OWN["host"])
    assert not is_here("192.0.2.1")
    assert not is_here("no-such-host.invalid")


def own_names():
    """Names of this host that its launcher does not know it by."""
    name = OWN["host"]
    addresses = {one.address for found in psutil.net_if_addrs().values() for one in found
                 if one.family == socket.AF_INET}
    return ["127.0.0.1", "127.0.0.2", "127.1.2.3", "::1", "LOCALHOST", "LocalHost", name.upper(),
            name.title(), "0:0:0:0:0:0:0:1", *sorted(addresses)]


def resolves(name):
    try:
        return bool(socket.getaddrinfo(name, 0))
    except OSError:
        return False


@pytest.mark.parametrize("name", list(filter(resolves, own_names())))
@pytest.mark.parametrize("write", [doctor_hosts.openmpi_hostfile, doctor_hosts.hydra_hostfile])
def test_a_launcher_gets_the_name_by_which_it_knows_this_host(name, write):
    """Under another one Open MPI logs in to itself."""
    assert is_here(name)
    assert write([HostEntry(name, 2, 1)]).strip() in (f"{OWN['host']} slots=2", f"{OWN['host']}:2")


@pytest.mark.parametrize("name", ["localhost", OWN["host"], "192.0.2.1", "no-such-host.invalid",
                                  "x" * 300, "2001:db8::1"])
def test_other_names_stay(name):
    assert doctor_hosts.name_for_launcher(name) == name


def test_one_of_several_addresses_is_enough(monkeypatch):
    def found(name, *_, **__):
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 0))
                for address in ("192.0.2.7", "127.0.0.1")]

    monkeypatch.setattr(doctor_hosts.socket, "getaddrinfo", found)
    assert is_here("two-addresses")


@pytest.mark.parametrize("name", ["xeon", "beowulf-hetero"])
def test_an_example_hostfile_leads_to_the_one_of_this_machine(tmp_path, fake_ssh, name):
    text = (launch.ROOT / "hostfiles" / name).read_text()
    assert "launch/ssh hostfiles/localhost" in "".join(text.splitlines()[:3])
    hosts = [line.split()[0] for line in text.splitlines() if not line.startswith("#")]
    fake_ssh({host: [255, "", f"ssh: Could not resolve hostname {host}"] for host in hosts})
    found = check_hosts(write(tmp_path, text), len(hosts))
    assert found[-1].level == "fail"
    assert "names no host that can run ranks" in found[-1].detail
    assert "hostfiles/localhost" in found[-1].remedy
    with pytest.raises(UsageError, match="take hostfiles/localhost"):
        doctor_hosts.living(write(tmp_path, text))
    with pytest.raises(UsageError, match="leave out --hosts to use this machine alone"):
        doctor_hosts.check_head(write(tmp_path, text))
    assert "hostfiles/localhost" in (launch.ROOT / "README.md").read_text()


def card(address, netmask, family=socket.AF_INET):
    return SimpleNamespace(family=family, address=address, netmask=netmask)


def test_the_network_of_the_hosts(monkeypatch):
    table = {"a": "10.1.0.2", "b": "10.1.0.3", "c": "10.2.0.9"}
    monkeypatch.setattr(doctor_hosts, "is_here", lambda name: name == "head")
    monkeypatch.setattr(doctor_hosts.socket, "gethostbyname", table.__getitem__)
    monkeypatch.setattr(doctor_hosts.psutil, "net_if_addrs", lambda: {
        "lo": [card("127.0.0.1", "255.0.0.0")],
        "eth0": [card("10.1.0.1", "255.255.255.0"), card("fe80::1", None, socket.AF_INET6)],
        "docker0": [card("172.17.0.1", "255.255.0.0")],
    })

    def network(*names):
        return common_network([HostEntry(name, 1, 1) for name in names])

    assert network("head", "a", "b") == "10.1.0.0/24"
    assert network("head", "a", "c") == ""
    assert network("head") == ""


def test_the_network_of_an_address_as_open_mpi_takes_it(monkeypatch):
    monkeypatch.setattr(doctor_hosts.psutil, "net_if_addrs", lambda: {
        "eth0": [card("192.0.2.7", "255.255.255.0"), card("fd00::7", None, socket.AF_INET6),
                 card("fe80::1%eth0", None, socket.AF_INET6)],
        "lo": [card("127.0.0.1", "255.0.0.0")]})
    assert doctor_hosts.network_of("192.0.2.7") == "192.0.2.0/24"
    assert doctor_hosts.network_of("fd00::7") == "eth0"
    assert doctor_hosts.network_of("192.0.2.8") == ""
