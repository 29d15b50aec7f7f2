"""The two plug-in axes: proposers, which make guesses, and decomposers, which split a response
into threads. A new one is one file, registered by one line.

Must not know the scheduler's state, transports or ranks.
"""
