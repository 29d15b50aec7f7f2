"""What decoding all alone writes, in this process: the reference for jobs over ranks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pipeinfer.backends.base import Backend
from pipeinfer.core.sampling import noise_key
from pipeinfer.core.types import ALL_SEQS, END, FloatArray, SamplingParams, make_rows
from pipeinfer.models.locate import EMBEDDED, open_tokenizer
from pipeinfer.planning.wide import shares_of
from tests.kit.plain_loop import PlainLoop
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
        rows = make_rows([(token, position + i, (0,), i == len(tokens) - 1)
                          for i, token in enumerate(tokens)])
        values: FloatArray | None = None
        for stage in self._stages:
            values = stage.decode(rows, values)
        assert values is not None
        return values[0]


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
