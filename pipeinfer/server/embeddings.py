"""Embeddings of texts: each is a prompt whose result is made of its normed rows.

Uses the vocabulary and the engine client; no HTTP.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any

import numpy as np

from pipeinfer.core.types import FloatArray, Pooling, SamplingParams
from pipeinfer.models.text.tokenizer import Tokenizer
from pipeinfer.server import prompts
from pipeinfer.server import schema_requests as schema
from pipeinfer.server.choice import Generation
from pipeinfer.server.requests import EngineRequest


def inputs_of(request: schema.EmbeddingRequest, tokenizer: Tokenizer, n_ctx: int
              ) -> list[list[int]]:
    """Return the token ids of each input, with the end that the model's file states.

    Raises ApiError for an input that is empty or does not fit the context.
    """
    texts, inputs = prompts.prompts_of(request.input, tokenizer, special=True)
    end = [tokenizer.eos_id] if tokenizer.adds_eos and tokenizer.eos_id is not None else []
    found = [tokens + end if text and tokens[-1:] != end else tokens
             for text, tokens in zip(texts, inputs, strict=True)]
    prompts.check_lengths(found, n_ctx, "input")
    return found


def asked(inputs: list[list[int]], pooling: Pooling) -> EngineRequest:
    """Return a request of the engine for the embeddings of some inputs."""
    return EngineRequest(inputs, [""] * len(inputs), n=1, max_tokens=1, seed=0, ignore_eos=True,
                         params=SamplingParams(embed=True, pooling=pooling))


def vector_of(generation: Generation) -> FloatArray:
    """Return the embedding in a result, float32[n_embd], scaled to length 1."""
    ((_, _, _, top, _),) = generation.rows
    row = np.array([element for _, element in top], np.float32)
    return row / np.float32(max(float(np.linalg.norm(row)), 1e-12))


def answer(vectors: Sequence[FloatArray], n_tokens: int, model: str, in_base64: bool
           ) -> dict[str, Any]:
    """Return the answer with these embeddings. n_tokens: of all inputs."""
    data = [{"object": "embedding", "index": index,
             "embedding": _base64(vector) if in_base64 else vector.tolist()}
            for index, vector in enumerate(vectors)]
    return {"object": "list", "data": data, "model": model,
            "usage": {"prompt_tokens": n_tokens, "total_tokens": n_tokens}}


def _base64(vector: FloatArray) -> str:
    return base64.b64encode(vector.astype("<f4").tobytes()).decode()
