"""PASTA stage 1: mark what in a response could be written side by side (paper section 4.1).

An annotator writes ``<async topic='...'>...</async>`` and ``<sync/>`` into a response; a valid
annotation is the response again once the tags are gone.

Does not know: networks (the annotator is a function), models, masks.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeinfer.errors import UsageError
from pipeinfer_lab.training.adapt.chats import chat_of, read_jsonl

if TYPE_CHECKING:
    from pipeinfer_lab.training.pasta.endpoint import Endpoint

_TAG = re.compile(r"<async topic=(?:'([^']*)'|\"([^\"]*)\")>|(</async>)|(<sync\s*/?>)")
MAX_TOPIC_WORDS = 3
MIN_BLOCK_WORDS = 5
#: prompt, response -> annotated response
Annotator = Callable[[str, str], str]


class Malformed(ValueError):
    """An annotation that breaks the rules; the text says which."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Part of an annotated response: ``block`` with topic, ``text``, or ``sync``."""

    kind: str
    text: str = ""
    topic: str = ""


def parse(annotated: str, response: str) -> list[Piece]:
    """The parts of a valid annotation of ``response``; Malformed otherwise."""
    pieces: list[Piece] = []
    topic: str | None = None
    at = 0
    for match in _TAG.finditer(annotated):
        text = annotated[at : match.start()]
        at = match.end()
        single, double, close, sync = match.groups()
        if close:
            if topic is None:
                raise Malformed("an </async> that closes nothing")
            if len(text.split()) < MIN_BLOCK_WORDS:
                raise Malformed(f"a block of fewer than {MIN_BLOCK_WORDS} words")
            pieces.append(Piece("block", text, topic))
            topic = None
            continue
        if topic is not None:
            raise Malformed("a tag inside a block")
        if text:
            pieces.append(Piece("text", text))
        if sync:
            pieces.append(Piece("sync"))
            continue
        topic = (single or double or "").strip()
        if not 1 <= len(topic.split()) <= MAX_TOPIC_WORDS:
            raise Malformed(f"a topic that is not one to {MAX_TOPIC_WORDS} words")
    if topic is not None:
        raise Malformed("a block that is not closed")
    if at < len(annotated):
        pieces.append(Piece("text", annotated[at:]))
    if "".join(piece.text for piece in pieces) != response:
        raise Malformed("the text without tags is not the response")
    return pieces


INSTRUCTIONS = """\
You are an experienced annotator. You get a question and a chat assistant's response. Decide which
parts of the response could have been written at the same time by separate writers, and mark them.

- Wrap each such part in <async topic='...'> and </async>. The topic has at most three words; later
  text sees the topic but not the part.
- Mark only parts that the text after them does not need. A part has at least five words.
- Where later text does need marked parts, put <sync/> before it. Every <sync/> makes everyone wait:
  use as few as possible.
- Never nest tags. Copy the response exactly, blanks and line breaks included: with the tags
  removed it must be the same text.
- If nothing can be written in parallel, return the response as it is.

Return the annotated response and nothing else."""

#: Question, response as annotated; written for this project.
DEMONSTRATIONS = (
    (
        "Name two uses of salt.",
        "<async topic='cooking'>In the kitchen, salt brings out the taste of food.</async>"
        "<async topic='winter roads'> On winter roads, salt keeps the water from freezing.</async>",
    ),
    (
        "How far do I get in 3 hours at 50 km/h, and is it enough for 140 km?",
        "<async topic='formula'>Distance is speed multiplied by time.</async>"
        "<async topic='given values'> The speed is 50 km/h and the time is 3 hours.</async>"
        "<sync/> So you get 50 * 3 = 150 km far, which is enough.",
    ),
    ("What is the capital of France?", "It is Paris."),
)


def plain_text(annotated: str) -> str:
    """An annotated response without its tags."""
    return _TAG.sub("", annotated)


