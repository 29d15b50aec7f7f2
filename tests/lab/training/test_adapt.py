"""Training of models that people have: rows, LoRA, new tokens, checkpoints, merged models."""

# ruff: noqa: E402  (skipped where a package is missing)
from __future__ import annotations

import json

import numpy as np
import pytest

for _package in ("torch", "transformers", "safetensors", "tokenizers"):
    pytest.importorskip(_package, reason=f"training needs {_package}")

import torch
from click.testing import CliRunner
from safetensors import safe_open

from pipeinfer.backends.pytorch.weights import load_shard
from pipeinfer.errors import ModelError, UsageError
from pipeinfer.models.locate import EMBEDDED, open_tokenizer
from pipeinfer.strategies.decomposers.base import MAIN, Feed, Fork, Halt, Join, Skip
from pipeinfer.strategies.decomposers.pasta import Pasta
from pipeinfer.strategies.decomposers.prompts import vocabulary_of
from pipeinfer_lab.training.__main__ import main
from pipeinfer_lab.training.adapt import sft
from pipeinfer_lab.training.adapt.chats import Chat, read_chats
from pipeinfer_lab.training.adapt.lora import (
    LoraAdapter,
    LoraSettings,
    NewTokens,
    load_adapter,
    save_adapter,
)
from pipeinfer_lab.training.adapt.merged import Merged
from pipeinfer_lab.training.adapt.rows import row_of
from pipeinfer_lab.training.adapt.trainee import Arithmetic, Trainee
from pipeinfer_lab.training.adapt.tune import Tuning, _parts, tune
from pipeinfer_lab.training.adapt.wording import TAGS, Wording
from pipeinfer_lab.training.pasta import pasta
from pipeinfer_lab.training.pasta.annotate import parse
from tests.kit.tiny_torch import reference, save, tokens_of
from tests.lab.training.conftest import do

DRAFT = EMBEDDED / "draft.gguf"
PLAIN = Arithmetic("cpu", torch.float32, False)
SENTENCE = " is {} and has been so for many years."
ANSWER = "".join(f"<async topic='{name}'>{name}{SENTENCE.format(k)}</async>"
                 for k, name in enumerate(("Ann", "Bob"))) + "<sync/> Both are well."


def chats():
    bare = "".join(piece.text for piece in parse(ANSWER, ANSWER.replace("<sync/>", "").replace(
        "</async>", "").replace("<async topic='Ann'>", "").replace("<async topic='Bob'>", "")))
    return [Chat(({"role": "user", "content": f"Tell me {k}."},), bare, ANSWER) for k in range(4)]


@pytest.fixture
def data(tmp_path):
    path = tmp_path / "chats.jsonl"
    path.write_text("\n".join(json.dumps({
        "messages": [*chat.messages, {"role": "assistant", "content": chat.answer}],
        "annotated": chat.annotated}) for chat in chats()))
    return path


@torch.no_grad()
def logits_of(path, tokens):
    """All logits of a stored model over a plain text."""
    trainee = Trainee(path, PLAIN, LoraSettings())  # B is 0: nothing is added
    return plain_logits(trainee, tokens)


@torch.no_grad()
def plain_logits(trainee, tokens):
    ids = torch.tensor([tokens])
    n = len(tokens)
    return trainee.logits(trainee.states(ids, torch.arange(n)[None],
                                         torch.ones(1, n, n).tril().bool()))[0]


@pytest.mark.parametrize(("tags", "positions"), [
    ({}, "pred-10x"), ({tag: 5000 + k for k, tag in enumerate(TAGS)}, "pred-10x"),
    ({}, "pred-1x"), ({}, "fixed:37")])
