"""Plans: who holds what, who is left out, what `pipeinfer plan` says."""

from __future__ import annotations

import itertools
import json
import random
import re
from types import SimpleNamespace

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from pipeinfer.cli import main, terminal
from pipeinfer.cluster.placement import members_of
from pipeinfer.config import ClusterConfig
from pipeinfer.errors import PlanError, UsageError
from pipeinfer.forecast import report as forecast
from pipeinfer.models.gguf import ModelFile
from pipeinfer.nodes import NodeSettings, RankInfo
from pipeinfer.planning import partition, planner
from pipeinfer.planning.measure import Figures
from pipeinfer.planning.partition import Load, Member, measure
from tests.kit.random_model import RandomSpec, tiny, write_random_model
from tests.kit.random_projectors import write_family
from tests.kit.sample import fewer

GIB = 2.0**30


def load(n, size=1.0, head=0.0):
    return Load((1.0,) * n, (size,) * n, last_cost=head)


def hosts(*names, **settings):
    return [RankInfo(rank, name, 8 * GIB, settings=NodeSettings(**settings))
            for rank, name in enumerate(names)]


def iterative(split):
    return 1 / split.total


def make(members, n=12, config=None, where=None, head=0.0, predict=iterative):
    candidates = list(range(1, len(members) + 1))
    where = where or hosts("zero", *(f"host{i}" for i in candidates))
    return planner.make_plan(
        config or ClusterConfig(),
        load(n, head=head),
        members,
        candidates,
        where,
        predict,
        timed=True,
    )


@pytest.mark.parametrize("split", ["planned", "equal"])
def test_too_little_memory_without_the_head_names_the_option_that_adds_it(split):
    small = [Member("rank 1 on one", 1.0, memory=4.0)]
    with pytest.raises(PlanError, match=r"lacks .*; --head-stage lets rank 0 hold layers, too$"):
        make(small, config=ClusterConfig(split=split))
    with pytest.raises(PlanError) as caught:
        make([*small, *small], config=ClusterConfig(split=split, head_stage=True))
    assert "--head-stage" not in str(caught.value)


def test_equal_ranks_get_equal_shares():
    plan = make([Member(str(i), 1.0) for i in range(5)])
    assert plan.split.counts == (3, 3, 2, 2, 2)
    assert plan.line() == ""
    assert plan.ranks == (1, 2, 3, 4, 5)
    assert plan.ranges == [(0, 3), (3, 6), (6, 8), (8, 10), (10, 12)]


@given(st.lists(st.floats(0.96, 1.04), min_size=2, max_size=6), st.integers(6, 40))
def test_noise_makes_no_plan(noise, n):
    where = hosts("zero", *(f"host{i}" for i in range(len(noise))))
    candidates = range(1, len(noise) + 1)
    figures = {rank: Figures(1e9, 1, {1: 1e-3 * x, 2: 2e-3, 4: 4e-3})
               for rank, x in zip(candidates, noise, strict=True)}
    members = members_of(candidates, [None] * len(noise), where, figures)
    assert len({member.per_cost for member in members}) == 1
    assert make(members, n, where=where).line() == ""


def test_speeds_apart_stay_apart():
    assert partition.level({1: 1.0, 2: 1.05, 3: 2.0, 4: 2.1, 5: 9.0}) == {
        1: 1.025, 2: 1.025, 3: 2.05, 4: 2.05, 5: 9.0}


def of_costs(*costs, **more):
    return [Member(str(k), cost, **more) for k, cost in enumerate(costs)]


SPLITS = {
    "a slightly better split is not worth being unequal": (
        of_costs(1.0, 1.0), {"n": 24, "head": 1.0}, (12, 12), ""),
    "a better one is": (of_costs(1.0, 1.0), {"n": 24, "head": 8.0}, (16, 8), ""),
    "a rank that slows all is left out": (
        of_costs(1.0, 40.0, 1.0), {}, (6, 0, 6), "rank 2 left out (takes 40.0 times as long"),
    "equal ranks are never left out": (of_costs(*[1.0] * 4, overhead=5.0), {}, (3, 3, 3, 3), ""),
    "a needed rank stays however slow": (of_costs(1.0, 40.0, memory=6.0), {}, (6, 6), ""),
    "split equal": (of_costs(1.0, 9.0), {"config": ClusterConfig(split="equal")}, (6, 6), ""),
}


