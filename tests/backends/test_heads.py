"""Heads of the target: their rows from shards, and their results from a file of their own."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from msgspec import structs

from pipeinfer.backends.base import tap
from pipeinfer.backends.composed import ChainBackend
from pipeinfer.backends.llamacpp.backend import LlamaOptions
from pipeinfer.backends.llamacpp.head import LlamaHead
from pipeinfer.backends.llamacpp.taps import refusal
from pipeinfer.core.drafting import FeedDraft
from pipeinfer.core.types import make_rows
from pipeinfer.errors import BackendError, ModelError
from pipeinfer.models.gguf import ModelFile
from pipeinfer.models.heads import HeadSource, SmallVocabulary, complete, has_head, head_of
from pipeinfer.models.shard import extract_shard
from pipeinfer.strategies.proposers.target_head import TargetHead
from tests.kit.clockwork import write_clockwork, write_eagle
from tests.kit.drafting import job
from tests.kit.llama import load
from tests.kit.llama_head import LlamaEagle
from tests.kit.random_model import RandomSpec, tiny, write_random_model
from tests.kit.sample import FULL, mostly_full

HEADED = ("glm4moe", "deepseek2-mtp", "qwen35-mtp", "qwen35moe-mtp")
TEXT = [int(one) for one in np.random.default_rng(3).integers(0, 256, 40)]
SIZES = {"n_ctx": 256, "n_seq_max": 4, "n_batch": 64}
OPTIONS = LlamaOptions(head="mtp", keep_order=False, layer_callbacks=False, huge_pages=False,
                       type_k="f16", type_v="f16", flash_attn="off")


def written(folder, name, qtype="Q8_0"):
    return ModelFile(write_random_model(folder / f"{name}.gguf", tiny(name, qtype=qtype)))


def parts(model, cuts, folder):
    bounds = [0, *cuts, model.n_layers]
    return [load(extract_shard(model, a, b, cache_dir=folder), (a, b), model.n_layers, **SIZES)
            for a, b in itertools.pairwise(bounds)]


def tapped(backends, layers, chunks, output=lambda _: True):
    """The tapped rows and the last results of TEXT, decoded in chunks."""
    taken = [tap(one, layers) for one in backends]
    rows, results, at = [], [], 0
    for count in chunks:
        batch, hidden = make_rows([(TEXT[at + k], at + k, (0,), output(at + k))
                                   for k in range(count)]), None
        for one in backends:
            hidden = one.decode(batch, hidden)
        rows.append(np.concatenate([one() for one in taken], axis=1))
        results.append(np.array(hidden))
        at += count
    for one in backends:
        one.close()
    return np.concatenate(rows), np.concatenate(results)


@pytest.mark.parametrize("name", mostly_full(HEADED, "glm4moe", "qwen35-mtp"))
@pytest.mark.parametrize("qtype", ["Q8_0", pytest.param("F32", marks=FULL)])
def test_rows_of_the_last_norm_are_the_same_over_stages_and_widths(name, qtype, tmp_path):
    model = written(tmp_path, name, qtype)
    taps = (model.n_layers,)
    one_by_one, logits = tapped(parts(model, (), tmp_path), taps, [1] * 40)
    middle = 2 if model.n_layers == 4 else 4
    for cuts, chunks, output in (((), [16, 16, 8], lambda _: True),
                                 ((), [16, 16, 8], lambda index: index == 39),
                                 ((middle,), [4] * 10, lambda index: index % 2)):
        rows, _ = tapped(parts(model, cuts, tmp_path), taps, chunks, output)
        assert rows.tobytes() == one_by_one.tobytes(), (cuts, chunks)
    (plain,) = parts(model, (), tmp_path)
    for index, token in enumerate(TEXT):  # asking changes no bit
        row = make_rows([(token, index, (0,), True)])
        assert np.asarray(plain.decode(row)).tobytes() == logits[index].tobytes()
    plain.close()


@pytest.mark.parametrize("name", ["llama", *(
    pytest.param(one, marks=FULL) for one in ("qwen3", "gpt-oss", "qwen35-mtp"))])
def test_inputs_of_layers_are_the_same_over_stages_and_widths(name, tmp_path):
    spec = RandomSpec(architecture=name, n_layer=6, qtype="Q8_0") \
        if name in ("llama", "qwen3") else tiny(name)
    path = write_random_model(tmp_path / "model.gguf", spec)
    model = ModelFile(path)
    taps = (1, model.n_layers // 2, model.n_layers - 1)
    one_by_one, logits = tapped(parts(model, (), tmp_path), taps, [1] * 40)
    assert one_by_one.shape == (40, 3 * model.n_embd)
    cuts = (4, 8) if name == "qwen35-mtp" else (1, 2)
    rows, of_stages = tapped(parts(model, cuts, tmp_path), taps, [8] * 5)
    assert rows.tobytes() == one_by_one.tobytes()
    assert of_stages.tobytes() == logits.tobytes()
    chain = ChainBackend(parts(model, cuts, tmp_path))
    rows, _ = tapped([chain], taps, [8] * 5)
    assert rows.tobytes() == one_by_one.tobytes()


@pytest.mark.parametrize("name", mostly_full(HEADED, "glm4moe", "qwen35-mtp"))
def test_a_head_in_a_file_of_its_own_is_that_of_the_whole_file(name, tmp_path):
    """The latter is llama.cpp's own way: the model with its head, in one process."""
    model = written(tmp_path, name)
    rows, _ = tapped(parts(model, (), tmp_path), (model.n_layers,), [1] * 40)
    found = []
    for source in (model.path, HeadSource(model)):
        head = LlamaHead.open(source, model.n_layers, SIZES, 1, OPTIONS)
        head.decode(make_rows([(TEXT[k], k, (0,), False) for k in range(1, 30)]), rows[:29])
        hidden, token, logits = rows[29:30], TEXT[30], []
        for position in range(30, 34):
            result = head.decode(make_rows([(token, position, (0,), True)]), hidden)
            logits.append(np.array(result))
            token, hidden = int(logits[-1].argmax()), head.tapped
        head.close()
        found.append(np.concatenate(logits))
    assert np.isfinite(found[0]).all()
    assert found[0].tobytes() == found[1].tobytes()