def by_endpoint(endpoint: Endpoint, *, tries: int = 3) -> Annotator:
    """Ask a chat model, tell it what was wrong, and give up after ``tries`` malformed answers."""

    def show(prompt: str, response: str) -> str:
        return json.dumps({"question": prompt, "response": response}, ensure_ascii=False)

    def annotate(prompt: str, response: str) -> str:
        messages = [{"role": "system", "content": INSTRUCTIONS}]
        for question, answer in DEMONSTRATIONS:
            messages.append({"role": "user", "content": show(question, plain_text(answer))})
            messages.append({"role": "assistant", "content": answer})
        messages.append({"role": "user", "content": show(prompt, response)})
        problem = Malformed("never asked")
        for _ in range(tries):
            answer = endpoint.ask(messages)
            for candidate in (answer, answer.strip()):
                try:
                    parse(candidate, response)
                except Malformed as error:
                    problem = error
                else:
                    return candidate
            messages.append({"role": "assistant", "content": answer})
            messages.append(
                {"role": "user", "content": f"That has {problem}. Write it again, correctly."}
            )
        raise problem

    return annotate


#: Words by which a line leans on lines before it.
_LEANING = re.compile(
    r"\b(now|so far|therefore|thus|hence|in the end|these|altogether|in total|finally|previous)\b",
    re.IGNORECASE,
)


def by_rules(prompt: str, response: str) -> str:  # noqa: ARG001
    """Every line that leans on no other is a block; the first that leans waits for all before it.

    For responses made of independent lines or paragraphs, such as those of generated tasks.
    """
    out: list[str] = []
    pending = False
    for line in re.findall(r"\n*[^\n]+|\n+", response):
        if _LEANING.search(line):
            out.append(f"<sync/>{line}" if pending else line)
            pending = False
        elif len(line.split()) < MIN_BLOCK_WORDS:
            out.append(line)
        else:
            topic = re.sub(r"^[\s\d.*)-]+", "", line).split()[0].strip(".,:;'\"")
            out.append(f"<async topic='{topic or 'part'}'>{line}</async>")
            pending = True
    return "".join(out)


def key_of(prompt: str, response: str) -> str:
    """Name of a record, for resuming."""
    return hashlib.sha256(f"{prompt}\0{response}".encode()).hexdigest()[:16]


def question_of(messages: Sequence[Mapping[str, str]]) -> str:
    """What an annotator is shown of a conversation: its only message, or all with their roles."""
    if len(messages) == 1:
        return messages[0]["content"]
    return "\n\n".join(f"{one['role']}: {one['content']}" for one in messages)


def annotate_file(
    source: Path, out: Path, annotator: Annotator, report: Callable[[str], None] = print
) -> dict[str, int]:
    """Annotate every answer of ``source`` (see `chat_of`) that ``out`` does not hold yet.

    A record of ``out`` has ``annotated``, or ``problem`` where the annotator gave up; both count
    as done. Returns how many were annotated, given up, and already there.
    """
    done = {record.get("key") for record in read_jsonl(out)} if out.exists() else set()
    counts = {"annotated": 0, "given up": 0, "already there": 0}
    out.parent.mkdir(parents=True, exist_ok=True)
    with out.open("a", encoding="utf-8") as file:
        for number, record in enumerate(read_jsonl(source), 1):
            chat = chat_of(record, f"{source}, record {number}")
            response = chat.answer
            if response is None:
                raise UsageError(f"{source}, record {number}: has no answer to annotate: add "
                                 "response, or end messages with the assistant's")
            prompt = question_of(chat.messages)
            key = key_of(prompt, response)
            if key in done:
                counts["already there"] += 1
                continue
            asked = {"messages": chat.messages} if "messages" in record else {"prompt": prompt}
            row: dict[str, Any] = {"key": key, **asked, "response": response}
            try:
                row["annotated"] = annotator(prompt, response)
                parse(row["annotated"], response)
                counts["annotated"] += 1
            except Malformed as error:
                row.pop("annotated", None)
                row["problem"] = str(error)
                counts["given up"] += 1
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
            file.flush()
            done.add(key)
    report(", ".join(f"{count} {name}" for name, count in counts.items()))
    return counts


def write_tasks(path: Path, count: int, seed: int) -> None:
    """A JSONL file of generated training tasks with their right answers."""
    from pipeinfer_lab.training.tasks import tasks

    source = tasks.stream([seed, 6])
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as file:
        for _ in range(count):
            task = next(source)
            row = {"prompt": task.question, "response": task.answer}
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
