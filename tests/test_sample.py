"""Which tests run: the sample shows every behaviour, `--full` runs everything."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.rig.fixtures import LEFT_OUT
from tests.rig.launch import ROOT
from tests.support.sample import FULL, matrix, mostly_full

#: tests of which the sample has no case at all, and what shows the same there
ALONE = {
    "tests/namespaces/test_namespaces.py::test_long_and_lossy_links_change_no_token":
        "good links beside it, slow ones in tests/lab/test_faults.py",
    "tests/mpi/test_proposers.py::test_a_wide_window_is_one_exact_run_on_torch":
        "widths up to 48 in tests/backends/test_torch_backend.py, windows in runs beside it",
    "tests/mpi/test_chaos.py::test_requests_of_every_kind_outlive_a_stage_and_rank_0":
        "plain requests that outlive a stage beside it, rank 0 in tests/mpi/test_supervised.py",
    "benchmarks/gpu/test_padded.py::test_policies_write_what_a_padded_plain_loop_writes_on_a_vulkan"
    "_device": "padding in tests/backends/test_padded.py, whole jobs on the RPC device beside it",
    "benchmarks/gpu/test_padded.py::test_requests_beside_each_other_on_a_vulkan_device":
        "lanes that are chains in tests/scheduler/test_lanes.py",
    "benchmarks/gpu/test_padded.py::test_one_rank_with_a_device_among_ranks_without":
        "ranks that all have a device beside it, hosts without in tests/cluster/test_gpu_memory.py",
    "tests/mpi/test_chaos.py::test_what_cannot_be_survived_is_called_lost":
        "the verdicts by hand in test_chaos.py, a job whose last stage dies in test_serve.py",
    "tests/mpi/test_wide_losses.py::test_a_member_that_wakes_up_again_disturbs_nobody":
        "a member that stops in test_the_tokens_are_those_of_before",
    "tests/mpi/test_recovery.py::test_a_link_that_is_cut_from_the_start_costs_no_request_anything":
        "a link cut later beside it, one cut from the start in tests/cluster/test_assembly.py",
    "tests/namespaces/test_up.py::test_streams_outlive_a_host_that_leaves_and_comes_back":
        "a job moved under a stream in tests/supervise/test_up.py, which hosts it gets in "
        "tests/supervise/test_hosts.py, when they are asked in tests/supervise/test_rules.py",
    "tests/mpi/test_chaos.py::test_nothing_that_hits_the_whole_job_costs_a_client_a_token":
        "rank 0 and the HTTP process killed in tests/mpi/test_supervised.py, one that hangs in "
        "tests/supervise/test_http_door.py, full disks in test_journal.py and test_hosts.py",
    "tests/server/test_door.py::test_what_has_ended_or_has_lost_its_client_is_not_handed_over":
        "what is handed over in test_a_stream_goes_on_with_the_next_job",
    "tests/namespaces/test_getting_started.py::test_a_newcomer_gets_from_two_machines_to_a_chat":
        "the same launcher over hosts in tests/namespaces/test_namespaces.py",
    "benchmarks/serving/test_load.py::test_memory_is_flat_and_slow_readers_hold_nobody_up":
        "slow readers in tests/server/test_http.py, requests under load beside it",
    "tests/mpi/test_smollm2.py::test_it_is_what_a_server_takes_when_nothing_is_named":
        "which model is taken in tests/models/test_locate.py",
    "tests/strategies/test_sampling_law.py::test_the_joint_law_of_three_tokens":
        "the law of one token by 8,000 draws in tests/core/test_sampling.py; every policy writes "
        "what plain decoding writes with the same noise in tests/scheduler/test_scheduler.py",
    "tests/mpi/test_wide_moves.py::test_a_slow_members_slice_is_moved_while_requests_run":
        "moves between ranks beside it, when and where to in tests/cluster/test_balance.py",
    "tests/mpi/test_wide_mixtures.py::test_a_spare_takes_the_experts_of_a_lost_member":
        "a member of a mixture whose layers keep a state killed in tests/mpi/test_wide_states.py",
    "tests/mpi/test_torch_wide.py::test_stages_of_a_grid_may_be_on_different_backends":
        "ranks on different backends in tests/mpi/test_torch.py, grids on torch beside it",
    "tests/mpi/test_torch_wide.py::test_every_policy_gives_the_tokens_of_the_slices_on_one_rank":
        "slices on torch over ranks beside it, every policy over slices in tests/mpi/test_wide.py",
    "tests/mpi/test_torch.py::test_a_folder_is_served":
        "the command line with a folder beside it, a server in tests/mpi/test_serve.py",
    "tests/namespaces/test_cut.py::"
    "test_two_stages_that_do_not_hear_each_other_go_on_without_one_of_them":
        "such a link in tests/mpi/test_recovery.py, two members beside it",
    "tests/namespaces/test_namespaces.py::test_settings_of_single_hosts":
        "tests/test_nodes.py, a host of the nodes file in tests/mpi/test_plans.py",
    "tests/namespaces/test_namespaces.py::test_a_host_without_the_model_says_so":
        "test_a_stage_without_the_model_says_so in tests/mpi/test_distribute.py",
    "tests/mpi/test_hub.py::test_a_model_in_parts_is_the_model":
        "a model in parts over ranks in test_hosts_get_no_byte_of_layers_that_they_do_not_hold",
    "tests/server/test_page_status.py::test_a_key_is_asked_for_on_the_operators_page":
        "the same form in tests/server/test_page.py",
    "tests/mpi/test_distribute.py::test_a_spare_that_dies_while_it_receives_costs_the_other_nothing":
        "test_a_stage_killed_midway_leaves_its_layers_to_the_other",
    "tests/namespaces/test_door.py::test_a_stream_outlives_a_host_and_rank_0":
        "rank 0 killed under a stream in tests/mpi/test_supervised.py, hosts that do not answer in "
        "tests/cli/test_doctor_hosts.py",
    "benchmarks/gpu/test_gpu.py::test_the_rehearsal_on_an_rpc_device":
        "test_rows_on_an_rpc_device_where_its_library_is_built; the steps' life beside it",
    "benchmarks/gpu/test_gpu.py::test_the_rehearsal_on_a_vulkan_device":
        "the same; it needs a software driver for Vulkan, and minutes",
}
TESTS = """
import pytest
@pytest.mark.full
def test_long(): pass
def test_short(): pass
@pytest.mark.parametrize("n", [1, pytest.param(2, marks=pytest.mark.full)])
def test_cells(n): pass
"""


@pytest.mark.slow
@pytest.mark.parametrize(("args", "wanted", "says"), [
    (["test_it.py"], {"short", "cells[1]"}, "sample: 2 tests are left out"),
    (["test_it.py", "--full"], {"long", "short", "cells[1]", "cells[2]"}, "full run"),
    (["test_it.py::test_long", "test_it.py::test_cells[2]"], {"long", "cells[2]"}, "sample: 0"),
    (["test_it.py::test_cells"], {"cells[1]", "cells[2]"}, "sample: 0"),
])
def test_what_is_selected(tmp_path, args, wanted, says):
    (tmp_path / "test_it.py").write_text(TESTS)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = full\n")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "tests.rig.fixtures", "-v",
         "--basetemp", tmp_path / "inner", *args],  # nothing of other runs is cleaned up
        cwd=tmp_path, capture_output=True, text=True, check=False,
        env=os.environ | {"PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"})
    assert done.returncode == 0, done.stdout + done.stderr
    passed = [line.split()[0] for line in done.stdout.splitlines() if " PASSED" in line]
    assert {name.partition("::test_")[2] for name in passed} == wanted
    assert says in done.stdout
    assert ("deselected" in done.stdout) == ("2 tests" in says)


def test_what_is_left_out_has_a_sibling_that_runs(request):
    options = request.config.option
    if options.keyword or options.markexpr or any("::" in arg for arg in request.config.args):
        pytest.skip("something else chose the tests")
    run = {item.nodeid.partition("[")[0] for item in request.session.items}
    left_out = {name.partition("[")[0] for name in request.config.stash.get(LEFT_OUT, ())}
    assert left_out - run - set(ALONE) == set()


def left_out(cells):
    return {cell.values for cell in cells if FULL in cell.marks}


def test_a_matrix_shows_each_value_of_each_axis():
    cells = matrix("abc", [1, 2], "xyzw")
    assert len(cells) == 24
    shown = {cell.values for cell in cells} - left_out(cells)
    assert shown == {("a", 1, "x"), ("b", 2, "y"), ("c", 1, "z"), ("a", 2, "w")}


def test_most_cells_can_be_left_out():
    kept, other = mostly_full([1, 2], 2)[1], mostly_full([1, 2], 2)[0]
    assert (kept, left_out([other])) == (2, {(1,)})
    with pytest.raises(AssertionError):
        mostly_full([1, 2], 3)
