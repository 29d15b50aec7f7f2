"""Decomposers: how a response is split into threads and read as one text (PASTA, PDOS,
    Skeleton-of-Thought, APAR).

Pure except for `prompts`, which writes prompts with a tokenizer and the chat template, and
`factory`, which makes decomposers where tokens are decoded. Independent of cells, runs and ranks.
"""
