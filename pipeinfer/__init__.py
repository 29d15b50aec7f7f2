"""Asynchronous pipelined speculation for large language models over MPI."""

from pipeinfer import waiting as waiting  # before any library that has threads

__version__ = "0.5.0"
