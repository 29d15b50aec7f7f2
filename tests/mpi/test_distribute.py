"""Real jobs in which only rank 0 has the model: its path leads nowhere in the others' directory."""

from __future__ import annotations

import json
import sys

import pytest

from benchmarks.inflate.inflate import inflate
from tests.kit import launch
from tests.kit.launch import PIPEINFER
from tests.kit.own_caches import own_caches
from tests.kit.sample import full

pytestmark = [pytest.mark.mpi, pytest.mark.slow]
EMBEDDED = launch.ROOT / "pipeinfer" / "models" / "embedded"
FAULTY = [sys.executable, str(launch.ROOT / "tests" / "mpi" / "programs" / "faulty.py")]
REQUEST = ["generate", "-m", "model.gguf", "-p", "def area(r):\n", "-n", "40", "--temp", "0",
           "--ignore-eos", "-c", "128", "--json"]

#: else it depends on the machine's load who holds what, and whether there are as many decodes as a
#: fault takes to come
SURE = ["--set", "split=equal", "--speculation", "off"]


@pytest.fixture(scope="module")
def head(tmp_path_factory):
    """The head's directory, with a model of some 70 MB."""
    directory = tmp_path_factory.mktemp("head")
    inflate(EMBEDDED / "target.gguf", directory / "model.gguf", n_embd=512, n_layer=12,
            n_head=8, n_head_kv=8, n_ff=1536)
    return directory


@pytest.fixture(scope="module")
def tokens(head):
    # one thread, as each stage of these jobs has: threads of a small model wait for each other
    return launch.answered(1, "-m", head / "model.gguf", *REQUEST[3:], "-t", "1")["tokens"]


MORTAL = {"OMPI_MCA_mpi_ft_enable": "0", "PRTE_MCA_state_base_recoverable": "0"}


def job(head, stages, command, n_stages=2, mpi=(), **env):
    """mpirun with rank 0 in `head` and the stages in `stages`, each side with its own cache."""
    return apart([(1, head, command, {}), (n_stages, stages, command, {})], mpi, **env)


def spread(head, hosts, command):
    """A job whose stages each have a directory and a cache of their own."""
    return apart([(1, directory, command, {}) for directory in (head, *hosts)])


def apart(parts, mpi=(), **env):
    """Exit code, output and errors of a job of parts, each with a directory and a cache of its own:
    ranks, directory, command, and what its environment has."""
    line = [launch.mpirun_path(), *mpi]
    for n_ranks, directory, command, own in parts:
        directory.mkdir(exist_ok=True)
        line += ["-np", str(n_ranks), "--wdir", str(directory)]
        for name, value in ({"PIPEINFER_CACHE": directory / "cache"} | own).items():
            line += ["-x", f"{name}={value}"]
        line += [*command, ":"]
    with own_caches(*(directory / "cache" for _, directory, _, _ in parts)):
        process = launch.start(line[:-1], timeout=120, **env)
        out, err = process.communicate(timeout=120)
    return process.returncode, out, err


def held(directory):
    """Layers of the shards in a host's cache, and their bytes in all."""
    paths = list((directory / "cache").glob("*.gguf"))
    return (sorted(tuple(map(int, path.stem.split("-")[1:3])) for path in paths),
            sum(path.stat().st_size for path in paths))


def received(out):
    return {int(k): s["received_bytes"] for k, s in json.loads(out)["stats"]["stages"].items()}


def test_a_stage_without_the_model_says_so(head, tmp_path):
    code, _, err = job(head, tmp_path, [*PIPEINFER, *REQUEST])
    assert code == 3, err
    line = next(x for x in err.splitlines() if x.startswith("pipeinfer: error:"))
    assert "model.gguf does not exist on" in line
    assert "--distribute" in line
    assert "Traceback" not in err