@pytest.mark.parametrize("name", SPLITS)
def test_who_gets_how_much(name):
    members, options, counts, says = SPLITS[name]
    plan = make(members, **options)
    assert plan.split.counts == counts
    assert plan.ranks == tuple(rank for rank, count in enumerate(counts, 1) if count)
    assert says in plan.line()


def test_a_slow_rank_gets_less_and_the_line_says_so():
    plan = make(of_costs(1e-3, 4e-3, 1e-3), predict=lambda split: 1 / split.slowest)
    assert plan.split.counts == (6, 1, 5)
    assert plan.line() == ("plan: layers 6, 1, 5 on ranks 1, 2, 3; slowest stage 6.0 ms instead "
                           "of 16.0 ms with equal shares")
    # a split that cannot be is no comparison
    assert "equal" not in make([Member(str(k), 1e-3, memory=4.0 * k) for k in (1, 2)]).line()


def test_ranks_of_one_host_share_its_memory():
    with pytest.raises(PlanError, match=r"ranks 1, 2 on one need 8\.0 GiB together"):
        planner.make_plan(
            ClusterConfig(split="equal"), load(12, GIB), [Member("a", 1.0, memory=7 * GIB)] * 3,
            [1, 2, 3], hosts("zero", "one", "one", "two"), iterative, timed=True)


def random_cluster(rng):
    """Members on up to three hosts with little memory each, the load, and each member's host."""
    n = rng.randint(2, 4)
    names = [rng.choice("abc") for _ in range(n)]
    room = {name: rng.choice([3.0, 4.0, 6.0, 12.0]) for name in "abc"}
    speed = {name: rng.choice([1.0, 3.0]) for name in "abc"}
    count = rng.randint(n, 9)
    weights = Load((1.0,) * count, (1.0,) * count, scratch=0.1, first_bytes=0.3, last_cost=0.5,
                   last_bytes=0.5)
    return weights, [Member(str(i), speed[name], memory=room[name])
                     for i, name in enumerate(names, 1)], names, room


def fits_hosts(split, names, room):
    return all(sum(size for size, name in zip(split.sizes, names, strict=True) if name == host)
               <= room[host] + 1e-9 for host in room)


def test_hosts_with_several_ranks_are_never_too_full_nor_given_up_too_soon():
    rng = random.Random(3)
    refused = 0
    for _ in range(300):
        weights, members, names, room = random_cluster(rng)
        n = len(weights.costs)
        candidates = list(range(1, len(members) + 1))
        try:
            plan = planner.make_plan(ClusterConfig(), weights, members, candidates,
                                     hosts("zero", *names), iterative, timed=True)
        except PlanError:
            refused += 1
            splits = (measure(weights, members, counts) for counts in
                      itertools.product(range(1, n + 1), repeat=len(members)) if sum(counts) == n)
            assert not any(fits_hosts(split, names, room) for split in splits)
            continue
        assert fits_hosts(plan.split, names, room)
        assert set(plan.left_out) == set(candidates) - set(plan.ranks)
    assert 10 < refused < 250


def test_an_equal_split_is_checked():
    tight = [Member("rank 1", 1.0), Member("rank 2 on two", 9.0, memory=5.0)]
    with pytest.raises(PlanError, match="rank 2 on two needs"):
        make(tight, config=ClusterConfig(split="equal"))


MODEL = SimpleNamespace(n_layers=12)


def test_what_sets_the_layers():
    where = hosts("zero", "one", "two", "three")
    ranks = [1, 2, 3]

    def ask(whole=None, **config):
        return planner.asked_counts(ClusterConfig(**config), MODEL, ranks, where, whole)

    assert ask() == [None, None, None]
    assert ask(layers="6,4,2") == [6, 4, 2]
    assert ask(layers="6, 0, 6") == [6, 0, 6]
    assert ask(whole=(2, 4, 6)) == [2, 4, 6]
    assert ask(whole=(2, 4, 6), layers="4,4,4") == [4, 4, 4]
    where[2] = structs.replace(where[2], settings=NodeSettings(role="spare"))
    where[3] = structs.replace(where[3], settings=NodeSettings(layers=5))
    assert ask() == [None, 0, 5]
    assert ask(layers="6,6") == [6, 0, 6]
    for layers, error, says in (("6,x,6", UsageError, "give counts such as"),
                                ("", None, ""), ("6,5", PlanError, "adds up to 11"),
                                ("3,3,3,3", PlanError, "4 counts, but 3 ranks"),
                                ("12", PlanError, "1 counts, but 3 ranks")):
        if error is not None:
            with pytest.raises(error, match=says):
                ask(layers=layers)