def test_the_interpreter_does_what_a_row_was_laid_out_for(words, tags, positions):
    """Fed with a row's main tokens and blocks, it forks, skips and joins at the row's places."""
    spacing = pasta.trained_spacing(positions)
    wording = Wording(words, tags, spacing)
    chat = chats()[0]
    flat = wording.flat(chat.messages, parse(chat.annotated, chat.answer))
    vocabulary = vocabulary_of(words)
    names = {i: tag for tag, i in tags.items()}
    known = vocabulary.piece
    vocabulary = type(vocabulary)(lambda t: names[t].encode() if t in names else known(t),
                                  wording.tagged)
    reader = Pasta(vocabulary, start=flat.prompt, room=4096, spacing=spacing)
    lengths = [block.end + 1 - block.start for block in flat.blocks]
    assert [block.room for block in flat.blocks] == {
        "pred-10x": [10 * round(length / 10) for length in lengths],
        "pred-1x": lengths, "fixed:37": [37, 37]}[positions]
    owner, positions = flat.owner, pasta.positions(flat)
    forks = []
    for at in range(flat.prompt, len(flat.tokens) - 1):
        if owner[at]:
            continue
        for action in reader.accepted(MAIN, flat.tokens[at]):
            if isinstance(action, Fork):
                block = flat.blocks[len(forks)]
                forks.append(action)
                assert block.promise == at
                assert list(action.tokens) == wording.begin
                inner = flat.tokens[block.start + flat.opening : block.end + 1]
                closing = [a for t in inner for a in reader.accepted(len(forks), t)]
                assert len(closing) == 1
                reader.settled(len(forks))
            if isinstance(action, Skip):
                following = next(k for k in range(at + 1, len(owner)) if not owner[k])
                assert positions[following] - positions[at] == action.count + 1
            if isinstance(action, Halt):
                assert at == flat.syncs[0]
            assert isinstance(action, Fork | Skip | Halt | Join | Feed)
    assert len(forks) == 2
    reader.ended(MAIN)
    assert b"".join(piece.text for piece in reader.take()).decode() == chat.answer
    assert reader.lengths == tuple(b.end - b.start + 1 for b in flat.blocks)


def test_tags_that_the_interpreter_inserts_are_not_learnt(words):
    wording = Wording(words)
    chat = chats()[0]
    flat = wording.flat(chat.messages, parse(chat.annotated, chat.answer))
    assert flat.opening > 1
    targets = pasta.targets(flat)
    for block in flat.blocks:
        assert (targets[block.start : block.start + flat.opening - 1] == pasta.IGNORE).all()
        assert targets[block.start + flat.opening - 1] == flat.tokens[block.start + flat.opening]
        assert targets[block.end] == pasta.IGNORE
    steps = pasta.steps(flat)
    assert not steps[flat.blocks[0].start : flat.blocks[0].start + flat.opening].any()
    assert flat.tokens[-1] in words.eog_ids


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "mistral-window", "qwen2", "qwen3", "gemma2", "phi3"])
def test_a_masked_row_has_the_logits_of_transformers_own_forward_pass(family, tmp_path):
    model = reference(family)
    tokens = tokens_of(24)
    with torch.no_grad():
        wanted = model(torch.tensor([tokens])).logits[0]
    assert torch.allclose(logits_of(save(model, tmp_path), tokens), wanted, atol=2e-4)


@pytest.mark.slow
def test_matrices_that_hold_several_are_adapted_and_merged(tmp_path):
    """phi3: queries, keys and values in one, gate and up in one."""
    path, tokens = save(reference("phi3"), tmp_path / "m"), tokens_of(20)
    trainee = Trainee(path, PLAIN, LoraSettings(4, 8.0))
    kinds = {name.rsplit(".", 3)[1] for name in trainee.learnt}
    assert kinds == {"qkv_proj", "o_proj", "gate_up_proj", "down_proj"}
    torch.manual_seed(2)
    for weight in trainee.learnt.values():
        weight.data.normal_(0, 0.1)
    save_adapter(tmp_path / "adapter", LoraAdapter(LoraSettings(4, 8.0), trainee.learnt, str(path)))
    do("merge", "--model", path, "--adapter", tmp_path / "adapter", "--out", tmp_path / "merged")
    wanted = plain_logits(trainee, tokens)
    assert torch.allclose(logits_of(tmp_path / "merged", tokens), wanted, atol=2e-4)
    assert not torch.allclose(logits_of(path, tokens), wanted, atol=0.05)


