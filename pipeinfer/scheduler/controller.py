"""Tunes the policy while it runs, from what runs and drafts really take.

The objective is accepted tokens per second. A small renewal model says what a setting brings: at
time 0 an accepted token is issued; guesses follow as fast as the draft names them and the slowest
stage takes them; the first wrong one ends the cycle when its predecessor's result is back, one
pipeline latency after its issue. The expected tokens of a cycle over its expected length is the
speed. Settings that the user gave are left alone. This module knows no clock and no cluster: it
is told durations, and returns limits.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Collection, Sequence
from functools import lru_cache
from typing import Any, TypeAlias

from msgspec import Struct, field, structs

from pipeinfer.core.policy import Ablation, Policy
from pipeinfer.planning import judge
from pipeinfer.scheduler.settings import Limits, row_price
from pipeinfer.scheduler.speculation_trial import SpeculationTrial
from pipeinfer.scheduler.turns_trial import TurnsTrial

SIZES = (1, 2, 3, 4, 6, 8, 12, 16)  #: guesses per micro-batch that are weighed
_MEMORY = 0.9  #: weight of the past in a running mean
_SWITCH = 1.03  #: how much better another setting must look
_HORIZON = 48  #: guesses that a cycle is followed for one by one
_LONGEST = 512  #: guesses in a row that are right, at the most
_SAMPLES = 8  #: runs before the time on the way is believed: the first queue behind the prompt
_WINDOW = 32  #: runs back from which times on the way are taken
_EVERY = 4  #: results between two decisions
GOOD = 0.9  #: acceptance that few drafts surpass
_ALMOST_SURE = 0.95  #: acceptance of the longest chains that are drafted in turns
_LISTEN = 1.0  #: a cutoff that no guess passes, but the draft goes on to be judged
NEVER = 1.1  #: a cutoff at which the draft is not even asked
#: without these the model above still says what a setting brings, beside other settings
TUNABLE = frozenset({Ablation.CANCEL, Ablation.ALTERNATIVES})


Curve: TypeAlias = tuple[tuple[int, float], ...]


class Timing(Struct, frozen=True):
    """What a pipeline takes, in seconds.

    slowest: of a run of one row at the slowest stage
    computed: of a run of one row over all stages
    curve: (rows, time of such a run relative to one row)
    transit: the rest of a run's way (links, messages)
    draft: per drafted token
    """

    slowest: float
    computed: float
    curve: Curve
    transit: float
    draft: float

    def slot(self, rows: int) -> float:
        """How long the slowest stage is taken by a run."""
        return self.slowest * judge.relative(self.curve, rows)

    def latency(self, rows: int) -> float:
        """From issue to result in an empty pipeline."""
        return self.computed * judge.relative(self.curve, rows) + self.transit


def turns(timing: Timing, acceptance: float, most: int) -> int:
    """How many guesses of a chain, up to `most`, bring most tokens per second where draft and
    target take turns on the same cores; 0: plain decoding does."""
    paces = _paces(timing, acceptance, most)
    best = max(range(most + 1), key=paces.__getitem__)
    return best if paces[best] > _SWITCH * paces[0] else 0


def _paces(timing: Timing, acceptance: float, most: int) -> list[float]:
    """Tokens per second in turns with chains of 0, 1, ... `most` guesses."""
    levels = (acceptance**level for level in range(most + 1))
    return [expected / (timing.latency(1 + size) + size * timing.draft)
            for size, expected in enumerate(itertools.accumulate(levels))]


def longest(timing: Timing, most: int) -> int:
    """How many guesses, up to `most` and at least one, are drafted in turns where each of them is
    as good as certain; which of them are issued is decided by what they turn out to be worth."""
    return turns(timing, _ALMOST_SURE, most) or 1


def costs(curve: Curve, most: int) -> tuple[float, ...]:
    """See `Limits.costs`, for up to `most` guesses."""
    return tuple(round(judge.relative(curve, 1 + size) - 1.0, 1) for size in range(1, most + 1))


def least_hope(prices: tuple[float, ...], drafting: float) -> float:
    """The cutoff for drafted tokens that goes with `costs`: what a guess costs where most share a
    run, and twice what naming the next one does. A chain that begins with less is hardly worth its
    rows, so the draft stops there. drafting: of a token, in times of a run of one row.

    Twice, because the next one is right less often than this one: on recorded texts in virtual time
    once and three times were slower, on drafts of 45, 50 and 79 %.
    """
    return round(min(row_price(prices) + 2.0 * drafting, _ALMOST_SURE), 2)


def weighed_by(timing: Timing, most: int) -> dict[str, Any]:
    """Values of limits where draft and target take turns and every guess, up to `most`, has to be
    worth its row. What no model was asked for has bounds without a model's time."""
    prices, share = costs(timing.curve, most), timing.draft / timing.latency(1)
    size, price = longest(timing, most), max(round(share, 3), 0.001)  # 0 would mean: do not judge
    return {"tree_max": size, "draft_max": size, "costs": prices,
            "p_min": least_hope(prices, share), "draft_price": price,
            "free_max": longest(structs.replace(timing, draft=0.0), most),
            "free_min": least_hope(prices, 0.0)}


