"""Models that Ollama and llama.cpp have fetched, and what `pipeinfer models` says of models."""

from __future__ import annotations

import hashlib
import json

import pytest
from click.testing import CliRunner

from pipeinfer.cli.main import main
from pipeinfer.config import JobConfig
from pipeinfer.errors import ModelError
from pipeinfer.models import local_stores
from pipeinfer.models.locate import find, targeted
from tests.kit.gguf_files import altered, split
from tests.kit.random_model import RandomSpec, write_random_model

MODEL_LAYER = "application/vnd.ollama.image.model"


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return write_random_model(tmp_path_factory.mktemp("m") / "m.gguf", RandomSpec(n_layer=2))


@pytest.fixture
def store(tmp_path, monkeypatch):
    """Empty stores of all kinds."""
    for name in ("OLLAMA_MODELS", "LLAMA_CACHE", "HF_HUB_CACHE"):
        monkeypatch.setenv(name, str(tmp_path / name))
        (tmp_path / name).mkdir()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "HF_HUB_CACHE"))
    return tmp_path


def ollama(store, data, *parts, digest=""):
    """Put a model into Ollama's store under host, user, model and tag."""
    digest = digest or hashlib.sha256(data).hexdigest()
    root = store / "OLLAMA_MODELS"
    (root / "blobs").mkdir(exist_ok=True)
    blob = root / "blobs" / f"sha256-{digest}"
    blob.write_bytes(data)
    manifest = root.joinpath("manifests", *parts)
    manifest.parent.mkdir(parents=True, exist_ok=True)
    manifest.write_text(json.dumps({"schemaVersion": 2, "layers": [
        {"mediaType": "application/vnd.ollama.image.template", "digest": "sha256:" + "0" * 64},
        {"mediaType": MODEL_LAYER, "digest": f"sha256:{digest}", "size": len(data)}]}))
    return blob


def listed():
    done = CliRunner().invoke(main, ["models", "--json"])
    assert done.exit_code == 0, done.output
    return {one["name"]: one for one in json.loads(done.output)["models"]}


@pytest.mark.parametrize(("parts", "name"), [
    (("registry.ollama.ai", "library", "llama3.2", "1b"), "llama3.2:1b"),
    (("registry.ollama.ai", "maker", "model", "q8"), "maker/model:q8"),
    (("hf.co", "maker", "Model-GGUF", "Q4_K_M"), "hf.co/maker/Model-GGUF:Q4_K_M")])
def test_ollamas_models_go_by_its_names(store, source, parts, name):
    blob = ollama(store, source.read_bytes(), *parts)
    found = listed()[name]
    assert (found["place"], found["path"], found["layers"]) == ("Ollama", str(blob), 2)
    target = targeted(JobConfig.of(model=name))
    assert (target.path, target.name) == (blob, name)
    assert local_stores.label(blob) == name


def test_a_tag_may_be_left_out_where_it_is_the_latest(store, source):
    blob = ollama(store, source.read_bytes(), "registry.ollama.ai", "library", "tiny", "latest")
    assert find("tiny").path == find("tiny:latest").path == blob
    with pytest.raises(ModelError, match="no model of that name is here: `pipeinfer models`"):
        find("tiny:7b")


@pytest.mark.parametrize("manifest", [
    "", "{", "[]", '{"layers": 3}', '{"layers": []}',
    *(json.dumps({"layers": [{"mediaType": MODEL_LAYER, "digest": f"sha256:{digest}"}]})
      for digest in ("../../../etc/passwd", "1" * 64))])
def test_what_is_no_manifest_or_has_no_weights_is_no_model(store, source, manifest):
    ollama(store, source.read_bytes(), "registry.ollama.ai", "library", "good", "latest")
    ollama(store, b"no GGUF", "registry.ollama.ai", "library", "embed", "latest")
    path = store / "OLLAMA_MODELS" / "manifests" / "registry.ollama.ai" / "library" / "x" / "y"
    path.parent.mkdir()
    path.write_text(manifest)
    assert [one.name for one in local_stores.ollama_models()] == ["good:latest"]


def test_llama_cpps_cache_and_its_split_models(store, source):
    folder = store / "LLAMA_CACHE"
    (folder / "maker_one-Q8_0.gguf").write_bytes(source.read_bytes())
    (folder / "maker_mmproj-one.gguf").write_bytes(b"GGUF")
    split(source, folder, stem="maker_two")
    names = [one.name for one in local_stores.llama_cpp_models()]
    assert names == ["maker_one-Q8_0.gguf", "maker_two-00001-of-00003.gguf"]
    assert find("maker_one-Q8_0").path == folder / "maker_one-Q8_0.gguf"
    assert listed()[names[1]]["size"] == sum(
        path.stat().st_size for path in folder.glob("maker_two*"))


def test_a_file_here_comes_before_a_stored_model(store, source, tmp_path, monkeypatch):
    ollama(store, source.read_bytes(), "registry.ollama.ai", "library", "tiny", "latest")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny").write_bytes(source.read_bytes())
    assert str(find("tiny").path) == "tiny"


def test_what_can_be_done_with_a_model_is_what_those_say_who_do_it(store, source):
    folder = store / "LLAMA_CACHE"
    altered(source, folder / "odd.gguf", numbers={"llama.attention.sliding_window": 64})
    (folder / "broken.gguf").write_bytes(source.read_bytes()[:-2000])
    found = listed()
    assert "attention.sliding_window" in found["odd.gguf"]["cut"]
    assert found["odd.gguf"]["sliced"] == found["odd.gguf"]["cut"]
    assert "truncated" in found["broken.gguf"]["damage"]
    embedded = found["embedded"]
    assert (embedded["cut"], embedded["sliced"], embedded["slices"]) == ("", "", 4)
    assert (embedded["quantisation"], embedded["architecture"]) == ("Q8_0", "llama")
    assert set(found["task"]["decomposers"]) >= {"pasta", "pdos", "skeleton", "apar"}
    text = CliRunner().invoke(main, ["models"]).output
    assert "odd.gguf" in text
    assert "cannot be used" in text
    assert CliRunner().invoke(main, ["models", "odd.gguf"]).output.count("sliding_window") == 2
