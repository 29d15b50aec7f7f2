"""`pipeinfer sample`: several answers to each prompt, as PASTA's second stage learns from them.

Answers are decoded by the runtime, over as many ranks as it has, and written with their threads
laid out for training. What is learnt from them is `training.adapt.prefer`'s affair.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import click
import numpy as np

from pipeinfer import host
from pipeinfer.cli.loading import progress_hook
from pipeinfer.cli.options import ENV_PREFIX, JOB, config_options
from pipeinfer.cli.terminal import fetch_models, note, show_over
from pipeinfer.cluster import features
from pipeinfer.cluster.generate import (
    Generated,
    draw_seed,
    open_response,
    run_request,
    sampling_params,
)
from pipeinfer.cluster.launch import join
from pipeinfer.cluster.session import Session
from pipeinfer.config import RequestConfig, Resolved, SamplingConfig, SpeculationConfig
from pipeinfer.errors import RequestError, UsageError
from pipeinfer.files import check_writable
from pipeinfer.models.locate import model_paths, open_model
from pipeinfer.models.text import chat_template
from pipeinfer.strategies import registry
from pipeinfer.strategies.decomposers.base import MAIN, Fork, GiveUp, Halt, Skip, TokenVocabulary
from pipeinfer.strategies.decomposers.pasta import Pasta, Spacing
from pipeinfer.strategies.decomposers.prompts import validate, vocabulary_of
from pipeinfer_lab.commands.comparison import Answer, read_baseline
from pipeinfer_lab.commands.samples_file import begun, line_of
from pipeinfer_lab.training.adapt.chats import read_chats
from pipeinfer_lab.training.adapt.wording import Wording
from pipeinfer_lab.training.pasta import pasta
from pipeinfer_lab.training.pasta.endpoint import Endpoint
from pipeinfer_lab.training.pasta.pasta import Block, Flat
from pipeinfer_lab.training.pasta.verdicts import quality_against
from pipeinfer_lab.training.tasks import tasks


@dataclass(frozen=True, slots=True)
class Asked:
    """A prompt. reference: an answer to compare with, whose length is that of a sequential one
    unless there is a baseline. quality: of an answer's text. baseline: what Baseline-SFT has
    answered."""

    messages: Sequence[dict[str, str]]
    reference: str | None
    quality: Callable[[str], float]
    baseline: Answer | None = None

    @property
    def fields(self) -> dict[str, object]:
        """For JSON."""
        return {"messages": list(self.messages), "reference": self.reference,
                "baseline": None if self.baseline is None else self.baseline.text}


@dataclass(slots=True)
class LeftOut:
    """Answers that nothing can be learnt from. unclosed: those that are empty, too."""

    cut_off: int = 0
    unclosed: int = 0

    def report(self, of: int, n_predict: int) -> None:
        """Say how many of those drawn."""
        if self.cut_off:
            note(f"{self.cut_off} of {of} answers are left out because they were cut off: raise -n "
                 f"({n_predict}), and -c with it")
        if self.unclosed:
            note(f"{self.unclosed} of {of} answers are left out because they are empty or have a "
                 "block without an end")


@config_options(*JOB, "sampling")
@click.option("--prompts", type=click.Path(path_type=Path, dir_okay=False),
              help="JSONL of conversations with an answer each, which the model's are judged "
                   "against (needs --judge).")
@click.option("--tasks", "count", type=click.IntRange(1),
              help="So many generated tasks instead; their answers are right or wrong.")
@click.option("--samples", type=click.IntRange(2), default=8, show_default=True,
              help="Answers to each prompt.")
@click.option("-n", "--n-predict", "--predict", "n_predict", type=click.IntRange(1, 2**24),
              default=RequestConfig().n_predict, show_default=True,
              envvar=f"{ENV_PREFIX}N_PREDICT", help="Maximum number of tokens of an answer.")
@click.option("--judge", metavar="URL", help="Address of a model that judges the answers, such as "
              "http://127.0.0.1:8080/v1 (key: OPENAI_API_KEY).")
@click.option("--judge-model", default="default", show_default=True, metavar="NAME",
              help="Model to ask there.")
@click.option("--baseline", type=click.Path(path_type=Path, exists=True, file_okay=False),
              metavar="DIR", help="Plain answers to --prompts by a model from baseline-sft, as "
              "compare -o leaves them: their length is what speed-up is measured by, and the judge "
              "compares with them, too.")
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), required=True,
              help="JSONL to write: a prompt a line, for pipeinfer train pasta-bonbon.")
def sample_command(
    resolved: Resolved, prompts: Path | None, count: int | None, samples: int, n_predict: int,
    judge: str | None, judge_model: str, baseline: Path | None, out: Path,
) -> None:
    """Answer prompts several times by PASTA, for its second stage of training.

    \b
    pipeinfer sample -m MODEL-pasta --prompts chats.jsonl --judge URL --baseline DIR --out s.jsonl
    pipeinfer train pasta-bonbon --model MODEL-pasta --data s.jsonl --out adapter

    Answers are drawn from the model's own probabilities unless --temp, --top-k, --top-p or --min-p
    say otherwise. A file that is there is gone on with, if prompts, model and draws are the same.
    """
    config = resolved.config
    if (prompts is None) == (count is None):
        raise UsageError("give either --prompts or --tasks")
    if prompts is not None and judge is None:
        raise UsageError("--prompts needs a judge: give --judge")
    if baseline is not None and prompts is None:
        raise UsageError("--baseline answers --prompts; the answers of --tasks are right or wrong: "
                         "leave it out")
    job = config.job.replace(decomposer="pasta")
    params = config.sampling
    unbent = {"temp": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
    params = dataclasses.replace(params, **{  # type: ignore[arg-type]
        name: value for name, value in unbent.items() if resolved.origin[name] == "default"})
    asked: list[Asked] = []
    made: dict[str, Any] = {}
    if host.launched_rank() == 0:  # the files are on its host
        features.check(dataclasses.replace(config, job=job, sampling=params))
        validate(job.speculation)
        positions = positions_of(job.speculation)
        check_writable(out)
        there = begun(out)
        seed = params.seed
        if seed < 0:
            seed = draw_seed(params) if there.seed is None else there.seed
            click.echo(f"pipeinfer: seed {seed}", err=True)
        asked += generated(count, seed) if prompts is None else judged(
            prompts, Endpoint(str(judge), judge_model), baseline)
        chat_template.prepare()
    fetch_models(job)
    if host.launched_rank() == 0:
        made = how(params, seed, open_model(model_paths(job)[0]).fingerprint, samples,
                   None if prompts is None else judge_model, positions)
        there.check(made, [one.fields for one in asked])
    joined = join(job)
    if joined.place.rank:
        joined.serve()
        return
    with joined.lead(progress_hook(config.request)) as session, \
            out.open("a", encoding="utf-8") as file:
        file.truncate(there.kept)
        done, left = len(there.records), LeftOut()
        for number, one in enumerate(asked[done:], done):
            found = []
            opening = open_response(session, one.messages)
            for turn in range(samples):
                show_over(f"prompt {number + 1} of {len(asked)}, answer {turn + 1}")
                drawn = int(np.random.default_rng([seed, number, turn]).integers(2**31))
                try:
                    answer = run_request(session, opening, sampling_params(params, drawn),
                                         n_predict)
                except RequestError as error:
                    raise UsageError(f"prompt {number + 1}: {error}") from error
                if answer.reason != "stop":
                    left.cut_off += 1
                elif (record := scored(session, one, opening.prompt, answer)) is not None:
                    found.append(record)
                else:
                    left.unclosed += 1
            file.write(line_of(made, one.fields, found))
            file.flush()
        show_over("")
    left.report(len(asked[done:]) * samples, n_predict)


def positions_of(config: SpeculationConfig) -> Spacing:
    """Return the rule for positions. Raises UsageError for one that training does not have."""
    return pasta.trained_spacing(str(
        registry.values_of(registry.decomposer("pasta"), config)["pasta_positions"]))


def how(params: SamplingConfig, seed: int, model: str, samples: int, judge: str | None,
        positions: Spacing) -> dict[str, Any]:
    """What has to be the same for answers to go into one file. model: its fingerprint."""
    return {"model": model, "seed": seed, "samples": samples, "judge": judge, "temp": params.temp,
            "top_k": params.top_k, "top_p": params.top_p, "min_p": params.min_p,
            "logit_bias": list(params.logit_bias),
            **({} if positions == Spacing() else {"positions": [positions.kind, positions.count]})}


def scored(session: Session, asked: Asked, prompt: Sequence[int], answer: Generated
           ) -> dict[str, object] | None:
    """An answer with its layout and scores; None for one that has no layout. speedup: tokens of the
    baseline's answer (without one: of the reference) for each step that an ideal interpreter takes
    (paper section 4)."""
    tokenizer = session.tokenizer
    try:
        flat = layout(vocabulary_of(tokenizer), prompt, answer, session.limits.n_ctx,
                      Wording(tokenizer).end, positions_of(session.loaded.job.config.speculation))
    except ValueError:
        return None
    length = asked.baseline.tokens if asked.baseline is not None else len(
        tokenizer.split(asked.reference or "", special=False))
    return {**pasta.record_of(flat), "text": answer.text,
            "speedup": length / max(pasta.chain(flat), 1), "quality": asked.quality(answer.text)}


def layout(vocabulary: TokenVocabulary, prompt: Sequence[int], answer: Generated, room: int,
           end: int, spacing: Spacing | None = None) -> Flat:
    """An answer as training lays it out, by what the interpreter does with its tokens.

    end: what follows an answer that the model has ended. Raises ValueError for an answer that was
    cut off, is empty, or has a block that its thread did not close.
    """
    if answer.reason != "stop" or not answer.tokens:
        raise ValueError("was cut off, or is empty")
    own: dict[int, list[int]] = {}
    for token, thread in zip(answer.tokens, answer.threads, strict=True):
        own.setdefault(thread, []).append(token)
    reader = Pasta(vocabulary, start=len(prompt), room=room, spacing=spacing)
    ids, syncs, opening = list(prompt), [], 1
    blocks: list[Block] = []
    for token in own.get(MAIN, []):
        ids.append(token)
        promise = len(ids) - 1
        for action in reader.accepted(MAIN, token):
            match action:
                case Fork(thread, tokens=begin):
                    inner = own.get(thread, [])
                    closing = [a for one in inner for a in reader.accepted(thread, one)]
                    if not closing or GiveUp(thread) in closing:
                        raise ValueError("a block is not closed")
                    reader.settled(thread)
                    opening = len(begin)
                    blocks.append(Block(promise, len(ids), len(ids) + opening + len(inner) - 1, 0))
                    ids += [*begin, *inner]
                case Skip(_, count):
                    last = blocks.pop()
                    blocks.append(Block(last.promise, last.start, last.end, count))
                case Halt():
                    syncs.append(promise)
                case _:
                    pass
    text = sum(bool(piece.text) for piece in reader.flush())  # of a tag's tokens nothing is left
    return Flat((*ids, end), len(prompt), tuple(blocks), tuple(syncs), opening,
                len(ids) + 1 - len(prompt) - text)


def generated(count: int | None, seed: int) -> Iterator[Asked]:
    """Tasks that training has not held back; quality is the share of right sentences."""
    for task in islice(tasks.stream([seed, 5]), count):
        yield Asked([{"role": "user", "content": task.question}], "\n".join(task.lines),
                    lambda text, task=task: tasks.score(task, text))  # type: ignore[misc]


def judged(path: Path, endpoint: Endpoint, baseline: Path | None = None) -> list[Asked]:
    """Conversations; quality is a judge's verdicts against their own answers and the baseline's, in
    both orders (paper section 4). Raises UsageError for one without any answer, a file that is not
    there, or a baseline that answers other questions."""
    if not path.is_file():
        raise UsageError(f"--prompts {path}: there is no such file")
    chats = list(read_chats(path))
    questions = [chat.messages[-1]["content"] for chat in chats]
    answers: Sequence[Answer | None] = [None] * len(chats) if baseline is None else \
        read_baseline(baseline, questions)
    found = []
    for number, (chat, question, answer) in enumerate(
            zip(chats, questions, answers, strict=True), 1):
        if chat.answer is None and answer is None:
            raise UsageError(f"{path}, record {number}: has no answer to compare with: add one as "
                             '"response", or give --baseline')
        others = (None if answer is None else answer.text, chat.answer)
        found.append(Asked(chat.messages, chat.answer, functools.partial(
            _quality, endpoint, question, others), answer))
    return found


def _quality(endpoint: Endpoint, question: str, others: Sequence[str | None], text: str) -> float:
    return quality_against(endpoint, question, text, others)
