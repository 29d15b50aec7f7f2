"""The embedded pair's training: repeatable, resumable, and exported as llama.cpp reads it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from pipeinfer.errors import UsageError
from pipeinfer.lab.training.pair import corpus as corpus_module

torch = pytest.importorskip("torch")
pytest.importorskip("tokenizers")

from pipeinfer.lab.training.__main__ import main  # noqa: E402
from pipeinfer.lab.training.pair import tokenizer as tokenizer_module  # noqa: E402
from pipeinfer.lab.training.pair.embedded import SHARES, Settings, compare, inherit, run  # noqa: E402
from pipeinfer.lab.training.pair.export import ModelCard, write_gguf  # noqa: E402
from pipeinfer.lab.training.pair.loop import Plan, batch, train  # noqa: E402
from pipeinfer.lab.training.pair.model import DRAFT, TARGET, Llama, LlamaConfig  # noqa: E402
from pipeinfer.lab.training.pair.optim import orthogonalise  # noqa: E402

TINY = LlamaConfig(n_vocab=384, n_layer=2, n_embd=64, n_head=2, n_head_kv=1, n_ff=96, n_ctx=64)
PLAN = Plan(
    steps=6, batch_tokens=128, lengths=((0.0, 32), (0.5, 64)), warmup_steps=2, bfloat16=False
)
STREAM = (np.arange(20000) * 7919 % 383).astype(np.uint16)

SOURCE = '''"""Module {i} of a made-up library."""


def function_{i}(value, other={i}):
    """Add the value to the other one and return it.

    A second paragraph that a request does not need.
    """
    total = value + other
    for item in range({i}):
        total += item * {i}
    return total


class Thing{i}:
    """Hold a name and a size, as things do."""

    def __init__(self, name, size):
        self.name, self.size = name, size
'''


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Matrices of 64 columns gain nothing from threads, and lose much beside another process."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A standard library of 60 small modules, one of them a test."""
    root = tmp_path_factory.mktemp("lib")
    (root / "tests").mkdir()
    for i in range(60):
        (root / f"module_{i}.py").write_text(SOURCE.format(i=i))
    (root / "tests" / "test_all.py").write_text(SOURCE.format(i=99))
    (root / "LICENSE.txt").write_text("the licence\n")
    return root


def test_corpus_splits_by_name_and_asks_for_functions(library: Path) -> None:
    corpus = corpus_module.build(library)
    held = {d.name for d in corpus.held_out}
    assert held
    assert held == {name for name in held if corpus_module.is_held_out(name)}
    chats = [d for d in corpus.train if d.kind == "chat"]
    assert chats
    assert not held & {d.name.split(":")[0] for d in corpus.train}
    assert chats[0].text.startswith("<|im_start|>user\nWrite a Python function function_")
    assert "second paragraph" not in chats[0].text.split("<|im_end|>")[0]
    assert [d.name for d in corpus.train + corpus.held_out if d.kind == "test"] == [
        "tests/test_all.py"
    ]


def test_corpus_leaves_tables_out(tmp_path: Path) -> None:
    (tmp_path / "table.py").write_text("X = [" + "1234567890, " * 100 + "]\n")
    (tmp_path / "text.py").write_text("# words and words\n" * 50)
    names = [d.name for d in corpus_module.build(tmp_path).train]
    assert "table.py" not in names


def test_plan_warms_up_anneals_and_lengthens() -> None:
    plan = Plan(steps=100)
    assert plan.rate_at(0.0, 0) == pytest.approx(1 / plan.warmup_steps)
    assert plan.rate_at(0.5, 1000) == pytest.approx(0.505)
    assert plan.rate_at(1.0, 1000) == pytest.approx(0.01)
    assert [plan.length_at(x) for x in (0, 0.8, 0.99)] == [512, 1024, 2048]
    with pytest.raises(ValueError, match="either"):
        Plan()
    with pytest.raises(ValueError, match="divide"):
        Plan(steps=1, batch_tokens=1000)


