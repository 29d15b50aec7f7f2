"""Planning of the layers: measured or read costs and sizes, the best split, replans after a
loss.

Pure except for `measure` and `planner`, which examine this rank and the model files. Must not
depend on requests, transports or the insides of backends.
"""
