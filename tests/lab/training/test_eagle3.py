"""An EAGLE-3 head made for a target: its answers with hidden rows, what it learns, its file."""

from __future__ import annotations

from dataclasses import replace

import gguf
import numpy as np
import pytest
import torch
from click.testing import CliRunner

from pipeinfer.errors import ModelError
from pipeinfer.lab.training.__main__ import main
from pipeinfer.lab.training.draft.answers import Talk
from pipeinfer.lab.training.draft.own_draft import marks_of
from pipeinfer.lab.training.draft.teach import batches
from pipeinfer.lab.training.eagle3.collecting import AnswerBudget, tapped_answers
from pipeinfer.lab.training.eagle3.head import EagleHead, shape_for, usual_taps
from pipeinfer.lab.training.eagle3.own_head import HeadSettings, run
from pipeinfer.lab.training.eagle3.shards import fill, load_shards, shards_of, tokens_in
from pipeinfer.lab.training.eagle3.teach_head import (
    as_rounded,
    begin,
    chosen_tokens,
    frozen_parts,
    loss_of,
    pack,
    steps_of,
)
from pipeinfer.lab.training.network.restore import restore
from pipeinfer.models.heads import complete
from pipeinfer.models.locate import EMBEDDED, open_model, open_tokenizer
from tests.support.llama_head import LlamaEagle, LlamaTarget
from tests.support.sample import fewer

TARGET = EMBEDDED / "target.gguf"  # 12 layers of 256 columns
TAPS = (2, 6, 11)


@pytest.fixture(scope="module")
def target():
    return restore(TARGET).eval()


@pytest.fixture(scope="module")
def marks():
    return marks_of(open_tokenizer(TARGET))


@pytest.fixture(scope="module")
def folder(tmp_path_factory, marks):
    """Shards of an interrupted collection and of the one that went on."""
    folder = tmp_path_factory.mktemp("answers")
    for seed in (1, 2):
        budget = AnswerBudget(None, fewer(12, 8), slots=fewer(10, 8), length=fewer(40, 24),
                              seed=seed)
        fill(folder, tapped_answers(TARGET, marks, TAPS, budget), marks.before, lambda line: None)
    return folder


def inputs_of(model, tokens):
    """The input rows of every layer, by a plain forward pass."""
    x = model.token_embd(tokens[None])
    found = []
    for block in model.blk:
        found.append(x[0])
        x = block(x, model.cos[: len(tokens)], model.sin[: len(tokens)])
    return found


def test_noted_rows_are_the_inputs_of_the_tapped_layers(target, marks):
    talk, found = Talk(target, marks, slots=4, length=30, seed=3, taps=TAPS), []
    while len(found) < 4:
        found += talk.step()
    for text in [*found, *talk.rest()]:
        with torch.no_grad():
            layers = inputs_of(target, torch.from_numpy(text.tokens.astype(np.int64)))
        expected = torch.cat([layers[tap] for tap in TAPS], 1).numpy()
        assert text.rows.shape == expected.shape
        assert np.allclose(text.rows, expected, atol=0.02, rtol=0.02)


def test_rows_are_those_of_llama_cpp(folder):
    taught = load_shards(folder)
    whole = LlamaTarget(TARGET, TAPS)
    for start, stop in taught.lessons.spans(held_out=False)[:3]:
        whole.cut(0)
        _, rows = whole.step(taught.lessons.tokens[start:stop].tolist(), 0)
        noted = taught.rows_of(start, stop).astype(np.float32)
        # Q8_0 activations there, bfloat16 here
        assert np.linalg.norm(rows - noted) < 0.05 * np.linalg.norm(rows)
    whole.close()


def test_a_collection_goes_on_with_other_texts(folder):
    assert [path.name for path in shards_of(folder)] == ["00000.npz", "00001.npz"]
    taught = load_shards(folder)
    spans = [span for kind in (False, True) for span in taught.lessons.spans(held_out=kind)]
    assert tokens_in(folder) == len(taught.lessons.tokens) == sum(b - a for a, b in spans)
    assert len({taught.lessons.tokens[a:b].tobytes() for a, b in spans}) == len(spans)
    for name in ("00002.rows.npy", "00002.partial.npz"):  # a shard counts once it is whole
        (folder / name).write_bytes(b"cut off")
    assert len(load_shards(folder).rows) == 2


def test_a_step_of_the_chain_is_what_generation_computes(folder, target):
    """Unrolled side by side, and position by position as llama.cpp does it: the same rows."""
    taught = load_shards(folder)
    torch.manual_seed(1)
    head = EagleHead(shape_for(target.config, TAPS))
    begin(head, target, taught, seed=1)
    frozen = frozen_parts(target, chosen_tokens(taught, 300, target.config.n_vocab))
    group = batches(taught.lessons.spans(held_out=False), 120, np.random.default_rng(0))[0]
    batch = pack(taught, group, frozen.places)
    tokens = torch.nn.functional.embedding(batch.tokens, frozen.embedding)
    with torch.no_grad():
        hidden = head.encode(batch.rows)
        unrolled = list(head.unroll(tokens, hidden, 3))
        length = hidden.shape[1]
        for end in (4, length - 1):  # of a chain of three, whose own rows replace
            own = hidden.clone()
            for depth in range(3):
                at = end - 2 + depth
                step = next(head.unroll(tokens[:, : at + 1], own[:, : at + 1], 1))[:, at]
                assert torch.allclose(step, unrolled[depth][:, at], atol=1e-4, rtol=1e-3)
                if at + 1 < length:
                    own[:, at + 1] = step


