"""Inflated models compute what their sources compute, and keep their bytes."""

from __future__ import annotations

import enum
import getopt
import inspect
import json
import secrets
from pathlib import Path

import gguf
import numpy as np
import pytest
from click.testing import CliRunner
from gguf import GGMLQuantizationType as QType

from benchmarks.inflate import inflate as module
from benchmarks.inflate.inflate import Shape, head_map, inflate, placement, verify
from pipeinfer.models import locate
from tests.kit.sample import full

EMBEDDED = locate.EMBEDDED / "target.gguf"
VOCAB = 96
OLD = Shape(n_embd=64, n_layer=3, n_head=4, n_head_kv=2, n_ff=96, head_size=32)
BIGGER = {"n_embd": 160, "n_layer": 5, "n_head": 8, "n_head_kv": 4, "n_ff": 128}
TOKENS = np.random.default_rng(1).integers(0, VOCAB, 48).tolist()


def write_random(path: Path, qtype: QType, *, seed: int = 0, extra: str = "") -> Path:
    """A random llama of shape OLD without a tokenizer; weights of ordinary size."""
    generator = np.random.default_rng(seed)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_vocab_size(VOCAB)
    writer.add_context_length(128)
    writer.add_embedding_length(OLD.n_embd)
    writer.add_block_count(OLD.n_layer)
    writer.add_feed_forward_length(OLD.n_ff)
    writer.add_head_count(OLD.n_head)
    writer.add_head_count_kv(OLD.n_head_kv)
    writer.add_key_length(OLD.head_size)
    writer.add_value_length(OLD.head_size)
    writer.add_rope_dimension_count(OLD.head_size)
    writer.add_layer_norm_rms_eps(1e-3)
    writer.add_tokenizer_model("none")

    def matrix(name: str, rows: int, columns: int) -> None:
        data = generator.standard_normal((rows, columns), dtype=np.float32) * columns**-0.5
        packed = gguf.quants.quantize(data, qtype)
        writer.add_tensor(name, packed, raw_dtype=qtype)

    def norm(name: str) -> None:
        writer.add_tensor(name, generator.uniform(0.5, 1.5, OLD.n_embd).astype(np.float32))

    matrix("token_embd.weight", VOCAB, OLD.n_embd)
    matrix("output.weight", VOCAB, OLD.n_embd)
    norm("output_norm.weight")
    for layer in range(OLD.n_layer):
        for part in module._LAYER_TENSORS:
            name = f"blk.{layer}.{part}.weight"
            if part.endswith("norm"):
                norm(name)
            else:
                matrix(name, *OLD.tensor(part))
    if extra:
        norm(extra)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("sources")
    kinds = {"F32": QType.F32, "Q8_0": QType.Q8_0}
    return {name: write_random(folder / f"{name}.gguf", kind) for name, kind in kinds.items()}


@pytest.mark.parametrize(
    "shape",
    [
        BIGGER,
        full(BIGGER | {"n_head_kv": 2}),  # larger groups
        BIGGER | {"n_head_kv": 8},  # no groups: key/value heads are copied
        full(BIGGER | {"n_embd": 64}),  # depth and heads alone
        full(BIGGER | {"n_layer": 3, "n_head": 4, "n_head_kv": 2, "n_ff": 96}),  # width alone
    ],
)
def test_float_outputs_are_the_sources(
    sources: dict[str, Path], tmp_path: Path, shape: dict[str, int]
) -> None:
    inflate(sources["F32"], tmp_path / "big.gguf", **shape, qtype="F32")
    result = verify(sources["F32"], tmp_path / "big.gguf", tokens=TOKENS)
    assert result.positions == len(TOKENS)
    assert result.max_logit > 1
    # The attention cache is float16; everything else rounds as float32.
    assert result.max_logit_difference < 2e-3 * result.max_logit
    assert result.argmax_agreement == 1.0


def test_quantised_outputs_are_close(sources: dict[str, Path], tmp_path: Path) -> None:
    inflate(sources["Q8_0"], tmp_path / "big.gguf", **BIGGER)
    result = verify(sources["Q8_0"], tmp_path / "big.gguf", tokens=TOKENS)
    assert result.max_logit_difference < 0.03 * result.max_logit
    assert result.argmax_agreement > 0.9


def test_verify_notices_another_model(sources: dict[str, Path], tmp_path: Path) -> None:
    other = write_random(tmp_path / "other.gguf", QType.F32, seed=9)
    result = verify(sources["F32"], other, tokens=TOKENS)
    assert result.max_logit_difference > 0.5
    assert result.argmax_agreement < 0.5


