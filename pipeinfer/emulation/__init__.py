"""Machines, links and models by profile, and the real scheduler over them in virtual time.

Must not know the command line, start ranks or load models.
"""