def test_set_counts_reach_the_plan():
    members = [Member("a", 1.0, layers=7), Member("b", 1.0, layers=0), Member("c", 9.0, layers=5)]
    plan = make(members)
    assert plan.split.counts == (7, 0, 5)
    assert plan.line().endswith("rank 2 left out (set to hold no layers)")
    mixed = make([Member("a", 1.0), Member("b", 1.0, layers=2), Member("c", 1.0)])
    assert mixed.split.counts == (5, 2, 5)
    with pytest.raises(PlanError, match="add up to 13"):
        make([Member("a", 1.0, layers=13), Member("b", 1.0)])


def test_the_draft_takes_memory_of_its_host():
    where = hosts("zero", "zero", "one")
    members = members_of([1, 2], [None, None], where, {}, head_bytes=int(3 * GIB))
    assert [member.memory for member in members] == [5 * GIB, 8 * GIB]


# --- the command ------------------------------------------------------------------------------


@pytest.fixture
def plan(monkeypatch):
    monkeypatch.setattr("pipeinfer.forecast.report.TOKENS", 32)
    monkeypatch.setattr(terminal, "leave", lambda code: (_ for _ in ()).throw(SystemExit(code)))

    def run(*args, code=0):
        result = CliRunner().invoke(main.main, ["plan", *args])
        assert result.exit_code == code, result.output
        return result.output

    return run


@pytest.fixture
def lab(tmp_path):
    """A function that writes a hostfile and its nodes file, and gives the words of a dry run."""
    def words(hosts, nodes):
        (tmp_path / "lab").write_text("".join(f"{host}\n" for host in hosts))
        (tmp_path / "lab.toml").write_text(nodes)
        return ("--dry-run", "--hostfile", str(tmp_path / "lab"))
    return words


HETERO = ("--dry-run", "--hostfile", "hostfiles/beowulf-hetero")


def test_dry_run_on_unequal_nodes(plan):
    found = json.loads(plan("dolphin-70b", *HETERO, "--json"))
    assert sum(stop - start for start, stop in (s["layers"] for s in found["stages"])) == 80
    seconds = [stage["seconds"] for stage in found["stages"]]
    xeons = [s for s in found["stages"] if s["rank"] <= 7]
    assert len(xeons) == 7
    assert max(seconds) == pytest.approx(max(s["seconds"] for s in xeons), rel=0.01)
    for stage in found["stages"]:
        assert stage["bytes"] <= found["ranks"][stage["rank"]]["memory"]
    held = {s["rank"] for s in found["stages"]} | set(map(int, found["left_out"]))
    assert held == set(range(1, 13))
    speeds = found["tokens_per_second"]
    assert speeds["pipeinfer"] > speeds["speculative"] > speeds["iterative"] > 0
    assert [d["draft"] for d in found["drafts"]] == ["tinyllama", "orca-2-7b"]
    assert ["as rank 0" in note for note in found["notes"]] == [True, False]
    text = plan("dolphin-70b", *HETERO)
    assert "optiplex5  i7-4790" in text
    assert "tokens/s" in text
    assert "with equal shares the slowest stage would take" in text


def test_a_dry_run_counts_the_projector_next_to_a_model(plan, tmp_path):
    model, projector = write_family("gemma3", tmp_path)
    words = (str(model), "--dry-run", "--hostfile", "hostfiles/xeon", "--json")
    with_it = json.loads(plan(*words))
    note = next(one for one in with_it["notes"] if "pictures go through" in one)
    assert str(projector) in note
    assert "doctor -m" in note
    projector.unlink()
    without = json.loads(plan(*words))
    assert without["notes"] == [one for one in with_it["notes"] if one != note]
    free, less = (found["ranks"][0]["memory"] for found in (without, with_it))
    assert free - less > 80 << 20


@pytest.mark.parametrize(("settings", "asked", "drafts"), [
    ('draft = "tinyllama"', (), ["tinyllama"]),
    ('proposer = "draft-lookahead"\ndraft = "tinyllama"', (), ["tinyllama"]),
    ('role = "draft"', ("-md", "orca-2-7b"), ["orca-2-7b"]),
    ('proposer = "prompt-lookup"', ("-md", "orca-2-7b"), ["orca-2-7b"])])
