"""Makes the embedded pair: corpus, tokenizer, draft, target, distilled draft, GGUF files, report.

Every step leaves its result in the work directory and is skipped when that is there, so the same
command resumes after an interruption.

Does not know: how a step computes (see its module) or what inference does with the files.
"""

from __future__ import annotations

import json
import platform
import shutil
import sysconfig
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch

from pipeinfer.lab.training.minimise import Progress
from pipeinfer.lab.training.pair import corpus as corpus_module
from pipeinfer.lab.training.pair import loop, provenance
from pipeinfer.lab.training.pair import tokenizer as tokenizer_module
from pipeinfer.lab.training.pair.export import ModelCard, write_gguf
from pipeinfer.lab.training.pair.loop import Plan, train
from pipeinfer.lab.training.pair.model import DRAFT, TARGET, Llama, LlamaConfig, spread, thinned

#: Shares of the whole budget: a draft alone, for comparison; the target; and the draft that is
#: shipped, a thinned target, taught by the target in the second half of its time, and again
#: ("polish") with a fresh schedule.
SHARES = {"draft": 0.10, "target": 0.53, "distil": 0.185, "polish": 0.185}


@dataclass(frozen=True, slots=True)
class Settings(loop.Settings):
    """Settings of one run of the `embedded` command."""

    target: LlamaConfig = TARGET
    draft: LlamaConfig = DRAFT
    root: Path | None = None
    eval_tokens: int = 131072

    def plan_for(self, step: str) -> Plan:
        """The budget of one training step; the draft's later ones read in another order."""
        share = SHARES[step]
        minutes = None if self.minutes is None else self.minutes * share
        steps = None if self.steps is None else max(1, round(self.steps * share))
        seed = self.seed + {"distil": 1, "polish": 2}.get(step, 0)
        plan = replace(self.plan, minutes=minutes, steps=steps, seed=seed)
        if step != "polish":
            return plan
        return replace(
            plan,
            teacher_from=0.0,
            distil_weight=0.9,
            matrix_lr=plan.matrix_lr / 2,
            other_lr=plan.other_lr / 2,
        )


def run(settings: Settings, report: Callable[[str], None] = print) -> dict[str, object]:
    """Do whatever is not done yet; returns the report that is also written as report.json."""
    torch.set_num_threads(settings.threads)
    settings.work.mkdir(parents=True, exist_ok=True)
    report("corpus and tokenizer")
    prepare(settings)
    stream = np.load(settings.work / "train.npy", allow_pickle=False)
    report(f"{len(stream) / 1e6:.2f} M tokens in the training stream")

    def step(name: str, model: Llama, teacher: Llama | None = None) -> Progress:
        report(f"{name}: {model.parameter_count() / 1e6:.2f} M parameters")
        return train(
            model,
            stream,
            settings.plan_for(name),
            settings.work / f"{name}.safetensors",
            teacher=teacher,
            report=lambda line: report(f"{name}: {line}"),
        )

    draft, target = Llama(settings.draft), Llama(settings.target)
    draft.reset(settings.seed)
    target.reset(settings.seed + 1)
    spent = {"draft": step("draft", draft)}
    alone = Llama(settings.draft)
    alone.load_state_dict(draft.state_dict())
    spent["target"] = step("target", target)
    inherit(draft, target)
    spent["distil"] = step("distil", draft, target)
    spent["polish"] = step("polish", draft, target)

    result: dict[str, object] = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "seed": settings.seed,
        "corpus": json.loads((settings.work / "corpus.json").read_text()),
        "models": {
            name: {"parameters": model.parameter_count(), **model.config.to_dict()}
            for name, model in (("target", target), ("draft", draft))
        },
        "training": {name: asdict(progress) for name, progress in spent.items()},
        "held_out": {
            kind: compare(
                np.load(settings.work / f"held_out_{kind}.npy", allow_pickle=False),
                {"target": target, "draft_alone": alone, "draft": draft},
                settings,
            )
            for kind in ("library", "test")
        },
    }
    export(settings, target, draft)
    text = json.dumps(result, indent=2)
    (settings.work / "report.json").write_text(text + "\n")
    provenance.write(settings.out / "PROVENANCE.md", result)
    report(text)
    return result