def least_confidence(timing: Timing, acceptance: float, size: int) -> float:
    """The cutoff for drafted tokens that goes with `turns`: half of what one costs, in tokens that
    the same time would bring; half, because those behind it may be right, too."""
    seconds = timing.latency(1 + size) + size * timing.draft
    cost = (seconds - timing.latency(1)) / size
    tokens = sum(acceptance**level for level in range(size + 1))
    return min(0.4, 0.5 * cost * tokens / seconds)


def linear(row_cost: float) -> Curve:
    """The curve on which every further row costs the same share of the first."""
    return ((2, 1.0 + row_cost),)


class Setting(Struct, frozen=True):
    """What the controller chooses between. size 0: no speculation."""

    size: int
    join: bool = False


def speed(timing: Timing, acceptance: float, setting: Setting, credit: int = 1 << 30,
          alternatives: int = 2, second: float = 0.4) -> float:
    """Expected tokens per second of a setting; see the module docstring.

    second: where a first guess is wrong, how often the next alternative is right.
    """
    if setting.size == 0:
        return 1.0 / timing.latency(1)
    depth, hits = _batch(round(acceptance, 2), setting.size, alternatives, round(second, 2))
    drafted = setting.size * timing.draft
    rows, guesses = (1 + setting.size, depth) if setting.join else (1, 0)
    slot, latency = timing.slot(rows), timing.latency(rows)
    later = timing.slot(setting.size), timing.latency(setting.size)
    issue = drafted if setting.join else 0.0
    done = issue + latency
    issues, results = [issue], [done]
    reach, tokens, seconds = 1.0, 0.0, 0.0
    for right in range(_HORIZON):
        while guesses < right:  # the guess after `right - 1` right ones travels in a further run
            run = len(issues)
            if setting.join or run > 1:
                drafted += depth * timing.draft
            issue = max(drafted, issues[-1] + slot)
            if run >= credit:
                issue = max(issue, results[run - credit])
            slot, latency = later
            done = max(issue + latency, results[-1] + slot)
            issues.append(issue)
            results.append(done)
            guesses += depth
        share = reach * (1.0 - acceptance)
        tokens += share * (1 + right + hits[right % depth])
        seconds += share * results[-1]
        reach *= acceptance
    # Longer streaks go on at the pipeline's steady pace.
    pace = max(slot, depth * timing.draft, latency / credit) / depth
    further = acceptance / max(1.0 - acceptance, 1.0 / _LONGEST)
    tokens += reach * (1 + _HORIZON + further)
    seconds += reach * (results[-1] + further * pace)
    return tokens / seconds


@lru_cache(maxsize=4096)
def _batch(acceptance: float, size: int, alternatives: int, second: float
           ) -> tuple[int, tuple[float, ...]]:
    """What `size` rows of one run hold when they are filled best first.

    Returns the levels of first guesses among them, and for each level how likely an alternative
    that travels along is the token where the first guess is wrong.
    """
    offers: list[tuple[float, int, float]] = []  # probability, level, of an alternative
    for level in range(size):
        reach, left = acceptance**level, 1.0 - acceptance
        offers.append((reach * acceptance, level, 0.0))
        for _ in range(alternatives):
            offers.append((reach * left * second, level, left * second))
            left *= 1.0 - second
    offers.sort(key=lambda offer: -offer[0])
    kept = offers[:size]
    depth = max(1, len({offer[1] for offer in kept if offer[2] == 0.0}))
    wrong = max(1.0 - acceptance, 1e-9)
    return depth, tuple(
        sum(offer[2] for offer in kept if offer[1] == level) / wrong for level in range(depth)
    )