@pytest.mark.slow
def test_gguf_becomes_the_same_model_as_a_folder(words, tmp_path):
    do("merge", "--model", DRAFT, "--out", tmp_path / "folder")
    folder = open_tokenizer(tmp_path / "folder")
    text = "def f(x):\n    return x  # caf\u00e9 <|im_end|> 12"
    for special in (False, True):
        assert folder.split(text, special) == words.split(text, special)
    messages = [{"role": "user", "content": "Hi"}]
    assert folder.encode_chat(messages) == words.encode_chat(messages)
    assert folder.eog_ids == words.eog_ids
    assert torch.equal(logits_of(DRAFT, [1, 2, 3, 4]), logits_of(tmp_path / "folder", [1, 2, 3, 4]))
    do("merge", "--model", tmp_path / "folder", "--out", tmp_path / "again.gguf", "--like", DRAFT,
       "--dtype", "float32")
    assert torch.equal(logits_of(DRAFT, [1, 2, 3, 4]),
                       logits_of(tmp_path / "again.gguf", [1, 2, 3, 4]))


@pytest.mark.slow
@pytest.mark.parametrize("tags", ["text", "tokens"])
def test_what_is_trained_is_what_is_merged(data, tmp_path, tags, words):
    out = tmp_path / "adapter"
    told = do("pasta-sft", "--data", data, "--model", DRAFT, "--out", out, "--steps", 12,
              "--batch", 2, "--rate", 5e-3, "--tags", tags, "--dtype", "float32", "--threads", 1)
    assert "4 answers to learn from" in told
    losses = json.loads((out / "losses.json").read_text())
    assert np.mean(losses[-3:]) < np.mean(losses[:3]) - 0.5
    adapter = load_adapter(out)
    assert (adapter.tokens is None) == (tags == "text")
    do("merge", "--model", DRAFT, "--adapter", out, "--out", tmp_path / "folder")
    do("merge", "--model", DRAFT, "--adapter", out, "--out", tmp_path / "m.gguf", "--dtype",
       "float32")
    trainee = Trainee(DRAFT, PLAIN, adapter.settings)
    names = {}
    if adapter.tokens is not None:
        first = adapter.tokens.first
        trainee.add_tokens({tag: [0] for tag in TAGS}, first)
        trainee.learnt["tokens.embedding"].data.copy_(adapter.tokens.embedding)
        names = {tag: first + k for k, tag in enumerate(TAGS)}
    for name, weight in adapter.weights.items():
        trainee.learnt[name].data.copy_(weight)
    chat = chats()[0]
    wording = Wording(words, names)
    tokens = list(row_of(wording, chat, method="pasta").tokens)
    wanted = plain_logits(trainee, tokens)
    for made in (tmp_path / "folder", tmp_path / "m.gguf"):
        assert torch.allclose(logits_of(made, tokens), wanted, atol=2e-3)
        grown = open_tokenizer(made)
        for tag in names:
            assert grown.split(f"a{tag}b", special=True) == [
                *words.split("a", special=False), names[tag], *words.split("b", special=False)]
            assert grown.piece(names[tag]) == tag.encode()
        grown.close()


@pytest.mark.slow
def test_an_interrupted_run_goes_on_as_it_would_have(tmp_path, words):
    rows = [row_of(Wording(words), chat, method="pasta") for chat in chats()]
    plan = Tuning(batch=3, epochs=2, rate=1e-3)
    made = [Trainee(DRAFT, PLAIN, LoraSettings(4, 8.0)) for _ in range(3)]
    silent = {"report": lambda line: None}
    whole = tune(made[0], rows, plan, tmp_path / "a.safetensors", **silent)
    tune(made[1], rows, plan, tmp_path / "b.safetensors", stop_after=1, **silent)
    assert tune(made[2], rows, plan, tmp_path / "b.safetensors", **silent) == whole
    assert len(whole) == 3
    for name, weight in made[0].learnt.items():
        assert torch.equal(weight, made[2].learnt[name])
    with pytest.raises(ModelError, match="other data or options"):
        tune(made[2], rows[:3], plan, tmp_path / "b.safetensors", **silent)


def test_micro_batches_add_up_to_the_batch(words):
    rows = [row_of(Wording(words), chat, method=("plain", "pasta")[k % 2])
            for k, chat in enumerate(chats())]
    found = []
    for tokens in (1, 10_000):
        trainee = Trainee(DRAFT, PLAIN, LoraSettings(4, 8.0))
        loss = 0.0
        for part, _ in _parts(trainee, rows, tokens):
            part.backward()
            loss += float(part.detach())
        found.append((loss, {k: p.grad for k, p in trainee.learnt.items()}))
    (one, grads), (other, more) = found
    assert one == pytest.approx(other, rel=1e-5)
    assert all(torch.allclose(grads[name], more[name], atol=1e-5) for name in grads)


