"""A Beowulf cluster on one machine: network namespaces as hosts, with real links and real sshd.

    python -m tests.kit.namespaces --nodes 5 --slow 3:0.25 -- pipeinfer generate
    python -m tests.kit.namespaces --nodes 3 -- bash        # a shell on node1

Every node has its own network namespace behind a switch (a bridge in a namespace of its own, veth
links, `tc tbf` on both ends), its own host name, `/etc/hosts`, sshd with its own key, a cgroup
with a processor quota, and a second network that leads nowhere, as lab machines have. A command
that starts with `pipeinfer` runs over all nodes through launch/ssh, another one on node1.

Nothing stays behind: leaving cleans up, a watcher does when this process is killed, and a start
clears what both have left. Processes, memory and disks are shared; only `private` directories are
each node's own. Needs root. Knows nothing about models.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
STATE = Path("/run/pipeinfer-namespaces")  #: one directory per cluster, named after its process
TOOLS = ("ip", "tc", "sshd", "ssh", "ssh-keygen", "nsenter", "unshare", "mount")
_PERIOD_US, _LEAST_US = 10_000, 1_000
_LOG_IN = 30.0  #: seconds for a log-in that runs nothing
_CGROUP = Path("/sys/fs/cgroup")
_OUTER = ("OMPI_", "PMIX_", "PMI_", "PRTE_")


class Refused(Exception):
    """This machine does not allow it; the text says why."""


@functools.cache
def why_not() -> str:
    """Why no such cluster can be made here, or an empty text. Makes and removes a small one, and
    logs in from one of its nodes to the other."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    missing = [tool for tool in TOOLS if _tool(tool) is None]
    if missing:
        return f"not installed: {', '.join(missing)} (apt install iproute2 openssh-server)"
    try:
        with Cluster(2) as cluster:
            options = shlex.split(cluster.environment()["PIPEINFER_SSH_ARGS"])
            done = cluster.run(["ssh", "-v", "-o", "LogLevel=DEBUG1", *options, "node2", "true"],
                               timeout=_LOG_IN)
        return "" if done.returncode == 0 else f"node1 cannot log in at node2: {done.stderr[-600:]}"
    except (Refused, AssertionError) as error:
        return str(error)


def _tool(name: str) -> str | None:
    return shutil.which(name, path=os.environ.get("PATH", "") + ":/usr/sbin:/sbin:/usr/bin:/bin")


def _run(*command: str) -> str:
    """Standard output of a command that has to work. Raises Refused."""
    path = _tool(command[0])
    assert path is not None, command[0]
    done = subprocess.run([path, *command[1:]], capture_output=True, text=True, timeout=20,
                          check=False, stdin=subprocess.DEVNULL)
    if done.returncode:
        raise Refused(f"`{shlex.join(command)}` failed: {done.stderr.strip() or done.stdout}")
    return done.stdout


