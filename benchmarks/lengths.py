"""Long prompts on models of real sizes, beside llama.cpp's own programs on the same library.

    python -m benchmarks.lengths 8b.gguf --prompt 512 4096 --ranks 1 4 --programs llama.cpp/bin

Every figure is from one run. `prompt` is tokens of the prompt a second until the first token is
there, `decode` tokens a second behind it, without speculation, so that both sides do the same
work. --programs: a folder with llama-bench; its libllama.so is what pipeinfer uses as well.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.sizes import stats_of
from pipeinfer.llama.library import ensure_llama
from pipeinfer.llama.loader import LIBRARY_VARIABLE
from pipeinfer.models.locate import open_tokenizer

_TEXT = Path(__file__).parents[1] / "CHANGELOG.md"


def llama_bench(programs: Path, model: Path, rows: int, tokens: int, more: Sequence[str],
                timeout: float) -> dict[str, float]:
    """Return tokens per second of a prompt of `rows`, and of `tokens` decoded behind it."""
    found = {}
    for name, what in (("prompt", ["-p", str(rows), "-n", "0"]),
                       ("decode", ["-p", "0", "-n", str(tokens), "-d", str(rows)])):
        command = [str(programs / "llama-bench"), "-m", str(model), "-r", "1", "--no-warmup",
                   "-o", "json", "-t", str(os.cpu_count()), *what, *more]
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout,
                              check=True)
        (row,) = json.loads(done.stdout)
        found[name] = row["avg_ts"]
    return found


def prompt_of(model: Path, rows: int, folder: Path) -> Path:
    """Write a text of `rows` tokens of this model, and return its path."""
    tokenizer = open_tokenizer(model)
    text, file = _TEXT.read_text(), folder / f"{rows}.txt"
    text *= 1 + 8 * rows // len(text)
    least, most = 1, len(text)
    while least < most:
        middle = (least + most) // 2
        if len(tokenizer.encode(text[:middle])) < rows:
            least = middle + 1
        else:
            most = middle
    file.write_text(text[:least])
    tokenizer.close()
    return file


def own(model: Path, ranks: int, prompt: Path, words: Sequence[str], timeout: float,
        cache: str) -> dict[str, float]:
    """Return what `pipeinfer generate` took for the same."""
    stats = stats_of(ranks, [
        "generate", "-m", str(model), "-f", str(prompt), "--temp", "0", "--ignore-eos", "-md",
        "none", "--policy", "iterative", *words, "--json"], timeout, cache)
    seconds, rows = stats["time_to_first_token"], stats["n_prompt"]
    return {"rows": rows, "first": seconds, "prompt": rows / seconds,
            "decode": stats["tokens_per_second"], "R": stats["exact_width"],
            "MB": sum(stage["rss"] for stage in stats["stages"].values()) / 2**20}


def main() -> None:
    """Print a line of JSON for each program, length and number of ranks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--programs", type=Path)
    parser.add_argument("--prompt", nargs="+", type=int, default=[512])
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--ranks", nargs="+", type=int, default=[1])
    parser.add_argument("--more", default="", help="Further words for pipeinfer.")
    parser.add_argument("--bench", default="", help="Further words for llama-bench.")
    parser.add_argument("--timeout", type=float, default=3600.0)
    given = parser.parse_args()
    if given.programs:
        os.environ[LIBRARY_VARIABLE] = str(given.programs / "libllama.so")
    ensure_llama()
    with tempfile.TemporaryDirectory() as folder:
        for rows in given.prompt:
            if given.programs:
                found = llama_bench(given.programs, given.model, rows, given.tokens,
                                    given.bench.split(), given.timeout)
                _show("llama-bench", rows, found)
            prompt = prompt_of(given.model, rows, Path(folder))
            words = ["-n", str(given.tokens), "-c", str(rows + given.tokens + 64),
                     *given.more.split()]
            for ranks in given.ranks:
                _show(f"pipeinfer, {ranks} ranks", rows,
                      own(given.model, ranks, prompt, words, given.timeout, folder))


def _show(who: str, rows: int, found: dict[str, float]) -> None:
    print(json.dumps({"program": who, "length": rows}
                     | {k: round(v, 2) for k, v in found.items()}), flush=True)


if __name__ == "__main__":
    main()