@pytest.mark.slow
def test_a_run_that_is_interrupted_leaves_what_it_has_learnt(tmp_path, data, monkeypatch):
    from pipeinfer_lab.training.adapt import tune as module

    parts, count = module._parts, []

    def interrupted(*args):
        count.append(1)
        if len(count) == 3:
            raise KeyboardInterrupt
        return parts(*args)

    monkeypatch.setattr(module, "_parts", interrupted)
    args = ["baseline-sft", "--data", data, "--model", DRAFT, "--out", tmp_path / "a", "--steps",
            "6", "--batch", 1, "--dtype", "float32", "--threads", 1]
    assert "interrupted after step 2 of 6" in do(*args)
    assert load_adapter(tmp_path / "a").about["steps"] == "2 of 6"
    assert "goes on at step 3 of 6" in do(*args)
    assert load_adapter(tmp_path / "a").about["steps"] == "6 of 6"


@pytest.mark.slow
def test_all_weights_and_the_sequential_baseline(data, tmp_path):
    out = tmp_path / "whole"
    do("baseline-sft", "--data", data, "--model", DRAFT, "--out", out, "--tune", "all", "--steps",
       "4", "--batch", 4, "--rate", 1e-3, "--dtype", "float32", "--threads", 1)
    losses = json.loads((out / "losses.json").read_text())
    assert losses[-1] < losses[0]
    assert not torch.allclose(logits_of(out, [1, 2, 3]), logits_of(DRAFT, [1, 2, 3]))
    with safe_open(out / "model.safetensors", "pt") as file:
        assert "model.embed_tokens.weight" in file.keys()


def test_adapters_are_in_pefts_format(tmp_path, data):
    settings = LoraSettings(2, 4.0, ("q_proj", "down_proj"))
    run = sft.Sft(DRAFT, data, tmp_path / "a", method="plain", lora=settings,
                  tuning=Tuning(steps=1, batch=1), dtype="float32")
    sft.run(run, report=lambda line: None)
    config = json.loads((tmp_path / "a" / "adapter_config.json").read_text())
    assert (config["peft_type"], config["r"], config["lora_alpha"]) == ("LORA", 2, 4.0)
    assert set(config["target_modules"]) == {"q_proj", "down_proj"}
    with safe_open(tmp_path / "a" / "adapter_model.safetensors", "pt") as file:
        shapes = {name: file.get_slice(name).get_shape() for name in file.keys()}
    stem = "base_model.model.model.layers.0.self_attn.q_proj"
    shard = load_shard(DRAFT, (0, 1), torch.float32, torch.device("cpu"))
    rows, columns = shard.decoder[0].self_attn.q_proj.weight.shape
    assert shapes[f"{stem}.lora_A.weight"] == [2, columns]
    assert shapes[f"{stem}.lora_B.weight"] == [rows, 2]


@pytest.mark.parametrize(("change", "says"), [
    ({"peft_type": "LOHA"}, "only plain LoRA"), ({"use_dora": True}, "use_dora True"),
    ({"rank_pattern": {"a": 1}}, "rank_pattern"), ({"r": "x"}, "cannot be read"),
    ({"r": float("inf")}, "cannot be read"), ({"r": 0}, "cannot be read"),
    ({"peft_type": "a\nb"}, r"this is 'a\\nb'")])
def test_adapters_that_would_be_merged_wrongly_are_refused(tmp_path, change, says):
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 2} | change
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=says):
        load_adapter(tmp_path)


@pytest.mark.parametrize(("changed", "says"), [
    ({"A": (1, 64)}, "A.weight has shape .1, 64., which is none of rank 2"),
    ({"B": (64,)}, "B.weight has shape .64., which is none of rank 2"),
    ({"B": None}, "A.weight has no other half"),
    ({"A": (2, 1 << 20), "B": (1 << 20, 2)}, "has shape .1048576, 1048576., the model's"),
    ({"tokens": (3, 8, 2)}, "begin at 3 with 8 numbers each"),
    ({"tokens": (1 << 40, None, 2)}, "begin at 1099511627776"),
    ({"tokens": (None, None, 1)}, "numbers as embedding of 2 tokens")])
