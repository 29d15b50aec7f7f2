"""A small network's training: sources, optimizer, a run that resumes, what is needed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from pipeinfer.errors import UsageError
from pipeinfer.lab.training.network.corpus import is_held_out, library
from pipeinfer.models.locate import EMBEDDED

torch = pytest.importorskip("torch")

from pipeinfer.lab.training.__main__ import main  # noqa: E402
from pipeinfer.lab.training.network.loop import Plan, optimise  # noqa: E402
from pipeinfer.lab.training.network.model import Llama, LlamaConfig  # noqa: E402
from pipeinfer.lab.training.network.optim import orthogonalise  # noqa: E402

TINY = LlamaConfig(n_vocab=384, n_layer=2, n_embd=64, n_head=2, n_head_kv=1, n_ff=96, n_ctx=64)
PLAN = Plan(steps=6, warmup_steps=2, bfloat16=False)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Matrices of 64 columns gain nothing from threads, and lose much beside another process."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_sources_are_split_by_name_and_tests_are_none_of_them(tmp_path: Path) -> None:
    (tmp_path / "tests").mkdir()
    for i in range(60):
        (tmp_path / f"module_{i}.py").write_text(f"# module {i} of a library\n" * 30)
    (tmp_path / "tests" / "test_all.py").write_text("# a test\n" * 50)
    split = {held: list(library(held_out=held, root=tmp_path)) for held in (True, False)}
    names = {text.splitlines()[0]: f"module_{text.split()[2]}.py"
             for texts in split.values() for text in texts}
    assert len(names) == 60
    assert split[True]
    for held, texts in split.items():
        assert {is_held_out(names[text.splitlines()[0]]) for text in texts} == {held}


def test_tables_are_no_sources(tmp_path: Path) -> None:
    (tmp_path / "table.py").write_text("X = [" + "1234567890, " * 100 + "]\n")
    (tmp_path / "text.py").write_text("# words and words\n" * 50)
    found = [text for held in (True, False) for text in library(held_out=held, root=tmp_path)]
    assert found == ["# words and words\n" * 50]


def test_a_plan_has_one_budget() -> None:
    with pytest.raises(ValueError, match="either"):
        Plan()


def test_orthogonalise_levels_singular_values() -> None:
    matrices = torch.randn(3, 48, 32, generator=torch.Generator().manual_seed(0))
    values = torch.linalg.svdvals(orthogonalise(matrices))
    assert 0.5 < float(values.min())
    assert float(values.max()) < 1.3


def train(path: Path, config: LlamaConfig = TINY, stop_after: int | None = None) -> Llama:
    """A model that learns which token follows, from batches that depend on the step alone."""
    torch.manual_seed(0)
    model = Llama(config)

    def objective(step: int, spent: float):
        start = torch.arange(4)[:, None] * 50 + step
        tokens = (start + torch.arange(33)) * 7 % 383
        loss = torch.nn.functional.cross_entropy(
            model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        yield loss, tokens.numel()

    optimise(model, PLAN, path, objective, report=lambda line: None, stop_after=stop_after)
    return model


def test_a_resumed_run_equals_an_unbroken_one(tmp_path: Path) -> None:
    unbroken = train(tmp_path / "a.safetensors")
    stopped = train(tmp_path / "b.safetensors", stop_after=4)
    resumed = train(tmp_path / "b.safetensors")
    for name, weights in unbroken.state_dict().items():
        assert torch.equal(weights, resumed.state_dict()[name]), name
    assert not torch.equal(stopped.token_embd.weight, resumed.token_embd.weight)


def test_another_shape_in_the_checkpoint_is_refused(tmp_path: Path) -> None:
    train(tmp_path / "a.safetensors")
    with pytest.raises(ValueError, match="another model shape"):
        train(tmp_path / "a.safetensors", replace(TINY, n_layer=1))


def test_commands_say_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    arguments = ["draft", str(EMBEDDED / "target.gguf"), "--out", str(tmp_path / "draft.gguf"),
                 "--steps", "1"]
    with pytest.raises(UsageError, match=r"pip install 'pipeinfer\[train\]'"):
        CliRunner().invoke(main, arguments, catch_exceptions=False)
