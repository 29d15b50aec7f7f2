"""`pipeinfer sample`: several answers to each prompt, as PASTA's second stage learns from them.

Answers are decoded by the runtime, over as many ranks as it has, and written with their threads
laid out for training. What is learnt from them is `training.adapt.prefer`'s affair.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import click
import numpy as np

from pipeinfer import host
from pipeinfer.cli.options import JOB, config_options
from pipeinfer.cli.terminal import fetch_models, progress_hook, show_over
from pipeinfer.cluster.generate import Generated, open_response, run_request, sampling_params
from pipeinfer.cluster.launch import join
from pipeinfer.cluster.session import Session
from pipeinfer.config import Resolved
from pipeinfer.core.sampling import noise_key
from pipeinfer.errors import RequestError, UsageError
from pipeinfer.files import check_writable
from pipeinfer.models.text import chat_template
from pipeinfer.strategies.decomposers.base import MAIN, Fork, Hold, Skip, Vocabulary
from pipeinfer.strategies.decomposers.factory import vocabulary_of
from pipeinfer.strategies.decomposers.pasta import UNIT, Pasta
from pipeinfer.strategies.decomposers.prompts import check as check_decomposer
from pipeinfer.training.adapt.chats import read_chats
from pipeinfer.training.adapt.wording import Wording
from pipeinfer.training.pasta import bonbon, pasta
from pipeinfer.training.pasta.endpoint import Endpoint
from pipeinfer.training.pasta.pasta import Block, Flat
from pipeinfer.training.pasta.verdicts import compare
from pipeinfer.training.tasks import tasks


@dataclass(frozen=True, slots=True)
class Asked:
    """A prompt. reference: an answer to compare with, whose length is that of a sequential one.
    quality: of an answer's text."""

    messages: Sequence[dict[str, str]]
    reference: str
    quality: Callable[[str], float]


@config_options(*JOB, "sampling", "request")
@click.option("--prompts", type=click.Path(path_type=Path, dir_okay=False),
              help="JSONL of conversations with an answer each, which the model's are judged "
                   "against (needs --judge).")
@click.option("--tasks", "count", type=click.IntRange(1),
              help="So many generated tasks instead; their answers are right or wrong.")
@click.option("--samples", type=click.IntRange(2), default=8, show_default=True,
              help="Answers to each prompt.")
@click.option("--judge", metavar="URL", help="Address of a model that judges the answers, such as "
              "http://127.0.0.1:8080/v1 (key: OPENAI_API_KEY).")
@click.option("--judge-model", default="default", show_default=True, metavar="NAME",
              help="Model to ask there.")
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), required=True,
              help="JSONL to write: a prompt a line, for pipeinfer train pasta-bonbon.")
