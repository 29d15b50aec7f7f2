"""How a response is split into threads and read as one text: PASTA, PDOS, Skeleton-of-Thought,
APAR.

Pure but for `prompts`, which opens a response with a tokenizer and the chat template, and
`factory`, which makes its decomposer where tokens are decoded. Must not know cells, runs or ranks.
"""