def test_adapters_that_fit_no_model_are_refused_before_they_are_multiplied(tmp_path, changed, says):
    model, stem = Merged(DRAFT), "base_model.model.model.layers.0.self_attn.q_proj.lora_"
    shapes = dict(model.names)
    rows, columns = shapes["model.layers.0.self_attn.q_proj.weight"]
    parts = {"A": (2, columns), "B": (rows, 2)} | {
        part: shape for part, shape in changed.items() if part != "tokens"}
    tokens = None
    if "tokens" in changed:
        first, width, count = changed["tokens"]
        tokens = NewTokens(("<a>", "<b>"), model.n_vocab if first is None else first,
                           torch.zeros(count, width or shapes["model.embed_tokens.weight"][1]))
    save_adapter(tmp_path, LoraAdapter(LoraSettings(2, 4.0), {
        f"{stem}{part}.weight": torch.zeros(shape) for part, shape in parts.items() if shape},
        tokens=tokens))
    with pytest.raises(ModelError, match=says):
        Merged(DRAFT, load_adapter(tmp_path))


@pytest.mark.parametrize(("line", "says"), [
    ("{}", "neither messages nor prompt"), ('{"messages": [{"role": "x"}]}', "needs a role"),
    ('{"messages": [{"role": "assistant", "content": "x"}]}', "begins with an answer"),
    ('{"prompt": "x", "response": 3}', "must be texts"), ("[", "line 1")])
def test_records_that_are_no_conversations(tmp_path, line, says):
    (tmp_path / "x.jsonl").write_text(line)
    with pytest.raises(UsageError, match=says):
        list(read_chats(tmp_path / "x.jsonl"))


def test_records_in_other_encodings(tmp_path):
    """A byte order mark is skipped; what is no UTF-8 is named with its line."""
    path = tmp_path / "x.jsonl"
    line = b'{"prompt": "x", "response": "\xc3\xa4"}\n'
    path.write_bytes(b"\xef\xbb\xbf" + line + line)
    assert [chat.answer for chat in read_chats(path)] == ["\xe4"] * 2
    path.write_bytes(line + b'{"prompt": "\xe4"}\n')
    with pytest.raises(UsageError, match="line 2: 'utf-8' codec"):
        list(read_chats(path))


@pytest.mark.parametrize("given", [
    ("apar-sft", "--rate", "-1"), ("apar-sft", "--rate", "nan"), ("pasta-sft", "--rate", "inf"),
    ("baseline-sft", "--epochs", "nan"), ("pasta-bonbon", "--rate", "0"),
    ("pasta-bonbon", "--steps", "0"), ("pasta-bonbon", "--steps", "-1"),
    ("bita", "--steps", "0")])
def test_budgets_and_rates_are_above_0(given):
    command, option, value = given
    done = CliRunner().invoke(main, [command, option, value])
    assert done.exit_code == 2
    assert f"Invalid value for '{option}'" in done.output


def test_commands_say_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    done = CliRunner().invoke(main, ["bita", "--model", str(DRAFT), "--out",
                                     str(tmp_path / "masks.safetensors")])
    assert "pip install 'pipeinfer[torch]'" in str(done.exception)


def test_commands_that_cannot_do_what_they_are_told(tmp_path, data):
    def refused(*args):
        done = CliRunner().invoke(main, list(map(str, args)))
        assert isinstance(done.exception, UsageError), done.output
        return str(done.exception)

    folder = save(reference("llama"), tmp_path / "folder")
    assert "--like" in refused("merge", "--model", folder, "--out", tmp_path / "a.gguf")
    assert "overwrite" in refused("merge", "--model", DRAFT, "--out", DRAFT)
    assert "overwrite" in refused("merge", "--model", DRAFT, "--adapter", folder, "--out", folder)
    assert "its folder is missing" in refused("merge", "--model", DRAFT, "--out",
                                              tmp_path / "none" / "a.gguf")
    bare = tmp_path / "bare.jsonl"
    bare.write_text('{"prompt": "a", "response": "b"}\n')
    assert "train annotate" in refused("pasta-sft", "--data", bare, "--model", DRAFT, "--out",
                                       tmp_path / "o")
    assert "either" in refused("bita", "--model", DRAFT, "--out", tmp_path / "b", "--data", data,
                               "--text", data)
