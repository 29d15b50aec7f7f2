"""The losslessness matrix: every policy, ablation, tree shape and number of ranks against plain.

    python -m benchmarks.methods.lossless --prompts 4 --tokens 128            the whole matrix
    python -m benchmarks.methods.lossless --prompts 20 --share 0.25           a random quarter
    python -m benchmarks.methods.lossless --share 0.1 --grid 2x2              over wide stages
    python -m benchmarks.methods.lossless --share 0.1 --ranks 2,3,4 --turns   all cores in turns

Greedy and temperature 0.8 with three seeds. The reference is tests/kit/plain_loop.py
(llama-cpp-python on the unsplit file) for greedy and sampled decoding alike. Each mismatch is
teacher-forced: the plain loop is fed the tokens up to that position, once with single rows and once
in other widths, and the gap of the two best perturbed scores is printed beside the noise between
the widths. With --grid the reference is plain decoding over the same slices
(tests/kit/sliced_loop.py).
"""

from __future__ import annotations

import itertools
import random
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from benchmarks.methods.matrix import answers_of
from benchmarks.methods.prompts import PROMPTS
from benchmarks.records import raw_files
from pipeinfer.core.grid import parse_widths
from pipeinfer.core.sampling import noise_key
from pipeinfer.core.types import SamplingParams
from pipeinfer.models.gguf import ModelFile
from pipeinfer.planning.wide import shares_of
from pipeinfer.scheduler.settings import PUBLISHED
from tests.kit.near_tie import tie_where
from tests.kit.plain_loop import PlainLoop
from tests.kit.sliced_loop import SlicedLoop

EMBEDDED = Path(__file__).resolve().parents[2] / "pipeinfer" / "models" / "embedded"
POLICIES = (
    {"policy": "iterative"}, {"policy": "speculative"}, {"policy": "pipeinfer"},
    {"policy": "pipeinfer", "time_sharing": True},
    *({"policy": "pipeinfer", "ablations": [a]}
      for a in ("async", "continuous", "alternatives", "cancel")),
    {"policy": "published", **PUBLISHED},
    *({"policy": "published", **PUBLISHED, "ablations": [a]}
      for a in ("async", "continuous", "multibuffer", "cancel")),
)
SHAPES = ({"branches": 1, "alternatives": 0}, {"branches": 3, "p_split": 0.1},
          {"alternatives": 3, "p_split": 0.02, "path_min": 0.001}, {"adapt": True})
SAMPLINGS = ({"temperature": 0.0}, *({"temperature": 0.8, "key": noise_key(s)} for s in (1, 2, 3)))


@click.command()
@click.option("--prompts", default=4, help="How many prompts.")
@click.option("--tokens", default=128, help="New tokens per case.")
@click.option("--share", default=1.0, help="Random share of the matrix.")
@click.option("--ranks", default="1,2,3,4", help="World sizes.")
@click.option("--model", default=str(EMBEDDED / "target.gguf"))
@click.option("--draft", default=str(EMBEDDED / "draft.gguf"))
@click.option("--seed", default=0, help="Of the random share.")
@click.option("--grid", default="", help="Stages x members; world sizes follow from it.")
@click.option("--slices", default="", help="As of pipeinfer.")
@click.option("--layers", default="", help="As of pipeinfer; needed for several stages.")
@click.option("--sum-type", default="f32")
@click.option("--sum-path", default="auto")
@click.option("--turns", is_flag=True, help="Ranks take turns with all cores.")
@click.option("--p-min", default=0.3, help="Draft cutoff.")
@click.option("--raw", type=click.Path(path_type=Path),
              help="JSON with what the cases of each policy did, by the number of ranks.")
