"""Transports that carry messages between nodes: MPI, or mailboxes within one process.

Only files whose names begin with `mpi` import mpi4py. Must not depend on runs, models or policies.
"""
