"""What decoding all alone writes, in this process: the reference for jobs over ranks."""

from __future__ import annotations

from pathlib import Path

from pipeinfer.core.noise import noise_key
from pipeinfer.core.types import SamplingParams
from pipeinfer.models.locate import EMBEDDED, open_tokenizer
from pipeinfer.planning.wide import shares_of
from tests.rig.plain_loop import PlainLoop
from tests.rig.sliced_loop import SlicedLoop

TARGET = EMBEDDED / "target.gguf"
GREEDY = SamplingParams()


def seeded(seed: int, temperature: float = 0.8) -> SamplingParams:
    """What `generate` samples by with --seed, and with --temp."""
    return SamplingParams(temperature, 40, 0.95, 0.05, key=noise_key(seed))


def alone(prompt: str, count: int, params: SamplingParams = GREEDY, *, slices: int = 1,
          ignore_eos: bool = True, path: Path = TARGET) -> list[int]:
    """Tokens of a plain loop over the whole model, or over one stage of so many slices: other
    slices are other roundings."""
    tokenizer = open_tokenizer(path)
    tokens = tokenizer.encode(prompt)
    tokenizer.close()
    loop = PlainLoop(path) if slices == 1 else SlicedLoop(path, (12,), shares_of("", (slices,)))
    found: list[int] = loop.generate(tokens, count, params, ignore_eos=ignore_eos)
    loop.close()
    return found
