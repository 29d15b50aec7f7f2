"""Names of metadata of an architecture, without the architecture's own."""

from __future__ import annotations

WINDOW, PATTERN = "attention.sliding_window", "attention.sliding_window_pattern"
DENSE, NEXTN = "leading_dense_block_count", "nextn_predict_layers"
ORIGINAL_CONTEXT = "rope.scaling.original_context_length"
INDEXER_WIDTH = "attention.indexer.key_length"  #: of the keys with which it does
INDEXERS = "attention.indexer.types"  #: whether a layer chooses positions itself
RATIOS = "attention.compress_ratios"  #: tokens of a cell of a layer's cache
HASH = "hash_layer_count"  #: leading layers whose experts follow from the token
EMBEDDING_SCALE, RESIDUAL_SCALE = "embedding_scale", "residual_scale"
INTERVAL, RECURRENT = "full_attention_interval", "attention.recurrent_layers"
MOE_STEP = "interleave_moe_layer_step"
HEADS, KV_HEADS, FF = "attention.head_count", "attention.head_count_kv", "feed_forward_length"
SHARED = "attention.shared_kv_layers"  #: last layers, which read the caches of two before them
PER_LAYER = "embedding_length_per_layer_input"  #: columns that each layer has of a token's row
DEEPSTACK = "n_deepstack_layers"  #: layers that add rows of images, behind those of a token
