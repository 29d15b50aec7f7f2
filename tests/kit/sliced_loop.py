"""Plain decoding over slices: one row at a time, every slice in this process, Python sums.

What a grid has to reproduce, whatever ranks hold its slices. It shares the backend with the
runtime, but neither stages, transport nor the C part that sums up.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence

from pipeinfer.backends.composed import WideBackend
from pipeinfer.backends.llamacpp.backend import LlamaCppBackend
from pipeinfer.backends.team import TeamShape
from pipeinfer.core.types import ALL_SEQS, END, FloatArray
from pipeinfer.models.embedding import EmbeddingTable
from pipeinfer.models.gguf import ModelFile
from pipeinfer.models.shard import extract_shard
from pipeinfer.models.slices import slices_of
from pipeinfer.runtime.port_team import PortTeam
from pipeinfer.transport.inproc import local_ports
from tests.kit.llama import load
from tests.kit.plain_loop import FEW, PlainLoop
from tests.kit.rows import chunk


class SlicedLoop(PlainLoop):
    """Stages of slices. layers: of each stage. shares: of each stage's slices (see `slices_of`)."""

    def __init__(self, path: str | os.PathLike[str], layers: Sequence[int],
                 shares: Sequence[Sequence[float]], *, n_ctx: int = 2048, n_batch: int = 64,
                 sum_type: str = "f32", cache_dir: str | os.PathLike[str] | None = None) -> None:
        model = ModelFile(path)
        bounds = list(itertools.accumulate(layers, initial=0))
        self._stages: list[tuple[WideBackend, PortTeam]] = []
        self._loaded: list[LlamaCppBackend] = []
        self._run = 0
        self.n_vocab = model.n_vocab
        self._alone = FEW if model.arch_get("expert_count") else 1
        for (start, stop), parts in zip(itertools.pairwise(bounds), shares, strict=True):
            cut = slices_of(model, parts)
            last = stop == model.n_layers
            slices = [load(
                extract_shard(model, start, stop, piece=one, cache_dir=cache_dir), (start, stop),
                model.n_layers, first=False, n_ctx=n_ctx, n_seq_max=1, n_batch=n_batch,
                layer_callbacks=False) for one in cut]
            self._loaded += slices
            shape = TeamShape((tuple(range(len(cut))),), 0, sum_type, 0,
                              tuple(one.vocab for one in cut) if last else ())
            team = PortTeam(shape, local_ports(2)[1], (1,), _patient)
            self._stages.append((WideBackend(
                [[one] for one in slices], team, (start, stop), model.n_layers,
                EmbeddingTable.open(model) if start == 0 else None), team))

    def close(self) -> None:
        """Release all slices."""
        for backend, _ in self._stages:
            backend.close()
        for one in self._loaded:
            one.close()

    def reset(self) -> None:
        """See `PlainLoop.reset`."""
        for backend, _ in self._stages:
            backend.seq_rm(ALL_SEQS, 0, END)

    def decode(self, tokens: Sequence[int], position: int) -> FloatArray:
        """See `PlainLoop.decode`."""
        if 1 < len(tokens) <= self._alone:  # as rows draw their experts alone
            for i, token in enumerate(tokens[:-1]):
                self.decode([token], position + i)
            return self.decode(tokens[-1:], position + len(tokens) - 1)
        rows = chunk(tokens, position)
        values: FloatArray | None = None
        for backend, team in self._stages:
            team.begin(self._run, cancelled=False)
            values = backend.decode(rows, values)
        self._run += 1
        assert values is not None
        found: FloatArray = values[-1]
        return found

    def is_eog(self, token: int) -> bool:
        """Texts of this loop do not end by themselves."""
        del token
        return False


def _patient(index: int) -> None:
    """Slices of one process wait for each other as long as it takes."""
