"""The message loops: the head's, which executes the scheduler's instructions, and a stage's.

Must not know options, how a job starts, or what a model file is.
"""
