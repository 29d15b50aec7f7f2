"""Reading GGUF files, whole and damaged."""

from __future__ import annotations

import struct
import tracemalloc

import gguf
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeinfer.errors import ModelError
from pipeinfer.models.gguf import ModelFile
from tests.kit.gguf_files import split
from tests.kit.random_model import RandomSpec, write_random_model
from tests.kit.sample import examples


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    path = tmp_path_factory.mktemp("gguf") / "whole.gguf"
    return write_random_model(path, RandomSpec(n_layer=2, qtype="Q8_0"))


@pytest.fixture(scope="module")
def raw(whole):
    return whole.read_bytes()


def text(value):
    raw = value.encode()
    return struct.pack("<Q", len(raw)) + raw


def string_entry(key, value):
    return text(key) + struct.pack("<I", 8) + text(value)


def uint_entry(key, value):
    return text(key) + struct.pack("<II", 4, value)


def build(entries=(), tensors=(), magic=b"GGUF", version=3, counts=None, data=64):
    n_tensors, n_meta = counts or (len(tensors), len(entries))
    head = struct.pack("<4sIQQ", magic, version, n_tensors, n_meta)
    out = head + b"".join(entries) + b"".join(tensors)
    return out + bytes(-len(out) % 32 + data)


BASIC = (
    string_entry("general.architecture", "llama"),
    uint_entry("llama.block_count", 1),
    uint_entry("llama.embedding_length", 32),
)


def tensor(name="blk.0.x.weight", shape=(16,), kind=0, offset=0):
    dims = struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
    return text(name) + dims + struct.pack("<IQ", kind, offset)


def test_agrees_with_the_gguf_package(whole):
    model, reader = ModelFile(whole), gguf.GGUFReader(whole)
    assert set(model.meta_keys()) == {k for k in reader.fields if not k.startswith("GGUF.")}
    assert (model.architecture, model.n_layers, model.n_embd, model.n_vocab) == (
        "llama", 2, 64, 320,
    )
    assert model.get("tokenizer.ggml.tokens") == reader.fields["tokenizer.ggml.tokens"].contents()
    assert model.arch_get("rope.freq_base") == 10000.0
    assert model.get("tokenizer.ggml.add_bos_token") is True
    assert len(model.tensors) == len(reader.tensors)
    for theirs in reader.tensors:
        ours = model.tensors[theirs.name]
        assert (ours.offset, ours.nbytes) == (theirs.data_offset, theirs.n_bytes)
        assert ours.shape == tuple(theirs.shape.tolist())
        assert b"".join(model.read_tensor(ours, chunk=100)) == theirs.data.tobytes()
    assert sum(model.layer_bytes) == sum(t.nbytes for t in model.tensors.values()
                                         if t.layer is not None)


def test_fingerprint_follows_the_content(whole, tmp_path):
    same = tmp_path / "copy.gguf"
    same.write_bytes(whole.read_bytes())
    assert ModelFile(same).fingerprint == ModelFile(whole).fingerprint
    other = write_random_model(tmp_path / "o.gguf", RandomSpec(n_layer=2, qtype="Q8_0", seed=1))
    assert ModelFile(other).fingerprint != ModelFile(whole).fingerprint


@pytest.mark.parametrize("share", [0.0, 0.001, 0.01, 0.2, 0.5, 0.9, 0.999])
def test_truncated_files_are_named(raw, tmp_path, share):
    path = tmp_path / "cut.gguf"
    path.write_bytes(raw[: int(len(raw) * share)])
    with pytest.raises(ModelError, match=r"cut\.gguf.*fetch") as caught:
        ModelFile(path)
    assert "\n" not in str(caught.value)


@pytest.mark.slow
def test_every_truncation_of_the_header_is_refused(raw, tmp_path):
    path = tmp_path / "cut.gguf"
    for size in range(0, 12000, 37):
        path.write_bytes(raw[:size])
        with pytest.raises(ModelError):
            ModelFile(path)