def inherit(draft: Llama, target: Llama) -> None:
    """Begin the draft as a thinned target: its embedding, final norm, and evenly spread layers."""
    ours, theirs = draft.config, target.config
    if replace(ours, n_layer=theirs.n_layer) != theirs:
        raise ValueError("draft and target must differ in their number of layers alone")
    layers = spread(ours.n_layer, theirs.n_layer)
    draft.load_state_dict(thinned(target, layers).state_dict())


def prepare(settings: Settings) -> None:
    """Write tokenizer.json, corpus.json and the token streams, unless they are there."""
    work = settings.work
    if (work / "corpus.json").exists():
        return
    corpus = corpus_module.build(settings.root)
    # Tests outweigh the library two to one; words are learned from the library alone.
    tokenizer = tokenizer_module.train(
        (d.text for d in corpus.train if d.kind != "test"), settings.target.n_vocab
    )
    tokenizer.save(str(work / "tokenizer.json"))
    twice = [d for d in corpus.train if d.kind in ("library", "doc")]
    order = np.random.default_rng(settings.seed).permutation(len(corpus.train) + len(twice))
    documents = [*corpus.train, *twice]
    stream = tokenizer_module.encode_documents(tokenizer, (documents[i] for i in order))
    np.save(work / "train.npy", stream)
    for kind in ("library", "test"):
        held = [d for d in corpus.held_out if d.kind == kind]
        np.save(work / f"held_out_{kind}.npy", tokenizer_module.encode_documents(tokenizer, held))
    counts = {"stream_tokens": len(stream), "held_out": [d.name for d in corpus.held_out]}
    (work / "corpus.json").write_text(json.dumps({**corpus.counts(), **counts}, indent=1))


@torch.no_grad()
def compare(
    stream: np.ndarray, models: dict[str, Llama], settings: Settings, length: int = 512
) -> dict[str, float]:
    """Nats per token of each model and how often its arg-max equals the first model's."""
    length = min(length, settings.target.n_ctx)
    rows = min(settings.eval_tokens, len(stream) - 1) // length
    if rows <= 0:
        return {}
    x = stream[: rows * length].astype(np.int64).reshape(rows, length)
    y = stream[1 : rows * length + 1].astype(np.int64).reshape(rows, length)
    totals = {f"{name}_nats": 0.0 for name in models}
    reference = next(iter(models))
    totals |= {f"{name}_agreement": 0.0 for name in models if name != reference}
    for start in range(0, rows, 8):
        tokens, wanted = torch.from_numpy(x[start : start + 8]), torch.from_numpy(y[start:][:8])
        best: torch.Tensor | None = None
        for name, model in models.items():
            logits = model(tokens).flatten(0, 1)
            loss = torch.nn.functional.cross_entropy(logits, wanted.flatten(), reduction="sum")
            totals[f"{name}_nats"] += float(loss)
            choice = logits.argmax(-1)
            if best is None:
                best = choice
            else:
                totals[f"{name}_agreement"] += float((choice == best).sum())
    return {"tokens": rows * length} | {k: v / (rows * length) for k, v in totals.items()}


def export(settings: Settings, target: Llama, draft: Llama) -> None:
    """Write both GGUF files, and the licence of the text that they learned from beside them."""
    settings.out.mkdir(parents=True, exist_ok=True)
    tokenizer = tokenizer_module.load(settings.work / "tokenizer.json")
    for name, model in (("target", target), ("draft", draft)):
        card = ModelCard(
            name=f"pipeinfer embedded {name}",
            description="Trained on the Python standard library; a demonstration, not a product.",
            license="PSF-2.0",
        )
        write_gguf(settings.out / f"{name}.gguf", model, tokenizer, card)
    licence = _licence(settings.root)
    if licence is not None:
        shutil.copyfile(licence, settings.out / "LICENSE.txt")


def _licence(root: Path | None) -> Path | None:
    """The licence text that the standard library carries."""
    root = Path(sysconfig.get_paths()["stdlib"]) if root is None else root
    candidates: Sequence[Path] = (root / "LICENSE.txt", root.parent / "LICENSE.txt")
    return next((path for path in candidates if path.exists()), None)