def main(prompts: int, tokens: int, share: float, ranks: str, model: str, draft: str, seed: int,
         turns: bool, p_min: float, raw: Path | None, **wide: str) -> None:
    """Run the matrix and print what differs."""
    from pipeinfer.models.locate import open_tokenizer

    rng = random.Random(seed)
    tokenizer = open_tokenizer(model)
    if wide["grid"] or wide["slices"]:
        widths = parse_widths(wide["grid"] or "1")
        n_layers = ModelFile(model).n_layers
        counts = [int(n) for n in (wide["layers"] or str(n_layers)).split(",")]
        shares = [own or (1.0,) for own in shares_of(wide["slices"], widths)]
        plain: PlainLoop = SlicedLoop(model, counts, shares, sum_type=wide["sum_type"])
        ranks = str(sum(widths) + 1)
    else:
        plain = PlainLoop(model)
    texts = [tokenizer.encode(p) for p in PROMPTS[:prompts]]
    wanted = {(i, k): plain.generate(texts[i], tokens, SamplingParams(**s))
              for i, (k, s) in itertools.product(range(prompts), enumerate(SAMPLINGS))}
    wrong, rows = [], []
    for np_ in map(int, ranks.split(",")):
        keys = [key for key in itertools.product(
            range(prompts), range(len(SAMPLINGS)), range(len(POLICIES)), range(len(SHAPES)))
            if rng.random() < share]
        cases = [{"prompt": texts[i], "params": SAMPLINGS[k], "count": tokens,
                  "limits": {"draft_max": 3, "tree_max": 7, "p_min": p_min, **POLICIES[p],
                             **SHAPES[s]}} for i, k, p, s in keys]
        started = time.monotonic()
        answer = answers_of(np_, {
            "model": model, "draft_model": draft, "ctx": 1024, "branches": 3,
            "policy": "pipeinfer", **wide, **(
                {"turns": "auto"} if turns else {"threads": 1, "threads_draft": 1})},
            cases, timeout=3600)
        bad = 0
        for key, case, result in zip(keys, cases, answer["results"], strict=True):
            reference = wanted[key[0], key[1]]
            rows.append({"ranks": np_, "policy": name_of(case["limits"]), **result,
                         "differs": result["tokens"] != reference})
            if rows[-1]["differs"]:
                bad += 1
                wrong.append((np_, key, case, result["tokens"], reference))
        print(f"{np_} ranks, R={answer['exact_width']}: {len(keys)} cases, {bad} differ, "
              f"{time.monotonic() - started:.0f} s", flush=True)
    for item in wrong:
        explain(plain, *item)
    print(f"{len(rows)} cases, {len(wrong)} differ")
    if raw:
        raw_files.write(raw, summary(rows))


def name_of(limits: Mapping[str, Any]) -> str:
    """The policy of a case, and what it leaves out."""
    return limits["policy"] + " by turns" * bool(limits.get("time_sharing")) + "".join(
        f" without {one}" for one in limits.get("ablations", ()))


def summary(rows: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """What the cases of each policy did, by the number of ranks."""
    found: dict[tuple[str, int], dict[str, int]] = defaultdict(lambda: dict.fromkeys(
        ("cases", "differ", "guess", "right", "wrong", "cancelled"), 0))
    for row in rows:
        one = found[row["policy"], row["ranks"]]
        one["cases"] += 1
        one["differ"] += row["differs"]
        one["guess"] += row["issued_speculative"] > 0
        one["right"] += row["accepted_speculative"]
        one["wrong"] += row["guesses_tested"] - row["accepted_speculative"]
        one["cancelled"] += row["cancelled_runs"]
    return [{"policy": policy, "ranks": ranks, **one} for (policy, ranks), one in found.items()]


def rows_of(raw: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """The rows of the table `losslessness-cases`, over all numbers of ranks."""
    def row(title: str, mine: Sequence[Mapping[str, Any]]) -> list[str]:
        return [title, *(f"{sum(one[key] for one in mine):,}" for key in (
            "cases", "differ", "guess", "right", "wrong", "cancelled"))]

    policies = dict.fromkeys(map(name_of, POLICIES))
    return [*(row(policy, [one for one in raw if one["policy"] == policy])
              for policy in policies), row("all", raw)]


def explain(plain: PlainLoop, np_: int, key: tuple[int, ...], case: dict, got: list[int],
            reference: list[int]) -> None:
    """Teacher-force the plain loop to the first difference and measure the tie."""
    tie = tie_where(plain, case["prompt"], SamplingParams(**case["params"]), reference, got,
                    (2, 3, 4))
    verdict = "near-tie" if tie.near else "BUG"
    print(f"  {np_} ranks {key} {case['limits']}: at {tie.at} got {got[tie.at]}, plain "
          f"{reference[tie.at]}; "
          f"best {tie.best} gap {tie.gap:.3g} (logits), noise between widths {tie.noise:.3g}: "
          f"{verdict}")


if __name__ == "__main__":
    main()
