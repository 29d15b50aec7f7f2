"""What carries messages between nodes: MPI, or mailboxes within one process.

Only files whose names begin with `mpi` import mpi4py. Must not know runs, models or policies.
"""