def test_old_blocks_are_copied_and_new_outputs_are_zero(
    sources: dict[str, Path], tmp_path: Path
) -> None:
    report = inflate(sources["Q8_0"], tmp_path / "big.gguf", **BIGGER)
    small = {t.name: t for t in gguf.GGUFReader(sources["Q8_0"]).tensors}
    reader = gguf.GGUFReader(tmp_path / "big.gguf")
    large = {t.name: t for t in reader.tensors}
    assert report.layers == placement(3, 5) == (0, 1, 3)
    assert report.parameters == sum(int(t.n_elements) for t in reader.tensors)
    row = OLD.n_embd // 32 * 34
    down = small["blk.1.ffn_down.weight"].data
    there = large["blk.1.ffn_down.weight"].data
    assert np.array_equal(there[: OLD.n_embd, : down.shape[1]], down)
    assert not there[OLD.n_embd :].any()
    assert not there[:, down.shape[1] :].any()
    assert np.array_equal(large["token_embd.weight"].data[:, :row], small["token_embd.weight"].data)
    for part in ("attn_output", "ffn_down"):
        assert not large[f"blk.2.{part}.weight"].data.any()
    assert large["blk.2.ffn_up.weight"].data.any()
    epsilon = reader.get_field("llama.attention.layer_norm_rms_epsilon")
    assert epsilon is not None
    assert epsilon.contents() == pytest.approx(1e-3 * 64 / 160)


@pytest.mark.parametrize(
    ("groups", "new"), [((4, 2), (8, 4)), ((4, 2), (8, 2)), ((4, 2), (4, 4)), ((6, 2), (8, 4))]
)
def test_every_query_head_reads_its_own_keys(groups: tuple[int, int], new: tuple[int, int]) -> None:
    small, large = (Shape(64, 1, heads, kv, 64, 32) for heads, kv in (groups, new))
    queries, copies = head_map(small, large)
    assert len(set(queries)) == small.n_head
    for head, at in enumerate(queries):
        assert copies[at // (new[0] // new[1])] == head // (groups[0] // groups[1])


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"n_embd": 32}, "n_embd 32: the source needs 64"),
        ({"n_embd": 72}, "n_embd 72 is no multiple of 32"),
        ({"n_layer": 2}, "n_layer 2: the source needs 3"),
        ({"n_head_kv": 3}, "must be a multiple of n_head_kv"),
        ({"n_head": 8, "n_head_kv": 1}, "raise n_head_kv"),
        ({"qtype": "Q4_K"}, "choose one of F32, F16, Q8_0"),
    ],
)
def test_impossible_shapes_are_refused(
    sources: dict[str, Path], tmp_path: Path, change: dict[str, int | str], says: str
) -> None:
    with pytest.raises(ValueError, match=says):
        inflate(sources["Q8_0"], tmp_path / "big.gguf", **{**BIGGER, **change})  # type: ignore[arg-type]
    assert not list(tmp_path.iterdir())


def test_unknown_tensors_are_refused(tmp_path: Path) -> None:
    source = write_random(tmp_path / "odd.gguf", QType.F32, extra="blk.0.attn_q.bias")
    with pytest.raises(ValueError, match=r"blk\.0\.attn_q\.bias"):
        inflate(source, tmp_path / "big.gguf", **BIGGER)


def test_same_seed_same_file_and_progress(sources: dict[str, Path], tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    for name in ("a", "b"):
        inflate(
            sources["Q8_0"],
            tmp_path / name,
            **BIGGER,
            seed=3,
            progress=lambda done, total: seen.append((done, total)),
        )
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    assert seen[-1] == (5 * 9 + 3, 5 * 9 + 3)
    inflate(sources["Q8_0"], tmp_path / "c", **BIGGER, seed=4)
    assert (tmp_path / "a").read_bytes() != (tmp_path / "c").read_bytes()


def test_command_inflates_the_embedded_target(tmp_path: Path) -> None:
    out = tmp_path / "big.gguf"
    # Four times the width: sqrt(4) is exact, so that not even roundings differ.
    shape = "--n-embd 1024 --n-layer 14 --n-head 16 --n-head-kv 4 --n-ff 1024".split()
    arguments = [str(EMBEDDED), "-o", str(out), *shape, "--json"]
    result = CliRunner().invoke(module.inflate_command, arguments)
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report["argmax_agreement"] == 1.0
    assert report["max_logit_difference"] < 1e-4 * report["max_logit"]
    assert report["parameters"] > 3 * report["source_parameters"]


def test_command_says_what_to_change(tmp_path: Path) -> None:
    arguments = [str(EMBEDDED), "-o", str(tmp_path / "x.gguf"), "--n-embd", "128"]
    result = CliRunner().invoke(module.inflate_command, arguments)
    assert result.exit_code == 2
    assert "the source needs 256 or more" in result.output


def test_embedded_pair_is_fit_for_speculation() -> None:
    """On files that it never saw: the target is better, and the draft agrees often, not always."""
    draft = EMBEDDED.with_name("draft.gguf")
    assert EMBEDDED.stat().st_size + draft.stat().st_size < 25e6
    losses, agreement = [], []
    for library in (enum, getopt, secrets):
        text = inspect.getsource(library)
        tokens = module._tokens(EMBEDDED, text)[:900]
        target, small = (module._logits(path, tokens, 2) for path in (EMBEDDED, draft))
        rows = np.arange(len(tokens) - 1)
        for logits in (target, small):
            shifted = logits[:-1] - logits[:-1].max(-1, keepdims=True)
            log_sum = np.log(np.exp(shifted.astype(np.float64)).sum(-1))
            losses.append(float((log_sum - shifted[rows, tokens[1:]]).mean()))
        agreement.append(float((target.argmax(-1) == small.argmax(-1)).mean()))
    target_nats, draft_nats = np.mean(losses[::2]), np.mean(losses[1::2])
    assert 2 < target_nats < draft_nats - 0.1
    assert 0.55 < np.mean(agreement) < 0.88
