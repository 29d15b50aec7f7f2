"""Machines, links and models by profile: the real scheduler in virtual time, or the real runtime
paced.

Must not know the command line.
"""
