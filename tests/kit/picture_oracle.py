"""The reference for pictures: mtmd's own helper feeds text and pictures to one plain context of
llama.cpp, and single tokens follow."""

from __future__ import annotations

import ctypes
import itertools
from ctypes import POINTER, byref, c_bool, c_char_p, c_int32, c_size_t, c_void_p
from pathlib import Path
from typing import Any

import numpy as np

from pipeinfer.backends.llamacpp.backend import LlamaCppBackend
from pipeinfer.core.types import FloatArray, Media, Request, make_rows
from pipeinfer.llama import binding, mtmd
from pipeinfer.models.gguf import ModelFile
from tests.kit.llama import load
from tests.kit.simulated import cuts

MARK = "<__media__>"


class _Text(ctypes.Structure):
    _fields_ = (("text", c_char_p), ("size", c_size_t), ("special", c_bool), ("parse", c_bool))


class WithHelper(mtmd.Projector):
    """A projector that also reads text with marks, as mtmd's helper does."""

    def __init__(self, mmproj: Path, model: Path) -> None:
        super().__init__(str(mmproj), str(model), mtmd.Sizes())
        library = binding.loaded().path
        own = library.with_name("libmtmd.so")  # of a compiled library
        handle = ctypes.CDLL(str(own if own.exists() else library))
        self.tokenize = handle.mtmd_tokenize
        self.tokenize.argtypes = (c_void_p, c_void_p, POINTER(_Text), POINTER(c_void_p), c_size_t)
        self.evaluate = handle.mtmd_helper_eval_chunks
        self.evaluate.argtypes = (c_void_p, c_void_p, c_void_p, c_int32, c_int32, c_int32, c_bool,
                                  POINTER(c_int32))

    def chunks(self, text: str, media: list[bytes]) -> Any:
        """mtmd's chunks of a text with a mark for each picture."""
        do, data = self._do, text.encode()
        every = [do["helper_bitmap_init_from_buf"](self._handle, one, len(one), False,
                                                   do["helper_init_opt_default"]()).bitmap
                 for one in media]
        chunks = do["input_chunks_init"]()
        assert self.tokenize(self._handle, chunks, byref(_Text(data, len(data), True, True)),
                             (c_void_p * len(every))(*every), len(every)) == 0
        return chunks

    def prompt(self, text: str, media: list[bytes]) -> tuple[list[int], tuple[Media, ...]]:
        """The same as a prompt of pipeinfer's."""
        chunks, prompt, found = self.chunks(text, media), [], []
        for i in range(self._do["input_chunks_size"](chunks)):
            one = self._chunk(self._do["input_chunks_get"](chunks, i), encode=True)
            if one.rows is not None:
                found.append(Media(one.n_pos, one.causal, one.places, one.rows,
                                   one.rows.tobytes(), len(prompt)))
            prompt += one.tokens or [-1] * one.n
        return prompt, tuple(found)


def reference(model: ModelFile, mmproj: Path, text: str, media: list[bytes], n: int,
              n_batch: int = 1024) -> tuple[list[FloatArray], list[int], tuple[Media, ...]]:
    """The logits after the prompt and `n` greedy tokens, the prompt's tokens and its pictures."""
    backend = load(model.path, n_ctx=2048, n_batch=n_batch)
    with WithHelper(mmproj, model.path) as projector:
        past = c_int32(0)
        assert projector.evaluate(projector._handle, backend._ctx, projector.chunks(text, media),
                                  0, 0, n_batch, True, byref(past)) == 0
        prompt, found = projector.prompt(text, media)
    out, batch, pos = [_logits(backend, model)], binding.llama_batch_init(1, 0, 1), past.value
    for _ in range(n):
        batch.n_tokens, batch.token[0], batch.pos[0] = 1, int(out[-1].argmax()), pos
        batch.n_seq_id[0], batch.seq_id[0][0], batch.logits[0] = 1, 0, 1
        assert binding.llama_decode(backend._ctx, batch) == 0
        out.append(_logits(backend, model))
        pos += 1
    backend.close()
    return out, prompt, found


def _logits(backend: LlamaCppBackend, model: ModelFile) -> FloatArray:
    found = binding.llama_get_logits_ith(backend._ctx, -1)
    return np.ctypeslib.as_array(found, (model.n_vocab,)).copy()


def plain_tokens(path: Path, mmproj: Path, text: str, media: list[bytes], n: int,
                 chunk: int = 64) -> list[int]:
    """Greedy tokens of one plain context that reads the prompt in the pieces of a pipeline."""
    with WithHelper(mmproj, path) as projector:
        prompt, found = projector.prompt(text, media)
    backend = load(path, n_ctx=2048, n_batch=1024)
    edges = sorted(cuts(Request(0, tuple(prompt), n, media=found), chunk))
    for start, stop in itertools.pairwise([*edges, *[len(prompt)] * (edges[-1] < len(prompt))]):
        shown = next((one for one in found if one.start <= start < one.stop), None)
        part = shown and shown.part(start - shown.start, stop - shown.start)
        rows = make_rows([(prompt[i], i, (0,), i == len(prompt) - 1) for i in range(start, stop)],
                         media=part)
        logits = backend.decode(rows, part and part.rows)
    tokens = [int(logits[-1].argmax())]
    while len(tokens) < n:
        place = len(prompt) + len(tokens) - 1
        logits = backend.decode(make_rows([(tokens[-1], place, (0,), True)]))
        tokens.append(int(logits[-1].argmax()))
    backend.close()
    return tokens
