"""Backends, which compute layers of a model: on llama.cpp or on torch, behind one
protocol. Also the measurements of exact widths and of the cost of rows.

Modules here may not depend on requests, policies or transports.
"""
