"""Layers of GGUF files on stock llama.cpp. The only room that reads its structs.

Must not know requests, policies or transports.
"""