def test_batches_cover_an_epoch_once_and_predict_the_next_token() -> None:
    stream = np.arange(2000, dtype=np.uint16)
    rows = 128 // 32
    steps = ((len(stream) - 1 - 32) // 32) // rows
    seen: list[int] = []
    for step in range(steps):
        x, y = batch(stream, PLAN, step, 32)
        assert x.shape == y.shape == (rows, 32)
        assert torch.equal(x + 1, y)
        seen += x[:, 0].tolist()
    assert len(set(seen)) == len(seen) == steps * rows
    again, _ = batch(stream, PLAN, 0, 32)
    assert torch.equal(again[:, 0], torch.tensor(seen[:rows]))
    other, _ = batch(stream, replace(PLAN, seed=1), 0, 32)
    assert not torch.equal(again, other)


def test_orthogonalise_levels_singular_values() -> None:
    matrices = torch.randn(3, 48, 32, generator=torch.Generator().manual_seed(0))
    values = torch.linalg.svdvals(orthogonalise(matrices))
    assert 0.5 < float(values.min())
    assert float(values.max()) < 1.3


def test_resumed_run_equals_unbroken_run(tmp_path: Path) -> None:
    def go(name: str, stop_after: int | None = None) -> Llama:
        model = Llama(TINY)
        model.reset(0)
        train(model, STREAM, PLAN, tmp_path / name, report=len, stop_after=stop_after)
        return model

    unbroken = go("a.pt")
    stopped = go("b.pt", stop_after=4)
    resumed = go("b.pt")
    for name, weights in unbroken.state_dict().items():
        assert torch.equal(weights, resumed.state_dict()[name]), name
    assert not torch.equal(stopped.token_embd.weight, resumed.token_embd.weight)


def test_training_lowers_the_loss_and_teaching_makes_models_agree(tmp_path: Path) -> None:
    settings = Settings(out=tmp_path, work=tmp_path, steps=1, target=TINY, eval_tokens=512)
    teacher, pupil = Llama(TINY), Llama(replace(TINY, n_layer=1))
    for model in (teacher, pupil):
        model.reset(1)
    before = compare(STREAM, {"t": teacher}, settings)["t_nats"]
    plan = replace(PLAN, steps=60, batch_tokens=512)
    train(teacher, STREAM, plan, tmp_path / "t.pt", report=len)
    train(pupil, STREAM, plan, tmp_path / "p.pt", teacher=teacher, report=len)
    after = compare(STREAM, {"t": teacher, "p": pupil}, settings)
    assert after["t_nats"] < before - 1
    assert after["p_agreement"] > 0.5


def test_draft_begins_as_a_thinned_target() -> None:
    target, draft = Llama(replace(TINY, n_layer=5)), Llama(TINY)
    target.reset(0)
    draft.reset(1)
    inherit(draft, target)
    for ours, theirs in ((0, 0), (1, 4)):
        assert torch.equal(draft.blk[ours].attn_q.weight, target.blk[theirs].attn_q.weight)
    assert torch.equal(draft.token_embd.weight, target.token_embd.weight)
    with pytest.raises(ValueError, match="layers alone"):
        inherit(Llama(replace(TINY, n_ff=64)), target)


def test_other_shape_in_the_checkpoint_is_refused(tmp_path: Path) -> None:
    model = Llama(TINY)
    train(model, STREAM, replace(PLAN, steps=1), tmp_path / "a.pt", report=len)
    with pytest.raises(ValueError, match="another model shape"):
        train(Llama(replace(TINY, n_layer=1)), STREAM, PLAN, tmp_path / "a.pt", report=len)


def test_export_gives_llama_cpp_the_same_tokens_and_logits(library: Path, tmp_path: Path) -> None:
    import gguf

    from pipeinfer.lab.commands.inflate import _logits, _tokens

    texts = [d.text for d in corpus_module.build(library).train]
    tokenizer = tokenizer_module.train(texts, TINY.n_vocab)
    model = Llama(TINY)
    model.reset(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1 or name.endswith(("attn_output.weight", "ffn_down.weight")):
                parameter.normal_(1.0 if parameter.ndim == 1 else 0.0, 0.2)
    path = tmp_path / "tiny.gguf"
    card = ModelCard("tiny", "a test", "PSF-2.0")
    write_gguf(path, model, tokenizer, card, gguf.GGMLQuantizationType.F32)
    text = "def function_3(value):\n    # héllo  \t 123 'll\n        return 日本"
    ids = [tokenizer_module.END_OF_TEXT_ID, *tokenizer.encode(text).ids]
    with torch.no_grad():
        ours = model(torch.tensor([ids]))[0].numpy()
    assert _tokens(path, text) == ids
    theirs = _logits(path, ids, 1)
    assert np.abs(ours).max() > 0.5
    assert np.abs(ours - theirs).max() < 5e-3 * np.abs(ours).max()


def test_run_makes_both_files_and_resumes(library: Path, tmp_path: Path) -> None:
    lines: list[str] = []
    settings = Settings(
        out=tmp_path / "out",
        work=tmp_path / "work",
        steps=20,
        target=replace(TINY, n_layer=3),
        draft=TINY,
        threads=1,
        plan=PLAN,
        root=library,
        eval_tokens=256,
    )
    result = run(settings, report=lines.append)
    names = {"target.gguf", "draft.gguf", "LICENSE.txt", "PROVENANCE.md"}
    assert {p.name for p in settings.out.iterdir()} == names
    assert "| polish | 4 | 512 |" in (settings.out / "PROVENANCE.md").read_text()
    held = result["held_out"]
    assert isinstance(held, dict)
    assert 0 <= held["library"]["draft_agreement"] <= 1
    files = {p.name: p.read_bytes() for p in settings.out.glob("*.gguf")}
    for name in ("distil", "polish"):
        (settings.work / f"{name}.safetensors").unlink()
    run(settings, report=lines.append)
    assert files == {p.name: p.read_bytes() for p in settings.out.glob("*.gguf")}
    assert json.loads((settings.work / "report.json").read_text())["seed"] == 0


def test_shapes_are_what_the_package_promises() -> None:
    assert sum(SHARES.values()) == pytest.approx(1)
    assert 10e6 < Llama(TARGET).parameter_count() < 15e6
    assert TARGET.n_layer >= 8
    assert Llama(DRAFT).parameter_count() < 3e6
    for config in (TARGET, DRAFT):
        assert config.n_embd % 256 == config.n_ff % 256 == 0


def test_command_wants_one_budget(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="either --minutes or --steps"):
        CliRunner().invoke(main, ["embedded", "--out", str(tmp_path)], catch_exceptions=False)


def test_commands_say_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    arguments = ["tasks", "--out", str(tmp_path), "--steps", "1"]
    with pytest.raises(UsageError, match=r"pip install 'pipeinfer\[train\]'"):
        CliRunner().invoke(main, arguments, catch_exceptions=False)


def test_command_passes_its_options_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Settings] = []
    monkeypatch.setattr("pipeinfer.lab.training.pair.embedded.run",
                        lambda settings, report: seen.append(settings))
    arguments = ["embedded", "--out", str(tmp_path / "out"), "--work", str(tmp_path / "work")]
    arguments += ["--steps", "8", "--eval-tokens", "2048", "--stdlib", str(tmp_path)]
    CliRunner().invoke(main, arguments, catch_exceptions=False)
    (found,) = seen
    assert (found.out, found.work) == (tmp_path / "out", tmp_path / "work")
    assert (found.steps, found.minutes, found.eval_tokens) == (8, None, 2048)
    assert found.root == tmp_path
    assert (found.target, found.draft) == (TARGET, DRAFT)


@pytest.mark.full
@pytest.mark.slow
def test_command_takes_a_few_real_steps(tmp_path: Path) -> None:
    arguments = ["embedded", "--out", str(tmp_path / "out"), "--work", str(tmp_path / "work")]
    arguments += ["--steps", "8", "--eval-tokens", "2048"]
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 0, result.output
    size = sum(path.stat().st_size for path in (tmp_path / "out").glob("*.gguf"))
    assert 10e6 < size < 25e6
