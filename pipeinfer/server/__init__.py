"""The OpenAI API over a session: a separate HTTP process, and the engine in rank 0's loop.

The HTTP process must not depend on MPI, runs or stages; the engine must not depend on HTTP or
text.
"""
