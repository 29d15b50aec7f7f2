"""Models from the hub, as a user fetches them: a real `pipeinfer pull` against a local hub."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from hashlib import sha256
from pathlib import Path

import pytest

from pipeinfer.models import hub_files, media
from pipeinfer.models.gguf import ModelFile
from tests.kit import launch
from tests.kit.block_files import write_block_draft
from tests.kit.clockwork import write_apart, write_clockwork, write_eagle
from tests.kit.fake_hub import COMMIT, Hub, running
from tests.kit.gguf_files import split
from tests.kit.random_model import RandomSpec, write_random_model

pytestmark = pytest.mark.slow
REPO = "maker/Model-GGUF"
Q4, Q8 = "Model-Q4_K_M.gguf", "Model-Q8_0.gguf"


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """What the repository holds: two quantisations, one of them also in parts, and other files."""
    folder = tmp_path_factory.mktemp("repo")
    small = write_random_model(folder / "small.gguf", RandomSpec(n_layer=2, qtype="Q8_0"))
    large = write_random_model(folder / "large.gguf", RandomSpec(n_layer=8, qtype="F32", seed=1))
    parts = split(large, folder, stem="Model-F16")
    return {"README.md": b"# A model",
            Q8: small.read_bytes(), Q4: large.read_bytes(),
            **{f"F16/{path.name}": path.read_bytes() for path in parts}}


@pytest.fixture
def hub(files):
    with running(Hub({REPO: dict(files)})) as found:
        yield found


@pytest.fixture
def home(tmp_path):
    return tmp_path / "hf"


def variables(hub, home, **more):
    env = {"HF_ENDPOINT": hub.url, "HF_HOME": str(home), "HOME": str(home), "HF_TOKEN": "",
           "PIPEINFER_CACHE": str(home / "shards"), "OLLAMA_MODELS": str(home / "ollama"),
           "LLAMA_CACHE": str(home / "llama.cpp")}
    return env | more


def pipeinfer(hub, home, *args, **env):
    """A command, done."""
    return launch.run(1, [sys.executable, "-m", "pipeinfer", *args], timeout=100,
                      **variables(hub, home, **env))


def failure(done, code=3):
    """The one line that says what is wrong."""
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    lines = [line for line in done.stderr.splitlines() if line.startswith("pipeinfer: error: ")]
    assert len(lines) == 1, done.stderr
    return lines[0]


def in_cache(home, name):
    return home / "hub" / f"models--{REPO.replace('/', '--')}" / "snapshots" / COMMIT / name


def begun(home):
    return list((home / "hub").glob("**/*.incomplete"))


# --- what is fetched ------------------------------------------------------------------------------


def test_a_pull_lies_where_other_programs_look_for_it(hub, home, files):
    done = pipeinfer(hub, home, "pull", REPO)
    assert done.returncode == 0, done.stderr
    path = in_cache(home, Q4)
    assert done.stdout == f"{REPO}:Q4_K_M: {len(files[Q4]) / 1e6:.1f} MB at {path}\n"
    assert path.read_bytes() == files[Q4]
    assert path.is_symlink()
    assert (path.parents[2] / "refs" / "main").read_text() == COMMIT
    assert not begun(home)
    again = pipeinfer(hub, home, "pull", REPO)
    assert again.stdout == done.stdout
    assert hub.sent() == len(files[Q4])


@pytest.mark.parametrize("asked", [REPO, f"{REPO}:F16"])
def test_the_nearest_projector_comes_along_and_is_found(asked, hub, home, files):
    hub.repos[REPO] |= {"mmproj-Model-F16.gguf": b"GGUF no language model",
                        "mmproj-Model-F32.gguf": b"GGUF another", "mmproj-Other.gguf": b"GGUF"}
    done = pipeinfer(hub, home, "pull", asked)
    assert done.returncode == 0, done.stderr
    there = in_cache(home, "mmproj-Model-F16.gguf")
    assert there.read_bytes() == b"GGUF no language model"
    assert not in_cache(home, "mmproj-Model-F32.gguf").exists()
    model = in_cache(home, Q4 if asked == REPO else "F16/Model-F16-00001-of-00003.gguf")
    assert media.find(model, "") == str(there)


@pytest.mark.parametrize(("asked", "got"), [
    (f"{REPO}:Q8_0", Q8), (f"{REPO}:q8_0", Q8), (f"{REPO}:Q4_K_M", Q4)])
def test_a_quantisation_is_chosen_by_name(hub, home, files, asked, got):
    done = pipeinfer(hub, home, "pull", asked)
    assert done.returncode == 0, done.stderr
    assert in_cache(home, got).read_bytes() == files[got]
    assert hub.sent() == len(files[got])


def test_a_model_in_parts_comes_whole_and_is_one_model(hub, home, files):
    done = pipeinfer(hub, home, "pull", f"{REPO}:F16")
    assert done.returncode == 0, done.stderr
    first = "F16/Model-F16-00001-of-00003.gguf"
    assert str(in_cache(home, first)) in done.stdout
    parts = [name for name in files if name.startswith("F16/")]
    assert hub.sent() == sum(len(files[name]) for name in parts)
    listed = json.loads(pipeinfer(hub, home, "models", "--json").stdout)["models"]
    found = next(one for one in listed if one["name"] == f"{REPO}:F16")
    assert found["size"] == hub.sent()
    assert (found["place"], found["cut"], found["layers"]) == ("hub cache", "", 8)
    in_cache(home, parts[1]).unlink()
    listed = json.loads(pipeinfer(hub, home, "models", "--json").stdout)["models"]
    assert f"{REPO}:F16" not in [one["name"] for one in listed]


def test_what_is_here_runs_by_its_name_and_asks_nobody(hub, home):
    assert pipeinfer(hub, home, "pull", f"{REPO}:Q8_0").returncode == 0
    generate = ["generate", "-p", "a", "-n", "3", "--temp", "0", "--ignore-eos", "--json", "-t",
                "1", "-c", "256"]
    hub.asked.clear()
    by_name = pipeinfer(hub, home, *generate, "-m", f"{REPO}:Q8_0")
    assert by_name.returncode == 0, by_name.stderr
    assert json.loads(by_name.stdout)["stats"]["model"] == Q8
    by_path = pipeinfer(hub, home, *generate, "-m", str(in_cache(home, Q8)))
    assert json.loads(by_path.stdout)["tokens"] == json.loads(by_name.stdout)["tokens"]
    for more in ({"HF_HUB_OFFLINE": "1"}, {}):
        again = pipeinfer(hub, home, *generate, "-m", REPO, *([] if more else ["--offline"]),
                          **more)
        assert json.loads(again.stdout)["tokens"] == json.loads(by_name.stdout)["tokens"]
    assert hub.asked == []


def test_hf_fetches_and_runs_and_a_missing_preference_is_asked_for(hub, home, files):
    assert pipeinfer(hub, home, "pull", f"{REPO}:Q8_0").returncode == 0
    done = pipeinfer(hub, home, "generate", "-m", REPO, "-p", "a", "-n", "2", "-c", "256")
    assert done.returncode == 0, done.stderr
    assert f"pipeinfer: {Q4}: 100 % of" in done.stderr
    assert in_cache(home, Q4).read_bytes() == files[Q4]


def test_the_head_beside_a_model_comes_along(hub, home, tmp_path):
    whole = ModelFile(write_clockwork(tmp_path / "whole.gguf", "glm4moe"))
    write_apart(whole, tmp_path / "model.gguf", tmp_path / "head.gguf")
    model, head = ((tmp_path / f"{one}.gguf").read_bytes() for one in ("model", "head"))
    hub.repos["maker/Apart"] = {
        "Apart-Q4_K_M.gguf": model, "mtp-Apart-BF16.gguf": head + b"larger",
        "mtp-Apart-Q4_K_M.gguf": head, "Q8/Apart-Q8_0.gguf": model, "Q8/mtp-a.gguf": head,
        "eagle3-Apart.gguf": b"for models without a head of their own"}
    hub.repos["maker/Whole"] = {"Whole-Q4_K_M.gguf": whole.path.read_bytes(),
                                "mtp-Whole-Q4_K_M.gguf": head}
    plain = write_random_model(tmp_path / "plain.gguf").read_bytes()
    hub.repos["maker/Plain"] = {"Plain-Q4_K_M.gguf": plain, "dspark-Plain.gguf": b"a draft"}
    assert pipeinfer(hub, home, "pull", "maker/Apart").returncode == 0
    assert pipeinfer(hub, home, "pull", "maker/Apart:Q8_0").returncode == 0
    for name in ("Whole", "Plain"):
        assert pipeinfer(hub, home, "pull", f"maker/{name}").returncode == 0
    got = {path.relative_to(path.parents[1 + (path.parent.name == "Q8")]).as_posix()
           for path in home.rglob("*.gguf")}
    assert {one.split("/", 1)[1] for one in got} == {
        "Apart-Q4_K_M.gguf", "mtp-Apart-Q4_K_M.gguf", "Q8/Apart-Q8_0.gguf", "Q8/mtp-a.gguf",
        "Whole-Q4_K_M.gguf", "Plain-Q4_K_M.gguf", "dspark-Plain.gguf"}
    done = pipeinfer(hub, home, "generate", "-m", "maker/Apart", "-p", "a", "-n", "4", "-c",
                     "256", "-t", "1", "--ignore-eos", "--json")
    assert done.returncode == 0, done.stderr
    assert "prompt-lookup and the head in mtp-Apart-Q4_K_M.gguf" in done.stdout


@pytest.mark.parametrize(("write", "name", "option"), [
    (write_eagle, "eagle3", "--eagle"), (write_block_draft, "dflash", "-md")])
def test_a_head_is_taken_from_a_repository_of_its_own(write, name, option, hub, home, tmp_path):
    path = write_random_model(tmp_path / "model.gguf", RandomSpec(n_layer=4))
    head = write(tmp_path / "head.gguf", path, (0, 1, 2))
    hub.repos["maker/Heads"] = {f"{name}-model-Q8_0.gguf": head.read_bytes()}
    generate = ["generate", "-m", str(path), "-p", "a", "-n", "4", "-c", "256", "-t", "1",
                "--ignore-eos", "--json", option, "maker/Heads:Q8_0"]
    for more in ([], ["--offline"]):
        done = pipeinfer(hub, home, *generate, *more)
        assert done.returncode == 0, done.stderr
        assert f"{name}-model" in "".join(json.loads(done.stdout)["stats"]["notes"])
    assert hub.sent() == head.stat().st_size


# --- what goes wrong on the way -------------------------------------------------------------------


def test_a_pull_that_is_killed_goes_on_where_it_stopped(hub, home, files):
    size = len(files[Q4])
    hub.stall_after = size // 2
    process = subprocess.Popen(
        [sys.executable, "-m", "pipeinfer", "pull", REPO], stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL, env=launch.environment(**variables(hub, home)))
    assert hub.stalled.wait(60)
    until = time.monotonic() + 20
    while sum(path.stat().st_size for path in begun(home)) < size // 4:
        assert time.monotonic() < until
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait(20)
    (part,) = begun(home)
    have = part.stat().st_size
    hub.stall_after = 0
    hub.go_on.set()
    done = pipeinfer(hub, home, "pull", REPO)
    assert done.returncode == 0, done.stderr
    last = hub.fetched()[-1]
    assert (last.start, last.sent) == (have, size - have)
    assert in_cache(home, Q4).read_bytes() == files[Q4]


def test_answers_that_break_off_are_gone_on_from(hub, home, files):
    hub.cut_after = len(files[Q4]) // 3
    done = pipeinfer(hub, home, "pull", REPO)
    assert done.returncode == 0, done.stderr
    starts = [one.start for one in hub.fetched()]
    assert starts[0] == 0
    assert len(starts) >= 3
    assert starts == sorted(set(starts))
    assert in_cache(home, Q4).read_bytes() == files[Q4]


def test_a_proxy_without_ranges_costs_bytes_alone(hub, home, files):
    part = home / "hub" / f"models--{REPO.replace('/', '--')}" / "blobs"
    part.mkdir(parents=True)
    name = sha256(files[Q4]).hexdigest()
    (part / f"{name}.incomplete").write_bytes(files[Q4][:1000])
    hub.ignores_ranges = True
    done = pipeinfer(hub, home, "pull", REPO)
    assert done.returncode == 0, done.stderr
    assert hub.fetched()[-1].start == 1000
    assert in_cache(home, Q4).read_bytes() == files[Q4]


def test_what_arrives_damaged_is_thrown_away(hub, home, files):
    hub.damaged.add(Q4)
    said = failure(pipeinfer(hub, home, "pull", REPO))
    assert "arrived damaged (its SHA-256 is" in said
    assert said.endswith("fetch it again")
    assert not in_cache(home, Q4).exists()
    hub.damaged.clear()
    assert pipeinfer(hub, home, "pull", REPO).returncode == 0
    assert in_cache(home, Q4).read_bytes() == files[Q4]


def test_what_was_damaged_later_is_found_by_verify(hub, home, files):
    assert pipeinfer(hub, home, "pull", REPO).returncode == 0
    blob = in_cache(home, Q4).resolve()
    blob.write_bytes(files[Q4][:-1] + b"?")
    assert pipeinfer(hub, home, "pull", REPO).returncode == 0
    assert in_cache(home, Q4).read_bytes() != files[Q4]
    done = pipeinfer(hub, home, "pull", REPO, "--verify")
    assert done.returncode == 0, done.stderr
    assert "is damaged in the cache" in done.stderr
    assert in_cache(home, Q4).read_bytes() == files[Q4]


def test_no_network(hub, home):
    nobody = {"HF_ENDPOINT": "http://127.0.0.1:9"}
    said = failure(pipeinfer(hub, home, "pull", REPO, **nobody))
    assert "http://127.0.0.1:9 cannot be reached" in said
    assert "check the network, a proxy (HTTPS_PROXY) or HF_ENDPOINT" in said
    said = failure(pipeinfer(hub, home, "generate", "-m", REPO, "-p", "a", "--offline"))
    assert f"{REPO} is not in the hub's cache" in said
    assert "--offline forbids to fetch it" in said
    assert hub.asked == []
    # something that fits is there: it is taken, and the reason said
    assert pipeinfer(hub, home, "pull", f"{REPO}:Q8_0").returncode == 0
    done = pipeinfer(hub, home, "generate", "-m", REPO, "-p", "a", "-n", "1", "-c", "256",
                     **nobody)
    assert done.returncode == 0, done.stderr
    assert f"going on with {REPO}:Q8_0" in done.stderr


def test_a_hub_that_is_down(hub, home):
    hub.status = 503
    assert "answered 503" in failure(pipeinfer(hub, home, "pull", REPO))


@pytest.fixture
def small_disk(home):
    """Runs a script where `home` is a real file system of so many kilobytes."""
    space = ["unshare", "--mount", "--map-root-user", "sh", "-c"]
    home.mkdir()
    mount = f"mount -t tmpfs -o size=%dk none {home}"
    if subprocess.run([*space, mount % 64], check=False, capture_output=True).returncode:
        pytest.skip("this system allows no mounts in namespaces")
    return lambda hub, size, script: launch.start(
        [*space, f"{mount % size} && {script}"], timeout=60, **variables(hub, home))


def ended(process):
    out, err = process.communicate(timeout=60)
    return subprocess.CompletedProcess([], process.returncode, out, err)


PULL = f"{sys.executable} -m pipeinfer pull {REPO}"


def test_a_disk_that_fills_up_on_the_way(hub, home, files, small_disk, tmp_path):
    hub.stall_after = len(files[Q4]) // 2
    begin, full = tmp_path / "begin", tmp_path / "full"
    process = small_disk(hub, len(files[Q4]) // 1024 + 200, f"""
        {PULL} & while [ ! -e {begin} ]; do sleep 0.05; done
        cat /dev/zero >{home}/other 2>/dev/null; touch {full}; wait $!""")
    assert hub.stalled.wait(40)
    begin.touch()
    until = time.monotonic() + 20
    while not full.exists():
        assert time.monotonic() < until
        time.sleep(0.02)
    hub.go_on.set()
    said = failure(ended(process))
    assert f"the disk of {home}/hub is full: free some space, and the same command goes on" in said


def test_no_space(hub, files, small_disk):
    assert len(files[Q4]) > 1 << 20
    said = failure(ended(small_disk(hub, 1024, f"exec {PULL}")))
    assert "lacks space: " in said
    assert "the disk has only 1.0 MB; free some space, or set HF_HOME" in said
    assert hub.sent() == 0


# --- what the hub does not have, or does not give -------------------------------------------------


def test_a_repository_without_gguf(hub, home):
    hub.repos["maker/Model"] = {"model.safetensors": b"x", "config.json": b"{}"}
    said = failure(pipeinfer(hub, home, "pull", "maker/Model"))
    assert "maker/Model holds no GGUF model (2 files: json, safetensors)" in said
    assert "whose name ends in -GGUF" in said


def test_an_unknown_quantisation_lists_those_that_are_there(hub, home, files):
    said = failure(pipeinfer(hub, home, "pull", f"{REPO}:Q5_K_M"))
    size = sum(len(data) for name, data in files.items() if name.startswith("F16/"))
    assert said.endswith(
        f"{REPO} has no Q5_K_M: there are F16 ({size / 1e6:.1f} MB), Q4_K_M "
        f"({len(files[Q4]) / 1e6:.1f} MB), Q8_0 ({len(files[Q8]) / 1e6:.1f} MB)")
    said = failure(pipeinfer(hub, home, "pull", REPO, "-hff", "other.gguf"))
    assert f"{REPO} has no file other.gguf: there are F16" in said


def test_a_part_that_the_repository_lacks(hub, home):
    del hub.repos[REPO]["F16/Model-F16-00002-of-00003.gguf"]
    said = failure(pipeinfer(hub, home, "pull", f"{REPO}:F16"))
    assert "is one of 3 parts, but F16/Model-F16-00002-of-00003.gguf cannot be found" in said


def test_an_unknown_repository(hub, home):
    said = failure(pipeinfer(hub, home, "pull", "nobody/nothing"))
    assert f"there is no repository nobody/nothing on {hub.url}, or it is private" in said
    assert "log in with `hf auth login`, or set HF_TOKEN (401)" in said
    said = failure(pipeinfer(hub, home, "generate", "-m", "nobody/nothing", "-p", "a"))
    assert "nobody/nothing is no file or folder here; on the hub: there is no repository" in said
    assert "names no repository of the hub" in failure(pipeinfer(hub, home, "pull", "noslash"), 2)


@pytest.mark.parametrize(("token", "status"), [("", 401), ("other", 403)])
def test_a_gated_repository_says_what_to_do(hub, home, token, status):
    hub.gated.add(REPO)
    said = failure(pipeinfer(hub, home, "pull", REPO, HF_TOKEN=token))
    assert f"{REPO} is gated: accept its terms at {hub.url}/{REPO}" in said
    assert f"to a token that may read it ({status})" in said
    done = pipeinfer(hub, home, "pull", REPO, HF_TOKEN="good")
    assert done.returncode == 0, done.stderr


def test_a_token_is_the_hubs_alone(hub, home):
    """It comes from huggingface_hub's own settings, and does not follow to another host."""
    hub.private.add(REPO)
    assert "or it is private" in failure(pipeinfer(hub, home, "pull", REPO))
    home.mkdir(exist_ok=True)
    (home / "token").write_text("good")
    env = variables(hub, home)
    del env["HF_TOKEN"]
    clean = {k: v for k, v in os.environ.items() if k != "HF_TOKEN"}
    done = subprocess.run([sys.executable, "-m", "pipeinfer", "pull", REPO], env=clean | env,
                          cwd=Path(launch.ROOT), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert {one.token for one in hub.asked if not one.path.startswith("/cdn/")} >= {"good"}
    assert {one.token for one in hub.fetched()} == {""}


def test_a_model_with_its_head_inside_is_a_model():
    files = {"qwen3.5-9b-mtp-q8_0.gguf": 9, "mtp-qwen3.5-9b.gguf": 1, "model-mmproj-f16.gguf": 1}
    assert hub_files.models_in(files) == ["qwen3.5-9b-mtp-q8_0.gguf"]
