"""Asynchronous pipelined speculation for large language models over MPI."""

__version__ = "0.2.0"
