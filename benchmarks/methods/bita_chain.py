"""BiTA chained over stages, in virtual time, by how often masks are right.

    python -m benchmarks.methods.bita_chain     # a minute

The real scheduler and proposer over made-up text: what a mask names is right as often as the table
says, and a run takes each stage equally long however many rows it has. What a real adapter does
over real ranks is measured by `benchmarks.methods.bita stages`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import click
from msgspec import structs

from benchmarks.records import raw_files
from pipeinfer.core.policy import Policy
from pipeinfer.core.types import Choice, Request
from pipeinfer.lab.emulation.synthetic import (
    N_VOCAB,
    TAIL,
    SyntheticBackend,
    SyntheticPair,
    mixed,
)
from pipeinfer.lab.emulation.virtual import Scenario, Simulation, VirtualStage, Wire
from pipeinfer.scheduler.events import IssueRun, Submit
from pipeinfer.scheduler.scheduler import Scheduler
from pipeinfer.scheduler.settings import Limits
from pipeinfer.strategies.proposers.bita import Bita

MASKS, TOP, WIDTH = 3, 5, 16
SECONDS = 0.06  #: of a run in a stage
#: how often the likeliest token of mask 1, 2, 3 is right, and one of its first five
ADAPTERS = {
    "as the embedded one's (27, 18, 18 %; 57, 44, 42)": ((0.27, 0.57), (0.18, 0.44), (0.18, 0.42)),
    "50, 40, 30 %; 75, 65, 55": ((0.5, 0.75), (0.4, 0.65), (0.3, 0.55)),
    "70, 60, 50 %; 88, 80, 72": ((0.7, 0.88), (0.6, 0.8), (0.5, 0.72)),
    "85, 80, 75 %; 95, 92, 90": ((0.85, 0.95), (0.8, 0.92), (0.75, 0.9)),
}
WAYS = {
    "plain": {"policy": Policy.ITERATIVE},
    "one pass after the other": {"policy": Policy.SPECULATIVE},
    "chained, likelier than 0.08": {"path_min": 0.08, "draft_max": 4},
    "chained, likelier than 0.02": {"path_min": 0.02, "draft_max": 4},
    "chained, likelier than 0.005": {"path_min": 0.005, "draft_max": 4},
}

TITLES = {name: "27, 18, 18 %; 57, 44, 42 (the embedded adapter's)" if name.startswith("as") else
          name for name in ADAPTERS}
WAYS_SHOWN = ("one pass after the other", "chained, likelier than 0.02",
              "chained, likelier than 0.005")


class Masked(Simulation):
    """One request with masks that are right as often as `rates` says."""

    def __init__(self, scenario: Scenario, rates: tuple[tuple[float, float], ...]) -> None:
        super().__init__(scenario, None)
        rows = Bita(N_VOCAB, MASKS, TOP, None, width=WIDTH)
        self.scheduler = Scheduler(scenario.limits, rows, drafts=False)
        # masks reach beyond the last token
        self.target = SyntheticBackend(
            scenario.pair, layers=(0, 1), n_layers=1, n_seq_max=scenario.limits.n_ids,
            n_ctx=scenario.limits.n_ctx + MASKS + 1)
        self._rates = rates

    def _evaluate(self, item: IssueRun, skipped: bool) -> tuple[Choice, ...] | None:
        plain = super()._evaluate(item, skipped)
        if plain is None:
            return None
        rows = item.rows
        found = iter(plain)
        choices = []
        for token, pos, ids, wanted in zip(rows.tokens.tolist(), rows.positions.tolist(),
                                           rows.seq_ids, rows.outputs.tolist(), strict=True):
            if wanted:
                choice = next(found)
                choices.append(choice if token < N_VOCAB else
                               self._named(token - N_VOCAB, ids[0], pos))
        return tuple(choices)

    def _named(self, mask: int, seq_id: int, pos: int) -> Choice:
        """What mask number `mask` at `pos` names, the likeliest first."""
        end = pos - mask - 1
        path, pair = self.target.path(seq_id, end), self.spec.pair
        for k in range(mask + 2):
            path = (*path[1 - TAIL :], pair.token(path, end + k))
        right, (first, any_of_five) = path[-1], self._rates[mask]
        draw = (mixed(7, end, path, mask) & 0xFFFFFF) / 0x1000000
        place = 0 if draw < first else 1 + int((draw - first) / (any_of_five - first) * 4)
        wrong = [(right + 11 + 7 * k) % N_VOCAB for k in range(TOP)]
        names = [*wrong[:place], right, *wrong[place:]][:TOP] if place < TOP else wrong
        chances = [first, *([(any_of_five - first) / 4] * 4)]
        return Choice(names[0], top=tuple((name, math.log(chance)) for name, chance in
                                          zip(names, chances, strict=True)))


def answers(stages: int, rates: tuple[tuple[float, float], ...], way: str, tokens: int
            ) -> Iterator[tuple[list[int], float, float, float]]:
    """Tokens, tokens per second, busy share of the stages, share of that for what was wrong."""
    limits = structs.replace(
        Limits(n_ctx=tokens + 80, exact_width=WIDTH, credit=stages + 1, partitions=60, chunk=64),
        **WAYS[way])
    for seed in range(4):
        scenario = Scenario(
            (VirtualStage(lambda _: SECONDS, 12),) * stages, (Wire(5e-5, 1e9),) * (stages + 1),
            lambda _: 0.0, limits, SyntheticPair(0.0, seed=seed), row_bytes=16384, prompt=32,
            tokens=tokens, direct_cancel=True)
        one = Masked(scenario, rates)
        request = Request(0, scenario.pair.prompt(32, 0), tokens)
        one.at(0.0, lambda one=one, request=request: one.feed(Submit(request)))  # type: ignore[misc]
        one.advance()
        span = one.times[-1] - one.times[0]
        busy = sum(stage.busy for stage in one.stages)
        yield (one.tokens, (len(one.times) - 1) / span, busy / (one.now * stages),
               sum(one._wasted()) / busy)


def rows_of(raw: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """`bita-chain`, by the ways that it shows."""
    rows = []
    for rates, title in TITLES.items():
        for way in WAYS_SHOWN:
            cells = [f"{one['busy']:.0%}, {one['over']:.2f}".replace("%", " %")
                     for one in raw if (one["rates"], one["way"]) == (rates, way)]
            rows.append([title if way == WAYS_SHOWN[0] else "", way, *cells])
    return rows


@click.command()
@click.option("--stages", "counts", type=int, multiple=True, default=(2, 4, 8), show_default=True)
@click.option("--tokens", default=256, show_default=True)
@click.option("--raw", type=click.Path(path_type=Path), help="keep every number as JSON")
def main(counts: tuple[int, ...], tokens: int, raw: Path | None) -> None:
    """See the module docstring."""
    kept = []
    click.echo("| masks are right | | " + " | ".join(
        f"{count} stages: busy | wasted | over plain" for count in counts) + " |\n"
        + "|---" * (2 + 3 * len(counts)) + "|")
    for name, rates in ADAPTERS.items():
        lines: dict[str, list[str]] = {way: [] for way in WAYS}
        for count in counts:
            said: list[list[int]] = []
            plain = 0.0
            for way in WAYS:
                found = list(answers(count, rates, way, tokens))
                said = said or [one[0] for one in found]
                if [one[0] for one in found] != said:
                    raise SystemExit(f"{way}: other tokens than plain decoding's")
                speed, busy, wasted = (sum(one[k] for one in found) / len(found)
                                       for k in (1, 2, 3))
                plain = plain or speed
                kept.append({"rates": name, "way": way, "stages": count, "busy": busy,
                             "wasted": wasted, "speed": speed, "over": speed / plain})
                lines[way].append(f"{busy:.0%} | {wasted:.0%} | {speed / plain:.2f}")
        for way, cells in lines.items():
            click.echo(f"| {name} | {way} | " + " | ".join(cells) + " |")
    if raw is not None:
        raw_files.write(raw, kept)


if __name__ == "__main__":
    main()
