"""Tables of records that name many figures of `benchmarks.paper` at once, from its numbers."""

from __future__ import annotations

import csv
from collections.abc import Iterable
from pathlib import Path

_C = "c 8 nodes"
_NODES = (4, 8, 15, 32)


class Paper:
    """The numbers of `benchmarks.paper`: (figure, case, policy, metric) to mean and spread."""

    def __init__(self, path: Path) -> None:
        with path.open(newline="", encoding="utf-8") as file:
            self.values = {
                (row["figure"], row["case"], row["policy"], row["metric"]):
                (float(row["mean"]), float(row["spread"])) for row in csv.DictReader(file)}

    def mean(self, figure: str, case: str, policy: str, metric: str = "tokens_per_second"
             ) -> float:
        """A mean. Raises KeyError."""
        return self.values[figure, case, policy, metric][0]

    def cases(self, figure: str) -> list[str]:
        """The cases of a figure, in order."""
        return list(dict.fromkeys(case for one, case, *_ in self.values if one == figure))


def _span(values: Iterable[float], form: str = ".2f") -> str:
    """From the least to the most, or one number where both read the same."""
    found = list(values)
    ends = [format(end, form) for end in (min(found), max(found))]
    return " to ".join(dict.fromkeys(ends))


def _percent(values: Iterable[float], form: str = ".0%") -> str:
    """The same in percent, with one sign of percent."""
    return _span(values, form).replace("%", "") + " %"


def _gains(paper: Paper, figure: str, over: str, start: str = "") -> list[float]:
    """What this project's policy brings, in each case that begins so."""
    return [mean for (name, case, policy, metric), (mean, _) in paper.values.items()
            if name == figure and case.startswith(start)
            and (policy, metric) == ("pipeinfer", f"gain over {over}")]


def eight_nodes(paper: Paper) -> list[list[str]]:
    """`emulated-8-nodes`."""
    def times(values: list[float]) -> str:
        return f"{_span(values, '.1f')} times"

    policies = ("iterative", "speculative")
    rows = [[f"8 nodes, {title}",
             *(times(_gains(paper, "speed", over, f"{_C} {pair}")) for over in policies)]
            for pair, title in (
                ("dolphin-tinyllama", "Dolphin 70B + TinyLlama, 79 % accepted"),
                ("goliath-xwin7b", "Goliath 120B + XWin 7B, 52 %"))]
    return [*rows, ["six pairs, 4 to 32 nodes",
                    *(times(_gains(paper, "speed", over)) for over in policies)]]