def test_a_dry_run_lets_a_rank_draft(plan, lab, settings, asked, drafts):
    """That rank has a profile of its own, too."""
    dry = ("dolphin-70b", *lab(("desk", "old1", "old2"), (
        'link = "gigabit"\n[node."*"]\nprofile = "xeon-e5-2650x2"\n'
        f'[rank.2]\n{settings}\nprofile = "xeon-gold-6140x2"\n')), *asked)
    found = json.loads(plan(*dry, "--json"))
    assert found["ranks"][2]["profile"] == "xeon-gold-6140x2"
    assert [one["rank"] for one in found["stages"]] == [1]
    assert [one["draft"] for one in found["drafts"]] == drafts
    there = "lookup" not in settings
    _, _, _, head, _, last, *rest = plan(*dry).splitlines()
    assert head.rstrip().endswith("head" if there else "head and draft")
    assert last.rstrip().endswith("draft" if there else "left out")
    assert ("on rank 2, right at" in "".join(rest)) == there


@pytest.mark.parametrize(("numa", "profiled", "slots", "apart"), [
    ("per-rank", 1, 2, True), ("", 2, 2, True), ("", 1, 2, False), ("off", 2, 2, False),
    ("", 2, 1, False), ("", 2, 4, True)])
def test_a_dry_run_counts_a_rank_of_a_numa_node_with_its_memory(plan, lab, tmp_path, numa, profiled,
                                                                slots, apart):
    words = lab((f"old1 slots={slots}", f"old2 slots={slots}"), (
        'link = "gigabit"\n[node."*"]\nprofile = "xeon-e5-2650x2"\nmemory = "40 GiB"\n'
        + f'numa = "{numa}"\n' * bool(numa)))
    (tmp_path / "more.toml").write_text(f"[nodes.xeon-e5-2650x2]\nnuma_nodes = {profiled}\n")
    dry = ("dolphin-70b", "--dry-run", "--profiles", str(tmp_path / "more.toml"), "--json")
    found = json.loads(plan(*dry, *words, "--head-stage"))
    names = [f"{host}, NUMA node {turn % 2}" if apart else host
             for host in ("old1", "old2") for turn in range(slots)]
    assert [one["host"] for one in found["ranks"]] == names
    assert {one["memory"] for one in found["ranks"]} == {(20 if apart else 40) * GIB}
    for name in names:
        assert sum(one["bytes"] for one in found["stages"] if names[one["rank"]] == name) <= \
            (20 if apart else 40) * GIB
    assert sum(stop - start for start, stop in (one["layers"] for one in found["stages"])) == 80
    ranks = json.loads(plan(*dry, "--cluster", "a"))["ranks"]
    plain = json.loads(plan(*dry[:2], "--json", "--cluster", "a"))["ranks"]
    assert len(ranks) == profiled * len(plain)


def test_a_profile_with_an_impossible_number_of_numa_nodes_is_refused(plan, tmp_path):
    (tmp_path / "more.toml").write_text("[nodes.xeon-e5-2650x2]\nnuma_nodes = 100000000000\n")
    assert "numa_nodes is 100000000000: give 1 to 64" in plan(
        "dolphin-70b", "--dry-run", "--cluster", "a", "--profiles", str(tmp_path / "more.toml"),
        code=2)


@pytest.fixture
def desk(lab):
    """A function for the words of a dry run on a desktop with a GPU and two servers."""
    def words(gpu, **more):
        lines = [f'{key} = "{value}"' for key, value in more.items()]
        return (*lab(("desk slots=2", "old1", "old2"), "\n".join([
            'link = "gigabit"', '[node."old*"]', 'profile = "xeon-e5-2650x2"', "[node.desk]",
            'profile = "titan-v"', f'gpu_memory = "{gpu}"', *lines])), "--head-stage")
    return words


def test_a_dry_run_fills_the_memory_of_gpus(plan, desk):
    text = plan("dolphin-70b", *desk("11 GiB", device="gpu", memory="30 GiB"))
    assert "/ 11.0 GiB of GPU, 30.0 GiB of host" in text
    assert "of GPU" not in plan("dolphin-70b", *desk("11 GiB", device="cpu"))

    def bytes_on_desk(**more):
        found = json.loads(plan("dolphin-70b", *desk("8 GiB", **more), "--json"))
        assert {one["memory"] for one in found["ranks"][:2]} == {8 * GIB}
        return sum(one["bytes"] for one in found["stages"] if one["rank"] < 2)

    assert bytes_on_desk(device="gpu") <= 8 * GIB  # both ranks have one GPU
    assert 8 * GIB < bytes_on_desk(device="per-rank") <= 16 * GIB
    error = plan("dolphin-70b", *desk("2 GiB", device="per-rank"), "--split", "equal", code=4)
    assert "on desk, GPU of rank 0 needs" in error
    assert "use a lower -ngl" in error


