"""Lookahead decoding (arXiv 2402.02057): n-grams from a window of Jacobi iterations.

A window of W columns holds the last N-1 iterations (levels). In every step the target continues
each column by one token. The column's tokens then form an n-gram for the pool, and the next step
verifies at most G n-grams that the pool has for the last token. The rules: docs/algorithms.md 6.

A window is a token tree. Level 0 is a chain below the current token; its node i (0: the current
token itself) has the chain of column i's later levels below it. So a row attends to the right
tokens: the context, level 0 up to its column, and its own column (docs/algorithms.md 6.2). Equal
siblings are one row. Pure: independent of runs, sequence ids, clocks and random sources.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from msgspec import Struct, field

from pipeinfer.config import Option, OwnOption
from pipeinfer.core.drafting import Proposal, StartDraft
from pipeinfer.core.types import Choice
from pipeinfer.strategies.proposers import lookahead_worth as worth
from pipeinfer.strategies.proposers.base import Anchor, HintRow
from pipeinfer.strategies.spec import ProposerSetup, ProposerSpec

#: probability of the newest candidate's first token, of a later token if those before it are right,
#: and of other candidates' tokens at the same place; the scheduler calibrates them
FIRST, LATER, OTHER = 0.5, 0.75, 0.12


class Pool(Struct):
    """N-grams by their first token: at most `most` tails for each, the newest last.

    size: N
    most: G
    made: whole n-grams that only windows have produced
    """

    size: int
    most: int
    tails: dict[int, dict[tuple[int, ...], None]] = field(default_factory=dict)
    made: set[tuple[int, ...]] = field(default_factory=set)

    def add(self, ngram: Sequence[int], *, made: bool = False) -> None:
        """Add an n-gram of `size` tokens; one that is already there becomes the newest.

        made: whether it comes from a window, not from the text
        """
        if self.most <= 0:
            return
        tails = self.tails.setdefault(ngram[0], {})
        tail = tuple(ngram[1:])
        if not made:
            self.made.discard(tuple(ngram))
        elif tail not in tails:
            self.made.add(tuple(ngram))
        tails.pop(tail, None)
        tails[tail] = None
        if len(tails) > self.most:
            oldest = next(iter(tails))
            del tails[oldest]
            self.made.discard((ngram[0], *oldest))

    def add_all(self, tokens: Sequence[int], start: int = 0) -> None:
        """Add every n-gram of a text that ends at index `start` or later."""
        for stop in range(max(start + 1, self.size), len(tokens) + 1):
            self.add(tokens[stop - self.size : stop])

    def of(self, token: int) -> list[tuple[int, ...]]:
        """Return the tails after a token, the newest first."""
        return list(self.tails.get(token, ()))[::-1]


class Window(Struct):
    """The levels of one lane, oldest first.

    Level 0 has columns 1, 2, ...: its column 0 is the current token. Later levels start at column
    0. While levels are missing (warm-up) there is an additional column for each of them.
    """

    width: int
    size: int
    levels: list[list[int]]

    @classmethod
    def start(cls, width: int, size: int, text: Sequence[int]) -> Window:
        """Return a window with level 0 alone, of tokens picked from a text (docs/algorithms.md
        6.5).

        width: W
        size: N
        text: tokens
        """
        return cls(width, size, [[pick(text, i) for i in range(width + size - 3)]])

    @property
    def columns(self) -> int:
        """The present number of columns, column 0 included."""
        return len(self.levels[0]) + 1

    def rows(self, anchors: Sequence[Anchor], columns: range | None = None
             ) -> tuple[list[HintRow], list[int]]:
        """Return the window's rows below anchor 0, and the row that continues each column.

        anchors: of the run; a row that would repeat one is not made
        columns: only these, with the part of level 0 that they need; None: all
        The second list has, for each column, the index (among anchors and hints) of the row whose
        choice continues it.
        """
        columns = range(self.columns) if columns is None else columns
        nodes = {(anchor.parent, anchor.token): k for k, anchor in enumerate(anchors) if k}
        made: list[tuple[int, int]] = []

        def below(parent: int, token: int) -> int:
            if (parent, token) not in nodes:
                nodes[parent, token] = len(anchors) + len(made)
                made.append((parent, token))
            return nodes[parent, token]

        trunk = [0]
        for token in self.levels[0][: columns.stop - 1]:
            trunk.append(below(trunk[-1], token))
        tops = []
        for column in columns:
            node = trunk[column]
            for level in self.levels[1:]:
                node = below(node, level[column])
            tops.append(node)
        wanted = set(tops)
        rows = [HintRow(parent, token, len(anchors) + k in wanted)
                for k, (parent, token) in enumerate(made)]
        return rows, tops

    def step(self, current: int, new: Sequence[int]) -> list[tuple[int, ...]]:
        """Advance the window by one column; return the n-grams that are complete.

        current: the token that column 0 started from
        new: the tokens that continue the columns
        """
        if len(self.levels) < self.size - 1:
            self.levels = [level[1:] for level in (*self.levels, list(new))]
            return []
        keys = [current, *self.levels[0]]
        found = [(key, *(level[i] for level in self.levels[1:]), new[i])
                 for i, key in enumerate(keys)]
        later = [*self.levels[1:], list(new)]
        self.levels = [later[0][1:], *later[1:]]
        return found


class _Lane(Struct):
    """The state of one lane.

    tokens: the path
    current, tops: of the window in flight
    choice: what the next step does
    named: by length of the path, what the pool had then, see `Worth.learn`
    """

    tokens: list[int]
    pool: Pool
    window: Window
    current: int = -1
    tops: list[int] = field(default_factory=list)
    choice: worth.WindowChoice | None = None
    named: dict[int, tuple[list[worth.Tail], list[worth.Tail]]] = field(default_factory=dict)


class Lookahead:
    """The inline proposer of lookahead decoding.

    window: W; 0: no window, so the pool has the text's own n-grams only. 1 is of little use
    ngram: N
    candidates: G; with 0 no n-gram is verified
    prompt_pool: whether n-grams of prompt and output go to the pool as well
    cost: time of a run of so many rows; with it, steps verify fewer candidates and leave out
        windows where these do not pay
    fixed: which of "window" and "candidates" are not tuned by `cost`
    Raises ValueError for impossible sizes. No choice of sizes changes a token.
    """

    def __init__(self, window: int = 2, ngram: int = 5, candidates: int = 2, *,
                 prompt_pool: bool = True, cost: Callable[[int], float] | None = None,
                 fixed: Collection[str] = ()) -> None:
        if window < 0 or ngram < 2 or candidates < 0:
            raise ValueError(f"impossible sizes: a window of {window}, n-grams of {ngram} tokens, "
                             f"{candidates} candidates")
        self.window, self.ngram, self.most = window, ngram, candidates
        self.candidates = candidates * (ngram - 1)
        self.rows = window_rows(window, ngram)
        self.chained = False  # each window needs the results of the one before
        self.paths = candidates + (window + ngram - 2 if window else 0)
        self._prompt_pool = prompt_pool
        self._worth = None if cost is None or not candidates else worth.Worth(
            cost, ngram, candidates, self.rows, "candidates" in fixed, "window" in fixed)
        self._lanes: dict[int, _Lane] = {}

    def opened(self, lane: int, tokens: Sequence[int]) -> None:
        """Add a lane with these tokens: a prompt, or the path of a lane that got a new number."""
        pool = Pool(self.ngram, self.most)
        if self._prompt_pool:
            pool.add_all(tokens)
        self._lanes[lane] = _Lane(list(tokens), pool,
                                  Window.start(max(self.window, 1), self.ngram, tokens))

    def accepted(self, lane: int, tokens: Sequence[int]) -> None:
        """Append accepted tokens to the lane's path."""
        state = self._lanes[lane]
        start = len(state.tokens)
        state.tokens += tokens
        if self._prompt_pool:
            state.pool.add_all(state.tokens, start)
        if self._worth is not None:
            self._weigh(state, self._worth)

    def _weigh(self, state: _Lane, judge: worth.Worth) -> None:
        """Compare the pool's tails with the tokens that followed; decide about the next step."""
        tokens, length = state.tokens, len(state.tokens)
        for at in [at for at in state.named if at + self.ngram - 1 <= length]:
            judge.learn(state.named.pop(at), tuple(tokens[at : at + self.ngram - 1]))
        found = state.pool.of(tokens[-1])
        text = [tail for tail in found if (tokens[-1], *tail) not in state.pool.made]
        state.named[length] = (text, found)
        state.choice = judge.choose()

    def propose(self, job: StartDraft) -> tuple[Proposal, ...]:
        """Return proposals from the pool. Candidates that start alike share their tokens."""
        last = job.suffix[-1] if job.suffix else job.accepted[job.base - 1]
        choice = self._lanes[job.lane].choice
        most = self.most if choice is None else choice.candidates
        return tuple(trie(self.tails(job.lane, last, job.max_depth, job.stop_ids)[:most],
                          job.max_tokens))

    def tails(self, lane: int, token: int, depth: int, stop_ids: frozenset[int]
              ) -> list[tuple[int, ...]]:
        """Return the pool's tails after a token, the newest first.

        lane: its number
        token: the last token of the path
        depth: most tokens of each tail
        stop_ids: tails are cut before these
        """
        found = []
        for tail in self._lanes[lane].pool.of(token):
            ends = [i for i, t in enumerate(tail) if t in stop_ids]
            cut = tail[: min([depth, *ends])]
            if cut:
                found.append(cut)
        return found

    def hints(self, lane: int, anchors: Sequence[Anchor], room: int, *, batch: int = 0,
              below: Sequence[int] | None = None) -> list[HintRow]:
        """Return hints for a run that verifies `anchors`."""
        del batch, below
        state = self._lanes[lane]
        wanted = self.window and (state.choice is None or state.choice.window)
        rows, tops = state.window.rows(anchors) if wanted else ([], [])
        if len(rows) > room:
            rows, tops = [], []
        state.current, state.tops = anchors[0].token, tops
        return rows

    def learn(self, lane: int, choices: Sequence[Choice | None], *, batch: int = 0) -> None:
        """Record the target's choices after the anchors and hints of a batch."""
        del batch
        state = self._lanes[lane]
        if state.tops:
            self.advance(lane, state.current, [choices[top] for top in state.tops])

    def advance(self, lane: int, current: int, chosen: Sequence[Choice | None]) -> None:
        """Advance the window by the choices for its columns.

        lane: its number
        current: the token that column 0 started from
        chosen: for each column; None, or no token: a token of the text is used instead
        """
        state = self._lanes[lane]
        new = [choice.token if choice is not None and choice.token >= 0
               else pick(state.tokens, len(state.tokens) + column)
               for column, choice in enumerate(chosen)]
        for ngram in state.window.step(current, new):
            state.pool.add(ngram, made=True)

    def closed(self, lane: int) -> None:
        """Remove a lane that has ended; no effect on one that was never opened."""
        self._lanes.pop(lane, None)


