"""The companion of a model that only wide stages send: as a file."""

from __future__ import annotations

from pipeinfer.models.embedding import EmbeddingSource
from pipeinfer.models.shard_cache import cache_directory, store


def extract_embedding(model, *, cache_dir=None):
    """The companion, from the cache or written now."""
    return store(EmbeddingSource(model), cache_directory(cache_dir), None)