class Cluster:
    """`n_nodes` hosts, node1 to nodeN. Use as a context manager; raises Refused.

    rate: of every link, as tc writes it ("" for no limit). burst: bytes that pass at once before
    that; a small one makes short transfers take what a wire takes, too. delay, loss: seconds that a
    frame takes, and the share that is lost (tests/kit/bad_wires.py); then nodes cannot be
    unplugged. cpu: cores per node, 0 for
    no limit; cpus: other values for some nodes. private: directories that are empty and its own on
    every node but node1, which keeps the real ones. sshd: whether they can be logged in to.
    host_name: the host name of all nodes, "" for node1, node2 and so on.
    """

    def __init__(self, n_nodes: int, *, rate: str = "1gbit", cpu: float = 0.0,
                 cpus: Mapping[int, float] | None = None, private: Sequence[str | Path] = (),
                 burst: str = "256kb", delay: float = 0.0, loss: float = 0.0,
                 sshd: bool = True, host_name: str = "") -> None:
        self._sshd, self._host_name = sshd, host_name
        self.delay, self.loss = delay, loss
        self.n_nodes, self.rate, self.burst = n_nodes, rate, burst
        self.cpus = {node: (cpus or {}).get(node, cpu) for node in self.nodes}
        self.private = [str(path) for path in private]
        self.id = f"pi{os.getpid():x}x{time.monotonic_ns() // 1000 % 4096:x}"
        self.state = STATE / self.id
        third = os.getpid() % 250
        self.subnet = f"10.{200 + os.getpid() // 250 % 50}.{third}.0/24"
        self._base = self.subnet.rsplit(".", 1)[0]
        self.hostfile = self.state / "hosts"
        self._daemons: list[subprocess.Popen[bytes]] = []
        self._started: list[subprocess.Popen[str]] = []
        self._watcher: subprocess.Popen[bytes] | None = None
        self._wires: subprocess.Popen[bytes] | None = None

    @property
    def nodes(self) -> range:
        """Numbers of the nodes, from 1."""
        return range(1, self.n_nodes + 1)

    def address(self, node: int) -> str:
        """A node's address on the switch."""
        return f"{self._base}.{node}"

    # --- making and removing ------------------------------------------------------------------

    def __enter__(self) -> Cluster:
        clear_leftovers()
        try:
            self._make()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Remove everything, what runs included; safe to call twice."""
        remove(self.id)
        for process in self._started:
            process.kill()
            process.communicate(timeout=20)
        if self._wires is not None:
            self._wires.kill()
            self._wires.communicate(timeout=10)
            self._wires = None
        for daemon in self._daemons:
            daemon.wait(timeout=10)
        if self._watcher is not None:
            assert self._watcher.stdin is not None
            self._watcher.stdin.close()
            self._watcher.wait(timeout=10)
            self._watcher = None

    def _make(self) -> None:
        self.state.mkdir(parents=True, mode=0o700)
        (self.state / "owner").write_text(f"{os.getpid()} {_started(os.getpid())}")
        self._watcher = subprocess.Popen(
            [sys.executable, str(Path(__file__).resolve()), "--watch", self.id],
            stdin=subprocess.PIPE, start_new_session=True)
        _run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(self.state / "key"))
        lines = ["127.0.0.1 localhost"] + [f"{self.address(n)} node{n}" for n in self.nodes]
        (self.state / "etc-hosts").write_text("\n".join(lines) + "\n")
        self.hostfile.write_text("".join(f"node{n} slots=1\n" for n in self.nodes))
        switch = f"{self.id}sw"
        _run("ip", "netns", "add", switch)
        _run("ip", "-n", switch, "link", "add", "br0", "type", "bridge")
        _run("ip", "-n", switch, "link", "set", "br0", "up")
        for node in self.nodes:
            _run("ip", "netns", "add", f"{self.id}n{node}")
        if self.delay or self.loss:
            self._make_bad_wires()
        for node in self.nodes:
            self._make_links(node, switch)
            self._make_cgroup(node)
        for node in self.nodes if self._sshd else ():
            self._start_sshd(node)
        if self._sshd:
            self._await_sshd()

    def _make_links(self, node: int, switch: str) -> None:
        space, port = f"{self.id}n{node}", f"port{node}"
        _run("ip", "-n", space, "link", "set", "lo", "up")
        ends = [(space, "eth0")]
        if self._wires is None:
            ends.append((switch, port))
            _run("ip", "link", "add", "eth0", "netns", space, "type", "veth", "peer", "name",
                 port, "netns", switch)
            _run("ip", "-n", switch, "link", "set", port, "master", "br0", "up")
        _run("ip", "-n", space, "address", "add", f"{self.address(node)}/24", "dev", "eth0")
        _run("ip", "-n", space, "link", "set", "eth0", "up")
        # The same unreachable network on every node, like a container bridge.
        _run("ip", "-n", space, "link", "add", "decoy0", "type", "veth", "peer", "name", "decoy1")
        _run("ip", "-n", space, "address", "add", f"172.29.0.{node}/24", "dev", "decoy0")
        for name in ("decoy0", "decoy1"):
            _run("ip", "-n", space, "link", "set", name, "up")
        if self.rate:
            for where, device in ends:
                _run("tc", "-n", where, "qdisc", "add", "dev", device, "root", "tbf", "rate",
                     self.rate, "burst", self.burst, "latency", "50ms")

    def _make_bad_wires(self) -> None:
        """Start the process that carries frames. Raises Refused."""
        self._wires = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("bad_wires.py")), "--delay",
             str(self.delay), "--loss", str(self.loss),
             *(f"/run/netns/{self.id}n{node}" for node in self.nodes)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            start_new_session=True)
        assert self._wires.stdout is not None
        assert self._wires.stderr is not None
        if self._wires.stdout.readline() != b"ready\n":
            said = self._wires.stderr.read().decode(errors="replace").strip()
            raise Refused(f"cards that lose frames cannot be made here: {said[-300:]}")

    def _make_cgroup(self, node: int) -> None:
        cores = self.cpus[node]
        try:
            (_cgroup_base() / f"{self.id}n{node}").mkdir()
            if cores:
                self.set_quota(node, cores)
        except OSError as error:
            if cores:
                raise Refused(f"processor quotas by cgroup are not available: {error}") from error

    def set_quota(self, node: int, cores: float) -> None:
        """Give a node so many cores from now on. Raises OSError where groups cannot do that."""
        period = max(_PERIOD_US, int(_LEAST_US / cores))
        quota = max(_LEAST_US, int(cores * period))
        group = _cgroup_base() / f"{self.id}n{node}"
        if (group / "cpu.max").exists():
            (group / "cpu.max").write_text(f"{quota} {period}")
            return
        for name, value in (("quota", -1), ("period", period), ("quota", quota)):
            (group / f"cpu.cfs_{name}_us").write_text(str(value))

    def _start_sshd(self, node: int) -> None:
        sshd = _tool("sshd")
        assert sshd is not None
        key = self.state / f"host-key-{node}"
        _run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key))
        config = self.state / f"sshd-{node}.conf"
        config.write_text(
            f"Port 22\nListenAddress {self.address(node)}\nHostKey {key}\n"
            f"AuthorizedKeysFile {self.state / 'key.pub'}\nPidFile none\nStrictModes no\n"
            "UsePAM no\nPermitRootLogin prohibit-password\nPasswordAuthentication no\n"
            "MaxStartups 100\n")
        Path("/run/sshd").mkdir(exist_ok=True)
        with (self.state / f"sshd-{node}.log").open("wb") as log:
            self._daemons.append(subprocess.Popen(
                self.command(node, [sshd, "-D", "-e", "-f", str(config)]), stdout=log,
                stderr=log, stdin=subprocess.DEVNULL, start_new_session=True))

    def _await_sshd(self) -> None:
        deadline = time.monotonic() + 20
        waiting = set(self.nodes)
        while waiting:
            node = min(waiting)
            log = (self.state / f"sshd-{node}.log").read_text(errors="replace")
            if "Server listening" in log:
                waiting.discard(node)
            elif self._daemons[node - 1].poll() is not None or time.monotonic() > deadline:
                raise Refused(f"sshd of node{node} does not start: {log.strip()[-300:]}")
            else:
                time.sleep(0.02)

    # --- use ----------------------------------------------------------------------------------

    def command(self, node: int, command: Sequence[str]) -> list[str]:
        """`command` as it has to be started here to run on a node."""
        etc = shlex.quote(str(self.state / "etc-hosts"))
        inside = [f"hostname {self._host_name or f'node{node}'}", f"mount --bind {etc} /etc/hosts"]
        for i, path in enumerate(self.private if node > 1 else []):
            own = self.state / f"disk-{node}-{i}"
            own.mkdir(exist_ok=True)
            inside.append(f"mount --bind {shlex.quote(str(own))} {shlex.quote(path)}")
        inside.append('exec "$@"')
        group = _cgroup_base() / f"{self.id}n{node}"
        join = f"echo $$ >{shlex.quote(str(group / 'cgroup.procs'))}; " if group.exists() else ""
        space = f"--net=/run/netns/{self.id}n{node}"
        return ["sh", "-ec", join + 'exec "$@"', "sh", "nsenter", space, "unshare", "--mount",
                "--uts", "sh", "-ec", "\n".join(inside), "sh", *command]

    def environment(self, **more: str) -> dict[str, str]:
        """What a command on a node needs: the key for ssh, and the hostfile's path."""
        env = {k: v for k, v in os.environ.items() if not k.startswith(_OUTER)}
        key = self.state / "key"
        return env | {
            "PIPEINFER_SSH_ARGS": f"-i {key} -o StrictHostKeyChecking=no -o "
                                  "UserKnownHostsFile=/dev/null -o LogLevel=ERROR",
            "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'benchmarks' / 'lab'}",
            "PIPEINFER_HOSTFILE": str(self.hostfile), **more,
        }

    def start(self, command: Sequence[str], *, timeout: float, node: int = 1, **env: str
              ) -> subprocess.Popen[str]:
        """Start on a node, with pipes; mpirun ends itself shortly before `timeout`."""
        self._started.append(subprocess.Popen(
            self.command(node, command), stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            stdin=subprocess.DEVNULL, text=True, start_new_session=True,
            env=self.environment(MPIEXEC_TIMEOUT=str(max(1, int(timeout) - 5)), **env)))
        return self._started[-1]

    def run(self, command: Sequence[str], *, timeout: float, node: int = 1, **env: str
            ) -> subprocess.CompletedProcess[str]:
        """Run on a node; at the deadline everything on all nodes but sshd is killed."""
        process = self.start(command, timeout=timeout, node=node, **env)
        try:
            out, err = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            self.kill_jobs()
            out, err = process.communicate(timeout=10)
            raise AssertionError(
                f"the job did not end within {timeout} s\n{out[-2000:]}\n{err[-4000:]}") from None
        return subprocess.CompletedProcess(list(command), process.returncode, out, err)

    def pipeinfer(self, arguments: Sequence[str], *, timeout: float, ranks: int = 0, **env: str
                  ) -> subprocess.CompletedProcess[str]:
        """`pipeinfer ARGUMENTS` over all nodes through launch/ssh."""
        return self.run(self.launch(arguments, ranks), timeout=timeout, node=1, **env)

    def launch(self, arguments: Sequence[str], ranks: int = 0) -> list[str]:
        """The command that runs `pipeinfer ARGUMENTS` over all nodes."""
        return [str(ROOT / "launch" / "ssh"), str(self.hostfile), str(ranks or self.n_nodes),
                *arguments]

    def kill_jobs(self) -> None:
        """SIGKILL to every process of every node but the ssh daemons that listen."""
        keep = {daemon.pid for daemon in self._daemons}
        for node in self.nodes:
            for pid in self.pids(node):
                if pid not in keep:
                    with contextlib.suppress(OSError):
                        os.kill(pid, signal.SIGKILL)

    def pids(self, node: int) -> list[int]:
        """Process ids of everything that runs on a node."""
        return _pids(f"{self.id}n{node}")

    def unplug(self, node: int) -> None:
        """Cut a node off: its port of the switch goes down."""
        _run("ip", "-n", f"{self.id}sw", "link", "set", f"port{node}", "down")

    def plug(self, node: int) -> None:
        """Undo `unplug`."""
        _run("ip", "-n", f"{self.id}sw", "link", "set", f"port{node}", "up")

    def separate(self, one: int, other: int) -> None:
        """Cut the link between two nodes, both ways; both go on hearing all others. What they send
        each other goes to an address that no card has, so nobody is told."""
        for here, there in ((one, other), (other, one)):
            _run("ip", "-n", f"{self.id}n{here}", "neighbour", "replace", self.address(there),
                 "lladdr", "02:00:00:00:00:01", "nud", "permanent", "dev", "eth0")

    def sent_bytes(self, node: int) -> int:
        """Bytes that a node has sent over its link."""
        text = _run("ip", "-j", "-s", "-n", f"{self.id}n{node}", "link", "show", "eth0")
        return int(json.loads(text)[0]["stats64"]["tx"]["bytes"])