@pytest.mark.parametrize("name", mostly_full(HEADED, "glm4moe", "qwen35-mtp"))
@pytest.mark.parametrize("spare", [32, 40])
def test_a_small_vocabulary_changes_no_logit_that_it_has(name, spare, tmp_path):
    """Also of tokens that only the text brought; the spare rows are used up, and used again."""
    model = written(tmp_path, name)
    rows, _ = tapped(parts(model, (), tmp_path), (model.n_layers,), [1] * 40)
    small = SmallVocabulary((*range(60), 97, 98), spare)
    others = list(dict.fromkeys(one for one in TEXT if one not in small.tokens))
    assert spare == 40 or len(others) > spare - 10
    heads = [LlamaHead.open(HeadSource(model, of), model.n_layers, SIZES, 1,
                            structs.replace(OPTIONS, repack="off")) for of in (None, small)]
    assert heads[0].info.n_vocab == heads[1].info.n_vocab == model.n_vocab
    seen = []
    for first, stop in ((1, 16), (16, 30), (30, 31)):
        batch = make_rows([(TEXT[k], k, (0,), k == stop - 1) for k in range(first, stop)])
        seen += TEXT[first:stop]
        whole, few = (np.array(one.decode(batch, rows[first - 1 : stop - 1])) for one in heads)
        recent = list(dict.fromkeys(one for one in reversed(seen) if one not in small.tokens))
        has = sorted((*small.tokens, *recent[:spare]))
        assert few[:, has].tobytes() == whole[:, has].tobytes()
        assert np.isneginf(np.delete(few, has, axis=1)).all()
        assert heads[0].tapped.tobytes() == heads[1].tapped.tobytes()
    batch = make_rows([(token, 31 + k, (0,), True) for k, token in enumerate(range(200, 232))])
    whole, few = (np.array(one.decode(batch, np.tile(rows[30:31], (32, 1)))) for one in heads)
    has = [*small.tokens, *range(200, 232)]
    assert few[:, has].tobytes() == whole[:, has].tobytes()
    for one in heads:
        one.close()


