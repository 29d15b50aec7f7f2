"""Faults on purpose, and the pace of another machine: what `cluster.hooks` finds here."""
