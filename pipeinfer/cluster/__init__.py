"""The life of a job: ranks find one another, layers are dealt out and loaded, the running session,
losses and recoveries, the end.

Must not know HTTP or the command line.
"""
