"""Which layers go where: costs and sizes measured or read, the best split, and who takes over
what.

Pure but for `measure` and `planner`, which look at this rank and at model files. Must not know
requests, transports or backends' insides.
"""