# --- cleaning up ------------------------------------------------------------------------------


def _cgroup_base() -> Path:
    """Where groups with a processor quota are made: version 1's cpu hierarchy, or version 2."""
    if (_CGROUP / "cpu" / "cpu.cfs_quota_us").exists() or (_CGROUP / "cpu" / "tasks").exists():
        return _CGROUP / "cpu"
    with contextlib.suppress(OSError):
        (_CGROUP / "cgroup.subtree_control").write_text("+cpu")
    return _CGROUP


def _pids(space: str) -> list[int]:
    """Processes whose network is the namespace `space`."""
    try:
        wanted = (Path("/run/netns") / space).stat().st_ino
    except OSError:
        return []
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                if os.stat(entry / "ns" / "net").st_ino == wanted:
                    found.append(int(entry.name))
    return found


def remove(cluster: str) -> None:
    """Kill what runs in a cluster's namespaces and delete all that bears its name."""
    spaces = sorted(path.name for path in Path("/run/netns").glob(f"{cluster}*"))
    for _ in range(50):
        pids = [pid for space in spaces for pid in _pids(space)]
        if not pids:
            break
        for pid in pids:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)
    for space in spaces:
        with contextlib.suppress(Refused):
            _run("ip", "netns", "delete", space)
    for group in (*(_CGROUP / "cpu").glob(f"{cluster}n*"), *_CGROUP.glob(f"{cluster}n*")):
        for _ in range(50):
            with contextlib.suppress(OSError):
                group.rmdir()
            if not group.exists():
                break
            time.sleep(0.02)
    shutil.rmtree(STATE / cluster, ignore_errors=True)


