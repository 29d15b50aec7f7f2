"""BiTA with real layers: tuning, and that tuning and decoding compute the same."""

# ruff: noqa: E402  (skipped where a package is missing)
from __future__ import annotations

import contextlib
import dataclasses
import shutil
from pathlib import Path

import numpy as np
import pytest

for _package in ("torch", "transformers", "safetensors"):
    pytest.importorskip(_package, reason=f"the torch backend needs {_package}")

import torch
from click.testing import CliRunner
from safetensors.torch import save_file

from pipeinfer.backends.pytorch.backend import TorchBackend
from pipeinfer.backends.pytorch.options import TorchOptions
from pipeinfer.core.types import Rows, make_rows
from pipeinfer.errors import ModelError
from pipeinfer.models.bita_adapter import load_bita
from pipeinfer_lab.training.__main__ import main
from pipeinfer_lab.training.bita.bita import (
    KINDS,
    Adapter,
    Plan,
    batch_of,
    hit_rates,
    labels_of,
    mask_logits,
    read_contexts,
    tune,
)
from pipeinfer_lab.training.bita.frozen import continue_greedily, load_frozen
from pipeinfer_lab.training.bita.own_answers import Samples, answered, even
from tests.kit.sample import fewer
from tests.kit.tiny_torch import LAYERS, VOCAB, reference, save

PLAN = Plan(steps=12, batch=4, groups=6, samples=24, tokens=28, given=10, masks=3, prompts=4,
            rate=2e-2, warmup=4, bfloat16=False)


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def folder(request, tmp_path_factory):
    path = tmp_path_factory.mktemp(request.param)
    return save(reference(request.param), path)


@pytest.fixture(scope="module")
def model(folder):
    return load_frozen(folder, 1)


@pytest.fixture
def samples(model):
    """Texts that the model continues, with a rhythm that can be learnt."""
    starts = (torch.arange(24)[:, None] * 7 + torch.arange(10)) % VOCAB
    return even(continue_greedily(model, starts, 18), PLAN.given)


def backend_of(folder, adapter=None, prompt_id=2):
    backend = TorchBackend.load(folder, n_ctx=256, n_seq_max=4, n_batch=64, n_threads=1,
                                options=TorchOptions("cpu"))
    if adapter is not None:
        if adapter.n_prompts:
            backend.preload(adapter.prefix(0, LAYERS), (prompt_id,))
        assert backend.add_embeddings(adapter.masks) == VOCAB
    return backend


def exported(model, kind, seed=1):
    """A random adapter, as it would be written and read."""
    learned = Adapter(kind, model, dataclasses.replace(PLAN, seed=seed))
    with torch.no_grad():
        for parameter in learned.parameters():
            parameter.mul_(20)
    return learned, learned.export(model, {})


def test_samples_are_the_models_own_greedy_text(folder, samples):
    backend = backend_of(folder)
    path = samples.tokens[3].tolist()
    logits = backend.decode(make_rows([(t, i, (0,), True) for i, t in enumerate(path)]))
    assert logits.argmax(-1)[9:-1].tolist() == path[10:]


@pytest.mark.parametrize("kind", KINDS)
def test_a_group_of_masks_is_a_decode_behind_the_cut(folder, model, samples, kind):
    """Training's layout against what inference evaluates: prompts preloaded, masks as tokens
    beyond the vocabulary, the context cut behind the group's token."""
    learned, adapter = exported(model, kind)
    tokens, cuts = samples.tokens[:2], torch.tensor([[10, 14, 20], [11, 12, 24]])
    with torch.no_grad():
        found = mask_logits(model, learned, read_contexts(model, tokens), cuts)
    for b in range(2):
        for g, cut in enumerate(cuts[b].tolist()):
            backend = backend_of(folder, adapter)
            backend.decode(make_rows([(int(t), i, (0,), False)
                                      for i, t in enumerate(tokens[b, : cut + 1])]))
            view = (0, 2) if adapter.n_prompts else (0,)
            rows = make_rows([(VOCAB + r, cut + 1 + r, (0,), True) for r in range(3)], (view,) * 3)
            np.testing.assert_allclose(backend.decode(rows), found[b, g].numpy(), atol=2e-4)


def test_labels_leave_the_next_token_to_the_ordinary_row():
    tokens = torch.arange(20).expand(2, -1)
    assert labels_of(tokens, torch.tensor([[3, 9], [4, 5]]), 3).tolist() == [
        [[5, 6, 7], [11, 12, 13]], [[6, 7, 8], [7, 8, 9]]]


