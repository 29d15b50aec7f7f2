"""The OpenAI API over a session: an HTTP process of its own, and the engine beside rank 0's loop.

The HTTP process must not know MPI, runs or stages; the engine must not know HTTP or text.
"""