def groups(timing: Timing, width: int, lanes: int) -> tuple[int, ...]:
    """Into how large groups 1, 2, ... `lanes` lanes are best put, a run for each group.

    All lanes get a token per cycle: the latency of a run, or the time the slowest stage takes for
    all of them, whichever is longer. width: most rows of a run. Index: lanes - 1.
    """
    sizes = range(1, min(width, lanes) + 1)
    costs = {size: (timing.latency(size), timing.slot(size)) for size in sizes}

    def cycle(count: int, size: int) -> float:
        latency, slot = costs[size]
        return max(latency, -(-count // size) * slot)

    return tuple(min(range(1, min(count, width) + 1), key=lambda size: cycle(count, size))
                 for count in range(1, lanes + 1))


def in_flight(timing: Timing, size: int) -> int:
    """Runs that fill the pipeline without queueing before its slowest stage, and one more."""
    return max(2, math.ceil(timing.latency(size) / max(timing.slot(size), 1e-9)) + 1)


class _Mean(Struct):
    """A running mean that starts at its first value."""

    value: float = 0.0
    count: int = 0

    def add(self, value: float) -> None:
        self.value = value if not self.count else _MEMORY * self.value + (1 - _MEMORY) * value
        self.count += 1


class Controller(Struct):
    """Hears of runs and drafts, and says which limits to use from now on.

    limits: the starting point
    pinned: names of `Limits` fields that must stay
    curve: (rows, relative time) as stages measured it when they loaded; used until runs of so many
        rows have come back
    max_rows: maximum rows in flight, for which the stages' caches have room
    trial: finds out whether guesses pay, where the draft shares processors with stages
    draft_share: seconds of a token of the draft's models, in runs of one row; used until one has
        been measured
    """

    limits: Limits
    pinned: Collection[str] = ()
    curve: Curve = ((2, 1.5),)
    max_rows: int = 1 << 30
    trial: SpeculationTrial | TurnsTrial | None = None
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
        """Whether there is anything to tune."""
        limits = self.limits
        if limits.policy is Policy.ITERATIVE:
            return limits.parallel > 1
        return limits.policy is Policy.PIPEINFER and limits.ablations <= TUNABLE

    def run_returned(self, rows: int, slowest: float, computed: float, latency: float,
                     gaps: Sequence[float] | None = ()) -> None:
        """A run of generated tokens came back computed by every stage; seconds.

        gaps: when other requests were about, the times between stages that worked on it, head
        first and last: they may hold queueing behind others' runs. None: prompts are on their
        way, behind which everything queues everywhere.
        """
        self._results += 1
        if self.limits.same_cores:
            slowest = computed
        if rows == 1 or not self._slowest.count:
            # Where every tip waits for guesses no run of one row may ever come back.
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
        """A draft job named so many tokens in so many seconds."""
        if tokens:
            self._draft.add(seconds / tokens)

    @property
    def timing(self) -> Timing | None:
        """What was measured, None before enough runs came back."""
        if not self._slowest.count or max(len(self._transit), len(self._gaps)) < _SAMPLES:
            return None
        points = dict(self.curve)
        points |= {rows: mean.value for rows, mean in self._wide.items() if mean.count > 1}
        way, computed = self._on_the_way(), self._computed.value
        draft = self._draft.value if self._draft.count else self.draft_share * (computed + way)
        return Timing(self._slowest.value, computed, tuple(sorted(points.items())), way, draft)

    def _on_the_way(self) -> float:
        """Time between stages, without queueing.

        In a busy pipeline runs queue before its slowest stage, always, and before others now and
        then: so the least of each gap, and for the largest of those what the others suggest.
        """
        alone = min(self._transit) if len(self._transit) >= _SAMPLES else math.inf
        if not self._gaps:
            return alone
        least = sorted(min(gap) for gap in zip(*self._gaps, strict=True))
        if least[0] >= 0.0:  # else clocks differ, and only the sum means anything
            least[-1] = min(least[-1], statistics.median(least))
        return min(alone, max(math.fsum(least), 0.0))

    def progress(self, total: int, now: float, lanes: int, key: object) -> Limits | None:
        """What came of it all, see `SpeculationTrial.tokens`; limits for the next runs when
        guesses begin or end because of that."""
        if self.trial is None or not self.trial.tokens(total, now, lanes, key):
            return None
        return self._change({"path_min": cutoff(self.limits.credit)
                             if self.trial.speculate else NEVER})

    def advise(self, acceptance: float, second: float) -> Limits | None:
        """Limits for the next runs; None: nothing changes.

        acceptance: of first guesses. second: of the next alternative where the first is wrong.
        """
        if not self.active or self._results % _EVERY or (timing := self.timing) is None:
            return None
        quiet = self.trial is not None and not self.trial.speculate
        if self.limits.take_turns:
            return self._change({}, timing) if quiet else self._take_turns(timing, acceptance)
        if quiet or self.limits.policy is Policy.ITERATIVE or not self._draft.count:
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

    def _take_turns(self, timing: Timing, acceptance: float) -> Limits | None:
        limits, most = self.limits, min(self.limits.exact_width - 1, SIZES[-1] - 1)
        if limits.costs:  # then each guess is weighed, and the width is for the best
            wanted, likely = weighed_by(timing, most), _ALMOST_SURE
            if not (self._draft.count and limits.draft_price):
                del wanted["draft_price"]
        else:
            size, likely = turns(timing, acceptance, most), acceptance
            if isinstance(self.trial, SpeculationTrial):
                self.trial.expect(size > 0)
            size = max(size, 1)  # whether guesses pay at all the trial finds out
            wanted = {"tree_max": size, "draft_max": size,
                      "p_min": round(least_confidence(timing, acceptance, size), 2)}
        before = limits.tree_max
        paces = _paces(timing, likely, most)
        if before <= most and paces[wanted["tree_max"]] < _SWITCH * paces[before]:
            wanted |= {"tree_max": before, "draft_max": before}
        return self._change(wanted, timing)

    def _change(self, wanted: dict[str, Any], timing: Timing | None = None) -> Limits | None:
        """The limits with these values, as far as the user left them free; None: they have."""
        if self.limits.parallel > 1 and timing is not None:
            wanted["share"] = groups(timing, self.limits.exact_width, self.limits.parallel)
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
        """The cutoff when nothing is issued: ask the draft only where a good one would pay."""
        good = max(speed(timing, 0.9, Setting(size), self._credit(timing, size))
                   for size in SIZES[:4])
        return _LISTEN if good > _SWITCH * speed(timing, 0.9, Setting(0)) else NEVER

    def _choose(self, timing: Timing, acceptance: float, second: float) -> Setting:
        """The best setting among those that are free, keeping the present one unless clearly
        beaten."""
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
            best = Setting(0)  # a gain this small is lost to what guesses get in the way of
        if self._setting in value and value[best] < _SWITCH * value[self._setting]:
            return self._setting
        self._setting = best
        return best


def alternatives_for(credit: int) -> int:
    """Second, third, ... choices that pay in a pipeline of that depth (docs/options.md)."""
    return 1 if credit < 12 else 2


def cutoff(credit: int) -> float:
    """Least probability of acceptance that deserves a slot, for a pipeline of that depth.

    Found by sweeps in virtual time (docs/emulation.md): a guess of less delays better ones.
    """
    return min(max(0.4 / max(credit, 1), 0.004), 0.2)


def gaps(issued: float, returned: float, spans: Sequence[Sequence[float]]) -> list[float]:
    """Seconds between stages that worked on a run, from its issue to its return.

    spans: as in `messages.Decode`; only begin and seconds count.
    """
    ends = [issued, *[span[0] + span[1] for span in spans]]
    starts = [*[span[0] for span in spans], returned]
    return [start - end for end, start in zip(ends, starts, strict=True)]
