"""Backends, which compute layers of a model: on llama.cpp, on torch, or as a toy, behind one
protocol. Also the measurements of exact widths and of the cost of rows.

Modules here may not depend on requests, policies or transports.
"""
