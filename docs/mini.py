"""PipeInfer in one file: a scheduler, a token tree, a draft, stages and cancellation, over a toy.

    python docs/mini.py                 # a race of three policies, and a picture of their pipelines
    python docs/mini.py --stages 4      # a longer pipeline: more is gained

A large model is cut into *stages*, one per machine; a token passes through all of them. With one
token at a time, only one stage works at any moment. So a small *draft* model proposes what
comes, and its draft tokens are evaluated before it is known whether they are right:

    head      draft  draft  draft  accept A   cancel C   draft  ...
    stage 1          run A  run B  run C                        run D
    stage 2                 run A  run B      C is left out            run D

- *Runs* are micro-batches of draft tokens. The head issues them without waiting: asynchronous, and
  continuous as long as nothing comes back (`Head.speculate`).
- Draft tokens form a *tree* below the last accepted token (`Node`). A result says which token the
  model itself writes behind each. Those that agree are accepted, in order (`Head.advance`). So the
  text is the model's own, whatever the draft says.
- Each draft token reads the *cells* (keys and values) of its own path. A cell belongs to a set of
  *sequences*: a run gets a sequence of its own, into which the cells of its path are copied, which
  moves nothing. Copies, removals and runs come to all stages in one order: that is what makes
  many runs in flight safe (`Stage`).
- A run without a draft token that can still be accepted is *cancelled*: stages leave it out.

The package does the same with MPI between machines and llama.cpp or torch in the stages. Read on in
`pipeinfer/`: `scheduler/scheduler.py` (`Head`), `scheduler/token_tree.py` (`Node`),
`scheduler/sequence_pool.py` (sequences), `runtime/stage.py` (`Stage`), `core/messages.py` (what
passes between them), `scheduler/controller.py` (how many to issue).
"""

from __future__ import annotations

import argparse
import queue
import string
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import NamedTuple

VOCABULARY = 64
ACCEPTED = 0  #: the sequence of the accepted text
STAGE_S, ROW_S, DRAFT_S = 0.010, 0.001, 0.002  #: a run in a stage, each of its rows, a draft token
PICTURE_S, WIDTH = 0.004, 96  #: of a character, and how many


# --- the model, as arithmetic on integers ---------------------------------------------------------


def mix(*numbers: int) -> int:
    """Return a number that looks random and depends on all of these."""
    found = 0x9E3779B9
    for number in numbers:
        found = (found ^ number) * 0x85EBCA6B % 2**32
        found ^= found >> 13
    return found


def model(text: tuple[int, ...], stages: int) -> int:
    """Return the token behind a text, computed at once: what every policy has to write."""
    rows = list(text)
    for layer in range(stages):
        total = 0
        for position, row in enumerate(rows):
            total += mix(layer, row) * (position + 1)
            rows[position] = mix(layer, row, total % 2**32)
    return rows[-1] % VOCABULARY


def written(prompt: list[int], count: int, stages: int) -> list[int]:
    """Return what the model writes behind a prompt."""
    text = list(prompt)
    for _ in range(count):
        text.append(model(tuple(text), stages))
    return text[len(prompt):]


def draft(text: tuple[int, ...], stages: int) -> list[int]:
    """Return one or two candidates for the next token, the likelier one first.

    A real draft is a smaller model. This one knows the answer, and is wrong about as often.
    """
    right, luck = model(text, stages), mix(7, *text[-4:]) % 100
    other = (right + 1 + luck) % VOCABULARY
    if luck < 72:
        return [right]  # it is sure
    return [right, other] if luck < 82 else [other, right] if luck < 92 else [other]


class Row(NamedTuple):
    """value: a token's id for the first stage, what the stage before has made of it for others.
    sequences: to which its cell will belong. It sees the cells of the first one."""

    value: int
    position: int
    sequences: tuple[int, ...]


@dataclass(frozen=True)
class Run:
    """Rows that a stage evaluates together. left_out: it was cancelled before a stage began it."""

    number: int
    rows: tuple[Row, ...]
    left_out: bool = False


class Copy(NamedTuple):
    """Cells of one sequence at positions `[start, stop)` belong to another one as well."""

    source: int
    target: int
    start: int
    stop: int


class Remove(NamedTuple):  # a sequence lets go of all its cells
    sequence: int


class Cell(NamedTuple):
    """What a layer remembers of a row."""

    position: int
    sequences: set[int]
    value: int