def figures(paper: Paper) -> list[list[str]]:
    """`emulated-figures`, without what the paper says."""
    pairs = list(dict.fromkeys(case.rpartition(" ")[2] for case in paper.cases("speed")))
    three = ("dolphin-tinyllama", "falcon-7b", "goliath-xwin7b")

    def speed(pair: str, nodes: int, policy: str) -> float:
        return paper.mean("speed", f"c {nodes} nodes {pair}", policy)

    constant = [speed(pair, 32, policy) / speed(pair, 4, policy)
                for pair in pairs for policy in ("iterative", "speculative")]
    fastest = {max(_NODES, key=lambda n, p=pair: speed(p, n, "pipeinfer")) for pair in pairs}

    def first(policy: str) -> str:
        return _span(paper.mean("ttft", case, policy, "ttft")
                     / paper.mean("ttft", case, "iterative", "ttft")
                     for case in paper.cases("ttft"))

    def gain(cluster: str, pair: str) -> float:
        figure = "speed" if cluster == "c" else "constrained"
        return _gains(paper, figure, "speculative", f"{cluster} 8 nodes {pair}")[0]

    more = sum(gain("a", pair) >= gain("c", pair) for pair in three)
    assert more == len(three), "gigabit no longer brings more than InfiniBand for all three pairs"
    desktops = [paper.mean("constrained", f"b 13 nodes {pair}", "pipeinfer")
                / paper.mean("constrained", f"a 8 nodes {pair}", "pipeinfer") - 1
                for pair in three]

    def part(name: str) -> tuple[str, str]:
        found = [paper.values["ablations", f"{_C} {pair}", f"without {name}", "contribution"]
                 for pair in three]
        return (_percent((mean for mean, _ in found), "+.0%"),
                _percent(spread for _, spread in found))

    def spread(policy: str) -> float:
        mean, deviation = paper.values["prompts", "gpu senku-tinyllama", policy,
                                       "tokens_per_second"]
        return deviation / mean

    def kept(figure: str, after: str, before: str, policy: str) -> str:
        left = paper.mean(figure, after, policy) / paper.mean(figure, before, policy)
        return f"{100 * left:.0f} %"

    def delayed(name: str, policy: str) -> str:
        return kept("delay", f"{name} 75 ms", f"{name} 0 ms", policy)

    def scale(stages: int, metric: str) -> float:
        return paper.mean("scale", f"{stages} stages", "pipeinfer", metric)

    scheduler = max(scale(stages, "scheduler, us per run") for stages in (8, 16, 32, 64, 128, 256))
    kilobytes = "KB per link and accepted token"
    return [
        ["4, speed over synchronous speculation",
         f"4 to 32 nodes, six pairs: {_span(_gains(paper, 'speed', 'speculative-published'))} over "
         f"the paper's setting, {_span(_gains(paper, 'speed', 'speculative'))} over the best of "
         f"the grid; at 8 nodes {_span(_gains(paper, 'speed', 'speculative', _C))}"],
        ["4, over iterative", f"{_span(_gains(paper, 'speed', 'iterative'))}; 8 nodes "
         f"{_span(_gains(paper, 'speed', 'iterative', _C))}"],
        ["4, more nodes", f"baselines at 32 nodes {_span(constant)} of their speed at 4; every "
         f"pair fastest at {', '.join(map(str, sorted(fastest)))}"],
        ["5, time to first token", f"as published {first('published')} of iterative's; this "
         f"project's policy {first('pipeinfer')} on average over texts: it guesses behind the "
         "prompt, and a right first guess is there at once ([by nodes](#published-ttft))"],
        ["7a, memory", "the same memory, more speed per GiB by the factors of Fig. 4"],
        ["7c, gigabit", f"{_span(_gains(paper, 'constrained', 'speculative'))} over the best "
         "synchronous; A, 8 nodes: more than C for all three pairs"],
        ["7c, five desktops more",
         ", ".join(f"{100 * value:.0f} %" for value in desktops) + " (layers as planned)"],
        *([title, "{} (spread {})".format(*part(name)) if name == "cancel" else
           "{} ({})".format(*part(name))] for title, name in (
               ("8, what cancellation brings", "cancel"),
               ("8, continuous speculation", "continuous"),
               ("8, second choices (no component of the paper)", "alternatives"),
               ("8, asynchronous speculation", "async"))),
        ["9, four GPUs (acceptances assumed)", f"{_span(_gains(paper, 'gpu', 'speculative'))} over "
         "the best synchronous, in all that fit"],
        ["10, prompt to prompt (variance assumed)",
         f"not so: standard deviation {100 * spread('pipeinfer'):.0f} % (as published "
         f"{100 * spread('published'):.0f} %) against "
         + _percent(map(spread, ("speculative", "speculative-published")))],
        ["75 ms on every link",
         f"keeps {delayed('delay', 'pipeinfer')} of its speed on C (iterative "
         f"{delayed('delay', 'iterative')}), {delayed('delay-gpu', 'pipeinfer')} on GPUs "
         f"({delayed('delay-gpu', 'iterative')})"],
        ["a node 8 times slower", "planned split keeps "
         f"{kept('slow', 'slow-planned x8', 'slow-planned x1', 'pipeinfer')} of the speed, equal "
         f"split {kept('slow', 'slow-equal x8', 'slow-equal x1', 'pipeinfer')}"],
        ["256 stages",
         f"the scheduler's time per run stays near {scheduler / 1e3:.1f} ms; bytes per link and "
         f"token grow {scale(256, kilobytes) / scale(8, kilobytes):.1f} times from 8 to 256 "
         "stages, since a deeper pipeline holds more guesses; beyond 128 stages nothing is gained"],
    ]


def time(paper: Paper) -> list[list[str]]:
    """`emulated-time`, a single value."""
    parts = []
    for pair, accepted in (("dolphin-tinyllama", "79 % accepted"), ("goliath-xwin7b", "52 %")):
        share = {name: paper.mean("time", f"{_C} {pair}", "pipeinfer", f"share {name}")
                 for name in ("token", "guess", "dead", "skipped")}
        useful, dead = share["token"] + share["guess"], share["dead"] + share["skipped"]
        cells = ", ".join(f"{100 * one:.0f}" for one in (useful, dead, 1 - useful - dead))
        parts.append(f"{accepted}: {cells} %")
    return [["; ".join(parts)]]


def useless_draft(paper: Paper) -> list[list[str]]:
    """`emulated-useless-draft`, a single value."""
    found = {case: paper.mean("useless draft", case, "pipeinfer", "over iterative")
             for case in paper.cases("useless draft")}
    slow = {case: value for case, value in found.items() if value < 0.98}
    assert all(case.startswith("gpu") for case in slow), "not only GPUs are slower"
    losses = " and ".join(f"{100 * (1 - value):.0f}" for value in sorted(
        slow.values(), reverse=True))
    return [[f"{len(found) - len(slow)} of {len(found)} cases within 2 %; on the GPUs {losses} % "
             "slower, the share of the GPU that only drafts"]]


def tuning(paper: Paper) -> list[list[str]]:
    """`emulated-tuning`, a single value."""
    found = {case: mean for (figure, case, _, _), (mean, _) in paper.values.items()
             if figure == "controller"}
    missed = {case for case, mean in found.items() if mean < 0.95}
    assert missed == {"acceptance-c 100%", "acceptance-gpu 0%"}, "other points are missed"
    return [[
        f"at {len(found) - len(missed)} of {len(found)} points at most 5 %, at many a gain; "
        f"misses: an acceptance of exactly 100 % on C ({found['acceptance-c 100%']:.2f} of "
        "micro-batches of 8: the model takes one guess in 512 to be wrong, and another setting has "
        f"to look 3 % better) and 0 % on GPUs ({found['acceptance-gpu 0%']:.2f} of iterative: one "
        "of the four only drafts, so three hold the layers)"]]
