"""PASTA stage 1: fine-tune a model on annotated responses (paper section 4).

Does not know: who annotated, how responses are decoded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from torch import Tensor

from pipeinfer.errors import UsageError
from pipeinfer.lab.training.adapt.chats import read_jsonl
from pipeinfer.lab.training.adapt.rows import fitting
from pipeinfer.lab.training.minimise import Progress
from pipeinfer.lab.training.pair.loop import Plan, optimise
from pipeinfer.lab.training.pair.model import Llama
from pipeinfer.lab.training.pair.tokenizer import IM_END_ID
from pipeinfer.lab.training.pasta import annotate, pasta
from pipeinfer.lab.training.tasks import batches, formats
from pipeinfer.lab.training.tasks.formats import Example
from pipeinfer.lab.training.tasks.markup import SYSTEM, Codec


def plan_for(steps: int, seed: int = 0, rate: float = 3e-4, matrix_rate: float = 2e-3) -> Plan:
    """A run that goes on from a trained model: lower rates and a shorter warm-up."""
    return Plan(steps=steps, seed=seed, warmup_steps=10, matrix_lr=matrix_rate, other_lr=rate,
                bfloat16=False)


def example_of(codec: Codec, record: Mapping[str, str], *, annotated: bool = True) -> Example:
    """The training row of one record; without its tags for the sequential baseline.

    Malformed where the annotation is not one of its response; ValueError where the response itself
    holds tags.
    """
    prompt = formats.prompt_ids(codec, SYSTEM["pasta" if annotated else "plain"], record["prompt"])
    text = record["response"]
    if annotated:
        text = annotate.pasta_lang(codec, annotate.parse(record["annotated"], text))
    ids = [*prompt, *codec.encode(text), IM_END_ID]
    return formats.pasta_example(pasta.parse(ids, len(prompt), codec.tags, codec.digits))


def examples_of(
    codec: Codec, source: Path, context: int, report: Callable[[str], None]
) -> list[Example]:
    """All usable rows of an annotated JSONL file; UsageError where there is none."""
    rows = fitting(read_jsonl(source), lambda record: example_of(codec, record), context, report)
    if not rows:
        raise UsageError(f"{source} contains no usable annotated response")
    return rows


def finetune(
    model: Llama,
    rows: list[Example],
    plan: Plan,
    checkpoint: Path,
    report: Callable[[str], None] = print,
    *,
    batch: int = 8,
    stop_after: int | None = None,
) -> Progress:
    """Minimise the mean nats per target of 4.7's layout, every epoch in a new order.

    batch: responses of a step.
    """

    def objective(step: int, spent: float) -> Iterator[tuple[Tensor, int]]:  # noqa: ARG001
        some = batches.chosen(rows, batch, plan.seed, step, whole=True)
        loss, count = batches.loss_sum(model, batches.collate(some), bfloat16=plan.bfloat16)
        yield loss / count, sum(len(row.tokens) for row in some)

    return optimise(model, plan, checkpoint, objective, report=report, stop_after=stop_after)