def test_rounding_is_that_of_the_file():
    matrix = torch.randn(8, 96, generator=torch.Generator().manual_seed(2))
    matrix[3, 32:64] = 0
    kind = gguf.GGMLQuantizationType.Q4_0
    stored = gguf.quants.dequantize(gguf.quants.quantize(matrix.numpy(), kind), kind)
    assert np.allclose(as_rounded(matrix).numpy(), stored, atol=1e-6)


def test_the_usual_taps_are_low_middle_and_high():
    assert usual_taps(30) == (2, 15, 27)
    assert usual_taps(12) == (2, 6, 9)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run of a few steps: settings, report, head file, completed file."""
    work = tmp_path_factory.mktemp("eagle3")
    settings = HeadSettings(TARGET, work / "head.gguf", work / "work", texts=fewer(30, 20),
                            slots=fewer(10, 20), length=fewer(48, 32), steps=fewer(30, 10),
                            taps=TAPS, vocabulary=600)
    result = run(settings, report=lambda line: None)
    complete(settings.out, TARGET, work / "whole.gguf")
    return settings, result, work / "whole.gguf"


def stored_head(path, target):
    """The head of a file, and the tokens that it can propose."""
    reader = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    head, weights = EagleHead(shape_for(target.config, TAPS)), {}
    for name in head.state_dict():
        stored = {"enc_norm.weight": "enc.output_norm.weight"}.get(
            name, name if name in reader else f"blk.0.{name}")
        weights[name] = torch.from_numpy(gguf.quants.dequantize(
            reader[stored].data, reader[stored].tensor_type).copy())
    head.load_state_dict(weights)
    return head, reader["d2t"].data.astype(np.int64)


def test_a_head_learns(trained, target):
    settings, result, _ = trained
    taught = load_shards(settings.work / "answers")
    head, tokens = stored_head(settings.out, target)
    frozen, fresh = frozen_parts(target, tokens), EagleHead(head.config)
    begin(fresh, target, taught, seed=0)
    batch = pack(taught, taught.lessons.spans(held_out=True), frozen.places)
    with torch.no_grad():
        before, after = (float(loss_of(one, frozen, batch, 3, bfloat16=False))
                         for one in (fresh, head))
    assert after < before - 0.3
    assert len(result["held_out_agreement"]) == 3


def test_a_run_that_is_done_changes_nothing(trained):
    settings, _, _ = trained
    before = settings.out.read_bytes()
    run(settings, report=lambda line: None)
    assert settings.out.read_bytes() == before
    other = replace(settings, taps=(1, 6, 11))
    with pytest.raises(ModelError, match="of another taps"):
        run(other, report=lambda line: None)


def test_the_file_runs_in_llama_cpp_as_the_head_in_torch(trained, target):
    settings, _, whole = trained
    taught = load_shards(settings.work / "answers")
    head, able = stored_head(settings.out, target)
    frozen = frozen_parts(target, able)
    spans = taught.lessons.spans(held_out=False)[:4]
    eagle = LlamaEagle(whole)
    for start, stop in spans:
        tokens, rows = taught.lessons.tokens[start:stop].tolist(), taught.rows_of(start, stop)
        batch = pack(taught, [(start, stop)], frozen.places)
        with torch.no_grad():
            batch = type(batch)(batch.rows, batch.tokens, torch.ones_like(batch.learned),
                                batch.likely, batch.shares)
            steps = [logits for logits, _ in steps_of(head, frozen, batch, 2)]
        at = len(tokens) - 3
        eagle.cut(0)
        hidden = eagle.encode(rows[:-1].astype(np.float32))
        eagle.read(tokens[1 : at + 1], hidden[:at], 0)
        first, own = eagle.propose(tokens[at + 1], hidden[at], at)
        second, _ = eagle.propose(tokens[at + 2], own, at + 1)
        for found, logits in ((first, steps[0][at]), (second, steps[1][at])):
            possible = np.isfinite(found)
            assert possible.nonzero()[0].tolist() == frozen.tokens.tolist()
            expected = logits.numpy()
            assert np.abs(found[possible] - expected).max() < 0.1 * expected.std() + 0.1
            assert expected[found[possible].argmax()] > expected.max() - 0.2
        eagle.cut(at)
        chain = eagle.chain(tokens[at + 1], hidden[at], at, 3)
        assert chain[0] == int(first.argmax())
        assert set(chain) <= set(frozen.tokens.tolist())
    eagle.close()


@pytest.mark.parametrize(("args", "says"), [
    (["--taps", "2,15"], "--taps 2,15: give three numbers"),
    (["--taps", "2,6,12"], "taps 2, 6, 12 of a target of 12 layers: give three ascending"),
    (["--out", "x.bin"], "--out must end in .gguf"),
    (["--minutes", "1"], "give either --minutes or --steps"),
])
def test_impossible_options_are_refused_with_the_reason(tmp_path, args, says):
    if "--out" not in args:
        args = [*args, "--out", str(tmp_path / "x.gguf")]
    done = CliRunner().invoke(main, ["eagle3", str(TARGET), "--work", str(tmp_path), "--steps",
                                     "1", "--texts", "1", *args])
    assert done.exit_code != 0
    assert says in f"{done.output} {done.exception}"


def test_the_shipped_kind_of_file_is_small_and_says_what_it_lacks(trained):
    settings, _, whole = trained
    model = open_model(settings.out)
    assert not {"token_embd.weight", "output.weight"} & model.tensors.keys()
    assert model.get("pipeinfer.eagle3.from_target") == ["token_embd", "output", "tokenizer"]
    assert model.arch_get("target_layers") == list(TAPS)
    assert open_tokenizer(whole).chat_template == open_tokenizer(TARGET).chat_template