@given(position=st.integers(0, 11000), value=st.integers(0, 255))
@examples(150)
def test_a_changed_byte_is_read_or_refused(raw, tmp_path_factory, position, value):
    path = tmp_path_factory.getbasetemp() / "changed.gguf"
    changed = bytearray(raw)
    changed[position] = value
    path.write_bytes(changed)
    message = ""
    try:
        model = ModelFile(path)
        for key in model.meta_keys():
            model.get(key)
    except ModelError as error:
        message = str(error)
    assert "\n" not in message


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"GGML" + bytes(60), "not a GGUF file"),
        (b"<html>not found</html>      ", "not a GGUF file"),
        (build(BASIC, version=1), "version 1"),
        (build(BASIC, version=0x03000000), "big-endian"),
        (build(BASIC, counts=(2**62, 3)), "more than it can hold"),
        (build(BASIC, counts=(0, 2**63)), "more than it can hold"),
        (build([*BASIC, BASIC[0]]), "twice"),
        (build([*BASIC, text("k") + struct.pack("<I", 77)]), "unknown type 77"),
        (build([*BASIC, text("k") + struct.pack("<IQ", 8, 2**60)]), "truncated"),
        (build([*BASIC, text("k") + struct.pack("<IIQ", 9, 8, 2**58)]), "truncated"),
        (build([*BASIC, text("k") + struct.pack("<IIQ", 9, 8, 4) + struct.pack("<Q", 2**63)]),
         "truncated"),
        (build([*BASIC, text("k") + struct.pack("<IIQ", 9, 4, 2**61)]), "truncated"),
        (build([*BASIC, text("k") + struct.pack("<IIQ", 9, 9, 1)]), "array of type 9"),
        (build([*BASIC, struct.pack("<Q", 2**63)]), "truncated"),
        (build([*BASIC, struct.pack("<Q", 2) + b"\xff\xfe" + struct.pack("<IB", 0, 1)]), "UTF-8"),
        (build([*BASIC, uint_entry("general.alignment", 0)]), "alignment 0"),
        (build([*BASIC, uint_entry("general.alignment", 48)]), "alignment 48"),
        (build([*BASIC, string_entry("general.alignment", "x")]), "alignment 'x'"),
        (build(BASIC, [tensor(shape=(1, 1, 1, 1, 1))]), "5 dimensions"),
        (build(BASIC, [tensor(shape=(0,))]), "impossible shape"),
        (build(BASIC, [tensor(shape=(33,), kind=8)]), "impossible shape"),
        (build(BASIC, [tensor(shape=(2**62, 2**62))]), "truncated"),
        (build(BASIC, [tensor(kind=4)]), "type 4"),
        (build(BASIC, [tensor(kind=9999)]), "type 9999"),
        (build(BASIC, [tensor(offset=8)]), "offset 8"),
        (build(BASIC, [tensor(offset=2**63)]), "truncated"),
        (build(BASIC, [tensor(), tensor()]), "twice"),
        (build([BASIC[1], BASIC[2]]), "architecture"),
        (build(BASIC[:2]), "embedding_length"),
        (build([*BASIC[:1], BASIC[2], uint_entry("llama.block_count", 0)]), "block_count is 0"),
        (build([*BASIC[:1], BASIC[2], string_entry("llama.block_count", "8")]), "'8'"),
    ],
)
def test_damaged_files_are_refused_in_one_line_and_little_memory(content, message, tmp_path):
    path = tmp_path / "bad.gguf"
    path.write_bytes(content)
    tracemalloc.start()
    with pytest.raises(ModelError, match=message) as caught:
        ModelFile(path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert "bad.gguf" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert peak < 1 << 20


def test_missing_files_and_directories(tmp_path):
    with pytest.raises(ModelError, match="no such file"):
        ModelFile(tmp_path / "absent.gguf")
    with pytest.raises(ModelError, match="is a directory"):
        ModelFile(tmp_path)


def test_split_models_are_one_model(whole, tmp_path):
    paths = split(whole, tmp_path)
    model, reference = ModelFile(paths[0]), ModelFile(whole)
    assert model.paths == tuple(paths)
    assert set(model.tensors) == set(reference.tensors)
    for name, tensor in model.tensors.items():
        assert b"".join(model.read_tensor(tensor)) == b"".join(
            reference.read_tensor(reference.tensors[name])
        )


def test_split_models_name_what_is_wrong(whole, tmp_path):
    paths = split(whole, tmp_path)
    with pytest.raises(ModelError, match="00001-of-00003"):
        ModelFile(paths[1])
    lonely = tmp_path / "renamed.gguf"
    lonely.write_bytes(paths[0].read_bytes())
    with pytest.raises(ModelError, match="one of 3 parts"):
        ModelFile(lonely)
    kept = paths[2].read_bytes()
    paths[2].unlink()
    with pytest.raises(ModelError, match=r"one of 3 parts, but model-00003-of-00003\.gguf is not"):
        ModelFile(paths[0])
    paths[2].write_bytes(paths[1].read_bytes())
    with pytest.raises(ModelError, match=r"00003-of-00003.gguf: its split.no is 1, not 2"):
        ModelFile(paths[0])
    paths[1].unlink()
    paths[2].unlink()
    with pytest.raises(ModelError, match=r"00002-of-00003.gguf, model-00003-of-00003.gguf are not"):
        ModelFile(paths[0])
    paths[1].write_bytes(kept.replace(b"split.no\x02\0\0\0\x02", b"split.no\x02\0\0\0\x01"))
    paths[2].write_bytes(kept)
    with pytest.raises(ModelError, match="twice"):
        ModelFile(paths[0])
