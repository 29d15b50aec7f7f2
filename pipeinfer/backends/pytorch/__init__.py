"""Layers of GGUF files and Hugging Face folders on torch, with the layer code of transformers.

Modules here may not depend on requests, policies or transports.
"""
