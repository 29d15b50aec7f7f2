"""Model folders without torch: what plans read of them, and which backend takes what."""

from __future__ import annotations

import dataclasses

import pytest

pytest.importorskip("safetensors", reason="the folder is written with safetensors")

from pipeinfer.backends.factory import backend_for, backends_of
from pipeinfer.config import JobConfig, ModelConfig
from pipeinfer.errors import UnsupportedArchitecture, UsageError
from pipeinfer.models.gguf import ModelFile
from pipeinfer.models.hf_folder import ModelDir, torch_parts
from pipeinfer.models.locate import context_size, open_model
from pipeinfer.nodes import RankInfo
from pipeinfer.planning.planner import load_of
from tests.kit import launch
from tests.kit.embedded_folder import write_folder

EMBEDDED = launch.ROOT / "pipeinfer" / "models" / "embedded"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_folder(EMBEDDED / "target.gguf", tmp_path_factory.mktemp("hf") / "target-0.5")


def test_a_folder_says_what_the_gguf_says(folder):
    own, theirs = open_model(folder), ModelFile(EMBEDDED / "target.gguf")
    assert isinstance(own, ModelDir)
    for name in ("architecture", "n_layers", "n_embd", "n_vocab"):
        assert getattr(own, name) == getattr(theirs, name)
    for key in ("attention.head_count", "attention.head_count_kv", "context_length",
                "feed_forward_length"):
        assert own.arch_get(key) == theirs.arch_get(key)
    assert own.name == "target-0.5"
    assert own.get("general.file_type") == 0
    assert context_size(ModelConfig(), own) == context_size(ModelConfig(), theirs)
    assert own.nbytes == sum(own.layer_bytes) + 4 * (
        own.n_embd + own.n_vocab * own.n_embd * (1 + ("lm_head.weight" in own.tensors)))


def test_the_fingerprint_follows_config_and_weights(folder, tmp_path):
    copy = write_folder(EMBEDDED / "target.gguf", tmp_path / "copy")
    assert ModelDir(copy).fingerprint == ModelDir(folder).fingerprint
    weights = bytearray((copy / "model.safetensors").read_bytes())
    info = ModelDir(copy).tensors["model.layers.7.mlp.up_proj.weight"]
    weights[info.start + info.nbytes // 2] ^= 1
    (copy / "model.safetensors").write_bytes(weights)
    assert ModelDir(copy).fingerprint != ModelDir(folder).fingerprint
    config = (folder / "config.json").read_text()
    (copy / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    (copy / "config.json").write_text(config.replace("silu", "gelu"))
    assert config != (copy / "config.json").read_text()
    assert ModelDir(copy).fingerprint != ModelDir(folder).fingerprint


def test_memory_is_what_torch_will_hold(folder):
    """A quantised file grows when it becomes floats, and speeds are still per byte of the file."""
    own, gguf = ModelDir(folder), ModelFile(EMBEDDED / "target.gguf")
    assert torch_parts(own, 4) == torch_parts(gguf, 4) == torch_parts(own, 0)
    assert [2 * size for size in torch_parts(own, 2)[0]] == torch_parts(own, 4)[0]
    on_torch, on_llama = load_of(gguf, 512, 64, 4), load_of(gguf, 512, 64)
    assert on_torch.costs == on_llama.costs
    assert on_torch.sizes[0] > 3 * on_llama.sizes[0] - 4 * 512 * 512
    assert load_of(own, 512, 64).sizes == on_torch.sizes
    pytest.importorskip("torch", reason="the backend that is compared with")
    pytest.importorskip("transformers", reason="the backend that is compared with")
    from pipeinfer.backends.pytorch.backend import TorchBackend
    from pipeinfer.backends.pytorch.options import TorchOptions

    backend = TorchBackend.load(folder, layers=(3, 5), n_ctx=512, n_seq_max=1, n_batch=64,
                                n_threads=1, options=TorchOptions("cpu"))
    assert backend.info.weight_bytes + backend.info.cache_bytes == sum(on_torch.sizes[3:5])


def test_which_backend_takes_what(folder):
    gguf = EMBEDDED / "target.gguf"
    assert [backend_for(asked, gguf) for asked in ("auto", "llamacpp", "torch")] == [
        "llamacpp", "llamacpp", "torch"]
    assert [backend_for(asked, folder) for asked in ("auto", "torch")] == ["torch", "torch"]
    with pytest.raises(UsageError, match=r"is a folder, which llama\.cpp cannot load"):
        backend_for("llamacpp", folder)


def test_ranks_are_looked_at_before_anything_loads(folder):
    model = ModelFile(EMBEDDED / "target.gguf")

    def rank(number, backend, missing=()):
        return RankInfo(number, f"h{number}", asked_backend=backend, torch_missing=tuple(missing))

    hosts = [rank(0, "torch", ["torch"]), rank(1, "auto"), rank(2, "torch")]
    assert backends_of(JobConfig(), model, hosts) == (
        "llamacpp",
        "torch",
    )  # the head holds no stage
    with pytest.raises(UsageError, match="rank 0 on h0: the torch backend needs torch: pip"):
        backends_of(JobConfig.of(head_stage=True), model, hosts)
    with pytest.raises(UsageError, match="--distribute"):
        backends_of(JobConfig.of(distribute=True), model, hosts)
    with pytest.raises(UsageError, match="--device tpu"):
        backends_of(JobConfig.of(device="tpu"), model, hosts)
    odd = ModelDir(folder)
    odd.architecture = "mamba"
    with pytest.raises(UnsupportedArchitecture, match="'mamba' are not supported"):
        backends_of(JobConfig(), odd, hosts)
    assert dataclasses.asdict(ModelConfig())["backend"] == "auto"
