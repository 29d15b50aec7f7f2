"""`pipeinfer chaos`: what it plans, measures and says, and that it tells a lost token from a kept
one on real jobs."""

from __future__ import annotations

import json
import random
import tempfile

import pytest

from pipeinfer.core.grid import Grid
from pipeinfer.errors import UsageError
from pipeinfer_lab.chaos import soak, whole
from pipeinfer_lab.chaos.campaign import CampaignFile
from pipeinfer_lab.chaos.client import Answer, take
from pipeinfer_lab.chaos.command import chaos_command, plan
from pipeinfer_lab.chaos.report import Outcome, resumed, spread, summary, table
from pipeinfer_lab.chaos.trial import FAULTS, MOMENTS, bodies
from pipeinfer_lab.chaos.victims import Victims
from pipeinfer_lab.chaos.whole import DISKS, WHOLE, can_mount
from tests.kit import launch
from tests.kit.refusals import assert_refused
from tests.kit.sample import full

CHAOS = [*launch.PIPEINFER, "chaos"]


def test_time_until_a_stream_flows_again_is_the_end_of_its_longest_silence():
    assert resumed([1.0, 2.0, 2.1, 2.9, 3.0], death=2.0) == pytest.approx(0.9)
    assert resumed([1.0, 2.05, 2.06, 4.0, 4.1, 4.2], death=2.0) == pytest.approx(2.0)
    assert resumed([5.0], death=2.0) == pytest.approx(3.0)
    assert resumed([1.0, 1.5], death=2.0) is None


def test_a_campaign_is_the_same_for_a_seed_and_covers_what_was_asked():
    def shape(**more):
        options = {"faults": ("kill",), "moments": ("random",), "runs": 40, "seed": 3, **more}
        return [(o.fault, o.moment) for o in plan(**options)]

    assert shape() == shape()
    assert shape() != shape(seed=4)
    assert {moment for _, moment in shape()} == set(MOMENTS)
    every = {*FAULTS} - (set() if can_mount() else {*DISKS})
    assert {fault for fault, _ in shape(faults=("all",))} == every - {"cut-link"}
    assert {fault for fault, _ in shape(faults=("all",), two=True)} == every
    assert set(shape(faults=("kill", "stop"), moments=("decode",))) == {
        ("kill", "decode"), ("stop", "decode")}
    assert bodies(4, 80, 1) == bodies(4, 80, 1) != bodies(4, 80, 2)
    assert {"seed" in body for body in bodies(4, 80, 1)} == {True, False}


def test_mixed_requests_have_every_kind_in_turn():
    made = bodies(7, 80, 1, mixed=True)
    assert [next(iter({*body} & {"response_format", "grammar", "n", "logprobs", "stop",
                                 "presence_penalty", "tools"})) for body in made] == [
        "response_format", "grammar", "n", "logprobs", "stop", "presence_penalty", "tools"]
    assert ["messages" in body for body in made] == [False] * 6 + [True]


def test_further_choices_follow_the_first_however_they_were_mixed():
    answer = Answer()
    for index, token in ((0, 1), (1, 7), (0, 2), (2, 9), (1, 8), (0, 3)):
        take(answer, {"choices": [{"index": index, "text": str(token)}],
                      "pipeinfer": {"tokens": [token]}}, None)
    assert (answer.tokens, answer.text, len(answer.times)) == ([1, 2, 3], "123", 6)
    answer.whole()
    assert (answer.tokens, answer.trouble) == ([1, 2, 3, 7, 8, 9], "")


@pytest.mark.full("plain requests that outlive a stage beside it, rank 0 in "
                  "tests/mpi/test_supervised.py")
def test_requests_of_every_kind_outlive_a_stage_and_rank_0():
    done = launch.run(1, [*CHAOS, "--mixed", "--runs", "2", "--requests", "7", "--ranks", "4",
                          "--fault", "kill", "--fault", "kill-head", "--moment", "decode",
                          "--tokens", "60", "--seconds", "120", "--json"], timeout=400)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["clean"] == 2