def trie(tails: Sequence[tuple[int, ...]], most: int) -> list[Proposal]:
    """Return at most `most` proposals for `tails`; tails that begin alike share proposals."""
    found: list[Proposal] = []
    nodes: dict[tuple[int, int], int] = {}
    for tail in tails:
        parent = -1
        for token in tail:
            node = nodes.get((parent, token), -1)
            if node < 0:
                if len(found) >= most:
                    break
                other = any(p == parent for p, _ in nodes)
                claim = OTHER if other else FIRST if parent < 0 else LATER
                node = nodes[parent, token] = len(found)
                found.append(Proposal(parent, token, claim, alternative=other))
            parent = node
    return found


def window_rows(window: int, ngram: int) -> int:
    """Return the most hints of a window: level 0 without the current token, and later levels."""
    if not window:
        return 0
    grown = [window + ngram - 2 - k for k in range(ngram - 1)]  # columns while levels are missing
    return max(columns * (k + 1) - 1 for k, columns in enumerate(grown))


def pick(tokens: Sequence[int], number: int) -> int:
    """Return an arbitrary token of a text, always the same one for the same number."""
    state = (number + 1) * 0x9E3779B97F4A7C15 & (1 << 64) - 1
    state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & (1 << 64) - 1
    return tokens[(state ^ state >> 27) % len(tokens)]