def test_prompts_change_nothing_for_rows_without_masks(folder, model):
    """Bit by bit, alone and with masks beside them in the decode."""
    def rows(masks):
        tokens = [(5, 0, (0, 1)), (6, 1, (0, 1)), (7, 2, (0,)), *masks]
        return Rows(np.array([r[0] for r in tokens], np.int32),
                    np.array([r[1] for r in tokens], np.int32), tuple(r[2] for r in tokens),
                    np.ones(len(tokens), np.bool_),
                    tuple((*r[2], 2) if r[0] >= VOCAB else r[2] for r in tokens))

    masks = [(VOCAB + r, 2 + r, (1,)) for r in range(3)]
    bare = backend_of(folder).decode(rows([]))
    adapter = exported(model, "deep")[1]
    with_prompts = backend_of(folder, adapter).decode(rows(masks))
    assert np.array_equal(bare, with_prompts[:3])
    other = backend_of(folder, exported(model, "deep", 2)[1]).decode(rows(masks))
    assert np.array_equal(bare, other[:3])
    assert not np.allclose(with_prompts[3:], other[3:])  # and masks do see them


def test_an_interrupted_run_goes_on_as_it_would_have(model, samples, tmp_path):
    def adapters():
        return {kind: Adapter(kind, model, PLAN) for kind in KINDS}

    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
    whole, parts, fresh = adapters(), adapters(), adapters()
    losses = tune(model, whole, samples, PLAN, tmp_path / "a", lambda line: None)
    tune(model, parts, samples, PLAN, tmp_path / "b", lambda line: None, stop_after=5)
    again = tune(model, fresh, samples, PLAN, tmp_path / "b", lambda line: None)
    assert again == losses
    for kind in KINDS:
        for (name, one), (_, other) in zip(whole[kind].named_parameters(),
                                           fresh[kind].named_parameters(), strict=True):
            assert torch.equal(one, other), name


def test_the_loss_falls_for_every_kind_of_prompt(tmp_path):
    """On a trained model: a random one has no text to foresee. The sample's has 2 layers, and takes
    more steps in less time."""
    model = load_frozen(Path("pipeinfer/models/embedded") / fewer("target.gguf", "draft.gguf"), 1)
    plan = dataclasses.replace(PLAN, steps=fewer(20, 24), rate=1e-2)
    starts = torch.arange(8)[:, None] * 31 + torch.arange(10) + 300
    samples = even(continue_greedily(model, starts, 18), PLAN.given)
    adapters = {kind: Adapter(kind, model, plan) for kind in KINDS}
    before = {kind: hit_rates(model, adapters[kind], samples, plan) for kind in KINDS}
    losses = tune(model, adapters, samples, plan, tmp_path, lambda line: None)
    for kind in KINDS:
        assert np.mean(losses[kind][-5:]) < np.mean(losses[kind][:2]) - 1.0
        after = hit_rates(model, adapters[kind], samples, plan)
        assert sum(after["top_5"]) > sum(before[kind]["top_5"])


def test_the_command_writes_an_adapter_and_goes_on_where_it_was(tmp_path):
    model = "pipeinfer/models/embedded/target.gguf"
    args = ["bita", "--model", model, "--out", str(tmp_path / "a.safetensors"), "--work",
            str(tmp_path / "work"), "--steps", "2", "--samples", "16", "--tokens", "70", "--masks",
            "2", "--prompts", "3"]
    (tmp_path / "text.py").write_text("def f(x):\n    return x + 1\n\n\n" * 40)
    done = CliRunner().invoke(main, [*args, "--text", str(tmp_path / "text.py")])
    assert done.exit_code == 0, done.output
    adapter = load_bita(tmp_path / "a.safetensors")
    assert (adapter.n_masks, adapter.n_prompts) == (2, 3)
    assert adapter.about["model"] == "target.gguf"
    assert len(adapter.about["hit_rates"]["first"]) == 2
    adapter.check(12, 256)
    other = shutil.copy("pipeinfer/models/embedded/draft.gguf", tmp_path / "other.gguf")
    for more, named in ((["--model", other], "another model"), (["--seed", "1"], "another seed"),
                        (["--text", __file__], "another text")):
        done = CliRunner().invoke(main, [*args, "--text", str(tmp_path / "text.py"), *more])
        assert isinstance(done.exception, ModelError)
        assert f"holds samples.npy of {named}: give another --work" in str(done.exception)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_answers_to_prompts_of_many_lengths_are_each_prompts_own(tmp_path, family):
    save(reference(family), tmp_path)
    model = load_frozen(tmp_path, 1)
    prompts = [[5, 6, 7], [8] * 11, [9, 10, 11, 12, 13, 14]]
    alone = [continue_greedily(model, torch.tensor([p]), 24 - len(p))[0].tolist() for p in prompts]
    end = alone[0][9]  # where the first answer ends

    def answers(path):
        return answered(model, [*prompts, [1] * 24], tokens=24, least=1, ends=[end], path=path,
                        autocast=contextlib.nullcontext, report=lambda line: None, batch=2)

    samples = answers(tmp_path / "a.npy")
    for tokens, given, length, prompt, text in zip(
            samples.tokens.tolist(), samples.given.tolist(), samples.length.tolist(), prompts,
            alone, strict=True):
        stops = [k for k in range(len(prompt), 24) if text[k] == end]
        assert (given, length) == (len(prompt), stops[0] + 1 if stops else 24)
        assert tokens[:length] == text[:length]
        assert not any(tokens[length:])
    again = answers(tmp_path / "a.npy")  # nothing is left to be answered
    assert torch.equal(again.tokens, samples.tokens)


