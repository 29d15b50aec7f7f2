"""Tokens per second of the three policies, against one another and llama-cpp-python.

    python -m benchmarks.kernels.speed --model BIG.gguf --draft pipeinfer/models/embedded/draft.gguf

Per configuration one job of several prompts (so that loading is paid once), greedy, ignored
end-of-text, speed without the prompt's time; the configurations are repeated in turn and the
median over rounds is reported, with ratios to llama-cpp-python in the same round.
"""

from __future__ import annotations

import statistics
import time

import click

from benchmarks.methods.matrix import answers_of
from benchmarks.methods.prompts import PROMPTS
from tests.rig.launch import ROOT
from tests.rig.plain_loop import PlainLoop

EMBEDDED = ROOT / "pipeinfer" / "models" / "embedded"
POLICIES = {
    "iterative": {"policy": "iterative"},
    "speculative": {"policy": "speculative", "p_min": 0.4, "p_split": 0.2},
    "pipeinfer": {"policy": "pipeinfer", "adapt": True},
}


def job(np_: int, config: dict, limits: dict[str, dict], tokens: int, prompts: int,
        params: dict) -> dict[str, dict]:
    """Figures by label of `limits`."""
    keys = [(label, p) for label in limits for p in PROMPTS[:prompts]]
    cases = [{"prompt": p, "params": params, "count": tokens, "limits": limits[label]}
             for label, p in keys]
    answer = answers_of(np_, {"policy": "pipeinfer", **config}, cases, timeout=1800)
    rows: dict[str, list[dict]] = {}
    for (label, _), result in zip(keys, answer["results"], strict=True):
        rows.setdefault(label, []).append(result)
    return {label: {
        "speed": sum(r["n_output"] - 1 for r in found) / sum(
            (r["n_output"] - 1) / r["tokens_per_second"] for r in found),
        "ttft": statistics.median(r["time_to_first_token"] for r in found),
        "acceptance": sum(r["accepted_speculative"] for r in found) / max(
            1, sum(r["guesses_tested"] for r in found)),
        "in_flight": sum(r["accepted_speculative"] for r in found) / sum(
            r["n_output"] for r in found),
        "issued": sum(r["issued_speculative"] for r in found),
        "tokens": [r["tokens"] for r in found], "width": answer["exact_width"],
    } for label, found in rows.items()}


def plain(model: str, tokens: int, prompts: int, threads: int) -> float:
    """llama-cpp-python's own speed."""
    from pipeinfer.models.locate import open_tokenizer

    tokenizer, loop = open_tokenizer(model), PlainLoop(model, n_ctx=1024, n_threads=threads)
    count, span = 0, 0.0
    for text in PROMPTS[:prompts]:
        path = tokenizer.encode(text)
        logits = list(loop.logits_after(path, []))[-1]
        start = time.perf_counter()
        for _ in range(tokens - 1):
            path.append(int(logits.argmax()))
            logits = loop.decode(path[-1:], len(path) - 1)
        span += time.perf_counter() - start
        count += tokens - 1
    loop.close()
    return count / span


@click.command()
@click.option("--model", default=str(EMBEDDED / "target.gguf"))
@click.option("--draft", default=str(EMBEDDED / "draft.gguf"))
@click.option("--ranks", default="1,2,3", help="World sizes.")
@click.option("--tokens", default=64)
@click.option("--prompts", default=3)
@click.option("--rounds", default=3)
@click.option("--temp", default=0.0)
def main(model: str, draft: str, ranks: str, tokens: int, prompts: int, rounds: int,
         temp: float) -> None:
    """Run and print one line per configuration."""
    params = {"temperature": temp, "key": 1}
    base: list[float] = []
    found: dict[tuple[int, str], list[dict]] = {}
    for _ in range(rounds):
        base.append(plain(model, tokens, prompts, 2))
        for np_ in map(int, ranks.split(",")):
            config = {"model": model, "draft_model": draft, "ctx": 1024}
            for label, one in job(np_, config, POLICIES, tokens, prompts, params).items():
                found.setdefault((np_, label), []).append(one)
    print(f"llama-cpp-python, 2 threads: {statistics.median(base):.2f} tokens/s "
          f"({min(base):.2f} to {max(base):.2f})")
    for (np_, label), runs in found.items():
        speed = statistics.median(r["speed"] for r in runs)
        ratio = statistics.median(r["speed"] / b for r, b in zip(runs, base, strict=True))
        last = runs[-1]
        print(f"{np_} ranks, {label}: {speed:.2f} tokens/s, x{ratio:.2f} of llama-cpp-python, "
              f"first token {1e3 * last['ttft']:.0f} ms, acceptance {last['acceptance']:.0%}, "
              f"{last['in_flight']:.0%} of tokens were in flight, R={last['width']}")


if __name__ == "__main__":
    main()
