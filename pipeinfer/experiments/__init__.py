"""The workshop: emulated clusters, comparisons, chaos, inflated and random models, plots, test
rigs.

Nothing that serves a user's request may import it.
"""
