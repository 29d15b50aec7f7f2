"""What everything is made of: rows, sequence operations, requests, the acceptance rule, the
messages between ranks and their bytes, and what the scheduler and a proposer say to each other.

Pure data and pure functions. Must not know models, MPI, clocks, threads or policies' decisions.
"""
