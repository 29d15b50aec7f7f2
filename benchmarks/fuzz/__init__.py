"""Mutated input of every kind that pipeinfer reads: `python -m benchmarks.fuzz` (docs/security.md).

`mutate` changes bytes and values, `gguf_case`, `safetensors_case`, `frame_case`, `http_case` and
`config_case` make and examine one kind each, `runner` runs cases in processes of their own.
"""
