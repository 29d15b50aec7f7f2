"""The five formats as reference programs: from scratch, one row per live thread and step.

Does not know: batching, sampling, models.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from pipeinfer.lab.training.pair.tokenizer import IM_END_ID
from pipeinfer.lab.training.pasta import pasta
from pipeinfer.lab.training.tasks import markup
from pipeinfer.lab.training.tasks.formats import common_prefix, prompt_ids
from pipeinfer.lab.training.tasks.markup import SYSTEM, Codec
from pipeinfer.lab.training.tasks.reference import Outcome, Program, Row, View, view

#: Tokens after which a thread is cut off.
LIMIT = 400


def start(format_name: str, codec: Codec, question: str) -> Program:
    """The program of a format for one question."""
    if format_name == "sot":
        return sot(codec, question)
    prompt = prompt_ids(codec, SYSTEM[format_name], question)
    return {"plain": plain, "pasta": pasta_lang, "pdos": pdos, "apar": apar}[format_name](
        codec, prompt
    )


def reading(ids: Sequence[int], position: int, seen: View, ban: tuple[int, ...] = ()) -> list[Row]:
    """Rows of a text that one thread reads, the ban on the last."""
    rows = [Row(token, position + at, seen, (seen,)) for at, token in enumerate(ids)]
    if ban:
        last = rows[-1]
        rows[-1] = Row(last.token, last.position, seen, last.store, ban)
    return rows


def plain(codec: Codec, prompt: list[int]) -> Program:
    """One token after the other."""
    seen = view()
    out = [(yield reading(prompt, 0, seen))[-1]]
    while out[-1] != IM_END_ID and len(out) < LIMIT:
        out.append((yield reading(out[-1:], len(prompt) + len(out) - 1, seen))[-1])
    return Outcome(tuple(out), codec.decode(out), len(out))


@dataclass(slots=True)
class Thread:
    """A fork: ``token`` waits to be evaluated at ``position``; ``after``: main tokens before it."""

    position: int
    token: int
    seen: View
    after: int = 0
    out: list[int] = field(default_factory=list)
    done: bool = False

    def row(self, *also: View, ban: tuple[int, ...] = ()) -> Row:
        """The row of the waiting token; the position counts on."""
        self.position += 1
        return Row(self.token, self.position - 1, self.seen, (self.seen, *also), ban)


def pasta_lang(codec: Codec, prompt: list[int]) -> Program:
    """PASTA-LANG's interpreter (paper section 3), positions by the predicted length."""
    tags, digits = codec.tags, codec.digits
    closing, sync = tags[markup.ASYNC_END], tags[markup.SYNC]
    in_main = (tags[markup.ASYNC], closing)
    in_fork = (sync, *(tags[t] for t in (markup.PROMISE, markup.ASYNC, markup.CHILD)))
    main = Thread(len(prompt), 0, view())
    forks: list[Thread] = []
    reply = yield reading(prompt, 0, main.seen, in_main)
    asked: list[Thread] = [main]
    reply = reply[-1:]
    steps, held = 0, False
    while asked:
        steps += 1
        for thread, token in zip(asked, reply, strict=True):
            cut = thread is not main and (token == IM_END_ID or len(thread.out) >= LIMIT)
            thread.token = closing if cut else token
            thread.out.append(thread.token)
            if thread is main:
                main.done = token == IM_END_ID or len(main.out) >= LIMIT
                held = token == sync
        rows: list[Row] = []
        fresh: list[Thread] = []
        asked = []
        for fork in forks:
            if fork.done:
                continue
            fork.done = fork.token == closing
            rows.append(fork.row(ban=in_fork))
            asked.append(fork)
        ready = not main.done and not (held and not all(fork.done for fork in forks))
        if ready:
            if held:
                # Closing rows of this very batch join too: their cells follow in order.
                for at, row in enumerate(rows):
                    rows[at] = Row(row.token, row.position, row.view, (*row.store, main.seen))
                for fork in forks:
                    main.seen |= fork.seen
                held = False
            units = pasta.promised_units(main.out, tags, digits)
            if units is not None:
                fork = Thread(
                    main.position + 1, tags[markup.ASYNC], main.seen.copy(), len(main.out)
                )
                fresh.append(fork)
                rows.append(main.row(fork.seen, ban=in_main))
                rows.append(fork.row(ban=in_fork))
                main.position += 10 * units
                asked += [main, fork]
            else:
                rows.append(main.row(ban=in_main))
                asked.append(main)
        forks += fresh
        if main.done and all(fork.done for fork in forks):
            break
        answers = yield rows
        closed = [thread is not main and thread.done for thread in asked]
        reply = [token for token, shut in zip(answers, closed, strict=True) if not shut]
        asked = [thread for thread, shut in zip(asked, closed, strict=True) if not shut]
    flat = main.out[:]
    for fork in reversed(forks):
        flat[fork.after : fork.after] = [tags[markup.ASYNC], *fork.out]
    return Outcome(tuple(flat), codec.decode(flat), steps)