def _make(setup: ProposerSetup) -> Lookahead:
    own = {name: f"lookahead_{name}" for name in ("window", "ngram", "candidates")}
    return Lookahead(
        *(setup.options[option] for option in own.values()),
        prompt_pool=setup.options["prompt_pool"], cost=setup.cost,
        fixed=[name for name, option in own.items() if option in setup.given])


SPEC = ProposerSpec(
    "lookahead", "n-grams that the target makes in spare rows (docs/lookahead.md)",
    inline=_make,
    options={
        "lookahead_window": OwnOption(2, Option(
            ("--lookahead-window",), "int",
            "With --proposer lookahead: columns of the window (W), each an n-gram "
            "per step; unless given, left out where it does not pay.", 0, 128)),
        "lookahead_ngram": OwnOption(5, Option(
            ("--lookahead-ngram",), "int",
            "With --proposer lookahead: tokens of an n-gram (N).", 2, 16)),
        "lookahead_candidates": OwnOption(2, Option(
            ("--lookahead-candidates",), "int",
            "With --proposer lookahead: maximum n-grams verified in a step (G); unless given, "
            "fewer where they do not pay.", 0, 128)),
        "prompt_pool": OwnOption(True, Option(
            (), "flag",
            "With --proposer lookahead: the pool holds the n-grams of prompt and answer, too, not "
            "only those of windows.")),
    })