def test_stages_get_their_layers_once(head, tmp_path, tokens):
    command = [*PIPEINFER, *REQUEST, "--distribute"]
    tcp = ("--mca", "pml", "ob1", "--mca", "btl", "tcp,self")
    code, out, err = job(head, tmp_path, command, mpi=tcp)
    assert code == 0, err
    assert json.loads(out)["tokens"] == tokens
    assert "could not measure" not in str(json.loads(out)["stats"]["notes"])
    sizes = {p.name: p.stat().st_size for p in (tmp_path / "cache").glob("*.gguf")}
    assert sorted(received(out).values()) == sorted(sizes.values())
    assert len(sizes) == 2
    assert sum(sizes.values()) > 10 << 20
    assert not list((head / "cache").glob("*.gguf"))  # nothing is stored on the way
    assert not list((tmp_path / "cache").glob("*.part"))
    code, out, err = job(head, tmp_path, command)
    assert code == 0, err
    assert json.loads(out)["tokens"] == tokens
    assert received(out) == {1: 0, 2: 0}


def test_a_whole_model_for_one_stage(head, tmp_path, tokens):
    code, out, err = job(head, tmp_path, [*PIPEINFER, *REQUEST, "--distribute"], n_stages=1)
    assert code == 0, err
    assert json.loads(out)["tokens"] == tokens


def test_a_stage_killed_midway_leaves_its_layers_to_the_other(head, tmp_path, tokens):
    code, out, err = job(head, tmp_path, [*FAULTY, "2", "receive", *REQUEST, "--distribute"])
    assert code == 0, err
    assert json.loads(out)["tokens"] == tokens
    assert received(out).keys() == {1}


def test_a_job_killed_midway_is_taken_up(head, tmp_path, tokens):
    code, _, err = job(head, tmp_path, [*FAULTY, "2", "receive", *REQUEST, "--distribute"],
                       **MORTAL)
    assert code != 0, err
    cache = tmp_path / "cache"
    there = {}
    for path in [*cache.glob("*.gguf"), *cache.glob("*.part")]:
        name = path.name.removesuffix(".part")
        assert name not in there
        there[name] = path.stat().st_size
    assert len(there) == 2
    parts = list(cache.glob("*.part"))
    assert parts
    assert all(path.stat().st_size > 1 << 20 for path in parts)
    code, out, err = job(head, tmp_path, [*PIPEINFER, *REQUEST, "--distribute"])
    assert code == 0, err
    assert json.loads(out)["tokens"] == tokens
    sizes = {p.name: p.stat().st_size for p in cache.glob("*.gguf")}
    assert sizes.keys() == there.keys()
    assert sum(received(out).values()) == sum(sizes.values()) - sum(there.values())
    assert not list(cache.glob("*.part"))


def test_survivors_get_only_the_layers_that_they_lack(head, tmp_path, tokens):
    hosts = [tmp_path / name for name in ("one", "two", "three")]
    code, out, err = spread(head, hosts, [*FAULTY, "2", "kill", *REQUEST, "--distribute", *SURE])
    assert code == 0, err
    assert json.loads(out)["tokens"] == tokens
    (first, before), (_, _), (third, after) = map(held, hosts)
    assert first == [(0, 4), (4, 6)]
    assert third == [(6, 8), (8, 12)]
    assert received(out) == {1: before, 2: after}


@pytest.mark.parametrize(("spares", "head_stage"), [
    full(1, []), full(2, []), (1, ["--head-stage"])])
def test_a_spare_has_received_what_it_takes_over(head, tmp_path, tokens, spares, head_stage):
    stages = ["one"] if head_stage else ["one", "two"]
    hosts = [tmp_path / name for name in (*stages, *("left", "right")[:spares])]
    last = len(stages)
    command = [*FAULTY, str(last), "kill", *REQUEST, "--distribute", "--spares", str(spares), *SURE,
               *head_stage]
    code, out, err = spread(head, hosts, command)
    assert code == 0, err
    assert json.loads(out)["tokens"] == tokens
    for host in hosts[last:]:
        assert held(host)[0] == [(0, 6), (6, 12)]
    stages = json.loads(out)["stats"]["stages"]
    assert stages["2"]["rank"] > last
    assert stages["2"]["layers"] == [6, 12]
    assert received(out)[2] == 0
