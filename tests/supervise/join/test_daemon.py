"""What a machine that has joined starts for the head, and what it refuses."""

from __future__ import annotations

import pytest

from pipeinfer.errors import UsageError
from pipeinfer.supervise.join.daemon import arguments_of, command_of, environment_of
from pipeinfer.supervise.launcher import Launcher

MPIRUN = Launcher("/opt/mpi/bin/mpirun", "openmpi", "5.0.11")
HYDRA = Launcher("/opt/mpich/bin/mpiexec", "hydra", "4.3.2")
#: as Open MPI 5.0.11 gives it to ssh
LINE = ("PRTE_PREFIX=/home/a/.venv;export PRTE_PREFIX;LD_LIBRARY_PATH=/home/a/.venv/lib:"
        "$LD_LIBRARY_PATH;export LD_LIBRARY_PATH;/home/a/.venv/bin/prted --daemonize "
        '--allow-run-as-root --prtemca ess "env" --prtemca ess_base_nspace "prterun-vm-27154@0" '
        '--prtemca ess_base_vpid 1 --prtemca ess_base_num_procs "2" --prtemca prte_hnp_uri '
        '"prterun-vm-27154@0.0;tcp://192.0.2.2:33089:64,24;tcp6://[fd00::2]:37227:64,24" '
        '--prtemca hwloc_default_binding_policy "none" --prtemca rmaps_default_mapping_policy '
        '"slot:oversubscribe" --prtemca state_base_recoverable "1" --prtemca PREFIXES '
        '"errmgr,ess" --prtemca plm_ssh_agent "/x/launch-agent" --prtemca plm_ssh_no_tree_spawn '
        '"1" --prtemca prte_if_include "10.1.2.0/24" --prtemca pmix_session_server "1" '
        '--prtemca plm "ssh"')


def test_the_daemon_of_this_machine_gets_the_arguments_of_the_head():
    kind, arguments = arguments_of(LINE)
    found = command_of(MPIRUN, kind, arguments)
    assert found[:4] == ["/opt/mpi/bin/prted", "--allow-run-as-root", "--prtemca", "ess"]
    assert found[found.index("prte_hnp_uri") + 1].startswith("prterun-vm-27154@0.0;tcp://192.0.2.2")
    assert found[found.index("prte_if_include") + 1] == "10.1.2.0/24"
    assert not {"--daemonize", "plm_ssh_agent", "/x/launch-agent"} & set(found)
    environ = environment_of(MPIRUN, {"PATH": "/bin", "LD_LIBRARY_PATH": "/lib"})
    assert environ["PRTE_PREFIX"] == "/opt/mpi"
    assert environ["LD_LIBRARY_PATH"] == "/opt/mpi/lib:/lib"


def test_the_line_for_a_user_of_sh_starts_the_same_daemon():
    line = f"( test ! -r ./.profile || . ./.profile; {LINE} )"
    assert arguments_of(line) == arguments_of(LINE)


def test_hydras_proxy_gets_them_too():
    """As MPICH 5.0.2 gives them to ssh."""
    line = ('"/home/a/bin/hydra_pmi_proxy" --control-port 192.0.2.1:34935 --rmk user '
            "--launcher ssh --launcher-exec /x/launch-agent --demux poll --pgid 0 --retries 10 "
            "--usize -1 --pmi-port 0 --gpus-per-proc -2 --gpu-subdevs-per-proc -2 --proxy-id 1")
    kind, arguments = arguments_of(line)
    assert command_of(HYDRA, kind, arguments) == [
        "/opt/mpich/bin/hydra_pmi_proxy",
        *line.replace("--launcher-exec /x/launch-agent ", "").split()[1:]]


def test_hydra_gets_the_heads_address_once_machines_have_joined():
    for own, more in (("", []), ("192.0.2.1", ["-localhost", "192.0.2.1"])):
        command = HYDRA.command(2, ["serve"], {"PATH": "/bin"}, "/x/hosts", agent="/x/agent",
                                own=own, tagged=False)
        at = command.index("-launcher-exec")
        assert command[at:command.index("-n")] == ["-launcher-exec", "/x/agent", *more]


@pytest.mark.parametrize(("kind", "arguments"), [
    ("hydra", []), ("sh", ["-c", "id"]), ("", [])])
def test_a_daemon_of_another_kind_is_refused(kind, arguments):
    with pytest.raises(UsageError, match="kind"):
        command_of(MPIRUN, kind, arguments)


@pytest.mark.parametrize("line", ["", "rm -rf /", "true; id"])
def test_a_line_that_starts_no_daemon_is_refused(line):
    with pytest.raises(UsageError, match="starts no daemon"):
        arguments_of(line)