def sample_command(resolved: Resolved, prompts: Path | None, count: int | None, samples: int,
                   judge: str | None, judge_model: str, out: Path) -> None:
    """Answer prompts several times by PASTA, for its second stage of training.

    \b
    pipeinfer sample -m MODEL-pasta --prompts chats.jsonl --judge URL --out s.jsonl
    pipeinfer train pasta-bonbon --model MODEL-pasta --data s.jsonl --out adapter

    Answers are drawn from the model's own probabilities unless --temp, --top-k, --top-p or --min-p
    say otherwise. A file that is there is gone on with.
    """
    config = resolved.config
    if (prompts is None) == (count is None):
        raise UsageError("give either --prompts or --tasks")
    if prompts is not None and judge is None:
        raise UsageError("--prompts needs a judge: give --judge")
    job = config.job.replace(decomposer="pasta")
    params = config.sampling
    seed = max(params.seed, 0)
    unbent = {"temp": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
    params = dataclasses.replace(params, **{  # type: ignore[arg-type]
        name: value for name, value in unbent.items() if resolved.origin[name] == "default"})
    asked: list[Asked] = []
    if host.launched_rank() == 0:  # the files are on its host
        check_decomposer(job.speculation, params)
        check_writable(out)
        asked += generated(count, seed) if prompts is None else judged(
            prompts, Endpoint(str(judge), judge_model))
        chat_template.prepare()
    done = len(out.read_text(encoding="utf-8").splitlines()) if out.exists() else 0
    fetch_models(job)
    joined = join(job)
    if joined.place.rank:
        joined.serve()
        return
    with joined.lead(progress_hook(config.request)) as session, \
            out.open("a", encoding="utf-8") as file:
        for number, one in enumerate(asked[done:], done):
            found = []
            opening = open_response(session, one.messages)
            for turn in range(samples):
                show_over(f"prompt {number + 1} of {len(asked)}, answer {turn + 1}")
                key = noise_key(int(np.random.default_rng([seed, number, turn]).integers(2**31)))
                try:
                    answer = run_request(session, opening, sampling_params(params, key),
                                         config.request.n_predict)
                except RequestError as error:
                    raise UsageError(f"prompt {number + 1}: {error}") from error
                if (record := scored(session, one, opening.prompt, answer)) is not None:
                    found.append(record)
            file.write(json.dumps({"messages": list(one.messages), "samples": found}) + "\n")
            file.flush()
        show_over("")


def scored(session: Session, asked: Asked, prompt: Sequence[int], answer: Generated
           ) -> dict[str, object] | None:
    """An answer with its layout and scores; None for one that has no layout. speedup: tokens of the
    reference for each step that an ideal interpreter takes (paper section 5)."""
    tokenizer = session.tokenizer
    try:
        flat = layout(vocabulary_of(tokenizer), prompt, answer, session.limits.n_ctx,
                      Wording(tokenizer).end)
    except ValueError:
        return None
    length = len(tokenizer.split(asked.reference, special=False))
    return {**pasta.record_of(flat), "text": answer.text,
            "speedup": length / max(pasta.chain(flat), 1), "quality": asked.quality(answer.text)}


def layout(vocabulary: Vocabulary, prompt: Sequence[int], answer: Generated, room: int,
           end: int) -> Flat:
    """An answer as training lays it out, by what the interpreter does with its tokens.

    end: what follows an answer that the model has ended. Raises ValueError for an answer that was
    cut off, is empty, or has a block that its thread did not close.
    """
    if answer.reason != "stop" or not answer.tokens:
        raise ValueError("was cut off, or is empty")
    own: dict[int, list[int]] = {}
    for token, thread in zip(answer.tokens, answer.threads, strict=True):
        own.setdefault(thread, []).append(token)
    reader = Pasta(vocabulary, start=len(prompt), room=room)
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
                    if not closing:
                        raise ValueError("a block is not closed")
                    reader.settled(thread)
                    opening = len(begin)
                    blocks.append(Block(promise, len(ids), len(ids) + opening + len(inner) - 1, 0))
                    ids += [*begin, *inner]
                case Skip(_, count):
                    last = blocks.pop()
                    blocks.append(Block(last.promise, last.start, last.end, count // UNIT))
                case Hold():
                    syncs.append(promise)
                case _:
                    pass
    return Flat((*ids, end), len(prompt), tuple(blocks), tuple(syncs), opening)


def generated(count: int | None, seed: int) -> Iterator[Asked]:
    """Tasks that training has not held back; quality is the share of right sentences."""
    for task in islice(tasks.stream([seed, 5]), count):
        yield Asked([{"role": "user", "content": task.question}], "\n".join(task.lines),
                    lambda text, task=task: tasks.score(task, text))  # type: ignore[misc]


def judged(path: Path, endpoint: Endpoint) -> Iterator[Asked]:
    """Conversations; quality is a judge's verdict against their own answers, in both orders. Raises
    UsageError for one without an answer, or a file that is not there."""
    if not path.is_file():
        raise UsageError(f"--prompts {path}: there is no such file")
    for number, chat in enumerate(read_chats(path), 1):
        if chat.answer is None:
            raise UsageError(f"{path}, record {number}: has no answer to compare with: add one as "
                             '"response"')

        def quality(text: str, question: str = chat.messages[-1]["content"],
                    reference: str = chat.answer) -> float:
            return bonbon.win_ratio(compare(endpoint, question, text, reference))

        yield Asked(chat.messages, chat.answer, quality)
