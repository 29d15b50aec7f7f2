"""Layers of GGUF files on stock llama.cpp. No other package reads its structs.

Modules here may not depend on requests, policies or transports.
"""