def clear_leftovers() -> None:
    """Remove clusters whose owner is gone."""
    for state in STATE.glob("pi*"):
        if not _alive(state / "owner"):
            remove(state.name)


def _alive(owner: Path) -> bool:
    try:
        pid, started = owner.read_text().split()
    except (OSError, ValueError):
        return False
    return _started(int(pid)) == started


def _started(pid: int) -> str:
    """When a process began, in the kernel's ticks: tells it from a later one of its number."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return ""


def _watch(cluster: str) -> None:
    """Wait until the owner closes the pipe, which its death does too; then clean up."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    sys.stdin.buffer.read()
    remove(cluster)


# --- the command ------------------------------------------------------------------------------


def _slow(text: str) -> tuple[int, float]:
    node, _, share = text.partition(":")
    return int(node), float(share)


@contextlib.contextmanager
def _leaving_cleanly() -> Iterator[None]:
    def leave(number: int, _: object) -> None:
        raise SystemExit(128 + number)

    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, leave)
    yield


def main() -> None:
    """See the module's docstring."""
    if sys.argv[1:2] == ["--watch"]:
        _watch(sys.argv[2])
        return
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--nodes", type=int, default=3)
    parser.add_argument("--rate", default="1gbit", help="rate of every link; none: no limit")
    parser.add_argument("--cpu", type=float, default=0.0, help="cores per node; 0: no limit")
    parser.add_argument("--slow", type=_slow, action="append", default=[], metavar="NODE:SHARE",
                        help="give a node this share of --cpu (default: of its part of the cores)")
    parser.add_argument("--private", action="append", default=[], metavar="DIRECTORY",
                        help="directory that each node has of its own, empty except on node1")
    parser.add_argument("command", nargs="+")
    args = parser.parse_args()
    cpu = args.cpu or (len(os.sched_getaffinity(0)) / args.nodes if args.slow else 0.0)
    reason = why_not()
    if reason:
        sys.exit(f"no cluster can be built here: {reason}")
    command = args.command
    with _leaving_cleanly(), Cluster(
        args.nodes, rate="" if args.rate == "none" else args.rate, cpu=cpu, private=args.private,
        cpus={node: share * cpu for node, share in args.slow},
    ) as cluster:
        if command[0] == "pipeinfer":
            command = [str(ROOT / "launch" / "ssh"), str(cluster.hostfile), str(args.nodes),
                       *command[1:]]
        done = subprocess.run(cluster.command(1, command), env=cluster.environment(),
                              check=False)
    sys.exit(done.returncode)


if __name__ == "__main__":
    main()