class Stage(threading.Thread):
    """A machine with some layers. Works through its inbox, in order.

    cancelled: numbers of runs. The head adds to it at any time; that a stage sees it late only
    costs time.
    """

    def __init__(self, layer: int, inbox: queue.SimpleQueue, outbox: queue.SimpleQueue,
                 cancelled: set[int], picture: Picture) -> None:
        super().__init__(daemon=True)
        self.layer, self.inbox, self.outbox = layer, inbox, outbox
        self.cancelled, self.picture, self.cells = cancelled, picture, []

    def run(self) -> None:
        """Handle messages until None comes."""
        while (message := self.inbox.get()) is not None:
            match message:
                case Copy(source, target, start, stop):
                    for cell in self.cells:
                        if source in cell.sequences and start <= cell.position < stop:
                            cell.sequences.add(target)
                case Remove(sequence):
                    for cell in self.cells:
                        cell.sequences.discard(sequence)
                    self.cells = [cell for cell in self.cells if cell.sequences]
                case Run():
                    message = self.evaluate(message)
            self.outbox.put(message)
        self.outbox.put(None)

    def evaluate(self, run: Run) -> Run:
        """Return the rows for the next stage."""
        if run.left_out or run.number in self.cancelled:
            return replace(run, left_out=True)
        with self.picture.work(f"stage {self.layer + 1}", string.ascii_letters[run.number % 52],
                               STAGE_S + ROW_S * len(run.rows)):
            return replace(run, rows=tuple(map(self.row, run.rows)))

    def row(self, row: Row) -> Row:
        """Add the row's cell, and let it see all cells of its sequence."""
        self.cells.append(Cell(row.position, {*row.sequences}, mix(self.layer, row.value)))
        total = sum(cell.value * (cell.position + 1) for cell in self.cells
                    if row.sequences[0] in cell.sequences and cell.position <= row.position)
        return row._replace(value=mix(self.layer, row.value, total % 2**32))


@dataclass(eq=False)
class Node:
    """A token of the tree. sequences: the first has the cells of its path; its own cell comes to
    all of them. answer: the token that the model writes behind it, once its run is back."""

    token: int
    position: int
    sequences: list[int]
    parent: Node | None = None
    answer: int | None = None
    wrong: bool = False
    children: dict[int, Node] = field(default_factory=dict)

    def below(self) -> Iterable[Node]:
        """Yield this node and all below it."""
        yield self
        for child in self.children.values():
            yield from child.below()


class Policy(NamedTuple):
    """When the head drafts. batch: draft tokens of a run; runs: in flight at most, with the one of
    an accepted token."""

    name: str
    batch: int
    runs: int


POLICIES = (
    Policy("one token at a time", batch=0, runs=1),
    Policy("synchronous speculation", batch=4, runs=1),  # draft, evaluate all, wait
    Policy("pipeinfer", batch=3, runs=4),
)


