"""What a model that llama.cpp has loaded asks of its backend: ids, callbacks, rows of a trial.

Reads the model's metadata and its architecture's declaration. Decodes nothing.
"""

from __future__ import annotations

import os
from typing import Any

from pipeinfer.backends.llamacpp import routers
from pipeinfer.backends.llamacpp.context import LlamaOptions, metadata
from pipeinfer.backends.llamacpp.layer_probe import ExpertSum, LayerProbe
from pipeinfer.backends.llamacpp.routers import Routers
from pipeinfer.errors import BackendError
from pipeinfer.llama import binding
from pipeinfer.llama.loader import find_library
from pipeinfer.models.architectures import declared

_WITH_WINDOWS = 2  #: further sequence ids that a model with sliding windows needs


class LoadedModel:
    """A model, a shard or a slice; head: or a head that drafts.

    handle: llama.cpp's. own: its architecture's declaration. keeps_state: whether its layers have a
    state of the text so far. n_tokens: of the file's vocabulary; a slice of the output matrix has a
    part. row_parts: rows of the model's width that cross a cut for each token. enters, again:
    whether callbacks put rows in, and once more. further_ids: sequence ids that it needs besides
    those of the rows and the grave.
    """

    def __init__(self, handle: Any, *, head: bool = False) -> None:
        self.handle, self._head = handle, head
        self.architecture = metadata(handle, "general.architecture")
        self.own = own = declared(self.architecture)
        self.is_slice = bool(metadata(handle, "pipeinfer.piece"))
        self.has_experts = int(metadata(handle, f"{self.architecture}.expert_count") or 0) > 0
        self.has_windows = not head and bool(binding.llama_model_n_swa(handle) > 0)
        self.keeps_state = not head and (own.whole or bool(
            binding.llama_model_is_recurrent(handle) or binding.llama_model_is_hybrid(handle)))
        self.n_tokens = int(binding.llama_vocab_n_tokens(binding.llama_model_get_vocab(handle)))
        self.row_parts = own.row_parts(lambda key: metadata(handle, f"{self.architecture}.{key}"))
        self.enters = bool(own.entry) and not head
        self.again = bool(own.again) and not head and self.row_parts > 1
        self.further_ids = 0 if own.whole else (
            _WITH_WINDOWS * self.has_windows + self.keeps_state)

    def chooses_experts(self, path: str | os.PathLike[str], options: LlamaOptions) -> bool:
        """Return whether pipeinfer's own code computes the routers of this mixture."""
        return self.has_experts and not self._head and options.on_cpu \
            and routers.single_row_dot() is not None and routers.of_floats(path)

    def most_rows(self, *, chooses_experts: bool) -> int:
        """Return the most rows of a trial that this kind of model allows."""
        if self.own.alone:
            return 1  # a trial has several sequences
        if not self.has_experts:
            return 1 << 16
        # A short trial seldom detects that a router's product depends on the number of rows:
        # quantisation hides most differences
        return routers.MOST_ROWS if chooses_experts else 1

    def _expert_sum(self) -> ExpertSum:
        """Return where the experts of a slice are summed."""
        if not (self.is_slice and self.has_experts):
            return ExpertSum.NONE
        shared = int(metadata(self.handle, "pipeinfer.shared_expert") or 0)
        return ExpertSum.SHARED if shared else ExpertSum.ALONE

    def probe(self, source: str | os.PathLike[str] | Routers | None, layers: tuple[int, int],
              options: LlamaOptions, *, last: bool, chooses_experts: bool, kind: type[LayerProbe]
              ) -> LayerProbe | None:
        """Return the callbacks that this shard needs; None for one that runs without any.

        source: the routers of a slice with some of the experts, or the file that they are read from
        """
        own = self.own
        pools = last and int(metadata(self.handle, f"{self.architecture}.pooling_type") or 0) > 0
        if self._head and not self.is_slice:
            return None
        if last and not (self.is_slice or own.entry or options.layer_callbacks or chooses_experts
                         or pools):
            return None
        count = layers[1] - layers[0]
        older = own.older_output and find_library().compiled
        output = own.older_output if older else own.output
        inner = "%d" not in output and count < binding.llama_model_n_layer(self.handle)
        probe = kind(count - 1, layers[0], own.entry, "l_out-%d" if inner else output)
        if self.again:
            probe.enter_again(own.again)
        probe.sum_experts_at(self._expert_sum())
        if metadata(self.handle, "pipeinfer.experts"):
            if not chooses_experts:
                raise BackendError("slices with whole experts need layers on the processor and "
                                   "routers in float32: use fewer slices")
            assert source is not None
            probe.select_among(source if isinstance(source, Routers) else Routers(source))
        elif chooses_experts:
            probe.choose_experts_row_by_row()
        return probe
