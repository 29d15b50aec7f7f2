"""What decoding all alone writes, in this process: the reference for jobs over ranks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pipeinfer.backends.base import Backend
from pipeinfer.core.sampling import noise_key
from pipeinfer.core.types import ALL_SEQS, END, FloatArray, SamplingParams
from pipeinfer.models.locate import EMBEDDED, open_tokenizer
from pipeinfer.planning.wide import shares_of
from tests.kit.plain_loop import PlainLoop
from tests.kit.rows import chunk
from tests.kit.sliced_loop import SlicedLoop

TARGET = EMBEDDED / "target.gguf"
GREEDY = SamplingParams()


class StagedLoop(PlainLoop):
    """Plain decoding over backends that hold the model's layers one behind the other."""

    def __init__(self, *stages: Backend) -> None:
        self._stages = stages

    def close(self) -> None:
        for stage in self._stages:
            stage.close()

    def reset(self) -> None:
        for stage in self._stages:
            stage.seq_rm(ALL_SEQS, 0, END)

    def decode(self, tokens: Sequence[int], position: int) -> FloatArray:
        values: FloatArray | None = None
        for stage in self._stages:
            values = stage.decode(chunk(tokens, position), values)
        assert values is not None
        return values[0]


def seeded(seed: int, temperature: float = 0.8) -> SamplingParams:
    """What `generate` samples by with --seed, and with --temp."""
    return SamplingParams(temperature, 40, 0.95, 0.05, key=noise_key(seed))


def encoded(path: Path, text: str) -> list[int]:
    """The tokens of a text, by the tokenizer of a model."""
    tokenizer = open_tokenizer(path)
    tokens = tokenizer.encode(text)
    tokenizer.close()
    return tokens


def alone(prompt: str, count: int, params: SamplingParams = GREEDY, *, slices: int = 1,
          ignore_eos: bool = True, path: Path = TARGET) -> list[int]:
    """Tokens of a plain loop over the whole model, or over one stage of so many slices: other
    slices are other roundings."""
    tokens = encoded(path, prompt)
    loop = PlainLoop(path) if slices == 1 else SlicedLoop(path, (12,), shares_of("", (slices,)))
    found: list[int] = loop.generate(tokens, count, params, ignore_eos=ignore_eos)
    loop.close()
    return found
