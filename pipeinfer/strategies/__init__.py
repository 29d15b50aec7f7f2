"""The two kinds of plug-ins: proposers, which propose tokens, and decomposers, which split a
response into response threads. A new one is one file, registered by one line.

Modules here may not depend on the scheduler's state, transports or ranks.
"""
