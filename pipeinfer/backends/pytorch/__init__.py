"""Layers of GGUF files and Hugging Face folders on torch, through the code of transformers.

Must not know requests, policies or transports.
"""