def pdos(codec: Codec, prompt: list[int]) -> Program:
    """Skeleton, branches, rest (PDOS stages 1 to 3); forced tokens are read along, for free."""
    tags = codec.tags
    step, end, colon = tags[markup.STEP], tags[markup.STEPS_END], tags[":"]
    ellipsis, gap = tags[markup.ELLIPSIS], tags["\n\n"]
    seen = view()
    position = len(prompt)
    first = (step, end, ellipsis, gap)
    out = [(yield reading(prompt, 0, seen, first))[-1]]
    steps = 1
    base = 0
    context = seen
    titles: list[list[int]] = []
    while out[-1] not in (IM_END_ID, end) and len(out) < LIMIT:
        pending = out[-1:]
        if out[-1] == step and not titles:
            base, context = position, seen.copy()
        if out[-1] == step:
            titles.append([])
        elif titles and out[-1] == colon:
            pending = [colon, ellipsis, gap, step]
            out += pending[1:]
            titles.append([])
        elif titles:
            titles[-1].append(out[-1])
        out.append((yield reading(pending, position, seen))[-1])
        position += len(pending)
        steps += 1
    if out[-1] != end or not base:
        return Outcome(tuple(out), codec.decode(out), steps)
    opening = out[: base - len(prompt)]
    threads = [Thread(base, step, context.copy()) for _ in titles[:-1]]
    rows = [
        row
        for thread, title in zip(threads, titles, strict=False)
        for row in reading([step, *title, colon], base, thread.seen, (ellipsis,))
    ]
    lengths = [len(title) + 2 for title in titles[:-1]]
    answers = yield rows
    reply = [answers[end - 1] for end in accumulate(lengths)]
    for thread, length in zip(threads, lengths, strict=True):
        thread.position = base + length
    asked = threads
    while asked:
        steps += 1
        for thread, token in zip(asked, reply, strict=True):
            thread.token = token
            thread.done = token in (step, IM_END_ID) or len(thread.out) >= LIMIT
            if not thread.done:
                thread.out.append(token)
        asked = [thread for thread in asked if not thread.done]
        if asked:
            reply = yield [thread.row() for thread in asked]
    tail = [
        token
        for thread, title in zip(threads, titles, strict=False)
        for token in [gap, step, *title, colon, *thread.out]
    ]
    tokens = [*opening, *tail]
    tokens.append((yield reading(tail, base, context))[-1])
    steps += 1
    position = base + len(tail)
    while tokens[-1] != IM_END_ID and len(tokens) < LIMIT:
        tokens.append((yield reading(tokens[-1:], position, context))[-1])
        position += 1
        steps += 1
    return Outcome(tuple(tokens), codec.decode(tokens), steps)


def apar(codec: Codec, prompt: list[int]) -> Program:
    """A parent list and children for its details; the parent never sees them."""
    fork, child = codec.tags[markup.FORK], codec.tags[markup.CHILD]
    parent = Thread(len(prompt), 0, view())
    children: list[Thread] = []
    asked = [parent]
    reply = (yield reading(prompt, 0, parent.seen))[-1:]
    steps = 0
    while True:
        steps += 1
        for thread, token in zip(asked, reply, strict=True):
            thread.token = token
            thread.out.append(token)
            thread.done = token == IM_END_ID or len(thread.out) >= LIMIT
        asked = [thread for thread in asked if not thread.done]
        rows: list[Row] = []
        grown: list[Thread] = []
        for thread in asked:
            if thread is parent and thread.token == fork:
                new = Thread(parent.position + 1, child, parent.seen.copy(), len(parent.out))
                rows.append(parent.row(new.seen, ban=(fork, child)))
                rows.append(new.row(ban=(fork, child)))
                children.append(new)
                grown += [parent, new]
            else:
                rows.append(thread.row(ban=(child,) if thread is parent else (fork, child)))
                grown.append(thread)
        asked = grown
        if not asked:
            break
        reply = yield rows
    flat = parent.out[:]
    for new in reversed(children):
        flat[new.after : new.after] = [t for t in new.out if t != IM_END_ID]
    return Outcome(tuple(flat), codec.decode(flat), steps)


def sot(codec: Codec, question: str) -> Program:
    """An outline, then every point by a request of its own, all at once."""
    system = SYSTEM["sot"]
    prompt = prompt_ids(codec, system, markup.SOT_OUTLINE.format(question=question))
    outlined = yield from plain(codec, prompt)
    outline = codec.decode([t for t in outlined.tokens if t != IM_END_ID])
    points = [line.split(". ", 1) for line in outline.splitlines() if ". " in line]
    if not points:
        return outlined
    requests = [
        prompt_ids(
            codec,
            system,
            markup.SOT_POINT.format(question=question, outline=outline, index=index, point=point),
        )
        for index, point in points
    ]
    shared = common_prefix(requests)
    stem = view()
    yield reading(requests[0][:shared], 0, stem)
    threads = [Thread(len(request), 0, stem.copy()) for request in requests]
    answers = yield [
        row
        for thread, request in zip(threads, requests, strict=True)
        for row in reading(request[shared:], shared, thread.seen)
    ]
    ends = accumulate(len(request) - shared for request in requests)
    reply = [answers[end - 1] for end in ends]
    asked = threads
    steps = outlined.steps
    while asked:
        steps += 1
        for thread, token in zip(asked, reply, strict=True):
            thread.token = token
            thread.done = token == IM_END_ID or len(thread.out) >= LIMIT
            if not thread.done:
                thread.out.append(token)
        asked = [thread for thread in asked if not thread.done]
        if asked:
            reply = yield [thread.row() for thread in asked]
    text = "\n".join(codec.decode(thread.out) for thread in threads)
    return Outcome(tuple(codec.encode(text)), text, steps)