def test_a_dry_run_leaves_the_memory_of_a_gpu_to_layers_where_the_draft_is_on_the_processor(
        plan, desk):
    def found(**more):
        data = json.loads(plan("dolphin-70b", *desk("2 GiB", device="per-rank", **more),
                               "-md", "orca-2-7b", "--json"))
        return [one["bytes"] for one in data["stages"] if one["rank"] == 0], data["drafts"][0]

    (layers,), draft = found()
    assert 1 * GIB < layers <= 2 * GIB
    assert draft["fits"]
    _, draft = found(memory="1 GiB")
    assert not draft["fits"]


@pytest.fixture
def minis(plan, lab):
    """A function for a dry run on so many machines of 6 GiB."""
    def run(hosts, *args, code=0):
        return plan(*args, *lab(
            [f"old{i}" for i in range(hosts)],
            'link = "gigabit"\n[defaults]\nprofile = "i5-2400"\nmemory = "6 GiB"\n'), code=code)
    return run


def test_a_plan_says_what_a_further_machine_would_bring(minis):
    found = [json.loads(minis(hosts, "mistral-7b", "-md", "tinyllama", "--json"))
             for hosts in (2, 3)]
    two, three = (one["tokens_per_second"]["pipeinfer"] for one in found)
    assert three > 1.1 * two
    assert found[0]["notes"][-1] == (f"a further machine like old1 would bring {three / two:.2f} "
                                     "times the speed and 6.0 GiB for layers")
    assert "further" not in minis(4, "mistral-7b", "--layers", "12,10,10")


def test_an_error_says_how_many_further_machines_would_do(minis):
    lacking = int(re.search(r"; (\d+) further machines like old1 would do",
                            minis(2, "dolphin-70b", code=4))[1])
    assert "; 1 further machine like" in minis(1 + lacking, "dolphin-70b", code=4)
    minis(2 + lacking, "dolphin-70b")
    assert "further" not in minis(2, "dolphin-70b", "--layers", "80", code=4)


def test_planned_beats_equal_on_unequal_nodes(plan):
    speeds = {split: json.loads(plan("dolphin-70b", *HETERO, "--split", split, "--json"))
              ["tokens_per_second"]["pipeinfer"] for split in ("planned", "equal")}
    assert speeds["planned"] > 1.3 * speeds["equal"]


def test_cluster_profile_and_own_split(plan):
    text = plan("goliath-120b", "--dry-run", "--cluster", "a", "--draft", "xwin-7b",
                "--layers", "20,20,20,20,20,20,17", "--link", "wan-25ms")
    assert all(one in text for one in ("20 (0-19)", "17 (120-136)", "wide area, 25 ms"))


def test_a_file_and_its_draft_on_a_cluster_profile(plan, tmp_path):
    path = write_random_model(tmp_path / "tiny.gguf", RandomSpec(n_layer=9, qtype="Q8_0"))
    lonely, draft = write_random_model(tmp_path / "m3.gguf", tiny("minimax-m3")), ("-md", str(path))
    text = plan(str(path), "--dry-run", "--cluster", "gpu", *draft, "--acceptance", "0.5")
    assert "tiny.gguf: 9 layers" in text
    assert "right at 50% of positions" in text
    for more, why in (((path,), "pair is known"), ((lonely, *draft), "at a time")):
        text = plan(*map(str, more), "--dry-run", "--cluster", "gpu")
        assert f"{why}: only iterative" in text
        assert "pipeinfer  " not in text


@pytest.mark.slow
def test_one_process_is_planned_as_it_measures_itself(plan):
    found = json.loads(plan("embedded", "--json"))
    (stage,) = found["stages"]
    assert (stage["rank"], stage["layers"]) == (0, [0, 12])
    assert 0 < stage["seconds"] < 60
    assert found["tokens_per_second"]["iterative"] > 0
    assert "launch/run N" in found["notes"][0]