class Head:
    """Rank 0: drafts, issues runs, takes results, accepts and cancels."""

    def __init__(self, policy: Policy, stages: int, picture: Picture) -> None:
        self.policy, self.n_stages, self.picture = policy, stages, picture
        pipes = [queue.SimpleQueue() for _ in range(stages + 1)]
        self.pipeline, self.results = pipes[0], pipes[-1]
        self.cancelled: set[int] = set()
        for layer in range(stages):
            Stage(layer, pipes[layer], pipes[layer + 1], self.cancelled, picture).start()
        self.free = list(range(64, ACCEPTED, -1))  # sequences that nobody uses
        self.users: Counter[int] = Counter()  # draft tokens of each other sequence
        self.flying: dict[int, list[Node]] = {}  # the nodes of each run in flight
        self.issued = self.drafted = self.right = 0
        self.waiting: list[Node] = []  # the next run

    def generate(self, prompt: list[int], count: int) -> list[int]:
        """Return the tokens that the model writes behind a prompt."""
        self.text, self.end = list(prompt), len(prompt) + count
        self.tip = None  # the last accepted token
        for position, token in enumerate(prompt):
            self.tip = Node(token, position, [ACCEPTED], self.tip)
            self.waiting.append(self.tip)
        self.go_on()
        while len(self.text) < self.end:
            # a result is taken as soon as there is one; until then there is time to draft
            if self.results.empty() and self.may_draft():
                self.speculate()
            else:
                self.take(self.results.get())
        self.pipeline.put(None)
        return self.text[len(prompt):]

    def may_draft(self) -> bool:
        """Whether the policy has a run left. A synchronous one drafts while none is in flight."""
        return bool(self.policy.batch) and len(self.flying) < self.policy.runs \
            and len(self.free) > 2 * self.policy.batch

    def speculate(self) -> None:
        """Grow the tree at its likeliest leaf by a micro-batch, and issue it."""
        leaf, path = self.tip, []
        while leaf.children:
            leaf = next(iter(leaf.children.values()))
            path.append(leaf.token)
        for step in range(self.policy.batch):
            with self.picture.work("head", "~", DRAFT_S):
                candidates = draft((*self.text, *path), self.n_stages)
            # the first of a run, and each that is not the likeliest, begin a sequence
            nodes = [self.add(token, leaf, new=step == 0 or rank > 0)
                     for rank, token in enumerate(candidates)]
            leaf = nodes[0]
            path.append(leaf.token)
            if not self.results.empty() and self.policy.runs > 1:
                break  # early: what came may show that these tokens are wrong
        self.issue()

    def add(self, token: int, parent: Node, *, new: bool) -> Node:
        """Add a draft token to the tree and to the next run."""
        sequence = parent.sequences[0]
        if new:
            sequence = self.free.pop()
            self.pipeline.put(Copy(parent.sequences[0], sequence, 0, parent.position + 1))
            above: Node | None = parent
            while above in self.waiting:  # of this run: its cell is not there to be copied
                above.sequences.append(sequence)
                above = above.parent
        node = parent.children[token] = Node(token, parent.position + 1, [sequence], parent)
        self.users[sequence] += 1
        self.waiting.append(node)
        self.drafted += 1
        return node

    def issue(self) -> None:
        """Send the rows that wait as a run."""
        if self.waiting:
            self.issued += 1
            self.flying[self.issued] = self.waiting
            self.pipeline.put(Run(self.issued, tuple(
                Row(node.token, node.position, tuple(node.sequences)) for node in self.waiting)))
            self.waiting = []

    def take(self, message: Run | Copy | Remove) -> None:
        """Handle what comes out of the last stage."""
        if isinstance(message, Run):  # the end of a copy or removal is nothing to the head
            nodes = self.flying.pop(message.number)
            for node, row in zip(nodes, () if message.left_out else message.rows, strict=False):
                node.answer = row.value % VOCABULARY
            self.advance()

    def advance(self) -> None:
        """Accept as many tokens as are known, and begin again behind them."""
        while self.tip.answer is not None and len(self.text) < self.end:
            token = self.tip.answer
            self.text.append(token)
            node = self.tip.children.pop(token, None)
            self.cancel(self.tip.children.values())
            if node is None:  # it was not drafted
                node = Node(token, self.tip.position + 1, [ACCEPTED])
                self.waiting.append(node)
            else:
                self.right += 1
                self.pipeline.put(Copy(node.sequences[0], ACCEPTED, node.position,
                                       node.position + 1))
                self.release(node)
                node.sequences = [ACCEPTED]
            self.tip = node
        self.go_on()

    def go_on(self) -> None:
        """Let the model evaluate the last token; a synchronous policy adds draft tokens first."""
        if self.policy.runs > 1 or not self.policy.batch:
            self.issue()

    def cancel(self, wrong: Iterable[Node]) -> None:
        """Let go of draft tokens that cannot be accepted, and of runs that hold nothing else."""
        for root in wrong:
            for node in root.below():
                self.release(node)
                node.wrong = True
        self.cancelled.update(number for number, nodes in self.flying.items()
                              if all(node.wrong for node in nodes))

    def release(self, node: Node) -> None:
        """A draft token leaves its sequence; the last one frees it.

        The removal comes to each stage behind the runs that wrote the cells, and before the next
        run that gets this sequence.
        """
        sequence = node.sequences[0]
        self.users[sequence] -= 1
        if not self.users[sequence]:
            self.pipeline.put(Remove(sequence))
            self.free.append(sequence)


class Picture:
    """Who worked when."""

    def __init__(self) -> None:
        self.began = time.monotonic()
        self.lines: dict[str, list[tuple[float, float, str]]] = {}

    @contextmanager
    def work(self, who: str, sign: str, seconds: float) -> Iterator[None]:
        """Let what is done in this context take `seconds` at least."""
        start = time.monotonic()
        yield
        time.sleep(max(0.0, seconds - (time.monotonic() - start)))
        self.lines.setdefault(who, []).append(
            (start - self.began, time.monotonic() - self.began, sign))

    def __str__(self) -> str:
        made = []
        for who, spans in sorted(self.lines.items()):
            line = ["."] * WIDTH
            for start, stop, sign in spans:
                for at in range(int(start / PICTURE_S), int(stop / PICTURE_S) + 1):
                    if at < WIDTH:
                        line[at] = sign
            made.append(f"  {who:<8} {''.join(line)}")
        return "\n".join(made)


def main() -> None:
    """Let the policies write the same text."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--stages", type=int, default=2)
    given, count = parser.parse_args(), 100
    prompt, first = [3, 1, 4, 1, 5, 9, 2, 6], 0.0
    wanted = written(prompt, count, given.stages)
    for policy in POLICIES:
        picture = Picture()
        head = Head(policy, given.stages, picture)
        if head.generate(prompt, count) != wanted:
            sys.exit(f"{policy.name}: not the model's own text")
        seconds = time.monotonic() - picture.began
        first = first or seconds
        print(f"{policy.name}: {count / seconds:.0f} tokens/s, {first / seconds:.2f} times; "
              f"{head.right} of {head.drafted} draft tokens accepted, {head.issued} runs, "
              f"{len(head.cancelled)} cancelled\n{picture}\n")
    print("All three wrote the model's own text, token for token. A letter is a run, ~ drafting.")


if __name__ == "__main__":
    main()