def test_cuts_lie_where_masks_have_tokens_of_the_models_own_to_learn():
    count, given, length = 40, 10, torch.tensor([15, 28] * 20)
    samples = Samples(torch.arange(count)[:, None].expand(-1, 28), torch.full((count,), given),
                      length)
    cuts_of = {15: set(), 28: set()}
    for step in range(60):
        tokens, cuts = batch_of(samples, PLAN, step)
        for row, mine in zip(tokens[:, 0].tolist(), cuts.tolist(), strict=True):
            cuts_of[int(length[row])] |= set(mine)
    assert cuts_of == {15: {9, 10}, 28: set(range(9, 24))}


def test_models_that_cannot_be_tuned_say_so(tmp_path):
    with pytest.raises(ValueError, match="more tokens"):
        Plan(tokens=66)
    model = load_frozen(save(reference("llama"), tmp_path / "llama"), 1)
    with pytest.raises(ValueError, match="prompts must be one of"):
        Adapter("wide", model, PLAN)


def of_the_authors(path, prompts=2, width=64, masks=3):
    """Names and layout of BiTA's program: prompt p's row is key 0, value 0, key 1, ..."""
    save_file({"model.prefix_encoder.embedding.weight":
               torch.arange(prompts * 2 * LAYERS * width).reshape(prompts, -1).float(),
               "model.mask_tokens.weight": torch.ones(masks, width),
               "model.norm.weight": torch.ones(width)}, path)
    return path


def train_bita(*args):
    done = CliRunner().invoke(main, ["bita", *map(str, args)])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.output


def test_the_authors_files_become_an_adapter(tmp_path):
    """Element (prompt p, layer l, key or value k, head h, dimension j) of their table is number
    p 2Ld + (2l + k) d + 16 h + j, for L=4 layers, d=64 and heads of 16."""
    whole = reference("llama", num_key_value_heads=4)
    where, out = of_the_authors(tmp_path / "authors"), tmp_path / "bita.safetensors"
    said = train_bita("--model", save(whole, tmp_path / "llama"), "--from", where, "--out", out)
    assert said == f"{out}: 3 masks, 2 prompts\n"
    found = load_bita(out)
    found.check(LAYERS, 64)
    assert found.keys.shape == found.values.shape == (LAYERS, 2, 4, 16)
    for p, layer, head, j in ((0, 0, 0, 0), (1, 0, 0, 5), (0, 3, 1, 2), (1, 2, 3, 15)):
        number = 512 * p + 2 * layer * 64 + 16 * head + j
        assert found.keys[layer, p, head, j] == np.float16(number)
        assert found.values[layer, p, head, j] == np.float16(number + 64)
    one = of_the_authors(tmp_path / "one.bin", masks=1)  # one vector for all masks
    train_bita("--model", tmp_path / "llama", "--from", one, "--masks", 4, "--out", out)
    assert load_bita(out).n_masks == 4


def test_other_files_than_the_authors_are_refused(tmp_path):
    model = save(reference("llama"), tmp_path / "llama")  # two heads share keys and values
    good = of_the_authors(tmp_path / "good.bin")
    (tmp_path / "noise.bin").write_bytes(b"hello")
    save_file({"other": torch.ones(2)}, tmp_path / "other.bin")
    torch.save({"mask_tokens.weight": Path}, tmp_path / "code.bin")
    for name, says in (("noise", "no safetensors file"), ("code", "no safetensors file"),
                       ("other", "has no mask_tokens.weight"), ("good", "4 heads share 2 keys")):
        with pytest.raises(ModelError, match=says):
            train_bita("--model", model, "--from", tmp_path / f"{name}.bin", "--out",
                       tmp_path / "out")
    assert not (tmp_path / "out").exists()
    with pytest.raises(ModelError, match="needs 64 and 2 x 4 x 64"):
        train_bita("--model", model, "--from", of_the_authors(good, width=32), "--out",
                   tmp_path / "out")
