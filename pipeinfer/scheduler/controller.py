"""The controller: tunes the policy while it runs, from the measured times of runs and drafts.

The objective is accepted tokens per second, predicted by the model by which layers are planned
(`planning.judge`). Settings that the user gave are left alone. Independent of clocks and clusters:
durations come in, a tuning goes out.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Sequence
from typing import Any

from msgspec import Struct, field, structs

from pipeinfer.core.policy import Ablation, Policy
from pipeinfer.planning import judge
from pipeinfer.planning.judge import Curve
from pipeinfer.scheduler.settings import Limits, Tuning, row_price

SIZES = (1, 2, 3, 4, 6, 8, 12, 16)  #: sizes of micro-batches that are compared
_MEMORY = 0.9  #: weight of the past in a running mean
_SWITCH = 1.03  #: how much better another setting must look
_SAMPLES = 8  #: runs before transit times are used: the first ones queue behind the prompt
_WINDOW = 32  #: runs back from which times on the way are taken
_EVERY = 4  #: results between two decisions
GOOD = 0.9  #: acceptance that few drafts surpass
_ALMOST_SURE = 0.95  #: acceptance assumed for the longest chains with `time_sharing`
_LISTEN = 1.0  #: a cutoff that no proposal passes, while calibration of the draft goes on
NEVER = 1.1  #: a cutoff at which no drafting jobs are started
#: ablations with which the model's comparison of settings still holds
TUNABLE = frozenset({Ablation.CANCEL, Ablation.ALTERNATIVES})


class Timing(Struct, frozen=True):
    """The measured times of a pipeline, in seconds.

    slowest: of a run of one row at the slowest stage
    computed: of a run of one row over all stages
    curve: (rows, time of such a run relative to one row)
    transit: the rest of a run's time (links, messages)
    draft: per drafted token
    """

    slowest: float
    computed: float
    curve: Curve
    transit: float
    draft: float

    def slot(self, rows: int) -> float:
        """Return the time that a run of `rows` rows occupies the slowest stage, in seconds."""
        return self.slowest * judge.relative(self.curve, rows)

    def way(self, rows: int) -> float:
        """Return the time from issue to result in an empty pipeline, in seconds."""
        return self.computed * judge.relative(self.curve, rows) + self.transit


def best_chain(timing: Timing, acceptance: float, most: int) -> int:
    """Return the length of draft chain that gives the most tokens per second with `time_sharing`.

    timing: of the pipeline
    acceptance: of each speculative token, given its parent
    most: longest chain
    0 where no chain is clearly faster than plain decoding.
    """
    paces = _paces(timing, acceptance, most)
    best = max(range(most + 1), key=paces.__getitem__)
    return best if paces[best] > _SWITCH * paces[0] else 0


def _paces(timing: Timing, acceptance: float, most: int) -> list[float]:
    """Tokens per second with `time_sharing`, for chains of 0, 1, ... `most` speculative tokens."""
    return [judge.alternating(timing, acceptance, size) for size in range(most + 1)]


def longest(timing: Timing, most: int) -> int:
    """Return the longest useful chain with `time_sharing` if each token is almost certain; 1 to
    `most`.

    Which of the drafted tokens are issued depends on their own probabilities.
    """
    return best_chain(timing, _ALMOST_SURE, most) or 1


def costs(curve: Curve, most: int) -> tuple[float, ...]:
    """Return `Limits.costs` for up to `most` speculative tokens."""
    return tuple(round(judge.relative(curve, 1 + size) - 1.0, 1) for size in range(1, most + 1))


def least_hope(prices: tuple[float, ...], drafting: float) -> float:
    """Return the cutoff for drafted tokens that goes with `costs`.

    It is the lowest cost of a row in a shared run, and twice the cost of drafting the next token. A
    chain that begins with less is hardly worth its rows, so the draft stops there.

    prices: `Limits.costs`, in runs of one row
    drafting: time of a drafted token, in runs of one row

    Twice, because the next token is right less often than this one: on recorded texts in virtual
    time factors of one and three were slower, with drafts of 45, 50 and 79 % acceptance.
    """
    return round(min(row_price(prices) + 2.0 * drafting, _ALMOST_SURE), 2)


def chain_cutoff(prices: tuple[float, ...], drafting: float) -> float:
    """Return `Limits.chain_min`: three times the cost of a further token, at most 0.85.

    prices, drafting: see `least_hope`

    The draft evaluates a token before it knows how probable that is, and time that is lost would
    have yielded more than plain decoding's tokens. In virtual time, factors from 2 to 4 and bounds
    from 0.7 to 0.95 are equally good within 2 %, with heads on 4 to 8 nodes and with a draft on
    recorded texts.
    """
    return round(min(3.0 * (row_price(prices) + drafting), 0.85), 2)


def weighed_by(timing: Timing, most: int) -> dict[str, Any]:
    """Return values of `Limits` for `time_sharing` in which every speculative token is weighed by
    its cost.

    timing: of the pipeline
    most: most speculative tokens of a run
    `free_max` and `free_min`, for proposals that no model was evaluated for, contain no drafting
    time.
    """
    prices, share = costs(timing.curve, most), timing.draft / timing.way(1)
    size, price = longest(timing, most), max(round(share, 3), 0.001)  # 0 would mean: do not judge
    return {"tree_max": size, "draft_max": size, "costs": prices,
            "p_min": least_hope(prices, share), "draft_price": price,
            "chain_min": chain_cutoff(prices, share),
            "free_max": longest(structs.replace(timing, draft=0.0), most),
            "free_min": least_hope(prices, 0.0)}


def least_confidence(timing: Timing, acceptance: float, size: int) -> float:
    """Return the cutoff for drafted tokens that goes with `best_chain`.

    Half of what a token costs, in tokens that the same time would yield. Half, because the tokens
    after it may be right, too.
    """
    seconds = timing.way(1 + size) + size * timing.draft
    cost = (seconds - timing.way(1)) / size
    tokens = sum(acceptance**level for level in range(size + 1))
    return min(0.4, 0.5 * cost * tokens / seconds)


def linear(row_cost: float) -> Curve:
    """The curve on which every further row costs the same share of the first."""
    return ((2, 1.0 + row_cost),)


class Setting(Struct, frozen=True):
    """A setting that the controller may choose.

    size: speculative tokens per micro-batch; 0: no speculation
    join: whether the tip is issued with the first micro-batch
    """

    size: int
    join: bool = False


def speed(timing: Timing, acceptance: float, setting: Setting, credit: int = 1 << 30,
          alternatives: int = 2, second: float = 0.4) -> float:
    """Return the expected tokens per second of a setting; arguments as of `judge.overlapping`."""
    if setting.size == 0:
        return judge.plain(timing, 1, 1)
    return judge.overlapping(timing, acceptance, setting.size, join=setting.join, credit=credit,
                             alternatives=alternatives, second=second)


def groups(timing: Timing, width: int, lanes: int) -> tuple[int, ...]:
    """Return the best size of decode groups for 1, 2, ... `lanes` lanes, with one run per group.

    timing: of the pipeline
    width: most rows of a run
    lanes: most lanes; the index into the result is the number of lanes minus 1
    """
    return tuple(max(range(1, min(count, width) + 1),
                     key=lambda size: judge.plain(timing, count, size))
                 for count in range(1, lanes + 1))


def in_flight(timing: Timing, size: int) -> int:
    """Return the number of runs that fill the pipeline without queueing at its slowest stage, plus
    one.
    """
    return max(2, math.ceil(timing.way(size) / max(timing.slot(size), 1e-9)) + 1)


class _Mean(Struct):
    """A running mean that starts at its first value."""

    value: float = 0.0
    count: int = 0

    def add(self, value: float) -> None:
        self.value = value if not self.count else _MEMORY * self.value + (1 - _MEMORY) * value
        self.count += 1


class Controller(Struct):
    """Records the times of runs and drafts, and returns the limits to use from now on.

    limits: the starting point
    pinned: names of `Tuning` fields that must stay
    curve: (rows, relative time) as stages measured it when they loaded; used for numbers of rows
        that were not measured since
    max_rows: maximum rows in flight that the stages' caches can hold
    draft_share: time of a token of the draft's models, in runs of one row; used until one was
        measured
    """

    limits: Limits
    pinned: Collection[str] = ()
    curve: Curve = ((2, 1.5),)
    max_rows: int = 1 << 30
    draft_share: float = 0.0
    _slowest: _Mean = field(default_factory=_Mean)
    _computed: _Mean = field(default_factory=_Mean)
    _transit: list[float] = field(default_factory=list)
    _gaps: list[tuple[float, ...]] = field(default_factory=list)
    _draft: _Mean = field(default_factory=_Mean)
    _wide: dict[int, _Mean] = field(default_factory=dict)
    _setting: Setting | None = None
    _results: int = 0

    @property
    def active(self) -> bool:
        """Whether the policy has anything to tune."""
        limits = self.limits
        if limits.policy is Policy.ITERATIVE:
            return limits.parallel > 1
        return limits.policy is Policy.PIPEINFER and limits.ablations <= TUNABLE

    def run_returned(self, rows: int, slowest: float, computed: float, latency: float,
                     gaps: Sequence[float] | None = ()) -> None:
        """Record a run of generated tokens that every stage computed; times are in seconds.

        rows: of the run
        slowest: time of its slowest stage
        computed: time of all stages together
        latency: from issue to return
        gaps: while other requests were active: the times between stages that worked on the run,
            head first and last, which may include queueing behind other runs. Empty: no other
            request. None: prompts are in the pipeline, so all times between stages include queueing
        """
        self._results += 1
        if self.limits.same_cores:
            slowest = computed
        if rows == 1 or not self._slowest.count:
            # If every tip is issued with speculative tokens, no run of one row ever returns.
            share = judge.relative(self.curve, rows)
            self._slowest.add(slowest / share)
            self._computed.add(computed / share)
        else:
            relative = slowest / max(self._slowest.value, 1e-9)
            self._wide.setdefault(rows, _Mean()).add(min(max(relative, 1.0), 4.0 * rows))
        if gaps is None:
            return
        if gaps:
            self._gaps.append(tuple(gaps))
            del self._gaps[:-_WINDOW]
        else:
            self._transit.append(max(latency - computed, 0.0))
            del self._transit[:-_WINDOW]

    def drafted(self, tokens: int, seconds: float) -> None:
        """Record that a drafting job proposed `tokens` tokens in `seconds` seconds."""
        if tokens:
            self._draft.add(seconds / tokens)

    @property
    def timing(self) -> Timing | None:
        """The measured times; None before enough runs came back."""
        if not self._slowest.count or max(len(self._transit), len(self._gaps)) < _SAMPLES:
            return None
        points = dict(self.curve)
        points |= {rows: mean.value for rows, mean in self._wide.items() if mean.count > 1}
        way, computed = self._on_the_way(), self._computed.value
        draft = self._draft.value if self._draft.count else self.draft_share * (computed + way)
        return Timing(self._slowest.value, computed, tuple(sorted(points.items())), way, draft)

    def _on_the_way(self) -> float:
        """Time between stages without queueing, in seconds.

        In a busy pipeline runs always queue at the slowest stage, and at others now and then. So
        the result is the sum of the least time of each gap, where the largest of those is at most
        their median.
        """
        alone = min(self._transit) if len(self._transit) >= _SAMPLES else math.inf
        if not self._gaps:
            return alone
        least = sorted(min(gap) for gap in zip(*self._gaps, strict=True))
        if least[0] >= 0.0:  # else the hosts' clocks differ, and only the sum has a meaning
            least[-1] = min(least[-1], statistics.median(least))
        return min(alone, max(math.fsum(least), 0.0))

    def advise(self, acceptance: float, second: float) -> Tuning | None:
        """Return limits for the next runs; None: no change.

        acceptance: of first proposals
        second: how often the next alternative is right where the first proposal is wrong
        """
        if not self.active or self._results % _EVERY or (timing := self.timing) is None:
            return None
        if self.limits.time_sharing:
            return self._take_turns(timing, acceptance)
        if self.limits.policy is Policy.ITERATIVE or not self._draft.count:
            return self._change({"credit": self._credit(timing, 1)}, timing)
        setting = self._choose(timing, acceptance, second)
        size = max(setting.size, 1)
        credit = self._credit(timing, size)
        return self._change({
            "credit": credit,
            "draft_max": size,
            "join_tip": setting.join,
            "path_min": cutoff(credit) if setting.size else self._silence(timing),
            "alternatives": alternatives_for(credit),
            "eager": size * timing.draft > 1.5 * timing.slot(size),
        }, timing)

    def _take_turns(self, timing: Timing, acceptance: float) -> Tuning | None:
        limits, most = self.limits, min(self.limits.exact_width - 1, SIZES[-1] - 1)
        if limits.costs:  # each token is weighed by itself, so the width is that of the best case
            wanted, likely = weighed_by(timing, most), _ALMOST_SURE
            if not (self._draft.count and limits.draft_price):
                del wanted["draft_price"]
        else:
            size, likely = best_chain(timing, acceptance, most), acceptance
            size = max(size, 1)  # what the user set is tried in any case
            wanted = {"tree_max": size, "draft_max": size,
                      "p_min": round(least_confidence(timing, acceptance, size), 2)}
        before = limits.tree_max
        paces = _paces(timing, likely, most)
        if before <= most and paces[wanted["tree_max"]] < _SWITCH * paces[before]:
            wanted |= {"tree_max": before, "draft_max": before}
        return self._change(wanted, timing)

    def _change(self, wanted: dict[str, Any], timing: Timing | None = None) -> Tuning | None:
        """The tuning with these values, except those that the user pinned; None: no change."""
        if self.limits.parallel > 1 and timing is not None:
            wanted["share"] = groups(timing, self.limits.widest_group, self.limits.parallel)
        changes = {name: value for name, value in wanted.items() if name not in self.pinned
                   and getattr(self.limits, name) != value}
        if not changes:
            return None
        self.limits = structs.replace(self.limits, **changes)
        return self.limits

    def _credit(self, timing: Timing, size: int) -> int:
        """Runs in flight that go with a size."""
        if "credit" in self.pinned:
            return self.limits.credit
        size = max(size, 1)
        return max(2, min(in_flight(timing, size), self.max_rows // size))

    def _silence(self, timing: Timing) -> float:
        """The cutoff while nothing is issued: query the draft only where a good one would pay."""
        good = max(speed(timing, 0.9, Setting(size), self._credit(timing, size))
                   for size in SIZES[:4])
        return _LISTEN if good > _SWITCH * speed(timing, 0.9, Setting(0)) else NEVER

    def _choose(self, timing: Timing, acceptance: float, second: float) -> Setting:
        """The best setting among those that are free; the present one unless clearly beaten."""
        limits = self.limits
        sizes = (limits.draft_max,) if "draft_max" in self.pinned else SIZES
        joins = (limits.join_tip,) if "join_tip" in self.pinned else (False, True)
        options = [Setting(0)] if "path_min" not in self.pinned else []
        options += [Setting(size, join) for size in sizes for join in joins
                    if size + join <= limits.exact_width]
        options = options or [Setting(1)]
        value = {option: speed(timing, acceptance, option, self._credit(timing, option.size),
                               limits.wanted_alternatives, second) for option in options}
        best = max(options, key=lambda option: value[option])
        if Setting(0) in value and value[best] < _SWITCH * value[Setting(0)]:
            best = Setting(0)  # speculative runs delay accepted tokens by more than this gain
        if self._setting in value and value[best] < _SWITCH * value[self._setting]:
            return self._setting
        self._setting = best
        return best


def alternatives_for(credit: int) -> int:
    """Return how many alternatives pay in a pipeline with this credit (docs/options.md)."""
    return 1 if credit < 12 else 2


def cutoff(credit: int) -> float:
    """Return the least probability of acceptance at which a token is issued, for this credit.

    Found by sweeps in virtual time (docs/emulation.md): a less probable token delays better ones.
    """
    return min(max(0.4 / max(credit, 1), 0.004), 0.2)


def gaps(issued: float, returned: float, spans: Sequence[Sequence[float]]) -> list[float]:
    """Return the times between the stages that worked on a run, from issue to return, in seconds.

    issued, returned: times of issue and return
    spans: as in `messages.Decode`; only begin and seconds count
    """
    ends = [issued, *[span[0] + span[1] for span in spans]]
    starts = [*[span[0] for span in spans], returned]
    return [start - end for end, start in zip(ends, starts, strict=True)]
