"""Development tools: emulated clusters, comparisons, chaos, faults, training, and their commands.

Nothing outside this package imports it; commands and hooks are loaded by name.
"""
