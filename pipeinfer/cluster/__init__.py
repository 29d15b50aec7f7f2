"""The life of a job: ranks meet, layers are planned and loaded, the session runs, recovers from
losses and ends.

Must not depend on HTTP or the command line.
"""