def test_a_small_vocabulary_has_the_marks_and_the_frequent_tokens(tmp_path):
    model = written(tmp_path, "glm4moe")
    kinds = model.get("tokenizer.ggml.token_type")
    marks = [i for i, kind in enumerate(kinds) if kind in (3, 4)]
    small = SmallVocabulary.of(model, 64)
    assert marks
    assert set(marks) <= set(small.tokens)
    assert len(small.tokens) + small.spare == 64
    low = [one for one in small.tokens if one not in marks]
    assert low == [i for i in range(model.n_vocab) if i not in marks][:len(low)]
    taken = [token for first, stop in small.rows() for token in range(first, stop)]
    assert taken == [*small.tokens, *range(small.spare)]
    assert SmallVocabulary.of(model, 0) is None
    assert SmallVocabulary.of(model, model.n_vocab // 2 + 1) is None
    assert HeadSource(model).total < model.nbytes / 2


def test_a_head_is_found_in_the_file_or_beside_it(tmp_path):
    model = written(tmp_path, "glm4moe")
    assert head_of(model) is model
    alone = tmp_path / "apart" / "model.gguf"
    alone.parent.mkdir()
    trunk = ModelFile(write_clockwork(alone, "glm4moe"))  # another model of other sizes
    assert head_of(trunk) is trunk
    only = tmp_path / "only.gguf"
    only.write_bytes(b"".join(HeadSource(model).blocks()))
    assert has_head(ModelFile(only))
    assert head_of(ModelFile(write_random_model(tmp_path / "plain.gguf", tiny("glm4")))) is None
    with pytest.raises(ModelError, match="no head"):
        HeadSource(ModelFile(tmp_path / "plain.gguf"))


def test_rows_that_llama_cpp_does_not_give_are_refused(tmp_path):
    assert "inputs of its layers" in refusal("falcon", (1,), 4)
    assert "last norm" in refusal("llama", (4,), 4)
    assert refusal("llama", (1, 3), 4) == "" == refusal("glm4moe", (4,), 4)
    (backend,) = parts(ModelFile(write_random_model(tmp_path / "m.gguf", tiny("falcon"))), (),
                       tmp_path)
    with pytest.raises(BackendError, match="falcon"):
        tap(backend, (1,))
    backend.close()


@pytest.mark.parametrize("name", ["llama", pytest.param("qwen3", marks=FULL)])
@pytest.mark.parametrize("own", [False, pytest.param(True, marks=FULL)])
def test_an_eagle_head_proposes_what_llama_cpp_alone_does(name, own, tmp_path):
    """Its rows come from three stages; llama.cpp's chain follows its own conventions."""
    target = ModelFile(write_random_model(tmp_path / "m.gguf", RandomSpec(
        architecture=name, n_layer=6, qtype="Q8_0")))
    layers = (1, 3, 5)
    file = ModelFile(write_eagle(tmp_path / "head.gguf", target.path, layers, own=own))
    rows, _ = tapped(parts(target, (2, 4), tmp_path), layers, [4] * 10)
    complete(file.path, target.path, tmp_path / "whole.gguf")
    alone = LlamaEagle(tmp_path / "whole.gguf")
    hidden = alone.encode(rows[:30])
    alone.read(TEXT[1:30], hidden[:29], 0)
    expected = alone.chain(TEXT[30], hidden[29], 29, 4)
    alone.close()
    head = TargetHead(LlamaHead.open(tmp_path / "whole.gguf", 1, SIZES, 1, structs.replace(
        OPTIONS, head="eagle3", flash_attn="on")))
    for at in (0, 7, 14, 21, 28):  # rows come in parts, and guesses are made meanwhile
        head.feed(FeedDraft(0, at, rows[at : min(at + 7, 30)]))
        found = head.propose(job(TEXT[: min(at + 8, 31)]), lambda: False)
    head.close()
    assert [one.token for one in found] == expected
    assert [one.depth for one in found] == [1, 2, 3, 4]


@pytest.mark.parametrize("name", mostly_full(HEADED, "deepseek2-mtp"))
def test_proposals_are_those_of_llama_cpp_alone(name, tmp_path):
    """Of a head in the model's whole file, which reads everything at once and then its chain."""
    model = written(tmp_path, name)
    middle = 2 if model.n_layers == 4 else 4
    rows, _ = tapped(parts(model, (middle,), tmp_path), (model.n_layers,), [4] * 10)
    alone = LlamaHead.open(model.path, model.n_layers, SIZES, 1, OPTIONS)
    alone.decode(make_rows([(TEXT[k], k, (0,), False) for k in range(1, 30)]), rows[:29])
    hidden, expected = rows[29:30], [TEXT[30]]
    for position in range(30, 34):
        logits = alone.decode(make_rows([(expected[-1], position, (0,), True)]), hidden)
        expected.append(int(np.asarray(logits)[0].argmax()))
        hidden = alone.tapped
    alone.close()
    head = TargetHead(LlamaHead.open(HeadSource(model), model.n_layers, SIZES, 1, OPTIONS))
    for at in range(30):
        head.feed(FeedDraft(0, at, rows[at : at + 1]))
        found = head.propose(job(TEXT[: at + 2]), lambda: False)
    head.close()
    assert [one.token for one in found] == expected[1:]
