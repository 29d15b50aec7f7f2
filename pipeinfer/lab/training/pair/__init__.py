"""Trains the embedded target and draft, and writes them as GGUF."""