def test_victims_are_known_by_what_they_are():
    rng = random.Random(1)
    holders = [1, 2, 3, 4, 5]
    for who, expected in {"leader": {1, 4}, "member": {2, 3, 5}, "any": {1, 2, 3, 4, 5}}.items():
        picked = [Victims(Grid((3, 2)), who).pick(holders, rng) for _ in range(200)]
        assert {rank for first, _ in picked for rank in first} == expected
        assert all(len(first) == len(second) == 1 and first != second for first, second in picked)
    stages = [Victims(Grid((3, 2)), "stage").pick(holders, rng) for _ in range(50)]
    assert {tuple(first) for first, _ in stages} == {(1, 2, 3), (4, 5)}
    assert not any(set(first) & set(second) for first, second in stages)
    assert Victims(Grid((3, 2))).name(5) == "rank 5 (member 1 of stage 2)"
    assert Victims(Grid((3, 2))).name(1) == "rank 1 (leader of stage 1)"
    assert Victims(Grid((3, 2))).name(6) == Victims().name(6) == "rank 6"
    pairs = {frozenset(Victims(Grid((1, 3))).pair(holders, rng)) for _ in range(100)}
    assert pairs == {frozenset(pair) for pair in ((2, 3), (2, 4), (3, 4))}
    assert {Victims().pair([1, 3, 4], rng) for _ in range(50)} == {(1, 3), (3, 4)}
    assert Victims().pick([7], rng) == ([7], [])


def test_figures_and_the_last_sentence():
    good = Outcome(0, "kill", "decode", happened=True, next_any=0.5, next_all=[0.5, 0.7],
                   ready=2.0, exit_code=0)
    slow = Outcome(1, "kill", "decode", happened=True, next_any=1.5, next_all=[1.5], ready=3.0,
                   exit_code=0)
    bad = Outcome(2, "stop", "load", happened=True, lost={1: "3 of 9 tokens"}, exit_code=6)
    untouched = Outcome(3, "kill", "prefill", exit_code=0)
    found = summary([good, slow, bad, untouched])
    assert (found["runs"], found["kept"], found["clean"], found["lost_requests"]) == (4, 3, 2, 1)
    assert found["next_token"] == {"median": 1.0, "p95": 1.5, "worst": 1.5, "count": 2}
    assert spread([float(n) for n in range(1, 41)])["p95"] == 38.0
    assert found["groups"]["kill, decode"]["every_stream"]["worst"] == 1.5
    last = table(found).splitlines()[-1]
    assert last == ("3 of 4 runs kept every token; next token after a fault: median 1.0 s, worst "
                    "1.5 s; in 1 the fault did not take place; exit codes 6 (1x).")
    assert "FAILED" in bad.line()
    assert "request 1 was lost: 3 of 9 tokens" in bad.line()


def test_a_campaign_goes_on_from_its_file(tmp_path):
    path, settings = tmp_path / "runs.jsonl", {"seed": 1, "faults": ["kill"]}
    first = CampaignFile(path, settings)
    assert first.begin([(1, 2), (3,)])
    kept, lost = Outcome(0, "kill", "decode", next_all=[0.5]), Outcome(2, "kill", "load",
                                                                       lost={1: "no answer"})
    for outcome in (kept, lost):
        first.add(outcome)
    with pytest.raises(UsageError, match="another process writes"):
        CampaignFile(path, settings)
    first.close()
    with path.open("a") as file:
        file.write('{"number": 1, "fau')  # killed within a line
    again = CampaignFile(path, settings)
    assert again.outcomes == {0: kept, 2: lost}
    assert again.begin([(1, 2), (3,)])
    assert not again.begin([(1, 2), (4,)])
    again.add(Outcome(1, "kill", "decode"))
    again.close()
    last = CampaignFile(path, settings)
    assert sorted(last.outcomes) == [0, 1, 2]
    last.close()
    with pytest.raises(UsageError, match=r"other options \(seed\)"):
        CampaignFile(path, settings | {"seed": 2})
    path.write_text("x = 1\n")
    with pytest.raises(UsageError, match="is no file of"):
        CampaignFile(path, settings)


def test_what_has_grown_is_named():
    def sizes(n_bytes, files):
        return [(2**20, 9)] * 6 + [(n_bytes, files)] * 3

    assert soak.grown({"up 1": sizes(32 * 2**20, 17), "door 2": sizes(2**20, 9)[:5]}) == []
    assert soak.grown({"up 1": sizes(65 * 2**20, 9), "door 2": sizes(2**20, 18)}) == [
        "up 1 has grown by 64 MiB, 0 files", "door 2 has grown by 0 MiB, 9 files"]


@pytest.mark.parametrize(("args", "says"), [
    (["--fault", "flood"], "flood"),
    (["--ranks", "3", "--spares", "2"], "leave no rank for a stage"),
    (["--moment", "lunch"], "lunch"),
    (["--victim", "leader"], "needs --grid"),
    (["--grid", "2x2", "--ranks", "4"], "has 4 members, but 3 ranks"),
    (["--ranks", "2", "--fault", "cut-link"], "needs two ranks besides the head"),
    (["--fault", "reload"], "--fault reload needs --minutes"),
    (["--minutes", "1", "--fault", "storm"], "--minutes has no --fault storm"),
    (["--minutes", "1", "--resume", "runs.jsonl"], "leave out --minutes")])
