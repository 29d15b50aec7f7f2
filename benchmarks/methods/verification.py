"""How often a draft's tokens are accepted at a temperature: shared noise beside SpecInfer's
multi-step sampling.

    python -m benchmarks.methods.verification

At each position of texts that the target writes at the temperature, with p and q the laws of target
and draft there: how often the target's token is the draft's first guess, or among its two or four.
Shared noise is what jobs do: the guesses are the best of the draft's scores under the target's
noise. In multi-step sampling they are drawn from q. Of one guess its acceptance is exact, the sum
of min(p, q), which no way to verify exceeds; the rest is counted over `_DRAWS` draws a position.
The pair is the embedded one, over openings of programs, and a synthetic one whose draft is
greedily right in 79 % of positions.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from benchmarks.methods.real_pair import CODE
from pipeinfer.core.noise import noise_key
from pipeinfer.core.sampling import choose
from pipeinfer.core.types import SamplingParams
from pipeinfer.lab.emulation.sampled import SampledPair, multi_step, softmax
from pipeinfer.models.bundled import EMBEDDED
from pipeinfer.models.locate import open_tokenizer
from tests.rig.plain_loop import PlainLoop

TEMPERATURES = (0.5, 0.8, 1.0)
OFFERS = (1, 2, 4)
_TOKENS, _SEEDS, _DRAWS = 96, 4, 32

Scores = npt.NDArray[np.float64]


def real(temperature: float) -> Iterator[tuple[Scores, Scores]]:
    """The scores of target and draft, before each token of the target's texts."""
    target, draft = (PlainLoop(EMBEDDED / name) for name in ("target.gguf", "draft.gguf"))
    tokenizer = open_tokenizer(EMBEDDED / "target.gguf")
    for opening in CODE:
        for seed in range(_SEEDS):
            params = SamplingParams(temperature, key=noise_key(seed))
            tokens = list(tokenizer.encode(opening))
            n_prompt, found = len(tokens), []
            logits = target.decode(tokens, 0)
            while len(tokens) < n_prompt + _TOKENS:
                token = choose(logits, params, np.array(tokens, np.int32), len(tokens) - 1).token
                if target.is_eog(token):
                    break
                found.append(np.array(logits, np.float64))
                tokens.append(token)
                logits = target.decode([token], len(tokens) - 1)
            target.reset()
            others = draft.logits_after(tokens[:n_prompt], tokens[n_prompt:])
            for one, other in zip(found, others, strict=False):
                yield one / temperature, np.array(other, np.float64)[: len(one)] / temperature
    target.close()
    draft.close()


def synthetic(temperature: float) -> Iterator[tuple[Scores, Scores]]:
    """The same of a synthetic pair."""
    pair = SampledPair(0.79, temperature=temperature)
    path: tuple[int, ...] = (1, 2, 3)
    for pos in range(2000):
        yield pair._scores(path, pos)
        path = (*path[-2:], pair.token(path, pos))


def accepted(pairs: Iterator[tuple[Scores, Scores]]) -> tuple[int, dict[str, list[float]]]:
    """The number of positions, and for each way the shares of `OFFERS` guesses."""
    rng = np.random.default_rng(5)
    count, shares = 0, {way: np.zeros(len(OFFERS)) for way in ("shared", "mss")}
    for target, draft in pairs:
        count += 1
        p, q = softmax(target), softmax(draft)
        noise = rng.gumbel(size=(_DRAWS, len(p)))
        choices = np.argmax(target + noise, axis=1)
        best = np.argsort(-(draft + noise), axis=1)[:, :OFFERS[-1]]
        shares["shared"] += [(best[:, :n] == choices[:, None]).any(axis=1).mean() for n in OFFERS]
        drawn = rng.choice(len(q), (_DRAWS, OFFERS[-1]), p=q)
        for k, n in enumerate(OFFERS):
            shares["mss"][k] += np.minimum(p, q).sum() if n == 1 else np.mean([
                multi_step(p, [(token, q) for token in tokens[:n].tolist()], draws)[1] >= 0
                for tokens, draws in zip(drawn, rng.random((_DRAWS, n + 1)), strict=True)])
    return count, {way: (found / count).tolist() for way, found in shares.items()}


def main() -> None:
    """See the module docstring."""
    for name, scores in (("embedded", real), ("synthetic", synthetic)):
        for temperature in TEMPERATURES:
            count, found = accepted(scores(temperature))
            print([f"{name} ({count} positions)", f"{temperature:g}",
                   *(f"{100 * found[way][k]:.1f} %" for k in range(len(OFFERS)) for way in found)],
                  flush=True)


if __name__ == "__main__":
    main()
