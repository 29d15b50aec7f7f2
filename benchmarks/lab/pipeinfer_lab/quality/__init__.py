"""How good answers are: sets of prompts, scores by rule, and a judge model.

Knows texts and how to ask a judge; no session, ranks, schedulers or tables.
"""