def test_wrong_use(args, says):
    assert_refused(chaos_command, args, 2, says)


def test_a_refused_campaign_leaves_no_folder_behind(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    other = tmp_path / "other.jsonl"
    other.write_text("{}\n")
    assert_refused(chaos_command, ["--resume", str(other)], 2, "is no file of")
    assert list((tmp_path / "temporary").iterdir()) == []


def test_faults_of_the_disk_need_root_and_say_so(monkeypatch):
    monkeypatch.setattr(whole, "_UNSHARE", ("absent-program",))
    with pytest.raises(UsageError, match="--fault full-disk needs root"):
        whole.check(("kill", "full-disk"))
    whole.check(("kill", "kill-host"))


def chaos(*args, ranks=3, runs=1, timeout=200):
    done = launch.run(1, [*CHAOS, "--ranks", str(ranks), "--runs", str(runs), "--requests", "2",
                          "--tokens", "40", "--json", *args], timeout=timeout)
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


@pytest.mark.mpi
@pytest.mark.slow
@pytest.mark.full("the verdicts by hand in test_chaos.py, a job whose last stage dies in "
                  "test_serve.py")
def test_what_cannot_be_survived_is_called_lost(tmp_path):
    """The only stage dies, and nobody else is there."""
    code, found = chaos("--fault", "kill", "--moment", "decode", "--keep-logs", str(tmp_path),
                        ranks=2)
    (run,) = found["outcomes"]
    assert (code, found["kept"]) == (1, 0)
    assert set(run["lost"]) == {"0", "1"}
    assert run["different"] == run["left"] == []
    assert run["hit"] == [1]
    assert {path.name for path in tmp_path.iterdir()} == {"undisturbed.log", "run-001.log"}


@pytest.mark.mpi
@pytest.mark.slow
@pytest.mark.parametrize(("faults", "moments"), [
    (("kill",), ("decode",)), full(("kill", "storm", "clock"), MOMENTS)],
    ids=["decode", "every moment"])
def test_neither_a_killed_stage_nor_a_jumping_clock_nor_bad_clients_cost_anybody_a_token(
        faults, moments, tmp_path):
    options = [word for moment in moments for word in ("--moment", moment)]
    options += [word for fault in faults for word in ("--fault", fault)]
    options += ["--client", "openai", "--resume", str(tmp_path / "runs.jsonl")]
    runs = len(faults) * len(moments)
    ranks = 4 if "storm" in faults else 3
    code, found = chaos(*options, ranks=ranks, runs=runs)
    assert {(run["fault"], run["moment"]) for run in found["outcomes"]
            if run["fault"] != "clock"} == {
        *([("storm", "always")] if "storm" in faults else []),
        *(("kill", moment) for moment in moments)}
    assert (code, found["clean"], found["exit_codes"]) == (0, runs, {"0": runs}), found
    assert chaos(*options, ranks=ranks, runs=runs) == (0, found)  # nothing is left to be run


@pytest.mark.mpi
@pytest.mark.slow
@pytest.mark.full("rank 0 and the HTTP process killed in tests/mpi/test_supervised.py, one that "
                  "hangs in tests/supervise/test_http_door.py, full disks in test_journal.py and "
                  "test_hosts.py")
@pytest.mark.parametrize("fault", [*WHOLE, *DISKS])
def test_nothing_that_hits_the_whole_job_costs_a_client_a_token(fault):
    if fault in DISKS and not can_mount():
        pytest.skip("no file system can be mounted here")
    code, found = chaos("--fault", fault, "--moment", "decode", "--seconds", "150")
    assert (code, found["clean"]) == (0, 1), found


@pytest.mark.mpi
@pytest.mark.slow
@pytest.mark.full("each of these faults in tests/mpi/test_supervised.py")
def test_a_server_outlives_one_fault_after_the_other():
    faults = ("kill", "kill-head", "kill-door", "rescale", "reload")
    code, found = chaos("--minutes", "1", "--every", "8", "--seconds", "150", "--client",
                        "openai", *(word for fault in faults for word in ("--fault", fault)),
                        timeout=500)
    *struck, end = found["outcomes"]
    assert end["fault"] == "end"
    assert len(struck) >= 2
    assert (code, found["clean"]) == (0, found["runs"]), found