@pytest.mark.parametrize(("args", "code", "says"), [
    (("dolphin-70b", "--dry-run", "--cluster", "c", "--acceptance", "nan"), 2, "not a number"),
    (("dolphin-70b", "--dry-run", "--cluster", "c", "-c", "-5"), 2, "-5 is not in the range"),
    (("dolphin-7b", "--dry-run", "--cluster", "a"), 2, "did you mean dolphin-70b?"),
    (("dolphin-70b", "--dry-run"), 2, "either --hostfile FILE or --cluster NAME"),
    (("dolphin-70b", *HETERO, "--cluster", "a"), 2, "either --hostfile FILE or --cluster NAME"),
    (("dolphin-70b",), 2, "can only be measured with a model file"),
    (("dolphin-70b", "--dry-run", "--cluster", "q"), 2, "there are a, b, c, gpu"),
    (("dolphin-70b", "--dry-run", "--cluster", "a", "--link", "wan"), 2, "no link profile 'wan'"),
    (("dolphin-70b", "--dry-run", "--hostfile", "hostfiles/localhost"), 2, "names no profile"),
    (("dolphin-70b", *HETERO, "--layers", "80"), 4, "1 counts, but 12 ranks"),
    (("falcon-180b", "--dry-run", "--cluster", "gpu", "--draft", "falcon-7b"), 4, "it lacks"),
    (("dolphin-70b", *HETERO, "--draft", "tinylama"), 2, "did you mean tinyllama?"),
    (("absent.gguf", "--dry-run", "--cluster", "a"), 3, "no such file"),
    (("dolphin-70b", *HETERO, "--profiles", "absent.toml"), 2, "cannot read profiles"),
])
def test_mistakes_are_one_line(plan, args, code, says):
    assert says in plan(*args, code=code)


def test_a_nodes_file_with_an_unknown_profile(plan, lab, tmp_path):
    words = lab(("ant slots=2", "bee"), '[defaults]\nprofile = "i7-4970"\n')
    assert "no node profile 'i7-4970'; did you mean i7-4790?" in plan("yi-9b", *words, code=2)
    text = plan("yi-9b", *lab(("ant slots=2", "bee"), (
        '[defaults]\nprofile = "i7-4790"\n[node.bee]\nrole = "spare"\n')))
    assert "gigabit is assumed" in text
    assert "left out: rank 2 on bee, set to hold no layers" in text
    (tmp_path / "lab.toml").unlink()
    assert "has no nodes file" in plan("yi-9b", *words, code=2)
    (tmp_path / "lab").unlink()
    assert "cannot read hostfile" in plan("yi-9b", *words, code=2)


def test_fewer_threads_are_slower(plan, lab):
    def slowest(text):
        words = lab("abc", 'link = "gigabit"\n[defaults]\nprofile = "i5-2400"\n' + text)
        found = json.loads(plan("yi-9b", *words, "--json"))
        return max(stage["seconds"] for stage in found["stages"])

    assert slowest("threads = 2") > 1.8 * slowest("threads = 4")


def test_a_slow_machine_that_would_do_as_rank_0_is_named(monkeypatch):
    """The draft may be as slow as a stage: the desktops are better heads than the Xeons."""
    monkeypatch.setattr(forecast, "TOKENS", fewer(forecast.TOKENS, 64))
    done = CliRunner().invoke(main.main, ["plan", "dolphin-70b", "--dry-run", "--cluster", "b"])
    assert done.exit_code == 0
    note = next(line for line in done.output.splitlines() if "as rank 0" in line)
    # the longer forecast prefers the other desktop
    assert f"with {fewer('i5-4590', 'i7-4790')}-" in note
    same = CliRunner().invoke(main.main, ["plan", "dolphin-70b", "--dry-run", "--cluster", "a"])
    assert "as rank 0" not in same.output


@pytest.mark.parametrize(("name", "expected"), [
    ("qwen35", [0, 0, 0, 2 * 2 * 2 * 64, 0]),  # the fourth layer has attention
    ("deepseek4", [0, 0, 2 * (256 + 128) // 4, 2 * 256 // 128])])
def test_a_text_costs_the_cells_that_it_adds(name, expected, tmp_path):
    """A state is as large behind any text."""
    model = ModelFile(write_random_model(tmp_path / "m.gguf", tiny(name)))
    load = planner.load_of(model, 512, 64, n_ids=4)
    behind = planner.with_text(load, model, 1000)
    found = [(two - one) / 1000 for one, two in zip(load.costs, behind.costs, strict=True)]
    assert found[:len(expected)] == expected
