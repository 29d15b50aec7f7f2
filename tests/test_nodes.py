"""Hostfiles, nodes files, and how settings of single hosts meet the options."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeinfer import host
from pipeinfer.cli.options import parse
from pipeinfer.config import JobConfig
from pipeinfer.errors import PlanError, UsageError
from pipeinfer.files import parse_bytes
from pipeinfer.nodes import (
    HostEntry,
    NodeSettings,
    RankInfo,
    apply,
    check_head,
    group_of,
    nodes_file_beside,
    ranks_of,
    read_hostfile,
    read_nodes,
    settle,
)

HOSTFILES = Path(__file__).resolve().parents[1] / "hostfiles"


def write(tmp_path, text, name="hosts"):
    path = tmp_path / name
    path.write_text(text)
    return path


def test_a_hostfile(tmp_path):
    path = write(tmp_path, """# a cluster
node1 slots=2   # the head
ann@node2 slots = 1 max_slots=4

10.0.0.3
node4:3
""")
    entries = read_hostfile(path)
    assert entries == (HostEntry("node1", 2, 2), HostEntry("node2", 1, 3, "ann"),
                       HostEntry("10.0.0.3", 1, 5), HostEntry("node4", 3, 6))
    assert ranks_of(entries, 5, path) == ("node1", "node1", "node2", "10.0.0.3", "node4")
    with pytest.raises(UsageError, match=(
            r"8 ranks were asked for, but the 4 hosts of .*hosts have 7 slots")):
        ranks_of(entries, 8, path)


def test_addresses_of_ipv6(tmp_path):
    path = write(tmp_path, "fd00::2 slots=2\nann@fd00::3\n[fd00::4]:3 user=bo\n[::5]\n")
    assert read_hostfile(path) == (
        HostEntry("fd00::2", 2, 1), HostEntry("fd00::3", 1, 2, "ann"),
        HostEntry("fd00::4", 3, 3, "bo"), HostEntry("::5", 1, 4))


@pytest.mark.parametrize(("text", "says"), [
    ("[fd00::2\n", r"'\[fd00::2' is not a valid host name"),
    ("a\nb\na slots=2\n", r"hosts:3: a is listed twice \(first on line 1\)"),
    ("a slots=two\n", r"hosts:1: 'two' slots"),
    ("a slots=0\n", r"hosts:1: '0' slots"),
    ("a slots=-1\n", r"'-1' slots"),
    ("a slots=3 max_slots=2\n", r"slots=3 exceeds max_slots=2"),
    ("\na slot=3\n", r"hosts:2: unknown key 'slot'; did you mean slots\?"),
    ("a 4\n", r"unknown key '4'"),
    ("slots=4\n", r"is not a host name: write"),
    ("a,b slots=2\n", r"'a,b' is not a valid host name"),
    ("-oProxyCommand=x\n", r"is not a host name: write"),
    ("-x\n", r"'-x' is not a valid host name"),
    ("# nothing\n\n", r"names no host"),
])
def test_bad_hostfiles_name_file_and_line(tmp_path, text, says):
    with pytest.raises(UsageError, match=says):
        read_hostfile(write(tmp_path, text))


def test_no_hostfile(tmp_path):
    with pytest.raises(UsageError, match="No such file"):
        read_hostfile(tmp_path / "none")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UsageError, match="not UTF-8"):
        read_hostfile(tmp_path / "binary")


NAME = st.from_regex(r"[a-z][a-z0-9.-]{0,8}", fullmatch=True)


@given(st.lists(st.tuples(NAME, st.integers(1, 99)), min_size=1, unique_by=lambda p: p[0]))
def test_hostfiles_round_trip(tmp_path_factory, hosts):
    path = write(tmp_path_factory.mktemp("h"), "".join(f"{n} slots={k}\n" for n, k in hosts))
    assert [(e.host, e.slots) for e in read_hostfile(path)] == hosts


NODES = """
layers = [10, 12, 12, 6]
link = "gigabit"
[defaults]
threads = 4
memory = "8 GiB"
[node."old*"]
profile = "i5-2400"
threads = 2
memory = "7.5 GB"
[node.old3]
role = "spare"
device = "gpu:1"
[node."*3"]
role = "draft"
numa = 1
[node.big]
role = "head"
threads-draft = 6
numa = "distribute"
gpu_layers = 20
[rank.2]
proposer = "prompt-lookup"
threads = 1
[rank.5]
draft = "small.gguf"
"""


def test_a_nodes_file(tmp_path):
    nodes = read_nodes(write(tmp_path, NODES, "hosts.toml"))
    assert (nodes.layers, nodes.link) == ((10, 12, 12, 6), "gigabit")
    assert nodes.of("other") == NodeSettings(threads=4, memory=8 * 2**30)
    assert nodes.of("old1.lab.example") == NodeSettings(
        profile="i5-2400", threads=2, memory=7_500_000_000)
    # patterns in the file's order, the host's own name last
    assert nodes.of("old3") == NodeSettings(
        profile="i5-2400", threads=2, memory=7_500_000_000, role="spare", device="gpu:1",
        numa="1")
    assert nodes.of("big").options() == {
        "threads": 4, "threads_draft": 6, "gpu_layers": 20, "numa": "distribute"}
    assert nodes.of("old3").options() == {"threads": 2, "gpu_layers": 100_000, "device": "cuda"}
    assert nodes.of("big").options(given={"threads", "numa"}) == {
        "threads_draft": 6, "gpu_layers": 20}
    second = nodes.of("old1", 2)  # a rank's own settings come after its host's
    assert (second.proposer, second.threads, second.profile) == ("prompt-lookup", 1, "i5-2400")
    assert second.drafts
    assert second.waits
    assert nodes.of("other", 5).drafts
    assert not nodes.of("old1", 1).drafts


@pytest.mark.parametrize(("host", "rank", "key"), [("big", 2, "proposer"), ("big", 5, "draft")])
def test_a_rank_does_not_propose_tokens_in_another_role(tmp_path, host, rank, key):
    nodes = read_nodes(write(tmp_path, NODES, "hosts.toml"))
    with pytest.raises(UsageError, match=rf'rank {rank} on {host} has role = "head" and {key}'):
        nodes.of(host, rank)


@pytest.mark.parametrize(("text", "says"), [
    ("[default]\n", r"unknown field `default`.*it has layers, link, \[defaults\]"),
    ("[node.a]\nthread = 2\n", r"\[node.\"a\"\] has an unknown key 'thread'; did you mean threads"),
    ("[node.a]\nrole = \"sparse\"\n", r"role is 'sparse'; did you mean spare\?"),
    ("[node.a]\nnuma = \"distibute\"\n", r"did you mean distribute\?"),
    ("[node.a]\nnuma = true\n", r"numa is True"),
    ("[node.a]\nmac = \"aa:bb\"\n", r"mac is 'aa:bb'"),
    ("[node.a]\ndevice = \"tpu\"\n", r"device is 'tpu'"),
    ("[node.a]\nmemory = \"8 gigs\"\n", r"memory is '8 gigs'"),
    ("[node.a]\nthreads = 2.5\n", r"threads is .*Expected `int"),
    ("[node.a]\nthreads = true\n", r"threads is .*Expected `int"),
    ("[node.a]\nprofile = 3\n", r"profile is 3: Expected `str`"),
    ("[node.a]\ngroup = 3\n", r"group is 3: Expected `str`"),
    ("[node]\na = 3\n", r"Expected `object`, got `int` - at `\$.node"),
    ("[rank.a]\nthreads = 2\n", r"Expected `int`, got `str`.*`\$.rank.*\[rank.NUMBER\]"),
    ("[rank]\n3 = 2\n", r"Expected `object`, got `int` - at `\$.rank"),
    ("rank = 3\n", r"`\$.rank`.*\[rank.NUMBER\]"),
    ("[rank.3]\nproposer = 3\n", r"\[rank.3\]: proposer is 3: Expected `str`"),
    ("[rank.3]\ndraft = 3\n", r"draft is 3: Expected `str`"),
    ("node = 3\n", r"`\$.node`; it has .*\[node"),
    ("defaults = 3\n", r"`\$.defaults`; it has"),
    ("layers = []\n", r"length >= 1 - at `\$.layers`"),
    ("layers = [1, -2]\n", r"`int` >= 0 - at `\$.layers\[1\]`"),
    ("link = 3\n", r"Expected `str`, got `int` - at `\$.link`"),
    ("link = \n", r"not valid TOML"),
])
def test_bad_nodes_files_name_the_place(tmp_path, text, says):
    with pytest.raises(UsageError, match=says):
        read_nodes(write(tmp_path, text, "hosts.toml"))


@pytest.mark.parametrize(("value", "size"), [
    (1024, 1024), ("8 GiB", 8 * 2**30), ("8gb", 8 * 10**9), ("1.5 MiB", 3 * 2**19), ("77", 77),
    ("2 TiB", 2 * 2**40),
])
def test_sizes(value, size):
    assert parse_bytes(value, "memory") == size


@pytest.mark.parametrize("value", [0, -5, "", "GiB", "8 EiB", 2.5, True, None, "1e9"])
def test_bad_sizes(value):
    with pytest.raises(UsageError, match="memory is"):
        parse_bytes(value, "memory")


def test_the_file_beside_the_hostfile(tmp_path):
    path = write(tmp_path, "a\n", "lab")
    assert nodes_file_beside(path) is None
    beside = write(tmp_path, "", "lab.toml")
    assert nodes_file_beside(path) == beside


def test_settings_fill_what_the_command_line_left_open(tmp_path, monkeypatch):
    monkeypatch.setenv("PIPEINFER_GPU_LAYERS", "3")
    path = str(write(tmp_path, NODES, "hosts.toml"))
    resolved = apply(parse(["--nodes", path, "-td", "1"]), "big")
    config, origin = resolved.config.job.model, resolved.origin
    assert (config.threads, config.threads_draft, config.gpu_layers) == (4, 1, 20)
    assert origin["threads"] == origin["gpu_layers"] == f"nodes file {path}"
    assert origin["threads_draft"] == "command line"
    assert f"nodes file {path}" in resolved.show()
    without = parse([])
    assert apply(without, "big") is without
    monkeypatch.setenv("PIPEINFER_NODES", path)
    by_environment = parse([])
    assert apply(by_environment, "old1").config.job.model.threads == 2


def test_the_head_is_rank_0(tmp_path):
    nodes = read_nodes(write(tmp_path, NODES, "hosts.toml"))
    check_head(nodes, ["big", "old1", "old2"])
    check_head(nodes, ["big", "big"])
    check_head(nodes, ["old1", "old2"])
    with pytest.raises(UsageError, match=r"makes big the head, but rank 0 runs on old1"):
        check_head(nodes, ["old1", "big"])


@pytest.mark.parametrize("hostfile", sorted(p for p in HOSTFILES.glob("*") if not p.suffix),
                         ids=lambda p: p.name)
def test_the_hostfiles_that_come_along(hostfile):
    entries = read_hostfile(hostfile)
    beside = nodes_file_beside(hostfile)
    assert beside is not None
    nodes = read_nodes(beside)
    check_head(nodes, ranks_of(entries, sum(e.slots for e in entries), hostfile))
    size = {"localhost": 1, "xeon": 8, "beowulf-hetero": 13}.get(hostfile.name)
    assert size is None or len(entries) == size
    for entry in entries:
        assert hostfile.name == "localhost" or nodes.of(entry.host).profile


@pytest.fixture
def two_sockets(tmp_path):
    for node, cpus in enumerate(("0-3,8", "4-7,9", "\n")):  # the last has memory only
        (tmp_path / f"node{node}").mkdir()
        (tmp_path / f"node{node}" / "cpulist").write_text(cpus)
    return tmp_path


@pytest.mark.parametrize(("which", "local_rank", "local_size", "cpus"), [
    ("0", 0, 1, {0, 1, 2, 3, 8}), ("1", 0, 1, {4, 5, 6, 7, 9}),
    ("1", 1, 2, {6, 7}), ("0", 3, 8, {0, 1, 2, 3, 8}),
    ("per-rank", 0, 2, {0, 1, 2, 3, 8}), ("per-rank", 1, 2, {4, 5, 6, 7, 9}),
    ("per-rank", 2, 3, {2, 3}), ("per-rank", 1, 3, {4, 5, 6, 7, 9}),
    ("distribute", 0, 1, None), ("", 0, 1, None),
])
def test_numa_nodes(monkeypatch, two_sockets, which, local_rank, local_size, cpus):
    bound = set(range(16))

    def bind(pid, wanted):
        nonlocal bound
        bound = set(wanted)

    monkeypatch.setattr("os.sched_setaffinity", bind)
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: bound)
    monkeypatch.setattr(host, "_quota", lambda: 16)
    place = host.Place(0, local_size, None, 16, local_rank, local_size)
    host.bind_numa(which, place, two_sockets)
    assert bound == (set(range(16)) if cpus is None else cpus)
    if cpus is not None:
        sharers = local_size if which.isdigit() else len(range(local_rank % 2, local_size, 2))
        assert place.cores == max(1, 5 // sharers)


def test_what_a_host_with_two_sockets_has(two_sockets):
    for node in (0, 1):
        (two_sockets / f"node{node}" / "meminfo").write_text(
            f"Node {node} MemTotal:       {node + 1}000 kB\nNode {node} MemFree: 7 kB\n")
        (two_sockets / f"node{node}" / "distance").write_text("10 21 30\n")
    assert host.numa_nodes(two_sockets) == [(0, 5, 1000 * 1024, (10, 21, 30)),
                                            (1, 5, 2000 * 1024, (10, 21, 30))]


BOUND = """
import sys
from pathlib import Path
from pipeinfer import host
host.bind_numa("0", host.Place(0, 1, None, 2, 0, 1), Path(sys.argv[1]))
print(Path("/proc/self/numa_maps").read_text())
"""


def test_pages_come_from_the_ranks_own_node(two_sockets):
    if not Path("/proc/self/numa_maps").exists():
        pytest.skip("this kernel shows no places of pages")
    done = subprocess.run([sys.executable, "-c", BOUND, two_sockets], capture_output=True,
                          text=True, check=True)
    assert " prefer:0 " in done.stdout


@pytest.mark.parametrize(("given", "numa", "local_size", "bound"), [
    ({}, "", 2, "per-rank"), ({}, "", 3, "per-rank"), ({}, "", 1, ""), ({"numa": "off"}, "", 2, ""),
    ({"numa": "distribute"}, "", 2, ""), ({}, "off", 2, "off"), ({}, "1", 2, "1")])
def test_ranks_are_spread_over_the_sockets_by_default(monkeypatch, two_sockets, given, numa,
                                                      local_size, bound):
    nodes, taken = host.numa_nodes(two_sockets), []
    monkeypatch.setattr(host, "numa_nodes", lambda: nodes)
    monkeypatch.setattr(host, "bind_numa", lambda which, place: taken.append(which))
    place = host.Place(0, local_size, None, 16, 0, local_size)
    config = settle(JobConfig.of(**given), place, NodeSettings(numa=numa))
    assert config.model.numa == given.get("numa", "")
    settle(config, place, NodeSettings(numa=numa))  # as before each measurement
    assert taken == [bound, bound]


def test_a_numa_node_that_is_not_there(two_sockets):
    with pytest.raises(UsageError, match=r"no NUMA node 7 \(it has 0, 1\)"):
        host.bind_numa("7", host.Place(0, 1, None, 2, 0, 1), two_sockets)


def test_a_session_takes_its_hosts_settings(tmp_path, monkeypatch):
    import os
    import socket

    from pipeinfer.cluster.launch import join

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    before = os.sched_getaffinity(0)
    path = write(tmp_path, f'[node."{socket.gethostname()}"]\nthreads = 1\nnuma = 0\n'
                 'device = "gpu:1"\ngpu_layers = 0\n', "hosts.toml")
    try:
        with join(JobConfig.of(nodes=str(path), ctx=128)).lead() as session:
            assert session.stages[1]["threads"] == 1
            assert session.hosts[0].settings.device == "gpu:1"
    finally:
        os.sched_setaffinity(0, before)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "0"
    path.write_text('[defaults]\nmemory = "1 MiB"\n')
    with (pytest.raises(PlanError, match=r"has 0 MiB: it lacks"),
          join(JobConfig.of(nodes=str(path))).lead()):
        pass


def test_ranks_of_a_host_may_be_a_group_of_their_own(tmp_path):
    nodes = read_nodes(write(tmp_path, "[node.\"a*\"]\ngroup = \"rack1\"\n[node.b]\n"
                                       "group = \"host\"\n"))
    names = [group_of(RankInfo(rank, name, settings=nodes.of(name)))
             for rank, name in enumerate(("a1", "a2", "b", "b", "c"))]
    assert names[0] == names[1] == "rack1"
    assert names[2] == names[3] not in (names[0], names[4])
    assert names[4] == ""
